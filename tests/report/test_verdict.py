"""A few sentences say what a student is worth and where that was seen, and every account of it begins with them."""

from dataclasses import replace

import pytest

from linearizer.cli.text import describe_run
from linearizer.page.cards import verdict_card
from linearizer.plan.allocation import StateSize
from linearizer.publish.card import card_of
from linearizer.publish.push import list_warnings
from linearizer.report.verdict import judge_lengths, judge_run
from linearizer.run.results import Estimate, LengthResult, ShortPredictions
from tests.support.cards import made

FIXED = StateSize(1000, 228_000)
MISSED = 2e-4, 160e-4  # by student and window
BETTER, UNSURE, WORSE = (-0.2, -0.1), (-0.1, 0.1), (0.1, 0.2)


def at(length, interval, agreement=0.97, **changes):
    """What was measured at one length: the interval of the difference, and the agreement of the student."""
    loss = Estimate(3.0, (2.9, 3.1))
    shares = {"student": (0.01, agreement), "window": (0.15, 0.826)}
    subjects = tuple(
        ShortPredictions(name, loss, *(Estimate(mean, (mean, mean)) for mean in means), missed)
        for (name, means), missed in zip(shares.items(), MISSED, strict=True)
    )
    apart = None if interval is None else Estimate(sum(interval) / 2, interval)
    return replace(LengthResult(length, "texts", 4, 100, subjects, apart), **changes)


def verdict(*results, state=FIXED):
    return judge_lengths(results, state)


def test_a_student_that_is_better_at_every_length_is_good_and_the_lengths_are_named():
    result = verdict(at(512, BETTER), at(2048, BETTER), at(4096, BETTER, 0.979))
    assert result.kind == "good"
    assert result.sentence == (
        "Better than a plain window of the same bytes on texts of 512, 2,048 and 4,096 tokens: on the longest it "
        "agrees with its teacher on 97.9% of tokens (KL 0.0100), the window on 82.6% (KL 0.1500). At 2 in 10,000 "
        "positions it misses what its teacher is sure of, the window at 160. Judged on texts of 512, 2,048 and 4,096 "
        "tokens; longer than 4,096 tokens: not judged. 228 kB, whatever the length."
    )
    assert (result.agreement, result.kl) == (0.979, 0.01)
    assert result.length == 4096 and result.lengths == (512, 2048, 4096)


@pytest.mark.parametrize(("agreement", "kind"), [(0.9, "good"), (0.8, "note"), (0.3, "bad")])
def test_a_better_student_is_coloured_by_how_near_its_teacher_it_is(agreement, kind):
    result = verdict(at(512, BETTER, agreement))
    assert result.kind == kind and ("That is far from its teacher." in result.sentence) == (kind == "bad")


def test_a_student_that_is_worse_at_a_longer_length_is_bad_and_the_length_is_named():
    result = verdict(at(512, BETTER), at(2048, BETTER), at(4096, WORSE, 0.8))
    assert result.kind == "bad" and result.length == 4096
    assert result.sentence.startswith(
        "Worse than a plain window of the same bytes on texts of 4,096 tokens (better on texts of 512 and 2,048 "
        "tokens): it agrees with its teacher on 80.0%"
    )
    shorter = verdict(at(512, WORSE), at(2048, BETTER))
    assert shorter.kind == "bad" and "Worse than a plain window of the same bytes on texts of 512" in shorter.sentence


def test_an_interval_that_includes_zero_shows_no_difference():
    result = verdict(at(512, BETTER), at(2048, UNSURE, 0.99))
    assert result.kind == "note"
    assert result.sentence.startswith(
        "No difference from a plain window of the same bytes is shown on texts of 2,048 tokens (better on texts of 512 "
        "tokens): it agrees"
    )
    assert verdict(at(512, None)).kind == "note"  # one text shows none
    longer = verdict(at(512, UNSURE), at(2048, BETTER))
    assert longer.length == 2048
    assert longer.sentence.startswith(
        "Better than a plain window of the same bytes on texts of 2,048 tokens (on texts of 512 tokens no difference "
        "is shown): it agrees"
    )


def test_texts_that_the_state_holds_whole_are_no_test():
    result = verdict(at(64, BETTER, 0.99), at(125, BETTER, 0.99))
    assert result.kind == "note"
    assert "Not tested: texts of 125 tokens fit into the state nearly whole, so nothing is shown" in result.sentence
    longer = verdict(at(100, UNSURE), at(400, BETTER))
    assert longer.kind == "good" and "(texts of 100 tokens fit into the state whole)" in longer.sentence
    assert verdict(at(100, WORSE), at(400, BETTER)).kind == "bad"  # it forgets what it could hold
    worse = verdict(at(64, WORSE), at(100, WORSE))
    assert worse.kind == "bad" and "(texts of 64 and 100 tokens fit into the state whole)" in worse.sentence
    assert verdict(at(100, (0.0001, 0.0003)), at(400, BETTER)).kind == "good"  # rounding


def test_texts_that_the_teacher_itself_reads_badly_are_no_test():
    result = verdict(at(512, BETTER), at(1024, WORSE, strained=True))
    assert result.kind == "good" and result.length == 512
    assert "the teacher itself predicts the end of texts of 1,024 tokens worse than a window" in result.sentence
    assert verdict(at(1024, BETTER, strained=True)).kind == "note"


def test_without_a_teacher_losses_are_compared():
    alone = tuple(replace(each, kl=None, agreement=None) for each in at(512, BETTER).subjects)
    result = verdict(at(512, BETTER, subjects=alone))
    assert result.kind == "note" and result.agreement is None
    assert "loss 3.000 nats per token, the window 3.000." in result.sentence
    assert result.sentence.endswith("The teacher was not there to compare with.")
    assert verdict(at(512, WORSE, subjects=alone)).kind == "bad"


def test_terminal_page_card_and_publishing_begin_with_it(tmp_path):
    run = made(tmp_path / "run")
    result = judge_run(run)
    assert result.length == 128 and result.kind == "note"
    assert describe_run(run).startswith(result.sentence)
    assert all(part in verdict_card(result) for part in result.sentence.split(". ", 1))
    body = card_of(run).write().split("\n---\n", 1)[1]
    assert body.split("\n\n")[1] == f"> {result.sentence}"
    assert list_warnings(run) == ((result.sentence,) if result.kind == "bad" else ())
    assert judge_run(made(tmp_path / "unjudged", losses={})) is None
