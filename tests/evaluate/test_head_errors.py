"""Errors of attention are those of rows written out in full, vanish where they have to, and follow the prediction."""

import pytest
import torch

from linearizer.evaluate.head_errors import (
    collect_errors,
    head_errors,
    mass_outside,
    measure_approximation,
    measure_curve,
    predicted_error,
    rank_correlation,
    ridge_for,
    spearman,
)
from linearizer.evaluate.subjects import Subject
from linearizer.method.checkpoint import make_layer_students
from linearizer.method.measure_run import measure_profile
from linearizer.plan.head_bytes import Head
from linearizer.plan.profile import HeadProfile, LayerProfile, Profile, ProfileSettings
from linearizer.progress import finish
from linearizer.student.layer_student import LayerStudent
from linearizer.student.packed_state import FewBits
from tests.support.models import MIXED, WHOLE, allocation_of, layers_of, student_of, teacher_of, tokens

RIDGES = tuple(2.0**-exponent for exponent in range(21))


def drawn(tokens, heads=2, group=2, dim=8):
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(1, heads * group, tokens, dim, generator=generator)
    k, v = (torch.randn(1, heads, tokens, dim, generator=generator) for _ in range(2))
    return q, k, v


# within a block of columns, across several, and of more columns than are computed
@pytest.mark.parametrize("length, off", [(40, 1e-5), (300, 1e-5), (1500, 2e-2)])
def test_errors_are_those_of_the_rows_written_out(length, off):
    q, k, v = drawn(length)
    student = LayerStudent([[5, 16], [3, 0]], 2, 8, "prf")
    student.reset(torch.Generator().manual_seed(0))
    rows, outputs = head_errors(student, q, k, v, 0.3)
    scores = (q.unflatten(1, (2, 2)) @ k[:, :, None].mT * 0.3)[0]
    exact = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf).softmax(-1)
    distance = torch.arange(length)[:, None] - torch.arange(length)
    near = (distance >= 0) & ((distance < 3) | (torch.arange(length) < 2))
    windowed = scores[1].masked_fill(~near, -torch.inf).softmax(-1)
    assert rows[1].item() == pytest.approx((exact[1] - windowed).abs().sum(-1).mean().item() / 2, abs=off)
    y, own = exact[1] @ v[0, 1], windowed @ v[0, 1]
    assert outputs[1].item() == pytest.approx(((y - own).square().sum() / y.square().sum()).item(), rel=1e-4)


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


def test_heads_that_see_all_have_no_error():
    q, k, v = drawn(40)
    assert head_errors(LayerStudent(["softmax", [40, 0]], 0, 8, "prf"), q, k, v, 0.3).abs().max() < 1e-5


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("length", [40, 300])
def test_the_rows_of_few_bits_are_those_of_the_keys_that_are_kept(bits, length):
    q, k, v = drawn(length)
    student = LayerStudent([[length, 0, 0, 0, bits], [5, 0, 6, 4, bits]], 2, 8, "prf")
    student.reset(torch.Generator().manual_seed(0))
    rows, outputs = head_errors(student, q, k, v, 0.3)
    kept = FewBits.of(q.unflatten(1, (2, 2)), k, v, bits, [0, 1], student.turns, 0.3**0.5, exact_values=False)
    keys, _ = kept.beside_sinks(torch.arange(length)[None] < 2)
    above = torch.ones(length, length).triu(1).bool()
    pairs = (q.unflatten(1, (2, 2)), k), (kept.query, keys)
    exact, own = ((x[0, 0] @ y[0, 0].mT * 0.3).masked_fill(above, -torch.inf).softmax(-1) for x, y in pairs)
    assert rows[0].item() == pytest.approx((exact - own).abs().sum(-1).mean().item() / 2, rel=1e-3)
    assert rows[0] < rows[1] < 1 and 0 < outputs[0] < outputs[1]
    assert not student.exact_values


def profile_of(masses=(0.2, 0.5, 0.8), sinks=0.1):
    freedoms = tuple(2.0 ** (exponent / 2) for exponent in range(21))  # N(λ) = λ^-½
    head = HeadProfile(freedoms, False, sinks, masses, 1.0)
    return Profile(ProfileSettings(ridges=RIDGES), 1000, (16, 32, 64), (LayerProfile((head, head)),))


def test_mass_outside_of_a_window_is_read_off_between_what_was_measured():
    result = profile_of()
    own = result.layers[0].heads[0]
    assert [mass_outside(window, own, result.windows) for window in (0, 8, 16, 48, 64, 900)] == pytest.approx(
        [0.9, 0.8, 0.7, 0.25, 0.1, 0.1]
    )


def test_theory_promises_less_error_to_more_features():
    result = profile_of()
    own = result.layers[0].heads[0]
    assert [ridge_for(count, own, result) for count in (2, 16, 64)] == pytest.approx(
        [1 / 4, 1 / 256, 1 / 4096], rel=1e-6
    )
    assert predicted_error(Head(window=16, features=16), own, result) == pytest.approx(0.7 / 256)
    assert predicted_error(Head(window=16), own, result) == pytest.approx(0.7)
    assert predicted_error(WHOLE, own, result) == 0


def test_of_slots_nothing_is_predicted_and_they_do_not_count_in_the_correlation():
    result = profile_of()
    assert predicted_error(Head(window=16, slots=16), result.layers[0].heads[0], result) is None
    predicted = ((0.1, None, 0.2), (), (None, 0.3))
    assert rank_correlation(((0.1, 9.0, 0.2), (), (0.0, 0.3)), predicted) == pytest.approx(1)
    assert rank_correlation(((0.5,),), ((None,),)) is None


@pytest.fixture(scope="module")
def measured():
    teacher, student = teacher_of("gemma3_text"), student_of("gemma3_text")
    layers = layers_of(teacher)
    result = finish(measure_profile(teacher, tokens(4, 64), layers, ProfileSettings(samples=128, rows=64)))
    return teacher, student, layers, result.profile


def test_windows_err_as_their_profile_foretells(measured):
    teacher, student, layers, profile = measured
    window = allocation_of(layers, [Head(window=4), Head(window=24)], 4)
    mixed = allocation_of(layers, MIXED, 2)
    whole = [[head.softmax for head in row] for row in mixed.heads]
    subjects = [
        Subject("student", student, mixed),
        Subject("window", student, window, make_layer_students(student, layers, window)),
    ]
    result = finish(measure_approximation(teacher, subjects, tokens(2, 64, seed=1), profile))
    assert [len(row) for row in result.subjects[0].rows] == [0, 2, 2]  # the first layer is bounded by itself
    seen = [[error < 1e-5 for error in row] for row in result.subjects[0].rows]
    assert seen == whole and any(map(any, whole))  # heads left softmax have no error, and only they
    for row, predicted in zip(result.subjects[1].rows, result.predicted[1], strict=True):
        assert row == pytest.approx(predicted, abs=0.15)
    assert result.correlation[1] > 0.79  # of four heads: at most two neighbours change places


def test_the_curve_is_a_list_that_plots_as_it_is(measured):
    teacher, student, layers, profile = measured
    counts = (16, 64)
    plain = []
    for count in counts:
        allocation = allocation_of(layers, [Head(features=count)], 0)
        plain.append(Subject(str(count), student, allocation, make_layer_students(student, layers, allocation)))
    curve = finish(measure_curve(teacher, {"untrained": plain}, counts, tokens(2, 64, seed=1), profile))
    assert curve.features == counts and curve.names == ("untrained",)
    assert len(curve.rows[0]) == len(curve.outputs[0]) == 2 and [len(row) for row in curve.layers[0]] == [2, 2, 2]
    assert curve.predicted[0] > curve.predicted[1] and all(0 < error < 1 for error in curve.rows[0])


def test_ranks_agree_fully_or_not_at_all():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 400]) == pytest.approx(1)
    assert spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    assert spearman([1, 1, 1], [1, 2, 3]) is None
    scipy = pytest.importorskip("scipy.stats")
    numbers, other = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8, 2, 8, 1, 8]
    assert spearman(numbers, other) == pytest.approx(scipy.spearmanr(numbers, other).statistic)
    with pytest.raises(ValueError, match="lists of 1 and 2"):
        spearman([1], [1, 2])
