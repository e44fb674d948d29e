"""What the page says of runs: what waits and for what, how far a run is, and why a student is the slower one."""

import time
from dataclasses import replace

import pytest
from transformers import AutoTokenizer

from linearizer.hub.models import find_model
from linearizer.page import cards, chat
from linearizer.plan.plan import Plan
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.locks import take_lock
from linearizer.run.results import Comparison, Side
from linearizer.workers import control, device_queue


@pytest.fixture
def waiting(tmp_path):
    """The status of a run that waits for others."""
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    return replace(control.status(run), state="queued")


def test_what_waits_says_what_for_since_when_and_how_long_still(waiting, tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_QUEUE", str(tmp_path / "queue"))
    assert "waiting for its turn" in cards.run_card(waiting, "run", 0.0)
    for place, (holder, words) in enumerate(((tmp_path / "holder", ">holder</a>"), (tmp_path / "b" / "x", "visitor"))):
        run = Run.create(holder, Plan("demo", budget=64))
        first = [device_queue.take_ticket(each.folder, [f"device {place}"]) for each in (run, waiting.run)]
        with take_lock(run.folder / "lock"):
            run.log(EventName.STARTED)
            run.log(EventName.PROFILE, done=1, total=4, unit="layers", seconds_left=600.0)
            card = cards.run_card(waiting, "run", time.time())
            assert words in card and "begun just now, measures the teacher, 10 min left" in card
        for ticket in first:
            ticket.remove()
    assert "The machine works on" not in cards.run_card(waiting, "run", 0.0)  # it is its own turn


def test_a_step_that_has_nothing_to_show_yet_says_what_will_be_there_and_one_that_does_nothing_is_none(tmp_path):
    run = Run.create(tmp_path / "trained", Plan.of("features", model="demo", budget=64))
    assert "Training begins when the teacher is measured." in cards.training_card(control.status(run), [], 0.0)
    assert cards.trains(run) and not cards.trains(Run.create(tmp_path / "plain", Plan("demo", budget=64)))


def test_the_list_of_runs_says_how_far_each_is(waiting):
    step = {"event": "price", "time": 0.0, "done": 3, "total": 12, "unit": "prices"}
    listed = cards.runs_table([replace(waiting, state="running", step=step)], 0.0)
    assert "prices every head, 25%" in listed and "64 tokens" in listed and "best" in listed


@pytest.mark.parametrize(
    "template, sent", [(None, "Hi"), ("{{ bos_token }}U: {{ messages[0].content }} A:", "U: Hi A:")]
)
def test_a_prompt_is_a_users_turn_where_the_model_has_a_chat_template(template, sent):
    tokenizer = AutoTokenizer.from_pretrained(find_model("demo").folder)
    tokenizer.chat_template = template
    assert chat.write_turn(tokenizer, "Hi") == sent


def test_the_pace_of_a_few_tokens_is_not_told():
    assert "50.0" in cards.side_card(Side("", 32, 0.1, 50.0, 32, 1000))
    assert "50.0" not in cards.side_card(Side("", 3, 0.1, 50.0, 32, 1000))


def test_a_model_that_writes_nothing_ended_at_once():
    silent = replace(side(1, 0.0), text="")
    assert "Ended at once." in cards.writing_card(silent, None, "")
    assert "Ended at once." not in cards.writing_card(replace(silent, text="and"), None, "")
    assert "Ended at once." not in cards.writing_card(None, None, "")
    assert "Both ended at once." in cards.comparison_note(Comparison("Hi", 2, silent, silent, None), "")


def side(tokens, rate):
    return Side("", tokens, 0.1, rate, tokens, 1000)


def test_a_slower_student_says_why_and_a_faster_one_nothing(quick_run):
    run = Run(quick_run)
    assert chat.explain_speed(run, side(32, 50.0), side(32, 60.0)) == ""
    why = chat.explain_speed(run, side(32, 80.0), side(32, 60.0))
    assert why.startswith("The student writes 75% as fast here, because after 32 tokens its teacher's cache is still")
    assert "queries and keys have to be turned into features" in why
    assert "the kernels that do this at once need a GPU" in why
    assert "cache" not in chat.explain_speed(run, side(4000, 80.0), side(4000, 60.0))
