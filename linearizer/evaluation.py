"""What a student kept of its teacher: next-token loss by position, agreement, and recall over a distance.

The teacher is the student's own base attending with softmax, so both go through the same code on the same tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linearizer.outputs import divergence, logits_of, token_losses
from linearizer.progress import Progress, Steps
from linearizer.runtime.attention import attending
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.text import repeated_passages

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


def teacher_logits(student: LinearizedForCausalLM, ids: Tensor) -> Tensor:
    """Let the student's base attend as the teacher that it was."""
    with attending(student.base, "sdpa"):
        return logits_of(student.base, ids)


def evaluate_language(
    student: LinearizedForCausalLM,
    windows: Tensor,
    as_teacher: bool = False,
    reference: LinearizedForCausalLM | None = None,
) -> Steps[Language]:
    """Measure a student on texts (texts, tokens); `as_teacher` puts the teacher through the same code.

    `reference` is one that has the teacher's weights, where adapters changed the student's.
    """
    losses, kls, agreements = [], [], []
    for done, ids in enumerate(windows.split(ROWS)):
        expected = teacher_logits(reference or student, ids)
        given = expected if as_teacher else logits_of(student, ids)
        losses.append(token_losses(given, ids).double().cpu())
        kls.append(divergence(expected, given).double().cpu())
        agreements.append((expected.argmax(-1) == given.argmax(-1)).double().cpu())
        yield Progress("evaluate", done + 1, -(-len(windows) // ROWS), "batches")
    loss = torch.cat(losses)
    edges = [edge for edge in EDGES if edge < loss.shape[1]]
    ranges = [loss[:, a:b].mean().item() for a, b in zip(edges, [*edges[1:], None], strict=True)]
    return Language(
        loss.mean().item(),
        tuple(ranges),
        torch.cat(kls).mean().item(),
        torch.cat(agreements).mean().item(),
        loss.numel(),
    )


def evaluate_recall(
    student: LinearizedForCausalLM, windows: Tensor, gaps: Sequence[int], passage: int = 48, as_teacher: bool = False
) -> Steps[tuple[Recall, ...]]:
    """Measure how much better a passage is predicted when it comes the second time."""
    found = []
    for done, gap in enumerate(gaps):
        first, second = [], []
        for ids in repeated_passages(windows, passage, gap).split(ROWS):
            given = teacher_logits(student, ids) if as_teacher else logits_of(student, ids)
            losses = token_losses(given, ids).double().cpu()
            begin = losses.shape[1] - 2 * passage - gap
            first.append(losses[:, begin + 1 : begin + passage])  # the passage's own first token is a surprise twice
            second.append(losses[:, 1 - passage :])
        found.append(Recall(gap, torch.cat(first).mean().item(), torch.cat(second).mean().item()))
        yield Progress("recall", done + 1, len(gaps), "gaps")
    return tuple(found)
