"""What is remembered over a distance: a passage that comes again, and text longer than the features were trained on."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from linearizer.evaluate.reading import read_losses
from linearizer.evaluate.subjects import Subject
from linearizer.model.memory import run_if_it_fits
from linearizer.model.text import repeated_passages
from linearizer.progress import Progress, Steps
from linearizer.run.results import Longer, Recall, Repeated

Tensor = torch.Tensor


def doubling_gaps(length: int, passage: int) -> tuple[int, ...]:
    """Choose gaps that double, as far as a text has room for them, and the largest that it has."""
    most = length - 2 * passage
    return (*(passage << step for step in range(30) if passage << step < most * 3 // 4), most)


def measure_recall(
    subjects: Sequence[Subject], windows: Tensor, passage: int, gaps: Sequence[int] = ()
) -> Steps[Recall]:
    """Measure how much better a passage is predicted when it comes the second time; no gaps: those that double."""
    gaps = tuple(gaps) or doubling_gaps(windows.shape[1], passage)
    found: list[list[tuple[float, float]]] = [[] for _ in subjects]
    for done, gap in enumerate(gaps):
        losses = read_losses(subjects, repeated_passages(windows, passage, gap))
        for row, own in zip(found, losses, strict=True):
            begin = own.shape[1] - 2 * passage - gap
            # the passage's own first token is a surprise twice
            first, second = own[:, begin + 1 : begin + passage], own[:, 1 - passage :]
            row.append((first.mean().item(), second.mean().item()))
        yield Progress("recall", done + 1, len(gaps), "gaps")
    rows = (Repeated(subject.name, *zip(*row, strict=True)) for subject, row in zip(subjects, found, strict=True))
    return Recall(passage, gaps, tuple(rows))


def measure_longer(subjects: Sequence[Subject], windows: Tensor, trained: int, positions: int) -> Steps[Longer | None]:
    """Measure the loss within and beyond the length of the training's texts; None where memory does not reach."""
    edges = (0, *(trained << step for step in range(30) if trained << step < windows.shape[1] - 1))
    losses = run_if_it_fits(partial(read_losses, subjects, windows))
    yield Progress("longer", 1, 1, "texts")
    if losses is None:
        return None
    ends = (*edges[1:], windows.shape[1] - 1)
    rows = tuple(tuple(own[:, a:b].mean().item() for a, b in zip(edges, ends, strict=True)) for own in losses)
    beyond = tuple(end > positions for end in ends)
    return Longer(trained, edges, beyond, tuple(subject.name for subject in subjects), rows, len(windows))
