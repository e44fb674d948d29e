"""Memory over a distance: the loss on a passage that is repeated."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from linearizer.evaluate.subjects import Pieces, Subject, read_branches, read_into
from linearizer.progress import Progress, Steps
from linearizer.run.results import Recall, Repeated
from linearizer.teacher.logits import fresh_cache, losses_of, texts_at_once
from linearizer.teacher.text import repeated_passages

Tensor = torch.Tensor


def doubling_gaps(length: int, passage: int) -> tuple[int, ...]:
    """Choose gaps that double, as far as a text has room for them, and the largest that it has."""
    most = length - 2 * passage
    return (*(passage << step for step in range(30) if passage << step < most * 3 // 4), most)


def measure_recall(
    subjects: Sequence[Subject], windows: Tensor, passage: int, gaps: Sequence[int] = ()
) -> Steps[Recall]:
    """Measure how much better a passage is predicted when it comes the second time; no gaps: gaps that double."""
    reader = RepeatReader(subjects, windows.shape[1], passage, gaps)
    split = windows.split(texts_at_once(subjects[0].model, windows.shape[1]))
    for done, ids in enumerate(split):
        for _ in reader.read(subjects, ids):
            pass
        yield Progress("recall", done + 1, len(split), "batches")
    return reader.result()


class RepeatReader:
    """Reads texts once, and from the same place on also passages that stood in them: all gaps share what is before.

    The first `length` tokens of a text end in a passage, a gap of other text, and the passage again in place of their
    own last tokens. What follows them in the text is read last.
    """

    def __init__(self, subjects: Sequence[Subject], length: int, passage: int, gaps: Sequence[int] = ()) -> None:
        self.names, self.length, self.passage = [subject.name for subject in subjects], length, passage
        self.gaps = tuple(gaps) or doubling_gaps(length, passage)
        # [subject][batch]: (texts, gaps), the first time and the second
        self.losses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in subjects]

    def read(self, subjects: Sequence[Subject], ids: Tensor) -> Pieces:
        """Let all subjects read texts to their ends, and store how well they predict the passages meanwhile."""
        begun = ids[:, : self.length]
        repeated = torch.stack([repeated_passages(begun, self.passage, gap) for gap in self.gaps], 1)
        ends = torch.cat([begun[:, None], repeated], 1)[..., -self.passage :]  # the text's own is the first
        before = self.length - self.passage
        caches = [fresh_cache(subject.model) for subject in subjects]
        losses: list[list[Tensor]] = [[] for _ in subjects]
        for begin, logits in read_into(subjects, ids[:, :before], caches):
            following = ids[:, begin + 1 : begin + 1 + logits[0].shape[1]]
            for own, given in zip(losses, logits, strict=True):
                own.append(losses_of(given, following))
            yield begin, logits
        last = []
        for subject, cache, own, kept in zip(subjects, caches, losses, self.losses, strict=True):
            logits_of_ends = read_branches(subject, ends, cache)
            last.append(logits_of_ends[:, 0])
            # the passage's own first token is a surprise twice
            given, following = logits_of_ends[:, 1:, :-1], ends[:, 1:, 1:]
            again = losses_of(given.flatten(0, 1), following.flatten(0, 1)).unflatten(0, given.shape[:2])
            kept.append((self.first_losses(torch.cat(own, 1)), again.double().mean(-1).cpu()))
        if self.length == ids.shape[1]:
            yield before, last
            return
        for begin, logits in read_into(subjects, ids[:, before:], caches):  # branches leave the caches as they were
            yield before + begin, logits

    def first_losses(self, losses: Tensor) -> Tensor:
        """Return the mean loss on every passage where it first stands, from the losses before a text's end."""
        begins = [losses.shape[1] - self.passage - gap for gap in self.gaps]
        passages = [losses[:, begin : begin + self.passage - 1] for begin in begins]
        return torch.stack([passage.double().mean(-1).cpu() for passage in passages], 1)

    def result(self) -> Recall:
        """Average over texts."""
        rows = []
        for name, batches in zip(self.names, self.losses, strict=True):
            first, second = (torch.cat(parts).mean(0).tolist() for parts in zip(*batches, strict=True))
            rows.append(Repeated(name, tuple(first), tuple(second)))
        return Recall(self.passage, self.gaps, tuple(rows))
