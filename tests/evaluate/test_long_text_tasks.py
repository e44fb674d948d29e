"""Facts are hidden where they should be, and one that looks them up answers what can be looked up."""

import pytest
import torch

from linearizer.errors import TextError
from linearizer.evaluate.evaluate_run import tasks_of_harness
from linearizer.evaluate.tasks import DEPTHS, KINDS, LOSS, frequent_words, lay_out, measure_long_text_tasks
from linearizer.progress import finish
from linearizer.run.results import Request
from linearizer.teacher.text import read_texts
from tests.support.looking_up import looking_up

LENGTHS = (192, 320)


@pytest.fixture(scope="module")
def windows(tokenizer):
    return read_texts("builtin", tokenizer, 320, 16)


@pytest.fixture(scope="module")
def scored(tokenizer, windows):
    """One who looks everything up, and one who only sees the last hundred tokens."""
    subjects = [looking_up(), looking_up(reach=100)]
    return finish(measure_long_text_tasks(subjects, tokenizer, windows, LENGTHS, samples=2, seed=1))


@pytest.mark.parametrize("kind", KINDS)
def test_texts_keep_their_length_and_hold_facts_question_and_answer(tokenizer, windows, kind):
    import random

    words = frequent_words(tokenizer, windows)[:40]
    puzzle = KINDS[kind](words, 0.5, random.Random(0))
    ids, answer = lay_out(puzzle, windows[0], tokenizer)
    text = tokenizer.decode(ids[0])
    assert ids.shape == (1, 320) and text.endswith(puzzle.question + "".join(f" {word}" for word in puzzle.answer))
    assert all(sentence in text for _, sentence in puzzle.facts) and len(answer) == len(puzzle.answer)
    assert 0.3 < text.index(puzzle.facts[0][1]) / len(text) < 0.6


def test_every_task_is_scored_by_depth_and_length_alike_for_all(scored, tokenizer, windows):
    rows = [(score.task, score.metric) for score in scored[0].scores]
    assert len(set(rows)) == len(rows) == len(KINDS) * len(LENGTHS) * (len(DEPTHS) + 1)
    assert rows == [(score.task, score.metric) for score in scored[1].scores]
    again = finish(measure_long_text_tasks([looking_up()], tokenizer, windows, LENGTHS, samples=2, seed=1))
    assert again[0].scores == scored[0].scores


def test_what_stands_in_the_text_is_found_and_what_is_out_of_sight_is_not(scored):
    for number, kind in enumerate(KINDS):
        if kind in ("single key", "many keys"):
            far, limited = (
                {(score.task, score.metric): score.value for score in subject.scores if score.task.startswith(kind)}
                for subject in scored
            )
            for task in {task for task, _ in far}:
                assert far.pop((task, LOSS)) < limited.pop((task, LOSS))
            assert set(far.values()) == {1.0}, number
            assert limited[f"{kind}, 320 tokens", "depth 10%"] == 0 and limited[f"{kind}, 320 tokens", "depth 90%"] == 1


def test_the_name_ruler_means_the_tasks_of_lm_eval_alone():
    asked = Request(tasks=("long-text", "ruler"))
    assert tasks_of_harness(asked) == ("ruler",)


def test_a_text_of_few_words_or_too_short_for_a_task_is_refused(tokenizer, windows):
    with pytest.raises(TextError, match="words for tasks"):
        frequent_words(tokenizer, torch.full((1, 64), 300))
    with pytest.raises(TextError, match="does not fit"):
        finish(measure_long_text_tasks([], tokenizer, windows, [12]))
