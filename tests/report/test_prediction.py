"""Wherever a predicted kl is shown, what was measured of whole students stands beside it, or multiplies it."""

import pytest

from linearizer.cli.text import describe_run
from linearizer.method.decide import decide
from linearizer.plan.allocation import heads_replaced
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.publish.card import card_of
from linearizer.report.quality_charts import corrected_by, find_knee, predicted_line
from linearizer.report.verdict import find_correction, predict_kl
from linearizer.run.measured import Candidate, Candidates, Prices
from tests.support.cards import made

PLAN = Plan("org/base@main", budget=64, length=128, bits=8)
OPTIONS = (*(Head(window=window, bits=8) for window in (4, 16, 64)), Head(window=4, slots=8, bits=8))


@pytest.fixture
def run(tmp_path):
    """A run by prices: of each head they predict 0.01 nats where it holds a window of 16."""
    run = made(tmp_path / "run", PLAN)
    rows = tuple(((0.1, 0.01, 0.001, 0.05),) * heads_replaced(layer) for layer in run.layers)
    run.write_product("prices.json", Prices(4, OPTIONS, rows).to_json())
    return run


def measured_at(run, factor):
    """Let the student by prices have been measured at so many times the kl that prices predict of it."""
    predicted = float(predict_kl(run, PLAN, decide(run, PLAN, run.layers)).split()[0])
    kl = factor * predicted
    own = Candidate("by prices", (0.01, kl)), Candidate("plain window", (0.02, 20 * kl))
    run.write("candidates.json", Candidates((32, 128), own).to_json())
    return predicted


def test_a_prediction_is_multiplied_by_what_the_run_measured(run):
    allocation = decide(run, PLAN, run.layers)
    most = "; more buys nothing: every head has all it can use"  # a window of the whole text
    assert predict_kl(run, PLAN, allocation).endswith(f"predicted: no whole student was measured{most}")
    predicted = measured_at(run, 1.5)
    assert find_correction(run).factor == pytest.approx(1.5, rel=1e-3)
    said = f"about {1.5 * predicted:.4f}: {predicted:.4f} predicted, × 1.5 as this run measured{most}"
    assert predict_kl(run, PLAN, allocation) == said
    assert predict_kl(run, PLAN, run.allocation) == ""  # it is not made of priced options


def test_terminal_and_card_show_what_was_measured_beside_what_was_predicted(run):
    predicted = measured_at(run, 3)
    sentences = (
        f"KL on 128 tokens of text that was not priced: {predicted:.4f} predicted, where each doubling of a text "
        f"counts alike; {3 * predicted:.4f} measured",
        "Kept: by prices; no other of 2 allocations of the same bytes has a smaller mean log KL",
    )
    for shown in (describe_run(run), card_of(run).write()):
        assert all(sentence in shown for sentence in sentences)


def test_the_curve_of_budgets_is_multiplied_and_says_so(run):
    (before,) = predicted_line(run)
    measured_at(run, 1.5)
    (after,) = predicted_line(run)
    assert corrected_by(run) == ", times 1.5, as whole students were measured"
    assert [kl for _, kl in after.points] == pytest.approx([1.5 * kl for _, kl in before.points], rel=1e-3)


def test_the_knee_is_where_a_falling_line_bends_most():
    falls = [(32, 0.1), (64, 0.01), (128, 0.001), (256, 0.0009), (512, 0.0008)]
    assert find_knee(falls) == 128
    assert find_knee([(64, 0.001), (128, 0.001), (256, 0.001)]) == 64  # no more than the least is worth its bytes
