"""One sentence says what a student is worth, and every account of it begins with that sentence."""

from dataclasses import replace

import pytest

from linearizer.cli.text import describe_run
from linearizer.publish.card import write_card
from linearizer.publish.push import list_warnings
from linearizer.publish.verdict import judge_language, judge_run
from linearizer.run.results import Estimate
from linearizer.run.state_size import StateSize
from tests.support.cards import made
from tests.support.evaluation_results import TYPED

FIXED, GROWS = StateSize(1000, 228_000), StateSize(1000, 440_000, 594)


def verdict(student, window, state=FIXED):
    """Judge (kl, agreement) of a student and of a window."""
    language = TYPED["language"].result

    def estimate(mean):
        return None if mean is None else Estimate(mean, (mean, mean))

    subjects = [
        replace(each, kl=estimate(kl), agreement=estimate(agreement)) if each.name in ("student", "window") else each
        for each in language.subjects
        for kl, agreement in [student if each.name == "student" else window]
    ]
    return judge_language(replace(language, subjects=tuple(subjects)), state)


@pytest.mark.parametrize(
    ("student", "window", "kind", "sentence"),
    [
        (
            (0.001, 0.979),
            (0.15, 0.826),
            "good",
            "Agrees with its teacher on 97.9% of tokens; a plain window of the same bytes on 82.6%. 228 kB, whatever "
            "the length.",
        ),
        ((0.1, 0.8), (0.2, 0.7), "note", "Agrees with its teacher on 80.0%"),
        ((1.5, 0.3), (2.0, 0.2), "bad", "That is far from its teacher."),
        (
            (0.2, 0.826),
            (0.2, 0.827),
            "note",
            "No better than a plain window of the same bytes: agrees with its teacher",
        ),
        ((3.5, 0.088), (0.3, 0.684), "bad", "Worse than a plain window of the same bytes: agrees"),
    ],
)
def test_the_verdict_says_what_was_measured_and_is_coloured_by_it(student, window, kind, sentence):
    result = verdict(student, window)
    assert result.kind == kind and sentence in result.sentence
    assert (result.agreement, result.window_agreement) == (student[1], window[1])
    assert result.worse_than_window == (student[0] > 1.02 * window[0])


def test_what_grows_is_said_to_grow():
    said = verdict((0.001, 0.98), (0.1, 0.8), GROWS).sentence
    assert "440 kB + 594 B a token: 2.87 MB after 4k, 19.9 MB after 32k, 78.3 MB after 128k tokens." in said


def test_without_a_teacher_losses_are_compared():
    result = verdict((None, None), (None, None))
    assert "The teacher was not there" in result.sentence and result.agreement is None


def test_terminal_card_and_publishing_begin_with_it(tmp_path):
    run = made(tmp_path / "run")
    result = judge_run(run)
    assert describe_run(run).startswith(result.sentence)
    body = write_card(run).split("\n---\n", 1)[1]
    assert body.split("\n\n")[1] == f"> {result.sentence}"
    assert list_warnings(run) == ((result.sentence,) if result.kind == "bad" else ())
    assert judge_run(made(tmp_path / "unjudged", losses={})) is None
