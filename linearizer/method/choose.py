"""Chooses between an allocation by prices and plain allocations of the same bytes, by their measured kl.

A price is measured for one head alone and on a few texts, so prices can mislead. The whole student is measured before
it is made, on texts that no head was priced on, over a quarter of a text, a text and two texts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import groupby, product
from operator import itemgetter

import torch
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from linearizer.method.by_prices import allocate_by_prices
from linearizer.method.decide import allocate_alike, offers_of
from linearizer.method.logits_by_rows import kl_of_answers, run_decoder
from linearizer.method.recorder import Samples, samples_of
from linearizer.method.substitute import attending_with, make_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.measured import CANDIDATES, Candidate, Candidates
from linearizer.run.stopping import log_progress
from linearizer.teacher.load import Teacher
from linearizer.teacher.logits import drawn_places
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.teacher.streaming import bytes_for_weights, is_streamed

PRICED, WINDOWS, SLOTS, WINDOW = "by prices", "windows by prices", "equal slots", "plain window"
PLAIN_BITS = 8  # of a number in the state of a plain window, unless the plan sets bits
SINGLE = 4  # bytes of a number in float32
HALVES = (torch.bfloat16, torch.float16)


def compare_students(
    run: Run, teacher: Teacher, texts: torch.Tensor, offered: Mapping[str, Allocation], ranks: Ranks = ALONE
) -> Steps[Candidates]:
    """Measure the students of allocations on texts (texts, tokens) that no head was priced on."""
    allocations = list(offered.values())
    ranks.hear((EventName.CHECK, allocations))
    kl = yield from log_progress(run, compare_share(run, teacher, texts, allocations, ranks))
    places = drawn_places(texts.shape[1])
    length, tokens = run.plan.resolved_length(run.positions), texts.shape[1]
    lengths = tuple(sorted({max(1, length // 4), min(length, tokens), tokens}))
    measured = tuple(
        Candidate(name, tuple(kl_of_places[:, places < length].mean().item() for length in lengths))
        for name, kl_of_places in zip(offered, kl, strict=True)
    )
    result = Candidates(lengths, measured)
    run.write_product(CANDIDATES, result.to_json())
    run.log(EventName.CHECKED, kept=result.kept.name, lengths=lengths, kl={each.name: each.kl for each in measured})
    return result


def compare_share(
    run: Run, teacher: Teacher, texts: torch.Tensor, allocations: Sequence[Allocation], ranks: Ranks = ALONE
) -> Steps[list[torch.Tensor]]:  # (texts, places) for each allocation
    """Measure a rank's share of the students of allocations, and gather those of the others."""
    arguments = teacher.inspection.layers, allocations, samples_of(run), drawn_places(texts.shape[1])
    with nullcontext() if teacher.inspection.packed else in_float32(teacher.model):
        return (yield from kl_at_places(teacher.model, texts, *arguments, ranks=ranks))


def candidates_of(run: Run, allocation: Allocation) -> Mapping[str, Allocation]:
    """Name the allocation, and plain allocations that take no more bytes; of equal ones only the first."""
    plan, layers, prices = run.plan, run.layers, run.prices
    candidates = {PRICED: allocation}
    if plan.strategy_spec.far_field and prices is not None:
        candidates[WINDOWS] = allocate_by_prices(offers_of(run, plan, layers, windows_alone=True), WINDOWS)
        candidates[SLOTS] = replace(allocate_alike(layers, plan, prices.sinks), strategy=SLOTS)
    window = replace(plan, strategy="window", bits=plan.bits or PLAIN_BITS, window=None)
    candidates[WINDOW] = allocate_alike(layers, window, plan.resolved_sinks)
    names: dict[tuple, str] = {}
    for name, candidate in candidates.items():
        names.setdefault((candidate.sinks, candidate.heads), name)
    return {name: candidates[name] for name in names.values()}


@contextmanager
def in_float32(model: PreTrainedModel) -> Iterator[None]:
    """Let a model compute in float32 where its device has the memory: in half precision a small kl is noise."""
    weights = list(model.parameters())
    halves = [(weight, weight.dtype) for weight in weights if weight.dtype in HALVES]
    needed = SINGLE * sum(weight.numel() for weight in weights)
    is_whole = not is_streamed(model) and len({weight.device for weight in weights}) == 1
    if not halves or not is_whole or needed > bytes_for_weights(str(model.device)):
        yield
        return
    try:
        for weight, _ in halves:
            weight.data = weight.data.float()
        yield
    finally:
        for weight, dtype in halves:
            weight.data = weight.data.to(dtype)


@torch.inference_mode()
def kl_at_places(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    allocations: Sequence[Allocation],
    samples: Samples,
    places: torch.Tensor,
    step: EventName = EventName.CHECK,
    ranks: Ranks = ALONE,
) -> Steps[list[torch.Tensor]]:  # (texts, places) for each allocation
    """Measure the kl of each allocation's student at some places of texts, in nats.

    Ranks share the pairs of a text and a student, and gather what each has measured.
    """
    batches = [texts] if is_streamed(teacher) else texts.split(1)  # streamed weights are read once for all texts
    own = ranks.share([*product(range(len(batches)), allocations)])
    measured, done = list[torch.Tensor](), 0
    yield Progress(step, 0, len(own), "students")
    for index, pairs in groupby(own, itemgetter(0)):
        ids, answers = batches[index], list[ModelOutput]()
        expected = run_decoder(teacher, ids)
        for _, allocation in pairs:
            exact = allocation.exact_until(layers)
            with attending_with(teacher, make_students(teacher, layers, allocation, samples, exact_tokens=exact)):
                answers.append(run_decoder(teacher, ids))
            done += 1
            yield Progress(step, done, len(own), "students")
        measured += [kl.cpu() for kl in kl_of_answers(teacher, ids, expected, answers, places)]
    measured = ranks.gather_shares(measured)
    return [torch.cat(measured[place :: len(allocations)]) for place in range(len(allocations))]
