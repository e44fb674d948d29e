"""How far back a student recalls: a repeated passage, or a needle, a pair key → value that is hidden in a text.

Keys and values are tokens drawn from the text itself: the model knows them, whatever its tokenizer, and nothing but the
pair predicts their order. A text ends in the key of one of its pairs; the value should follow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from linearizer.errors import RequestError
from linearizer.evaluate.subjects import Pieces, Subject, read_branches, read_end, read_into
from linearizer.method.head_prices import list_doublings
from linearizer.progress import Progress, Steps
from linearizer.run.results import Grid, Needle, Recall, RecallLosses
from linearizer.teacher.logits import logits_at_once, losses_of
from linearizer.teacher.ram import run_if_it_fits
from linearizer.teacher.ranks import Ranks
from linearizer.teacher.text import repeated_passages

Tensor = torch.Tensor
DEPTHS = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the text between the start and the question
KEY, VALUE = 8, 8  # tokens
PAIRS = 4  # the question is about one of them
# share of the value's tokens that a subject would have written, loss on the value, loss when the pair is new
PairScore = tuple[float | None, float | None, float | None]
NO_SCORE: PairScore = (None, None, None)  # memory does not reach
MIN_NEEDLE_TOKENS = 2 * (PAIRS + 1) * (KEY + VALUE)  # tokens of a text: half of them pairs


def measure_recall(
    subjects: Sequence[Subject], windows: Tensor, passage: int, gaps: Sequence[int] = (), places: Tensor | None = None
) -> Steps[Recall]:
    """Measure how much better a passage is predicted the second time, at some places of the texts or at all."""
    places = torch.arange(windows.shape[1]) if places is None else places
    reader = RepeatReader(subjects, windows.shape[1], passage, gaps)
    split = windows.split(logits_at_once(subjects[0].model, len(places)))
    for done, ids in enumerate(split):
        for _ in reader.read(subjects, ids, places):
            pass
        yield Progress("recall", done + 1, len(split), "batches")
    return reader.result()


class RepeatReader:
    """Reads texts once, and from one place on also repeated passages: all gaps share the tokens before that place.

    The first `length` tokens of a text end in a passage, a gap of other text, and the passage again, which replaces
    their own last tokens. The tokens that follow are read last. Gaps double, up to the largest that fits into a text,
    unless `gaps` are given.
    """

    def __init__(self, subjects: Sequence[Subject], length: int, passage: int, gaps: Sequence[int] = ()) -> None:
        self.names, self.length, self.passage = [subject.name for subject in subjects], length, passage
        largest = length - 2 * passage
        self.gaps = tuple(gaps) or (*list_doublings(passage, largest * 3 // 4), largest)
        # [subject][batch]: (texts, gaps), the first time and the second
        self.losses: list[list[tuple[Tensor, Tensor]]] = [[] for _ in subjects]

    def read(self, subjects: Sequence[Subject], ids: Tensor, places: Tensor) -> Pieces:
        """Let all subjects read texts to their ends, and store how well they predict the passages."""
        begun = ids[:, : self.length]
        repeated = torch.stack([repeated_passages(begun, self.passage, gap) for gap in self.gaps], 1)
        ends = torch.cat([begun[:, None], repeated], 1)[..., -self.passage :]  # the text's own is the first
        before = self.length - self.passage
        caches = [subject.fresh_cache() for subject in subjects]
        losses: list[list[Tensor]] = [[] for _ in subjects]
        early, late = places[places < before], places[places >= before] - before
        for read, logits in read_into(subjects, ids[:, :before], caches, early):
            for row, predicted in zip(losses, logits, strict=True):
                row.append(losses_of(predicted, ids[:, read + 1]))
            yield read, logits
        last, at_end = [], late[late < self.passage]
        # the passage's own first token is a surprise twice
        repeated_places = at_end[at_end < self.passage - 1]
        following = ends[:, 1:, repeated_places + 1]
        for subject, cache, row, batches in zip(subjects, caches, losses, self.losses, strict=True):
            logits_of_ends = read_branches(subject, ends, cache, at_end)
            last.append(logits_of_ends[:, 0])
            predicted = logits_of_ends[:, 1:, : len(repeated_places)]
            second = losses_of(predicted.flatten(0, 1), following.flatten(0, 1)).unflatten(0, predicted.shape[:2])
            batches.append((self.first_losses(torch.cat(row, 1), early), second.double().mean(-1).cpu()))
        if self.length == ids.shape[1]:
            yield before + at_end, last
            return
        for read, logits in read_into(subjects, ids[:, before:], caches, late):  # branches do not change the caches
            yield before + read, logits

    def first_losses(self, losses: Tensor, places: Tensor) -> Tensor:
        """Return the mean loss on the first occurrence of every passage, from the losses before a text's end."""
        begins = [self.length - 2 * self.passage - gap for gap in self.gaps]
        passages = [losses[:, (places >= begin) & (places < begin + self.passage - 1)] for begin in begins]
        return torch.stack([passage.double().mean(-1).cpu() for passage in passages], 1)

    def gather(self, ranks: Ranks) -> None:
        """Bring together the losses of the batches that each rank has read."""
        self.losses = [ranks.gather_shares(batches) for batches in self.losses]

    def result(self) -> Recall:
        """Average over texts."""
        rows = []
        for name, batches in zip(self.names, self.losses, strict=True):
            first, second = (torch.cat(parts).mean(0).tolist() for parts in zip(*batches, strict=True))
            rows.append(RecallLosses(name, tuple(first), tuple(second)))
        return Recall(self.passage, self.gaps, tuple(rows))


def needle_lengths(usual: int, positions: int) -> tuple[int, ...]:
    """Choose lengths of texts around the usual length of a run, as far as positions reach."""
    lengths = (usual // 2, usual, 2 * usual, 4 * usual)
    fitting = tuple(length for length in lengths if MIN_NEEDLE_TOKENS <= length <= positions)
    return fitting or (min(MIN_NEEDLE_TOKENS, positions),)


@dataclass(frozen=True)
class HiddenPairs:
    """Texts that hold pairs and end in a question."""

    ids: Tensor  # (texts, tokens), the value being last
    place: int  # where the pair of the question begins
    key: int = KEY  # tokens of that pair
    value: int = VALUE


def check_needle_length(length: int) -> None:
    """Refuse texts into which the pairs do not fit."""
    if length < MIN_NEEDLE_TOKENS:
        raise RequestError(
            f"{PAIRS} pairs do not fit into a text of {length} tokens: ask for lengths from {MIN_NEEDLE_TOKENS} on"
        )


def hide_pairs(windows: Tensor, depth: float, seed: int) -> HiddenPairs:
    """Hide pairs in texts of the same length, the first at a depth, the others elsewhere; end in the first again."""
    texts, length = windows.shape
    check_needle_length(length)
    generator = torch.Generator().manual_seed(seed)
    words = windows.flatten()  # with the frequency that the texts have
    drawn = words[torch.randint(len(words), (texts, PAIRS, KEY + VALUE), generator=generator)]
    room = length - (PAIRS + 1) * (KEY + VALUE)  # tokens of text
    target = min(room - 1, max(1, round(depth * room)))
    elsewhere = [place + 1 for place in torch.randperm(room - 1, generator=generator).tolist() if place + 1 != target]
    places = sorted([(target, 0), *zip(elsewhere, range(1, PAIRS), strict=False)])
    pairs = [(place, drawn[:, number]) for place, number in places]
    ids = torch.cat([insert_tokens(windows[:, :room], pairs), drawn[:, 0]], 1)
    return HiddenPairs(ids, target + (KEY + VALUE) * places.index((target, 0)))


def insert_tokens(text: Tensor, inserted: Sequence[tuple[int, Tensor]]) -> Tensor:  # (…, tokens)
    """Insert tokens before places of a text, which rise."""
    pieces, before = [], 0
    for place, tokens in inserted:
        pieces += [text[..., before:place], tokens]
        before = place
    return torch.cat([*pieces, text[..., before:]], -1)


def measure_needle(
    subjects: Sequence[Subject],
    windows: Tensor,  # (texts, at least the largest length)
    lengths: Sequence[int],
    positions: int,
    seed: int = 0,
) -> Steps[Needle]:
    """Ask all subjects for pairs at every depth of every length; a subject out of memory misses all longer texts."""
    lengths = sorted(lengths)
    cells = [(length, depth) for length in lengths for depth in DEPTHS]
    answers: list[list[PairScore]] = [[] for _ in subjects]
    for done, (length, depth) in enumerate(cells):
        hidden = hide_pairs(windows[:, :length], depth, seed + done)
        for row, subject in zip(answers, subjects, strict=True):
            fits = not row or row[-1] != NO_SCORE
            row.append((run_if_it_fits(partial(ask_subject, subject, hidden)) if fits else None) or NO_SCORE)
        yield Progress("needle", done + 1, len(cells), "cells")
    begins = range(0, len(cells), len(DEPTHS))
    tables = ([tuple(x[a : a + len(DEPTHS)] for a in begins) for x in zip(*row, strict=True)] for row in answers)
    grids = tuple(Grid(subject.name, *table) for subject, table in zip(subjects, tables, strict=True))
    return Needle(tuple(lengths), DEPTHS, tuple(length > positions for length in lengths), grids)


def ask_subject(subject: Subject, hidden: HiddenPairs) -> PairScore:
    """Score how a subject predicts the value at the question, and when the pair is new; means over the texts."""
    ids, cache = hidden.ids, subject.fresh_cache()
    pair, question = hidden.place, ids.shape[1] - hidden.key - hidden.value
    after = pair + hidden.key + hidden.value
    first, second = (
        read_end(subject, ids[:, begin:end], place - begin, cache)[:, hidden.key - 1 : -1]
        for begin, place, end in ((0, pair, after), (after, question, ids.shape[1]))
    )
    value = ids[:, -hidden.value :].to(second.device)
    correct = (second.argmax(-1) == value).double().mean().item()
    return correct, losses_of(second, value).mean().item(), losses_of(first, value).mean().item()
