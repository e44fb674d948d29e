"""What a run measures to decide by, beside its profile: prices of KV heads, or gates."""

from __future__ import annotations

import json

import torch

from linearizer.allocate.by_prices import MIN_KL, exchange_once
from linearizer.allocate.decide import alike, decide, offers_of, sinks_tried
from linearizer.errors import RequestError
from linearizer.measure.gates import learn_gates
from linearizer.measure.head_prices import KlOfLayers, measure_prices, measuring_seconds, options_to_price, with_repeats
from linearizer.measure.head_prices_by_gradient import estimate_prices
from linearizer.measure.whole_student import improve_by_exchanges, measure_students
from linearizer.model.initialise import begin_of
from linearizer.model.teacher import Teacher, windows_of
from linearizer.progress import Steps
from linearizer.run.allocation import Allocation
from linearizer.run.files import remove
from linearizer.run.folder import Run
from linearizer.run.head_bytes import Head
from linearizer.run.prices import PartialPrices, Prices
from linearizer.run.stopping import interruptible, logged

GATE_STEPS = 60
PARTLY = "state/prices.json"  # the prices of the first layers, while the others are measured
PATIENCE = 1200  # seconds that prices may take to be measured, before they are estimated instead


def priced_texts(run: Run, teacher: Teacher, token: str | None) -> torch.Tensor:
    """Take the text that heads are priced on: less than is profiled, and in half of it passages come again."""
    with interruptible(run):
        windows = windows_of(run.plan, teacher, max(2, run.plan.texts // 2), token)
    return with_repeats(windows, max(2, windows.shape[1] // 16), run.plan.seed)


def measured_prices(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[Prices]:
    """Price every KV head, unless this run has done so."""
    if found := run.prices:
        return found
    offered = options_to_price(texts.shape[1], run.plan.rules.far_field, run.plan.kept_bits)
    layers = teacher.inspection.layers
    generator = torch.Generator().manual_seed(run.plan.seed)
    if partly := begun_prices(run, offered, generator):
        sinks, before = partly.sinks, partly.kl
    else:
        sinks, before = (yield from measured_sinks(run, teacher, texts)), ()
    estimated = run.plan.prices == "estimated" or (
        run.plan.prices == "auto" and not before and measuring_seconds(teacher.model, layers, offered, texts) > PATIENCE
    )

    def keep(found: KlOfLayers) -> None:
        drawn = bytes(generator.get_state().tolist()).hex()
        run.write(PARTLY, PartialPrices(Prices(sinks, offered, tuple(found)), drawn).to_json())

    given = (teacher.model, texts, layers, offered, sinks, begin_of(run, generator))
    steps = estimate_prices(*given) if estimated else measure_prices(*given, before=before, keep=keep)
    found = yield from logged(run, steps)
    run.write("prices.json", found.to_json())
    remove(run.folder / PARTLY)
    run.log("priced", tokens=texts.numel(), estimated=estimated)
    return found


def begun_prices(run: Run, offered: tuple[Head, ...], generator: torch.Generator) -> Prices | None:
    """Give the prices of the first layers, where a run was stopped in pricing; damaged ones are measured anew.

    What is drawn goes on from there, so that the others get what they would have got.
    """
    if not run.has(PARTLY):
        return None
    try:
        partial = PartialPrices.from_json(run.read(PARTLY))
        drawn = bytes.fromhex(partial.drawn)
    except (RequestError, ValueError) as error:
        run.log("dropped", file=PARTLY, why=str(error.__cause__ or error))
        return None
    if partial.prices.options != offered:
        return None
    generator.set_state(torch.tensor(list(drawn), dtype=torch.uint8))
    return partial.prices


def measured_sinks(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[int]:
    """Choose how many sinks heads keep: as many as serve a student best whose heads all hold the same."""
    counts = sinks_tried(run.plan)
    if len(counts) == 1:
        return counts[0]
    layers = teacher.inspection.layers
    students = [alike(layers, run.plan, count) for count in counts]
    found = yield from logged(run, measure_students(teacher.model, texts, layers, students, begin_of(run)))
    best = min(zip(counts, found, strict=True), key=lambda one: max(one[1], MIN_KL))[0]
    run.log("tried", sinks=dict(zip(map(str, counts), found, strict=True)), kept=best)
    return best


def bought(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Buy by prices, and exchange what measuring shows to be better."""
    texts, layers = priced_texts(run, teacher, token), teacher.inspection.layers
    yield from measured_prices(run, teacher, texts)
    chosen, offers = decide(run, run.plan, layers), offers_of(run, run.plan, layers)

    tried: set[int] = set()

    def other(allocation: Allocation) -> Allocation | None:
        return exchange_once(offers, allocation, tried)

    steps = improve_by_exchanges(teacher.model, texts, layers, chosen, other, run.plan.exchanges, begin_of(run))
    best, measured = yield from logged(run, steps)
    run.log("exchanged", predicted=offers.kl(offers.levels(best)), measured=measured, changed=best != chosen)
    return best


def gated(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Learn gates, unless this run has done so, and leave softmax the heads that they are open for."""
    if run.gates is None:
        texts, plan = priced_texts(run, teacher, token), run.plan
        window = max(plan.budget or 0, 2 * plan.kept_sinks) - plan.kept_sinks
        steps = learn_gates(teacher.model, texts, teacher.inspection.layers, window, plan.kept_sinks, GATE_STEPS)
        run.write("gates.json", json.dumps((yield from logged(run, steps))))
    return decide(run, run.plan, teacher.inspection.layers)


def allocated(run: Run, teacher: Teacher, token: str | None) -> Steps[Allocation]:
    """Decide what every head holds, measuring what the plan's strategy asks for."""
    if run.plan.rules.decided_by == "prices":
        return (yield from bought(run, teacher, token))
    if run.plan.rules.decided_by == "gates":
        return (yield from gated(run, teacher, token))
    return decide(run, run.plan, teacher.inspection.layers)
