"""Estimated prices agree with measured ones where changes are small, and rank heads and options as those do."""

import pytest
import torch

from linearizer import pipeline
from linearizer.method import head_prices_by_gradient
from linearizer.method.head_prices import measure_prices, measure_some_prices
from linearizer.method.head_prices_by_gradient import estimate_prices
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.teacher import load as teacher_module
from tests.support.models import layers_of, teacher_of, tokens

OPTIONS = (Head(window=8), Head(window=32), Head(window=16, slots=16))


@pytest.fixture(scope="module")
def both():
    """Prices of the demo model's heads, measured and estimated on the same text."""
    plan = Plan("demo", budget=64, dtype="float32")
    teacher = teacher_module.load_teacher_of(plan)
    windows = teacher_module.texts_of(Plan("demo", budget=64, length=128), teacher, 3, None)
    given = (teacher.model, windows, teacher.inspection.layers, OPTIONS, 4, begin)
    return finish(measure_prices(*given)), finish(estimate_prices(*given)), given


def begin(student, index):
    student.reset(torch.Generator().manual_seed(0))


def flat(prices):
    return torch.tensor([cost for layer in prices.kl for head in layer for cost in head])


def test_estimated_prices_rank_as_the_measured_ones_do(both):
    ranks = [flat(prices).argsort().argsort().double() for prices in both[:2]]
    assert torch.corrcoef(torch.stack(ranks))[0, 1] > 0.85


def test_estimated_prices_are_of_the_size_of_the_measured_ones(both):
    measured, estimated = map(flat, both[:2])
    dear = measured > measured.median()
    assert (estimated / measured)[dear].log().mean().exp() == pytest.approx(1, abs=0.4)


@pytest.mark.parametrize("family", ["gpt2", "gemma3_text"])
def test_every_architecture_is_estimated_and_left_as_it_was(family):
    teacher, windows = teacher_of(family), tokens(2, 24)
    layers, before = layers_of(teacher), teacher(windows).logits
    prices = finish(estimate_prices(teacher, windows, layers, OPTIONS, 2, begin))
    assert all(
        len(row) == (0 if layer.native_window else layer.kv_heads) for row, layer in zip(prices.kl, layers, strict=True)
    )
    assert flat(prices).isfinite().all() and (flat(prices) >= 0).all()
    assert torch.equal(teacher(windows).logits, before)


def test_a_run_with_estimated_prices_ends_in_a_student(tmp_path):
    plan = Plan(
        "demo",
        budget=40,
        texts=2,
        length=64,
        samples=128,
        target_length=64,
        bits=16,
        prices="estimated",
        dtype="float32",
    )
    run = pipeline.begin(tmp_path / "run", plan)
    finish(pipeline.linearize(run))
    assert [event["estimated"] for event in run.events() if event["event"] == "priced"] == [True]
    _, student, window = run.evaluation_parts["language"]["subjects"]
    assert student["kl"]["mean"] <= window["kl"]["mean"]  # which it may be, where it did better


def test_an_estimate_that_goes_on_from_what_was_kept_is_one_that_was_never_stopped(monkeypatch):
    monkeypatch.setattr(head_prices_by_gradient, "MAX_GRADIENTS", 1)  # a text at a time
    teacher, windows = teacher_of("llama"), tokens(3, 24)
    given, kept = (teacher, windows, layers_of(teacher), OPTIONS, 2, begin, 1), []
    whole = finish(estimate_prices(*given, keep=lambda *done: kept.append(done)))
    assert sorted(first for (_, first), _ in kept) == sorted([0, 1, 2] * len(whole.kl))
    for behind in range(1, len(kept) + 1):  # one layer may be a text further than another
        assert finish(estimate_prices(*given, dict(kept[:behind]))) == whole
    assert finish(estimate_prices(*given[:-1], 2)) != whole


def test_texts_that_are_run_together_are_estimated_as_each_by_itself(monkeypatch):
    teacher, windows = teacher_of("llama"), tokens(3, 24)
    given = (teacher, windows, layers_of(teacher), OPTIONS, 2, begin)
    together = finish(estimate_prices(*given))
    monkeypatch.setattr(head_prices_by_gradient, "MAX_GRADIENTS", 1)
    assert flat(finish(estimate_prices(*given))) == pytest.approx(flat(together), rel=1e-3)


def test_a_few_prices_are_measured_as_among_all(both):
    given, measured = both[2], both[0]
    places = [(0, 1, 2), (3, 0, 0), (3, 3, 0)]
    teacher, windows, layers, _, _, _ = given
    result = finish(measure_some_prices(teacher, windows, layers, measured, places, begin))
    assert list(result) == places
    assert list(result.values()) == pytest.approx([measured.kl[i][j][k] for i, j, k in places])
