"""How well the next token is predicted: loss, divergence, agreement and calibration, with their spread over the text.

All subjects go through the same code on the same tokens. The first may be the teacher, with which the others are
compared. Intervals are by Student's t over documents, of paired differences where two subjects are compared: tokens of
one document are similar.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from linearizer.evaluate.subjects import Read, Subject, read_together
from linearizer.method.head_prices import list_doublings
from linearizer.plan.head_bytes import Layer
from linearizer.progress import Progress, Steps
from linearizer.run.results import Estimate, Language, LengthResult, Predictions, ShortPredictions, Tail
from linearizer.teacher.logits import drawn_places, kl_of, logits_at_once
from linearizer.teacher.ranks import ALONE, Ranks

Tensor = torch.Tensor
FEWEST = 8  # documents; where there are fewer, texts are the units
BINS = 10  # of the probability of the likeliest token
FIRST_EDGE = 64  # of the ranges of positions, which double, after the first at 0
STRAIN = 0.05  # nats by which a window predicts better than a teacher that reads longer texts than it learned to read
SURE, MISSED = 0.1, 1.0  # nats: a position is catastrophic where the teacher loses less, and the subject more
NORMAL = 1.96  # 95% of a normal distribution lie within this number of deviations
NO_CONTROLS: Mapping[int, Subject] = {}


class Scores(NamedTuple):
    """The scores of one subject at the places of texts whose next token it predicts: (texts, places), fp64."""

    loss: Tensor
    probability: Tensor  # of the likeliest token
    correct: Tensor  # whether it was the next token
    kl: Tensor  # NaN without a teacher
    agreement: Tensor  # NaN without a teacher


def measure_language(
    subjects: Sequence[Subject],
    windows: Tensor,
    documents: Tensor,
    layers: Sequence[Layer],
    read: Read = read_together,
    lengths: Sequence[int] = (),
    controls: Mapping[int, Subject] = NO_CONTROLS,
    ranks: Ranks = ALONE,
) -> Steps[Language]:
    """Let all subjects predict the same texts (texts, tokens); `documents` numbers the document of every token.

    In long texts they predict the tokens after some places, which are drawn. They are also compared over texts of
    `lengths`. Where the bytes of the student grow, so do those of its window: `controls` are the windows of shorter
    lengths. Ranks share the texts.
    """
    shown, subjects = len(subjects), [*subjects, *controls.values()]
    places, batches = drawn_places(windows.shape[1] - 1), []
    most = min(logits_at_once(subjects[0].model, len(places)), -(-len(windows) // ranks.count))
    split = windows.split(most)
    yield Progress("language", 0, len(split), "batches")
    for done, ids in enumerate(ranks.share(split), 1):
        batches.append(read_scores(subjects, ids, places, read))
        yield Progress("language", min(done * ranks.count, len(split)), len(split), "batches")
    scores = [join_scores(column, 0) for column in zip(*ranks.gather_shares(batches), strict=True)]
    unit, owners = owners_of(documents[:, 1:][:, places])
    units = Units(owners)
    teacher = scores[0].loss if subjects[0].allocation is None else None
    edges = 0, *list_doublings(FIRST_EDGE, windows.shape[1] - 1)
    pairs, first_columns = list(zip(subjects, scores, strict=True)), [count_before(places, edge) for edge in edges]
    rows = tuple(
        describe_predictions(
            subject, score, teacher, first_columns, units, subject.state_bytes(layers, windows.shape[1])
        )
        for subject, score in pairs[:shown]
    )
    controls_by_length = dict(zip(controls, pairs[shown:], strict=True))
    by_length = tuple(
        compare_at(length, shorter, pairs[:shown], documents, places, controls_by_length.get(length))
        for shorter, length in pairwise((1, *sorted(lengths)))
    )
    return Language(scores[0].loss.numel(), edges, unit, int(owners.max()) + 1, rows, by_length)


def compare_at(
    length: int,
    shorter: int,
    scored: Sequence[tuple[Subject, Scores]],
    documents: Tensor,
    places: Tensor,
    control: tuple[Subject, Scores] | None = None,
) -> LengthResult:
    """Compare all subjects over texts of one length: the scores of a longer text's first tokens are those of a text.

    A `control` replaces the window. The next `shorter` length determines the tokens that only this length has.
    """
    count = count_before(places, length - 1)  # the last token of a text predicts none
    named = {subject.name: (subject, begin_of_scores(scores, count)) for subject, scores in scored}
    if control is not None:
        named["window"] = control[0], begin_of_scores(control[1], count)
    unit, owners = owners_of(documents[:, 1:][:, places[:count]])
    units = Units(owners)
    has_teacher = scored[0][0].allocation is None
    rows = []
    for name, (_, scores) in named.items():
        kl, agreement = (units.estimate(x) if has_teacher else None for x in (scores.kl, scores.agreement))
        share = catastrophic(scores.loss, named["teacher"][1].loss).mean().item() if has_teacher else None
        rows.append(ShortPredictions(name, units.estimate(scores.loss), kl, agreement, share))
    (_, student), (window, window_scores) = named["student"], named["window"]
    excess = student.kl - window_scores.kl if has_teacher else student.loss - window_scores.loss
    strained = False
    if has_teacher:
        last_places = slice(count_before(places, shorter - 1), None)
        gain = units.estimate_difference(window_scores.loss - named["teacher"][1].loss, last_places)
        strained = gain is not None and gain.interval[1] < -STRAIN
    difference, allocation = units.estimate_difference(excess), window.allocation
    assert allocation is not None, "a window has no teacher's cache"
    return LengthResult(length, unit, units.count, allocation.longest_exact, tuple(rows), difference, strained)


def catastrophic(loss: Tensor, teacher: Tensor) -> Tensor:
    """Mark the positions that a teacher is sure of, and a subject misses: a mean hides them."""
    return ((teacher < SURE) & (loss > MISSED)).double()


def count_before(places: Tensor, end: int) -> int:
    """Count the places before one."""
    return int((places < end).sum())


def begin_of_scores(scores: Scores, count: int) -> Scores:
    """Take the scores at the first places of each text."""
    return Scores(*(column[:, :count] for column in scores))


def read_scores(
    subjects: Sequence[Subject], ids: Tensor, places: Tensor | None = None, read: Read = read_together
) -> list[Scores]:
    """Score some places of a batch of texts, or all but the last, for every subject."""
    places = torch.arange(ids.shape[1] - 1) if places is None else places
    parts: list[list[Scores]] = [[] for _ in subjects]
    for seen, logits in read(subjects, ids, places):
        if not len(seen):
            continue
        following = ids[:, seen + 1].to(logits[0].device)
        expected = logits[0] if subjects[0].allocation is None else None
        for row, predicted in zip(parts, logits, strict=True):
            row.append(scores_of(predicted, expected, following))
    return [join_scores(pieces, 1) for pieces in parts]


def scores_of(logits: Tensor, expected: Tensor | None, following: Tensor) -> Scores:
    """Score logits (texts, tokens, vocabulary) by the tokens that followed, and by the teacher's logits."""
    logs = logits.log_softmax(-1)
    best, likeliest = logs.max(-1)
    loss = -logs.gather(-1, following[..., None])[..., 0]
    unknown = torch.full_like(loss, math.nan)
    kl = unknown if expected is None else kl_of(expected, logits)
    agreement = unknown if expected is None else likeliest == expected.argmax(-1)
    return Scores(*(x.double().cpu() for x in (loss, best.exp(), likeliest == following, kl, agreement)))


def join_scores(parts: Sequence[Scores], dim: int) -> Scores:
    """Join scores of texts (0) or of tokens (1)."""
    return Scores(*(torch.cat(column, dim) for column in zip(*parts, strict=True)))


def describe_predictions(
    subject: Subject, scores: Scores, teacher: Tensor | None, begins: Sequence[int], units: Units, state: int
) -> Predictions:
    """Reduce the scores of one subject; ranges of positions begin at the columns `begins`."""
    ends = [*begins[1:], scores.loss.shape[1]]
    return Predictions(
        name=subject.name,
        state_bytes=state,
        loss=units.estimate(scores.loss),
        by_position=tuple(scores.loss[:, a:b].mean().item() for a, b in zip(begins, ends, strict=True)),
        excess=None if teacher is None else units.estimate(scores.loss - teacher),
        kl=None if teacher is None else units.estimate(scores.kl),
        agreement=None if teacher is None else units.estimate(scores.agreement),
        tail=None if teacher is None else tail_of(scores, teacher),
        calibration_error=calibration_error(scores.probability, scores.correct),
    )


def tail_of(scores: Scores, teacher: Tensor) -> Tail:
    """Measure how far the worst tokens are from the teacher, from its loss on each token."""
    divergence = scores.kl.flatten().sort().values
    high, highest = (divergence[int(share * (len(divergence) - 1))].item() for share in (0.99, 0.999))
    change = (-scores.loss).exp() - (-teacher).exp()
    return Tail(high, highest, change.square().mean().sqrt().item())


def calibration_error(probability: Tensor, correct: Tensor) -> float:
    """Return the distance of the likeliest token's probability from its frequency, in ranges of probability."""
    place = (probability * BINS).long().clamp(max=BINS - 1).flatten()
    differences = torch.zeros(BINS, dtype=torch.float64).index_add_(0, place, (probability - correct).flatten())
    return differences.abs().sum().item() / place.numel()


def owners_of(documents: Tensor) -> tuple[str, Tensor]:
    """Name the unit of intervals, and number it for every score: documents, or texts if there are few documents.

    `documents` numbers the document of every score.
    """
    _, numbered = torch.unique(documents, return_inverse=True)
    if int(numbered.max()) + 1 >= FEWEST:
        return "documents", numbered
    return "texts", torch.arange(len(documents))[:, None].expand_as(documents)


class Units:
    """The documents or texts over which means spread: tokens of one are alike, and so count together."""

    def __init__(self, owners: Tensor) -> None:
        self.owners, self.count = owners, int(owners.max()) + 1

    def estimate(self, scores: Tensor, tokens: slice = slice(None)) -> Estimate:  # noqa: B008
        """Return the mean of scores (texts, tokens), perhaps of a slice, and its interval of 95% by Student's t.

        The mean is a ratio of sums over units, whose error is that of a jackknife: large units draw the mean towards
        themselves. Units of different sizes count as fewer equal ones. A single unit has no spread.
        """
        sums, sizes = self.totals(scores, tokens)
        count, total = len(sizes), sizes.sum()
        mean = (sums.sum() / total).item()
        if count < 2:
            return Estimate(mean, (mean, mean))
        without_one = (sums.sum() - sums) / (total - sizes)
        error = math.sqrt((count - 1) / count) * (without_one - mean).norm().item()
        equal_units = (total**2 / sizes.square().sum()).item()
        half_width = student_t(max(equal_units - 1, 1)) * error
        return Estimate(mean, (mean - half_width, mean + half_width))

    def estimate_difference(self, differences: Tensor, tokens: slice = slice(None)) -> Estimate | None:  # noqa: B008
        """Estimate the mean of paired differences; None for a single unit."""
        return self.estimate(differences, tokens) if len(self.totals(differences, tokens)[1]) > 1 else None

    def totals(self, scores: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        """Sum the scores of each unit that reaches the tokens, and count them."""
        owners = self.owners[:, tokens].flatten()
        sums = torch.zeros(self.count, dtype=torch.float64).index_add_(0, owners, scores[:, tokens].flatten())
        sizes = torch.bincount(owners, minlength=self.count).double()
        return sums[sizes > 0], sizes[sizes > 0]


def student_t(freedoms: float) -> float:
    """Approximate within 2% the 97.5% quantile of Student's t, by powers of 1 / freedoms."""
    return NORMAL + sum(share / freedoms**power for power, share in enumerate((2.37, 2.82, 2.56, 3.0), 1))
