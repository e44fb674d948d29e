"""How far a student's attention is from its teacher's, head by head, on what the teacher's own layers attend with.

A head's rows are its outputs on unit values, which no bits round, so one code serves every kind of head. Their error is
half of what all weights are off by: the share of attention that is misplaced. Of longer texts it is estimated by the
weights of the first tokens and of others that are drawn, as each takes another pass. A memory that a rule writes has no
rows: it reads values for its gates, and its weights may be negative. An output's error is |y - ŷ|² as a share of |y|².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain

import numpy
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from linearizer.evaluate.subjects import Subject
from linearizer.plan.head_bytes import Head
from linearizer.plan.profile import Curve, HeadProfile, Profile
from linearizer.progress import Progress, Steps
from linearizer.run.results import Approximation, Errors, FeatureCurve, PredictedErrors
from linearizer.student.attention_interface import attention_modules, observing
from linearizer.student.layer_student import LayerStudent
from linearizer.student.matrix_rule import MatrixRule
from linearizer.teacher.layers import featured, layer_number
from linearizer.teacher.logits import logits_of

Tensor = torch.Tensor
COLUMNS = 128  # of the attention matrix that are computed together
MOST_COLUMNS, FIRST = 512, 16  # columns that are computed, the first always: those of sinks are like no other


def measure_approximation(
    teacher: PreTrainedModel, subjects: Sequence[Subject], windows: Tensor, profile: Profile
) -> Steps[Approximation]:
    """Compare the attention of students with their teacher's on the same texts."""
    errors = yield from measure_errors(teacher, subjects, windows)
    predicted = []
    for subject in subjects:
        assert subject.allocation is not None, "a teacher has no error"
        pairs = zip(subject.allocation.heads, profile.layers, strict=True)
        predicted.append(
            tuple(
                tuple(predicted_error(head, own, profile) for head, own in zip(row, layer.heads, strict=True))
                for row, layer in pairs
            )
        )
    ranked = tuple(rank_correlation(own.rows, row) for own, row in zip(errors, predicted, strict=True))
    return Approximation(tuple(errors), tuple(predicted), ranked)


def rank_correlation(rows: Sequence[Sequence[float | None]], predicted: PredictedErrors) -> float | None:
    """Correlate the ranks of the heads by measured and by predicted errors, where there is a prediction."""
    pairs = zip(chain.from_iterable(rows), chain.from_iterable(predicted), strict=True)
    known = [(measured, promised) for measured, promised in pairs if measured is not None and promised is not None]
    return spearman(*zip(*known, strict=True)) if known else None


def measure_errors(teacher: PreTrainedModel, subjects: Sequence[Subject], windows: Tensor) -> Steps[list[Errors]]:
    """Measure all subjects while the teacher reads, a text at a time."""
    layers = [layer_students(subject) for subject in subjects]
    total = len(attention_modules(teacher))
    sums: list[dict[int, Tensor]] = [{} for _ in subjects]

    def observe(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, _: dict) -> None:
        index = layer_number(module)
        for own, kept in zip(layers, sums, strict=True):
            if index in own:
                new = head_errors(own[index], q.float(), k.float(), v.float(), scale)
                kept[index] = kept.get(index, torch.zeros_like(new)) + new / len(windows)

    for done, ids in enumerate(windows.split(1)):
        with observing(teacher, observe):
            logits_of(teacher, ids)
        yield Progress("approximation", done + 1, len(windows), "texts")
    return [collect_errors(subject.name, kept, total) for subject, kept in zip(subjects, sums, strict=True)]


def layer_students(subject: Subject) -> dict[int, LayerStudent]:
    """Give the student of each layer of a subject."""
    with subject.at_work() as model:
        students = {layer_number(module): getattr(module, "student", None) for module in attention_modules(model)}
    return {index: student for index, student in students.items() if student is not None}


def collect_errors(name: str, sums: Mapping[int, Tensor], layers: int) -> Errors:
    """Collect the errors of all layers, and their means."""
    tables = ([sums[index][part].tolist() if index in sums else [] for index in range(layers)] for part in (0, 1))
    rows, outputs = (tuple(tuple(None if math.isnan(x) else x for x in row) for row in table) for table in tables)
    return Errors(name, rows, outputs, mean_of(rows), mean_of(outputs))  # type: ignore[arg-type]


def mean_of(table: Sequence[Sequence[float | None]]) -> float:
    known = [value for row in table for value in row if value is not None]
    return math.fsum(known) / max(len(known), 1)


@torch.inference_mode()
def head_errors(student: LayerStudent, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:  # (2, kv heads)
    """Give the errors of rows and outputs of one layer on one text: (1, heads, tokens, dim); rows of memories: NaN."""

    def both(value: Tensor) -> tuple[Tensor, Tensor]:  # (kv heads, group, tokens, columns)
        exact = scaled_dot_product_attention(q, k, value, is_causal=True, scale=scale, enable_gqa=True)
        own = student(q, k, value, scale, None, None)
        return exact[0].unflatten(0, (k.shape[1], -1)), own[0].unflatten(0, (k.shape[1], -1))

    tokens = k.shape[-2]
    drawn, shares = draw_columns(tokens)
    place = torch.arange(tokens, device=k.device)
    misplaced = q.new_zeros(k.shape[1], dtype=torch.float64)
    groups, student.exact_values = student.groups, True
    written = [group for group in featured(student) if isinstance(group.feature_map, MatrixRule)]
    student.groups = torch.nn.ModuleList(group for group in groups if group not in written)
    try:
        for some in torch.arange(len(drawn)).split(COLUMNS):
            columns, share = drawn[some].to(place), shares[some].to(misplaced)
            exact, own = both((place[:, None] == columns).to(k.dtype).expand(*k.shape[:2], -1, -1))
            misplaced += ((exact - own).abs().double() * share).sum((1, 2, 3)) / 2
    finally:
        student.exact_values, student.groups = False, groups
    misplaced[[head for group in written for head in group.heads]] = torch.nan
    exact, own = both(v)
    off = (exact - own).square().double().sum((1, 2, 3)) / exact.square().double().sum((1, 2, 3)).clamp_min(1e-30)
    return torch.stack([misplaced / (tokens * q.shape[1] // k.shape[1]), off]).cpu()


def draw_columns(tokens: int) -> tuple[Tensor, Tensor]:
    """Draw columns of the attention matrix; say for how many columns each stands."""
    first = min(tokens, FIRST)
    others = torch.randperm(tokens - first, generator=torch.Generator().manual_seed(0))[: MOST_COLUMNS - first]
    drawn = torch.cat([torch.arange(first), first + others.sort().values])
    return drawn, torch.where(drawn < first, 1.0, (tokens - first) / max(len(others), 1))


def predicted_error(head: Head, own: HeadProfile, profile: Profile) -> float | None:
    """Predict the error of a head from the profile: the attention outside of its window, times λ(M) of its features.

    The profile says nothing of slots, which merge tokens that queries can hardly tell apart.
    """
    if head.softmax:
        return 0.0
    if head.slots or head.memory:
        return None
    outside = mass_outside(head.window, own, profile.windows)
    return outside * (ridge_for(head.features, own, profile) if head.features else 1.0)


def mass_outside(window: int, own: HeadProfile, windows: Sequence[int]) -> float:
    """Interpolate the share of attention that falls neither on sinks nor into a window of this size."""
    inside = float(numpy.interp(window, (0, *windows), (0.0, *own.window_mass)))
    return max(0.0, 1 - own.sink_mass - inside)


def ridge_for(features: int, own: HeadProfile, profile: Profile) -> float:
    """Give the λ at which N(λ) equals the number of features: the error that theory promises."""
    curve = Curve.through(own.freedoms, profile.settings.ridges)
    low, high = -60.0, 60.0  # of -log λ
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if curve.at(middle) < features else (low, middle)
    return math.exp(-low)


def measure_curve(
    teacher: PreTrainedModel,
    subjects: Mapping[str, Sequence[Subject]],
    features: Sequence[int],
    windows: Tensor,
    profile: Profile,
) -> Steps[FeatureCurve]:
    """Measure subjects that have one number of features each: name -> a subject for every number."""
    tables: dict[str, list[Errors]] = {}
    for name, row in subjects.items():
        tables[name] = yield from measure_errors(teacher, row, windows)
    heads = [head for layer in profile.layers for head in layer.heads]
    predicted = tuple(math.fsum(ridge_for(count, head, profile) for head in heads) / len(heads) for count in features)
    rows = tuple(tuple(errors.rows_mean for errors in row) for row in tables.values())
    outputs = tuple(tuple(errors.outputs_mean for errors in row) for row in tables.values())
    by_layer = (zip(*(errors.rows for errors in row), strict=True) for row in tables.values())
    layers = tuple(tuple(tuple(mean_of([heads]) for heads in layer) for layer in table) for table in by_layer)
    return FeatureCurve(tuple(features), predicted, tuple(tables), rows, outputs, layers)


def spearman(first: Sequence[float], second: Sequence[float]) -> float | None:
    """Correlate the ranks of two lists, equal values sharing theirs; None where a list is constant or too short."""
    if len(first) != len(second):
        raise ValueError(f"lists of {len(first)} and {len(second)} values have no ranks to compare")
    values = torch.tensor([list(first), list(second)], dtype=torch.float64)
    above = (values[:, :, None] - values[:, None]).sign().sum(-1)  # twice a rank, less its mean
    size = above.square().sum(-1).prod().sqrt().item()
    return above.prod(0).sum().item() / size if len(first) > 2 and size > 0 else None
