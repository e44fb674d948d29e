"""How far a student's attention is from its teacher's, head by head, on the queries, keys and values of the teacher.

A head's rows are its outputs on unit values, which are not rounded, so the same code serves every kind of head. Their
error is half of the sum of all differences of weights: the share of attention that is misplaced. On longer texts it is
estimated by the weights of the first tokens and of a random sample of tokens, as each takes another pass. A memory that
a rule writes has no rows: it reads values for its gates, and its weights may be negative. An output's error is |y - ŷ|²
as a share of |y|².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import PreTrainedModel

from linearizer.evaluate.subjects import Subject
from linearizer.progress import Progress, Steps
from linearizer.run.results import Approximation, Errors
from linearizer.student.attention_interface import attention_modules, observing
from linearizer.student.layer_student import LayerStudent
from linearizer.student.matrix_rule import MatrixRule
from linearizer.teacher.layers import featured, layer_number
from linearizer.teacher.logits import logits_of

Tensor = torch.Tensor
COLUMNS = 128  # of the attention matrix that are computed together
MOST_COLUMNS, FIRST = 512, 16  # columns that are computed, the first always: sinks are unlike all others


def measure_approximation(
    teacher: PreTrainedModel, subjects: Sequence[Subject], windows: Tensor
) -> Steps[Approximation]:
    """Compare the attention of students with their teacher's while the teacher reads, a text at a time."""
    layers = [layer_students(subject) for subject in subjects]
    total = 1 + max(map(layer_number, attention_modules(teacher)))
    sums: list[dict[int, Tensor]] = [{} for _ in subjects]

    def observe(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, scale: float, _: dict) -> None:
        index = layer_number(module)
        for students, totals in zip(layers, sums, strict=True):
            if index in students:
                errors = head_errors(students[index], q.float(), k.float(), v.float(), scale)
                totals[index] = totals.get(index, torch.zeros_like(errors)) + errors / len(windows)

    for done, ids in enumerate(windows.split(1)):
        with observing(teacher, observe):
            logits_of(teacher, ids)
        yield Progress("approximation", done + 1, len(windows), "texts")
    pairs = zip(subjects, sums, strict=True)
    return Approximation(tuple(collect_errors(subject.name, totals, total) for subject, totals in pairs))


def layer_students(subject: Subject) -> dict[int, LayerStudent]:
    """Return the student of each layer of a subject."""
    with subject.prepared() as model:
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
    """Return errors of rows and outputs of one layer on one text (1, heads, tokens, dim); rows of memories: NaN."""

    def outputs(value: Tensor) -> tuple[Tensor, Tensor]:  # (kv heads, group, tokens, columns) of teacher and student
        exact = scaled_dot_product_attention(q, k, value, is_causal=True, scale=scale, enable_gqa=True)
        output = student(q, k, value, scale, None, None)
        return exact[0].unflatten(0, (k.shape[1], -1)), output[0].unflatten(0, (k.shape[1], -1))

    tokens = k.shape[-2]
    drawn, shares = draw_columns(tokens)
    place = torch.arange(tokens, device=k.device)
    misplaced = q.new_zeros(k.shape[1], dtype=torch.float64)
    groups, student.exact_values = student.groups, True
    written = [group for group in featured(student) if isinstance(group.feature_map, MatrixRule)]
    student.groups = torch.nn.ModuleList(group for group in groups if group not in written)
    try:
        for chunk in torch.arange(len(drawn)).split(COLUMNS):
            columns, share = drawn[chunk].to(place), shares[chunk].to(misplaced)
            exact, output = outputs((place[:, None] == columns).to(k.dtype).expand(*k.shape[:2], -1, -1))
            misplaced += ((exact - output).abs().double() * share).sum((1, 2, 3)) / 2
    finally:
        student.exact_values, student.groups = False, groups
    misplaced[[head for group in written for head in group.heads]] = torch.nan
    exact, output = outputs(v)
    error = (exact - output).square().double().sum((1, 2, 3)) / exact.square().double().sum((1, 2, 3)).clamp_min(1e-30)
    return torch.stack([misplaced / (tokens * q.shape[1] // k.shape[1]), error]).cpu()


def draw_columns(tokens: int) -> tuple[Tensor, Tensor]:
    """Draw columns of the attention matrix; return also the number of columns that each represents."""
    first = min(tokens, FIRST)
    random = torch.randperm(tokens - first, generator=torch.Generator().manual_seed(0))[: MOST_COLUMNS - first]
    drawn = torch.cat([torch.arange(first), first + random.sort().values])
    return drawn, torch.where(drawn < first, 1.0, (tokens - first) / max(len(random), 1))
