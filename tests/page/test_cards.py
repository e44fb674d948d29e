"""What the page says of runs: what waits and for what, how far a run is, and what a chat says of its models."""

import re
import time
from dataclasses import replace

import pytest

from linearizer.page import cards, chat_cards, plan_cards, run_list
from linearizer.page.chats import Chat, Document, Settings
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.report import line_chart
from linearizer.run.events import EventName
from linearizer.run.folder import Run, read_training
from linearizer.run.locks import take_lock
from linearizer.run.results import Comparison, Difference, Side, StateSizes
from linearizer.workers import control, device_queue

POINT = re.compile(r"([\d.]+) ([\d.]+)")


@pytest.fixture
def waiting(tmp_path):
    """The status of a run that waits for others."""
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    return replace(control.status(run), state="queued")


def test_what_waits_says_what_for_since_when_and_how_long_still(waiting, tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_QUEUE", str(tmp_path / "queue"))
    assert "starting" in cards.run_card(waiting, "run", 0.0)  # nothing is before it
    holders = (tmp_path / "holder", ">holder</a>"), (tmp_path / "b" / "x", "a run in another folder")
    for place, (holder, words) in enumerate(holders):
        run = Run.create(holder, Plan("demo", budget=64))
        first = [device_queue.take_ticket(each.folder, [f"device {place}"]) for each in (run, waiting.run)]
        with take_lock(run.folder / "lock"):
            run.log(EventName.STARTED)
            run.log(EventName.PROFILE, done=1, total=4, unit="layers", seconds_left=600.0)
            card = cards.run_card(waiting, "run", time.time())
            told = "waiting for its turn", words, "begun just now, measures the teacher, 10 min left"
            assert all(each in card for each in told)
        for ticket in first:
            ticket.remove()
    assert "The machine is running" not in cards.run_card(waiting, "run", 0.0)  # it is its own turn


def test_a_step_that_has_nothing_to_show_yet_says_what_will_be_there_and_one_that_does_nothing_is_none(tmp_path):
    run = Run.create(tmp_path / "trained", Plan.of("features", model="demo", budget=64))
    assert "Training begins once the teacher is measured." in cards.training_card(control.status(run), [])
    assert cards.trains(run) and not cards.trains(Run.create(tmp_path / "plain", Plan("demo", budget=64)))


def test_the_list_of_runs_says_how_far_each_is(waiting):
    step = {"event": "price", "time": 0.0, "done": 3, "total": 12, "unit": "prices"}
    listed = run_list.run_cards([replace(waiting, state="running", step=step)])
    assert "prices every head, 25%" in listed and "64 tokens" in listed and "best" in listed


def test_the_pace_of_a_few_tokens_is_not_told():
    assert "50.0" in chat_cards.side_card(Side("", 32, 0.1, 50.0, 32, 1000))
    assert "50.0" not in chat_cards.side_card(Side("", 3, 0.1, 50.0, 32, 1000))


def test_a_model_that_writes_nothing_ended_at_once():
    silent = replace(side(1, 0.0), text="")
    assert "Ended at once." in chat_cards.writing_card(silent, None, "")
    assert "Ended at once." not in chat_cards.writing_card(replace(silent, text="and"), None, "")
    assert "Ended at once." not in chat_cards.writing_card(None, None, "")
    assert "Both ended at once." in chat_cards.comparison_note(Comparison("Hi", 2, silent, silent))
    assert "All ended at once." in chat_cards.comparison_note(Comparison("Hi", 2, silent, silent, silent))


def test_what_the_others_write_as_the_teacher_does_is_told_in_one_line_and_marked():
    teacher, student, window = (replace(side(8, 50.0), text="a b c"), *[replace(side(8, 50.0), text="a <d>")] * 2)
    student = replace(student, difference=Difference(2, "a ", "b", "<d>"))
    note = chat_cards.comparison_note(now := Comparison("Hi", 2, teacher, student, window))
    assert "which is marked: the student 2 of 8 (25%), the window 8 of 8 (100%)." in note
    assert "<mark>&lt;d&gt;</mark>" in chat_cards.column([now], "student")
    assert "a <mark>b</mark> c" in chat_cards.column([now], "teacher")
    assert "<mark>" not in chat_cards.column([now], "window")


def test_a_meter_says_what_each_model_holds_and_draws_it():
    course = [StateSizes(tokens, 100, {"teacher": 10_000 * tokens, "student": 50_000}) for tokens in (50, 100)]
    card = chat_cards.meter_card(course, Chat(Settings(), document=Document(100, False)))
    assert "Read the document: 100 of 100 tokens" in card and "1 MB" in card and "50 kB" in card and "beginning" in card
    rising, flat = ([float(y) for _, y in POINT.findall(path)] for path in re.findall(r' d="(M[^"H]+)"', card))
    assert rising[0] > rising[1] > rising[2] and len({*flat}) == 1  # up is less
    assert "Reading the prompt" in chat_cards.meter_card(course[:1], Chat(Settings()))


def test_a_meter_names_what_recurrent_layers_keep_and_does_not_let_it_grow():
    sizes = [{"teacher": 10_000 * tokens + 500_000, "student": 550_000} for tokens in (50, 100)]
    course = [StateSizes(50 * step, 200, each, recurrent_bytes=500_000) for step, each in enumerate(sizes, 1)]
    card = chat_cards.meter_card(course, Chat(Settings()))
    assert "500 kB of each are in recurrent layers, and do not grow" in card
    assert "2.5 MB" in card  # the teacher's end at 200 tokens, on the axis
    assert "recurrent" not in chat_cards.meter_card([replace(course[0], recurrent_bytes=0)], Chat(Settings()))


def test_a_budget_is_stated_with_what_recurrent_layers_keep_beside_it():
    plan, layers = Plan("a/b", budget=64), (Layer(4, 2, 16, 16),)
    beside = "24 recurrent layers keep 150 MB beside it"
    assert f"whatever the length; {beside}" in plan_cards.budget_card(plan, layers, 4096, beside=beside)
    assert "recurrent" not in plan_cards.budget_card(plan, layers, 4096)


def test_a_meter_of_a_prompt_begins_where_the_document_ended():
    chat = Chat(Settings(), document=Document(300, True))
    course = [StateSizes(tokens, 100, {"teacher": 10_000 * (300 + tokens), "student": 50_000}) for tokens in (50, 100)]
    card = chat_cards.meter_card(course, chat, 300)
    assert "Read the prompt: 100 of 100 tokens" in card
    (start, *_, end), _ = ([float(y) for _, y in POINT.findall(path)] for path in re.findall(r' d="(M[^"H]+)"', card))
    ground = line_chart.HEIGHT - line_chart.BOTTOM
    assert (ground - start) / (ground - end) == pytest.approx(300 / 400, abs=0.01)


def side(tokens, rate):
    return Side("", tokens, 0.1, rate, tokens, 1000)


def test_a_training_that_was_ended_early_says_so_wherever_its_student_is_shown(tmp_path):
    run = Run.create(tmp_path / "run", Plan.of("features", model="demo", budget=64, steps=200))
    run.log(EventName.STARTED)
    run.log(EventName.DISTILLED, phase=0, steps=12, asked=200)
    words = "12 of 200 steps"
    assert words in plan_cards.plan_card(run.plan, read_training(run))
    assert words in run_list.list_run(replace(control.status(run), state="done"), 0.0)
    assert run_list.run_facts(run)["trained"] == words
    run.log(EventName.DISTILLED, phase=0, steps=200, asked=200)  # resumed, and ended
    assert words not in plan_cards.plan_card(run.plan, read_training(run))
