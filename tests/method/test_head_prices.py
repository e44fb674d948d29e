"""The price of an option estimates what the model's output loses when that head alone holds it."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from linearizer.evaluate.recall import measure_recall
from linearizer.evaluate.subjects import Subject
from linearizer.method import head_prices, logits_by_rows
from linearizer.method.choose import kl_at_places
from linearizer.method.head_prices import DRAWS, estimate_prices, options_to_price, place_weights
from linearizer.method.recorder import Samples
from linearizer.method.substitute import attending_with, make_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.teacher import load as teacher_module
from linearizer.teacher.logits import kl_of, logits_of
from linearizer.teacher.text import repeated_passages
from tests.support.models import WHOLE, allocation_of, layers_of, student_of, teacher_of, tokens

OPTIONS = (Head(window=8), Head(window=32), Head(window=16, slots=16))


DRAWN = Samples((None,) * 16)


@pytest.mark.parametrize("tokens", [64, 512, 4096])
def test_each_doubling_of_a_text_counts_alike_whatever_its_length(tokens):
    weights = place_weights(tokens)
    halves = [weights[tokens >> (step + 1) : tokens >> step].sum() / tokens for step in range(3)]
    assert weights.mean() == pytest.approx(1, rel=1e-5) and max(halves) < 1.1 * min(halves)


def test_windows_and_slots_double_up_to_the_texts():
    assert [head.window for head in options_to_price(64, far="")] == [4, 8, 16, 32, 48]
    few = [(4, 2), (4, 4), (4, 8), (8, 8), (8, 16), (8, 32), (16, 16)]
    many = [(16, 32), (16, 48)]  # beside a window of two blocks; the last holds a whole text
    assert sorted((head.window, head.slots) for head in options_to_price(64) if head.slots) == sorted(few + many)


@torch.no_grad()
def test_recall_reads_the_losses_of_the_two_passages():
    student, windows = student_of("llama", [Head(window=4)]), tokens(2, 40)
    (result,) = finish(measure_recall([Subject("student", student)], windows, 8, [10])).subjects
    ids = repeated_passages(windows, 8, 10)
    assert torch.equal(ids[:, 14:22], ids[:, 32:])
    logs = logits_of(student, ids).log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    assert result.first[0] == pytest.approx(-logs[:, 14:21].mean().item(), rel=1e-5)
    assert result.second[0] == pytest.approx(-logs[:, 32:].mean().item(), rel=1e-5)


@torch.no_grad()
def measured_prices(teacher, windows, layers, options, sinks, samples):
    """Let one head after the other of every second layer hold each option, and measure the kl: the reference."""
    expected, weights, kl = logits_of(teacher, windows), place_weights(windows.shape[1]), []
    for index in range(0, len(layers), 2):
        for head in range(layers[index].kv_heads):
            for option in options:
                rows = [[WHOLE] * each.kv_heads for each in layers]
                rows[index][head] = option
                allocation = Allocation("by hand", sinks, tuple(map(tuple, rows)))
                with attending_with(teacher, make_students(teacher, layers, allocation, samples)):
                    logits = logits_of(teacher, windows)
                kl.append((weights * kl_of(expected, logits)).mean())
    return torch.stack(kl)


@pytest.fixture(scope="module")
def measured_and_estimated():
    """Prices of the demo model's heads, measured and estimated on the same text."""
    teacher = teacher_module.load_teacher_of(Plan("demo", budget=64, dtype="float32"))
    windows = teacher_module.texts_of(Plan("demo", budget=64, length=128), teacher, 3, None)
    arguments = (teacher.model, windows, teacher.inspection.layers, OPTIONS, 4, DRAWN)
    prices = finish(estimate_prices(*arguments))
    return measured_prices(*arguments), flat(replace(prices, kl=prices.kl[::2]))


def flat(prices):
    return torch.tensor([cost for layer in prices.kl for head in layer for cost in head])


def test_estimated_prices_rank_as_the_measured_ones_do(measured_and_estimated):
    ranks = [prices.argsort().argsort().double() for prices in measured_and_estimated]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.85


def test_estimated_prices_are_of_the_size_of_the_measured_ones(measured_and_estimated):
    measured, estimated = measured_and_estimated
    dear = measured > measured.median()
    assert (estimated / measured)[dear].log().mean().exp() == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_every_architecture_is_estimated_and_left_as_it_was(family):
    teacher, windows = teacher_of(family), tokens(2, 24)
    layers, before = layers_of(teacher), teacher(windows).logits
    prices = finish(estimate_prices(teacher, windows, layers, OPTIONS, 2, DRAWN))
    assert all(
        len(row) == (0 if layer.native_window else layer.kv_heads) for row, layer in zip(prices.kl, layers, strict=True)
    )
    assert flat(prices).isfinite().all() and (flat(prices) >= 0).all()
    assert torch.equal(teacher(windows).logits, before)


def test_an_estimate_that_goes_on_from_what_was_kept_is_one_that_was_never_stopped(monkeypatch):
    monkeypatch.setattr(head_prices, "MAX_GRADIENTS", 1)  # a text at a time
    teacher, windows = teacher_of("llama"), tokens(3, 24)
    arguments, stored = (teacher, windows, layers_of(teacher), OPTIONS, 2, replace(DRAWN, seed=1)), []
    complete = finish(estimate_prices(*arguments, keep=lambda *part: stored.append(part)))
    assert sorted(first for (_, first), _ in stored) == sorted([0, 1, 2] * len(complete.kl))
    for behind in range(1, len(stored) + 1):  # one layer may be a text further than another
        assert finish(estimate_prices(*arguments, dict(stored[:behind]))) == complete
    assert finish(estimate_prices(*arguments[:-1], DRAWN)) != complete


def test_texts_that_are_run_together_are_estimated_as_each_by_itself(monkeypatch):
    teacher, windows = teacher_of("llama"), tokens(3, 24)
    arguments = (teacher, windows, layers_of(teacher), OPTIONS, 2, DRAWN)
    together = finish(estimate_prices(*arguments))
    monkeypatch.setattr(head_prices, "MAX_GRADIENTS", 1)
    assert flat(finish(estimate_prices(*arguments))) == pytest.approx(flat(together), rel=1e-3)


class Largest(TorchDispatchMode):
    """Records the numbers of the largest tensor that is made while it lasts."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        self.numbers = max([self.numbers, *sizes])
        return result


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_a_large_vocabulary_makes_no_larger_tensors_and_changes_no_price(family, monkeypatch):
    teacher, windows = teacher_of(family, vocab_size=4000), tokens(2, 64)
    layers = layers_of(teacher)
    students = [allocation_of(layers, [head], 2) for head in OPTIONS]

    def measure():
        with Largest() as largest:
            prices = finish(estimate_prices(teacher, windows, layers, OPTIONS, 2, DRAWN))
            kl = finish(kl_at_places(teacher, windows, layers, students, DRAWN, torch.arange(64)))
        return flat(prices), torch.stack(kl), largest.numbers

    prices, kl, largest = measure()
    some = finish(kl_at_places(teacher, windows, layers, students, DRAWN, places := torch.tensor([0, 7, 33, 62])))
    torch.testing.assert_close(torch.stack(some), kl[..., places], rtol=1e-4, atol=1e-6)
    assert largest >= windows.shape[1] * 4000  # of one text
    monkeypatch.setattr(logits_by_rows, "MAX_LOGITS", 5 * 4000)
    *in_parts, largest = measure()
    embedding = teacher.get_output_embeddings().weight.numel()
    assert largest <= max(5 * 4000 * DRAWS, embedding)
    torch.testing.assert_close(in_parts[0], prices, rtol=1e-4, atol=1e-9)
    torch.testing.assert_close(in_parts[1], kl, rtol=1e-4, atol=1e-6)
