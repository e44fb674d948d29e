"""Allocates for a run, after measuring the prices of KV heads or learning gates."""

from __future__ import annotations

import json

import torch

from linearizer.allocate.by_prices import MIN_KL, exchange_once
from linearizer.allocate.decide import allocate_alike, decide, offers_of, sinks_to_try
from linearizer.errors import RequestError
from linearizer.measure.gates import learn_gates
from linearizer.measure.head_prices import KlOfLayers, measure_prices, options_to_price, with_repeats
from linearizer.measure.head_prices_by_gradient import estimate_prices
from linearizer.measure.whole_student import improve_by_exchanges, measure_students
from linearizer.model.initialise import begin_of
from linearizer.model.teacher import Teacher, texts_of
from linearizer.progress import Steps
from linearizer.run.allocation import Allocation
from linearizer.run.events import EventName
from linearizer.run.files import remove
from linearizer.run.folder import Run
from linearizer.run.head_bytes import Head
from linearizer.run.prices import PartialPrices, Prices
from linearizer.run.stopping import interruptible, log_progress

GATE_STEPS = 60
PARTIAL_PRICES = "state/prices.json"  # the prices of the first layers, while the other layers are measured


def allocate(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Decide what every head holds, after measuring what the plan's strategy decides by."""
    if run.plan.rules.decided_by == "prices":
        return (yield from allocate_with_exchanges(run, teacher, token))
    if run.plan.rules.decided_by == "gates":
        return (yield from allocate_with_gates(run, teacher, token))
    return decide(run, run.plan, teacher.inspection.layers)


def allocate_with_exchanges(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Allocate by prices, then exchange options between heads where whole students measure a smaller kl."""
    texts, layers = texts_to_price_on(run, teacher, token), teacher.inspection.layers
    yield from price_heads(run, teacher, texts)
    first, offers = decide(run, run.plan, layers), offers_of(run, run.plan, layers)
    tried: set[int] = set()

    def exchange(allocation: Allocation) -> Allocation | None:
        return exchange_once(offers, allocation, tried)

    steps = improve_by_exchanges(teacher.model, texts, layers, first, exchange, run.plan.exchanges, begin_of(run))
    best, kl = yield from log_progress(run, steps)
    run.log(EventName.EXCHANGED, predicted=offers.kl(offers.levels(best)), measured=kl, changed=best != first)
    return best


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
        texts = texts_of(run.plan, teacher, max(2, run.plan.texts // 2), token)
    return with_repeats(texts, max(2, texts.shape[1] // 16), run.plan.seed)


def price_heads(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[Prices]:
    """Measure or estimate the prices of all KV heads, unless the run has them already."""
    if prices := run.prices:
        return prices
    options = options_to_price(texts.shape[1], run.plan.rules.far_field, run.plan.kept_bits)
    layers = teacher.inspection.layers
    generator = torch.Generator().manual_seed(run.plan.seed)
    if partial := read_partial_prices(run, options, generator):
        sinks, before = partial.sinks, partial.kl
    else:
        sinks, before = (yield from choose_sinks(run, teacher, texts)), ()
    estimated = run.plan.prices == "estimated"

    def keep(kl: KlOfLayers) -> None:
        drawn = bytes(generator.get_state().tolist()).hex()
        run.write_product(PARTIAL_PRICES, PartialPrices(Prices(sinks, options, tuple(kl)), drawn).to_json())

    arguments = (teacher.model, texts, layers, options, sinks, begin_of(run, generator))
    steps = estimate_prices(*arguments) if estimated else measure_prices(*arguments, before=before, keep=keep)
    prices = yield from log_progress(run, steps)
    run.write_product("prices.json", prices.to_json())
    remove(run.folder / PARTIAL_PRICES)
    run.log(EventName.PRICED, tokens=texts.numel(), estimated=estimated)
    return prices


def read_partial_prices(run: Run, options: tuple[Head, ...], generator: torch.Generator) -> Prices | None:
    """Read the prices of the first layers, if a run was stopped while pricing; drop them if they are damaged.

    The generator continues from its state of then, so that the other layers get the prices of an unstopped run.
    """
    if not run.has_file(PARTIAL_PRICES):
        return None
    try:
        partial = run.parse_file(PARTIAL_PRICES, PartialPrices.from_json)
        drawn = bytes.fromhex(partial.drawn)
    except (RequestError, ValueError) as error:
        run.log(EventName.DROPPED, file=PARTIAL_PRICES, why=str(error.__cause__ or error))
        return None
    if partial.prices.options != options:
        return None
    generator.set_state(torch.tensor(list(drawn), dtype=torch.uint8))
    return partial.prices


def choose_sinks(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[int]:
    """Choose the number of sinks with the smallest kl of a student whose heads all hold the same."""
    counts = sinks_to_try(run.plan)
    if len(counts) == 1:
        return counts[0]
    layers = teacher.inspection.layers
    students = [allocate_alike(layers, run.plan, count) for count in counts]
    kl = yield from log_progress(run, measure_students(teacher.model, texts, layers, students, begin_of(run)))
    best = min(zip(counts, kl, strict=True), key=lambda pair: max(pair[1], MIN_KL))[0]
    run.log(EventName.TRIED, sinks=dict(zip(map(str, counts), kl, strict=True)), kept=best)
    return best
