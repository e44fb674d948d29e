"""Allocates for a run, after measuring the prices of KV heads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linearizer.errors import RequestError
from linearizer.method.by_prices import MIN_KL, find_equal_share
from linearizer.method.choose import candidates_of, compare_students, kl_at_places
from linearizer.method.decide import allocate_alike, decide, fewer_bits, sinks_to_try
from linearizer.method.head_prices import Part, estimate_prices, options_to_price
from linearizer.method.recorder import samples_of
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation, heads_replaced
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import USUAL_LENGTH
from linearizer.progress import Steps
from linearizer.run.events import EventName
from linearizer.run.files import remove, writing
from linearizer.run.folder import Run
from linearizer.run.measured import KlOfLayer, Prices
from linearizer.run.stopping import log_progress
from linearizer.teacher.load import Teacher
from linearizer.teacher.logits import drawn_places
from linearizer.teacher.ranks import ALONE, Ranks

SINKS_LENGTH = 4  # budgets: sinks matter as soon as the first tokens leave a head's window
LAYERS = "state/priced"  # a file for each priced layer and group of texts, until all are priced


def allocate(run: Run, teacher: Teacher, texts: TextsOfRun, ranks: Ranks = ALONE) -> Steps[Allocation]:
    """Decide what every head holds: price the heads, spend the budget, and keep the best of a few whole students.

    An allocation is computed of stored measurements, so a run that was stopped decides the same again.
    """
    plan = run.plan
    if plan.strategy_spec.decided_by == "prices" and run.prices is None:
        yield from price_heads(run, teacher, texts.priced, ranks)
    allocation = decide(run, plan, teacher.inspection.layers)
    if plan.strategy_spec.decided_by == "prices":
        offered = candidates_of(run, allocation)
        measured = run.candidates or (yield from compare_students(run, teacher, texts.compared, offered, ranks))
        allocation = offered.get(measured.kept.name, allocation)
    run.write_product("allocation.json", allocation.to_json())
    run.log(EventName.ALLOCATED, strategy=allocation.strategy, features_mean=allocation.features_mean)
    return allocation


def price_heads(run: Run, teacher: Teacher, texts: torch.Tensor, ranks: Ranks = ALONE) -> Steps[Prices]:
    """Estimate the prices of all KV heads."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    sinks = next(iter(stored.values())).sinks if stored else (yield from choose_sinks(run, teacher, texts, ranks))
    ranks.hear((EventName.PRICE, sinks))
    prices = yield from log_progress(run, price_share(run, teacher, texts, sinks, ranks))
    run.write_product("prices.json", prices.to_json())
    remove(run.folder / LAYERS)
    run.log(EventName.PRICED, tokens=texts.numel())
    return prices


def price_share(run: Run, teacher: Teacher, texts: torch.Tensor, sinks: int, ranks: Ranks = ALONE) -> Steps[Prices]:
    """Estimate a rank's share of the prices, store those of each layer in a file of its own, and gather all."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    with writing(run.folder / LAYERS):
        (run.folder / LAYERS).mkdir(exist_ok=True)  # without its parents: a deleted run stays deleted

    def keep(part: Part, kl: KlOfLayer) -> None:
        run.write_product(f"{LAYERS}/{'-'.join(map(str, part))}.json", Prices(sinks, options, (kl,)).to_json())

    layers = teacher.inspection.layers
    shown = find_equal_share(options, next(filter(heads_replaced, layers)), sinks, run.plan.budget or 0)
    stored_kl = {part: prices.kl[0] for part, prices in stored.items()}
    arguments = (teacher.model, texts, layers, options, sinks, samples_of(run))
    return (yield from estimate_prices(*arguments, stored_kl, keep, ranks, shown))


def options_of(run: Run, teacher: Teacher, texts: torch.Tensor) -> tuple[Head, ...]:
    """List the options that the heads of a run are priced with."""
    plan = run.plan
    bits = plan.resolved_bits, fewer_bits(plan, teacher.inspection.layers)
    return options_to_price(texts.shape[1], plan.strategy_spec.far_field, *bits)


def read_priced_layers(run: Run, options: tuple[Head, ...]) -> dict[Part, Prices]:
    """Read the layers that were priced when a run was stopped, each on some texts; drop those that are damaged."""
    stored: dict[Part, Prices] = {}
    for path in sorted((run.folder / LAYERS).glob("*.json")):
        name = f"{LAYERS}/{path.name}"
        try:
            layer = run.parse_file(name, Prices.from_json)
        except RequestError as error:
            run.log(EventName.DROPPED, file=name, why=str(error.__cause__ or error))
            remove(path)
            continue
        if layer.options == options:
            index, _, first = path.stem.partition("-")
            stored[int(index), int(first)] = layer
    return stored


def choose_sinks(run: Run, teacher: Teacher, texts: torch.Tensor, ranks: Ranks = ALONE) -> Steps[int]:
    """Choose the number of sinks with the smallest kl of a student whose heads all hold the same."""
    counts = sinks_to_try(run.plan)
    if len(counts) == 1:
        return counts[0]
    students = [allocate_alike(teacher.inspection.layers, run.plan, count) for count in counts]
    ranks.hear((EventName.TRY, students))
    measured = yield from log_progress(run, try_share(run, teacher, texts, students, ranks))
    kl = [kl_of_places.mean().item() for kl_of_places in measured]
    best = min(zip(counts, kl, strict=True), key=lambda pair: max(pair[1], MIN_KL))[0]
    run.log(EventName.TRIED, sinks=dict(zip(map(str, counts), kl, strict=True)), kept=best)
    return best


def try_share(
    run: Run, teacher: Teacher, texts: torch.Tensor, students: Sequence[Allocation], ranks: Ranks
) -> Steps[list[torch.Tensor]]:  # (texts, places) for each student
    """Measure a rank's share of the students with other numbers of sinks, and gather those of the others."""
    texts = texts[:, : max(USUAL_LENGTH, SINKS_LENGTH * (run.plan.budget or 0))]
    arguments = teacher.inspection.layers, students, samples_of(run), drawn_places(texts.shape[1])
    return kl_at_places(teacher.model, texts, *arguments, EventName.TRY, ranks)
