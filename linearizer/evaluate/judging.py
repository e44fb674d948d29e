"""What a student kept of its teacher: next-token loss by position, agreement, and recall over a distance.

The teacher is the student's own base attending with softmax, so both go through the same code on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linearizer.evaluate.language import joined, read_scores
from linearizer.evaluate.recall import measure_recall
from linearizer.evaluate.subjects import Subject
from linearizer.progress import Progress, Steps
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

Tensor = torch.Tensor
EDGES = (0, 64, 256)  # where the ranges of positions begin
ROWS = 4  # texts at a time


@dataclass(frozen=True)
class Language:
    """Means over the tokens that were predicted, in nats."""

    loss: float
    by_position: tuple[float, ...]  # in the ranges that begin at EDGES, as far as the texts reach
    kl: float  # of the student's next-token distribution from the teacher's
    agreement: float  # how often the likeliest tokens are the same
    tokens: int


@dataclass(frozen=True)
class Evaluation:
    """One model of a comparison: the teacher, the student, or a control at equal bytes."""

    name: str
    state_bytes: int | None  # None: grows with the text
    language: Language
    recall: tuple[Recall, ...]


@dataclass(frozen=True)
class Recall:
    """Loss on a passage that comes twice, a gap apart."""

    gap: int
    first: float
    second: float


def subjects_of(
    student: LinearizedForCausalLM, as_teacher: bool, reference: LinearizedForCausalLM | None = None
) -> list[Subject]:
    """Put the teacher first, and the student after it unless the teacher itself is looked at."""
    teacher = Subject("teacher", (reference or student).base, softmax=True)
    return [teacher] if as_teacher else [teacher, Subject("student", student)]


def evaluate_language(
    student: LinearizedForCausalLM,
    windows: Tensor,
    as_teacher: bool = False,
    reference: LinearizedForCausalLM | None = None,
) -> Steps[Language]:
    """Measure a student on texts (texts, tokens); `as_teacher` puts the teacher through the same code.

    `reference` is one that has the teacher's weights, where adapters changed the student's.
    """
    subjects, batches = subjects_of(student, as_teacher, reference), []
    for done, ids in enumerate(windows.split(ROWS)):
        batches.append(read_scores(subjects, ids)[-1])
        yield Progress("evaluate", done + 1, -(-len(windows) // ROWS), "batches")
    found = joined(batches, 0)
    edges = [edge for edge in EDGES if edge < found.loss.shape[1]]
    ranges = [found.loss[:, a:b].mean().item() for a, b in zip(edges, [*edges[1:], None], strict=True)]
    loss, kl, agreement = (scores.mean().item() for scores in (found.loss, found.kl, found.agreement))
    return Language(loss, tuple(ranges), kl, agreement, found.loss.numel())


def evaluate_recall(
    student: LinearizedForCausalLM, windows: Tensor, gaps: Sequence[int], passage: int = 48, as_teacher: bool = False
) -> Steps[tuple[Recall, ...]]:
    """Measure how much better a passage is predicted when it comes the second time."""
    if not gaps:
        return ()
    found = yield from measure_recall(subjects_of(student, as_teacher)[-1:], windows, passage, gaps)
    (own,) = found.subjects
    return tuple(map(Recall, found.gaps, own.first, own.second))
