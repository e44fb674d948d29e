"""Allocates for a run, after measuring the prices of KV heads or learning gates."""

from __future__ import annotations

import json
from collections import Counter

import torch

from linearizer.errors import RequestError
from linearizer.method.by_prices import MIN_KL, allocate_by_prices, correct_prices, dear_offers
from linearizer.method.decide import allocate_alike, decide, fewer_bits, offers_by_prices, sinks_to_try
from linearizer.method.gates import learn_gates
from linearizer.method.head_prices import (
    Place,
    measure_prices,
    measure_some_prices,
    options_to_price,
    passes_from,
    with_repeats,
)
from linearizer.method.head_prices_by_gradient import estimate_prices
from linearizer.method.initialise import begin_of
from linearizer.method.substitute import Begin
from linearizer.method.whole_student import measure_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import USUAL_LENGTH
from linearizer.progress import Steps
from linearizer.run.events import EventName
from linearizer.run.files import remove, writing
from linearizer.run.folder import Run
from linearizer.run.prices import KlOfLayer, Prices
from linearizer.run.sharing import ALL, ALONE, Helpers, Share
from linearizer.run.stopping import interruptible, log_progress
from linearizer.teacher.kept_texts import texts_of_run
from linearizer.teacher.load import Teacher

GATE_STEPS = 60
SINKS_LENGTH = 4  # budgets: sinks matter as soon as the first tokens leave a head's window
MOST_REPEATED = 64  # tokens of a passage that comes again: short ones come again at many distances
PRICES, DEAR_PRICES = "prices", "dear-prices"  # tasks of helpers
DearPrice = tuple[int, int, int, float]  # layer, KV head, option, kl
LAYERS = "state/prices"  # a file for each layer that is priced, and for each group of texts, until all are


def allocate(run: Run, teacher: Teacher, token: str | None, helpers: Helpers = ALONE) -> Steps[Allocation]:
    """Decide what every head holds, after measuring what the plan's strategy decides by."""
    if run.plan.rules.decided_by == "prices" and run.prices is None:
        yield from price_heads(run, teacher, texts_to_price_on(run, teacher, token), helpers)
    if run.plan.rules.decided_by == "gates":
        return (yield from allocate_with_gates(run, teacher, token))
    return decide(run, run.plan, teacher.inspection.layers)


def allocate_with_gates(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Learn gates, unless the run has them already, and leave softmax the heads with the largest gates."""
    if run.gates is None:
        texts, plan = texts_to_price_on(run, teacher, token), run.plan
        window = max(plan.budget or 0, 2 * plan.kept_sinks) - plan.kept_sinks
        steps = learn_gates(teacher.model, texts, teacher.inspection.layers, window, plan.kept_sinks, GATE_STEPS)
        run.write_product("gates.json", json.dumps({"gates": (yield from log_progress(run, steps))}))
    return decide(run, run.plan, teacher.inspection.layers)


def texts_to_price_on(run: Run, teacher: Teacher, token: str | None) -> torch.Tensor:
    """Take half of the profiled texts, and repeat passages in half of these."""
    with interruptible(run):
        texts = texts_of_run(run, teacher, run.plan.texts_priced, token)
    passage = max(2, min(texts.shape[1] // 16, MOST_REPEATED))
    return with_repeats(texts, passage, run.plan.seed)


def price_heads(run: Run, teacher: Teacher, texts: torch.Tensor, helpers: Helpers = ALONE) -> Steps[Prices]:
    """Measure or estimate the prices of all KV heads."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    sinks = next(iter(stored.values())).sinks if stored else (yield from choose_sinks(run, teacher, texts))
    begin = begin_of(run)
    own = price_share(run, teacher, texts, sinks, begin, Share(0, helpers.count))
    prices, others = yield from log_progress(run, helpers.beside(f"{PRICES} {sinks}", own))
    if others:  # the prices that they kept are there now
        prices = yield from log_progress(run, price_share(run, teacher, texts, sinks, begin))
    measured: dict[Place, float] = {}
    if run.plan.prices == "estimated":
        mine = measure_dear_prices(run, teacher, texts, prices, begin, Share(0, helpers.count))
        own_prices, others = yield from log_progress(run, helpers.beside(f"{DEAR_PRICES} {sinks}", mine))
        measured = {(layer, head, option): kl for part in (own_prices, *others) for layer, head, option, kl in part}
        prices = correct_prices(prices, measured)
    run.write_product("prices.json", prices.to_json())
    remove(run.folder / LAYERS)
    estimated = run.plan.prices == "estimated"
    run.log(EventName.PRICED, tokens=texts.numel(), estimated=estimated, measured=len(measured))
    return prices


def help_pricing(
    run: Run, teacher: Teacher, token: str | None, task: str, sinks: int, share: Share
) -> Steps[list[DearPrice]]:
    """Price a share of the layers for the process of a run."""
    texts, begin = texts_to_price_on(run, teacher, token), begin_of(run)
    if task == PRICES:
        yield from price_share(run, teacher, texts, sinks, begin, share)
        return []
    prices = yield from price_share(run, teacher, texts, sinks, begin)  # all are there
    return (yield from measure_dear_prices(run, teacher, texts, prices, begin, share))


def price_share(
    run: Run, teacher: Teacher, texts: torch.Tensor, sinks: int, begin: Begin, share: Share = ALL
) -> Steps[Prices]:
    """Measure or estimate the prices of a share of the layers, and keep each layer's in a file of its own."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    with writing(run.folder / LAYERS):
        (run.folder / LAYERS).mkdir(exist_ok=True)  # without its parents: a run that was deleted stays so

    def keep(part: tuple[int, ...], kl: KlOfLayer) -> None:
        run.write_product(f"{LAYERS}/{'-'.join(map(str, part))}.json", Prices(sinks, options, (kl,)).to_json())

    given = (teacher.model, texts, teacher.inspection.layers, options, sinks, begin)
    if run.plan.prices == "measured":
        before = {part[0]: each.kl[0] for part, each in stored.items() if len(part) == 1}
        return (yield from measure_prices(*given, before, lambda index, kl: keep((index,), kl), share))
    sums = {(part[0], part[1]): each.kl[0] for part, each in stored.items() if len(part) == 2}
    return (yield from estimate_prices(*given, run.plan.seed, sums, keep, share))


def options_of(run: Run, teacher: Teacher, texts: torch.Tensor) -> tuple[Head, ...]:
    """List what the heads of a run are priced with."""
    plan = run.plan
    bits = plan.kept_bits, fewer_bits(plan, teacher.inspection.layers)
    return options_to_price(texts.shape[1], plan.rules.far_field, *bits)


def measure_dear_prices(
    run: Run, teacher: Teacher, texts: torch.Tensor, prices: Prices, begin: Begin, share: Share = ALL
) -> Steps[list[DearPrice]]:
    """Measure dear offers of a share of the layers, beside what estimated prices buy: these hardly order them."""
    layers = teacher.inspection.layers
    offers = offers_by_prices(run, run.plan, prices, layers)
    dear = dear_offers(prices, layers, allocate_by_prices(offers), run.plan.target_tokens(run.positions))
    by_layer = Counter(layer for layer, _, _ in dear)
    own = share.part_of({layer: count * passes_from(layers, layer) for layer, count in by_layer.items()})
    places = [place for place in dear if place[0] in own]
    if not places:
        return []
    kl = yield from measure_some_prices(teacher.model, texts, layers, prices, places, begin)
    return [(*place, kl_of_place) for place, kl_of_place in kl.items()]


def read_priced_layers(run: Run, options: tuple[Head, ...]) -> dict[tuple[int, ...], Prices]:
    """Read the layers that were priced when a run was stopped, on all texts or a group; drop those that are damaged."""
    stored: dict[tuple[int, ...], Prices] = {}
    for path in sorted((run.folder / LAYERS).glob("*.json")):
        name = f"{LAYERS}/{path.name}"
        try:
            layer = run.parse_file(name, Prices.from_json)
        except RequestError as error:
            run.log(EventName.DROPPED, file=name, why=str(error.__cause__ or error))
            remove(path)
            continue
        if layer.options == options:
            stored[tuple(map(int, path.stem.split("-")))] = layer
    return stored


def choose_sinks(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[int]:
    """Choose the number of sinks with the smallest kl of a student whose heads all hold the same."""
    counts = sinks_to_try(run.plan)
    if len(counts) == 1:
        return counts[0]
    layers, enough = teacher.inspection.layers, max(USUAL_LENGTH, SINKS_LENGTH * (run.plan.budget or 0))
    students, texts = [allocate_alike(layers, run.plan, count) for count in counts], texts[:, :enough]
    kl = yield from log_progress(run, measure_students(teacher.model, texts, layers, students, begin_of(run)))
    best = min(zip(counts, kl, strict=True), key=lambda pair: max(pair[1], MIN_KL))[0]
    run.log(EventName.TRIED, sinks=dict(zip(map(str, counts), kl, strict=True)), kept=best)
    return best
