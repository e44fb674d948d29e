"""Errors of attention are those of rows written out in full, and vanish where they have to."""

import pytest
import torch
from linearizer.student.packed_state import round_tokens

from linearizer.evaluate.head_errors import collect_errors, head_errors, measure_approximation
from linearizer.evaluate.subjects import Subject
from linearizer.progress import finish
from linearizer.student.layer_student import LayerStudent
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of, tokens


def drawn(tokens, heads=2, group=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads * group, tokens, dim, generator=generator)
    k, v = (torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(2))
    return q, k, v


# within a block of columns, across several, and of more columns than are computed
@pytest.mark.parametrize("length, tolerance", [(40, 1e-5), (300, 1e-5), (1500, 2e-2)])
def test_errors_are_those_of_the_rows_written_out(length, tolerance):
    q, k, v = drawn(length)
    student = LayerStudent([[5, 16], [3, 0]], 2, 8, "prf")
    student.reset(torch.Generator().manual_seed(0))
    rows, outputs = head_errors(student, q, k, v, 0.3)
    scores = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 0.3)[0]
    exact = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = (distance >= 0) & ((distance < 3) | (torch.arange(length) < 2))
    windowed = scores[1].masked_fill(~near, -torch.inf).softmax(-1)
    assert rows[1].item() == pytest.approx((exact[1] - windowed).abs().sum(-1).mean().item() / 2, abs=tolerance)
    y, output = exact[1] @ v[0, 1], windowed @ v[0, 1]
    assert outputs[1].item() == pytest.approx(((y - output).square().sum() / y.square().sum()).item(), rel=1e-4)


def test_a_memory_has_errors_of_outputs_and_none_of_rows():
    q, k, v = drawn(40)
    student, plain = (
        LayerStudent([[5, 4, 0, 0, 16, "gdn"], [3, 0]], 2, 8, "prf"),
        LayerStudent([[5, 0], [3, 0]], 2, 8, ""),
    )
    student.reset(torch.Generator().manual_seed(0))
    rows, outputs = head_errors(student, q, k, v, 0.3)
    assert rows[0].isnan() and outputs.isfinite().all() and len(student.groups) == 2
    torch.testing.assert_close(rows[1], head_errors(plain, q, k, v, 0.3)[0][1])
    collected = collect_errors("student", {0: torch.stack([rows, outputs])}, 1)
    assert collected.rows[0][0] is None and collected.rows_mean == pytest.approx(rows[1].item())


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("length", [40, 300])
def test_the_rows_of_few_bits_are_those_of_the_keys_that_are_kept(bits, length):
    q, k, v = drawn(length)
    student = LayerStudent([[length, 0, 0, 0, bits], [5, 0, 6, 4, bits]], 2, 8, "prf")
    student.reset(torch.Generator().manual_seed(0))
    rows, outputs = head_errors(student, q, k, v, 0.3)
    query, key, _ = student.turns.turn(q.unflatten(1, (2, 2)), k, v, 0.3**0.5)
    keys = round_tokens([key], bits, torch.arange(length)[None] < 2)[0]
    above = torch.ones(length, length).triu(1).bool()
    pairs = (q.unflatten(1, (2, 2)), k), (query, keys)
    exact, rounded = ((x[0, 0] @ y[0, 0].mT * 0.3).masked_fill(above, -torch.inf).softmax(-1) for x, y in pairs)
    assert rows[0].item() == pytest.approx((exact - rounded).abs().sum(-1).mean().item() / 2, rel=1e-3)
    assert rows[0] < rows[1] < 1 and 0 < outputs[0] < outputs[1]
    assert not student.exact_values


def test_only_heads_left_softmax_have_no_error():
    teacher, student = teacher_of("gemma3_text"), student_of("gemma3_text")
    mixed = allocation_of(layers_of(teacher), MIXED, 2)
    result = finish(measure_approximation(teacher, [Subject("student", student, mixed)], tokens(2, 64, seed=1)))
    rows = result.subjects[0].rows
    assert [len(row) for row in rows] == [0, 2, 2]  # the first layer is bounded by itself
    is_softmax = [[head.softmax for head in row] for row in mixed.heads]
    assert [[error < 1e-5 for error in row] for row in rows] == is_softmax and any(map(any, is_softmax))
