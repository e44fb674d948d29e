"""The price of an option is what the model's output loses when that head alone is cut to it."""

import pytest
import torch

from linearizer.evaluate.language import read_scores
from linearizer.evaluate.recall import measure_recall
from linearizer.evaluate.subjects import Subject
from linearizer.method.checkpoint import put_student_into
from linearizer.method.head_prices import measure_prices, options_to_price, place_weights, with_repeats
from linearizer.method.whole_student import measure_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.logits import kl_of, logits_of
from linearizer.teacher.text import repeated_passages
from tests.support.models import WHOLE, allocation_of, layers_of, student_of, teacher_of, tokens

OPTIONS = (Head(window=3), Head(window=4, slots=5), Head(window=12))


def begin(student, index):
    student.reset(torch.Generator().manual_seed(0))


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_each_doubling_of_a_text_counts_alike_whatever_its_length(tokens):
    weights = place_weights(tokens)
    halves = [weights[tokens >> (step + 1) : tokens >> step].sum() / tokens for step in range(3)]
    assert weights.mean() == pytest.approx(1, rel=1e-5) and max(halves) < 1.1 * min(halves)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3_text", "mixtral", "gpt_neox", "opt"])
@torch.no_grad()
def test_a_price_is_the_divergence_of_that_student(family):
    teacher, windows = teacher_of(family), tokens(2, 24)
    layers = layers_of(teacher)
    prices = finish(measure_prices(teacher, windows, layers, OPTIONS, 2, begin))
    expected = logits_of(teacher, windows)
    for index, layer in enumerate(layers):
        for head in range(layer.kv_heads if layer.native_window is None else 0):
            for option in (0, 1):
                rows = [list(row) for row in allocation_of(layers, [WHOLE], 2).heads]
                rows[index][head] = OPTIONS[option]
                student = put_student_into(
                    teacher_of(family), layers, Allocation("by hand", 2, tuple(map(tuple, rows)))
                )
                kl = kl_of(expected, logits_of(student, windows))
                cost = (place_weights(24) * kl).mean().item()
                assert prices.kl[index][head][option] == pytest.approx(cost, rel=1e-3, abs=1e-6)
    assert all(
        len(row) == (0 if layer.native_window else layer.kv_heads) for row, layer in zip(prices.kl, layers, strict=True)
    )


@torch.no_grad()
def test_pricing_leaves_the_teacher_as_it_was():
    teacher, windows = teacher_of("llama"), tokens(2, 24)
    before, names = logits_of(teacher, windows), {name for name, _ in teacher.named_modules()}
    finish(measure_prices(teacher, windows, layers_of(teacher), OPTIONS, 2, begin))
    assert torch.equal(logits_of(teacher, windows), before)
    assert {name for name, _ in teacher.named_modules()} == names
    assert teacher.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_the_layers_of_a_model_are_found(family):
    assert len(blocks_of(teacher_of(family))) == 3


def test_windows_and_slots_double_up_to_the_texts():
    assert [head.window for head in options_to_price(64, far="")] == [4, 8, 16, 32, 48]
    sizes = [(8, 8), (8, 16), (8, 32), (8, 48), (16, 16)]
    assert [(head.window, head.features) for head in options_to_price(64, far="features") if head.features] == sizes
    few = [(4, 2), (4, 4), (4, 8), (8, 8), (8, 16), (8, 32), (16, 16)]
    many = [(16, 32), (16, 48)]  # beside a window of two blocks; the last holds a whole text
    assert sorted((head.window, head.slots) for head in options_to_price(64) if head.slots) == sorted(few + many)


@torch.no_grad()
def test_students_are_measured_in_the_order_in_which_they_come():
    teacher, windows = teacher_of("llama"), tokens(2, 24)
    layers = layers_of(teacher)
    students = [allocation_of(layers, [Head(window=window)], 2) for window in (3, 20, 3)]
    first, second, third = finish(measure_students(teacher, windows, layers, students, begin))
    assert first == third > second
    student = put_student_into(teacher_of("llama"), layers, students[0])
    own = kl_of(logits_of(teacher, windows), logits_of(student, windows))
    assert first == pytest.approx(own.mean().item(), rel=1e-3)


@torch.no_grad()
def test_a_student_that_is_its_teacher_loses_nothing():
    windows = tokens(5, 24)
    student = student_of("llama", [WHOLE])
    whole = allocation_of(layers_of(teacher_of("llama")), [WHOLE], 2)
    teachers, mine = read_scores(
        [Subject("teacher", student.base, softmax=True), Subject("student", student, whole)], windows
    )
    assert mine.loss.mean().item() == pytest.approx(teachers.loss.mean().item(), abs=1e-5)
    assert mine.kl.mean().item() == pytest.approx(0, abs=1e-6)
    assert mine.agreement.mean() == teachers.agreement.mean() == 1.0 and mine.loss.shape == (5, 23)


@torch.no_grad()
def test_recall_reads_the_losses_of_the_two_passages():
    student, windows = student_of("llama", [Head(window=4)]), tokens(2, 40)
    (result,) = finish(measure_recall([Subject("student", student)], windows, 8, [10])).subjects
    ids = repeated_passages(windows, 8, 10)
    assert torch.equal(ids[:, 14:22], ids[:, 32:])
    logs = logits_of(student, ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert result.first[0] == pytest.approx(-logs[:, 14:21].mean().item(), rel=1e-5)
    assert result.second[0] == pytest.approx(-logs[:, 32:].mean().item(), rel=1e-5)


def test_repeats_are_in_the_second_half_of_the_texts_and_the_same_for_a_seed():
    windows = torch.arange(4 * 64).view(4, 64)
    changed = with_repeats(windows, 8, seed=1)
    assert torch.equal(changed[:2], windows[:2])
    assert all(len(set(text.tolist())) < 64 for text in changed[2:])
    assert torch.equal(changed, with_repeats(windows, 8, seed=1))
