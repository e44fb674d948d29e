"""What the page says of runs: what waits and for what, how far a run is, and what a chat says of its models."""

import re
import shutil
import time
from dataclasses import replace
from importlib.util import find_spec

import pytest

from linearizer.page import cards, plan_cards, result_step, run_list
from linearizer.page.chat import cards as chat_cards
from linearizer.page.chat.chats import Chat, Message, Settings, Turn
from linearizer.page.visitors import example_folder
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.locks import take_lock
from linearizer.run.results import Comparison, Difference, Side, StateSizes
from linearizer.run.training_end import read_training
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


def test_the_head_of_a_run_says_how_far_its_evaluation_is(waiting):
    step = {"event": "language", "time": 0.0, "done": 3, "total": 12, "unit": "texts", "part": "language"}
    work = replace(waiting, state="running", step={**step, "place": 2, "parts": 4})
    card = cards.run_card(replace(waiting, state="done", evaluation=work), "run", 0.0)
    assert "done" in card and "part 2 of 4: 3 of 12 texts" in card


def test_the_error_of_a_training_stands_beside_what_it_was_at_first(waiting):
    steps = [{"done": n, "total": 9, "tokens_per_second": 1.0, "attention_error": 9.0 / n} for n in (1, 2)]
    assert "attention error; 9 at first" in (card := cards.training_card(waiting, steps)) and "4.5" in card


def test_the_list_of_runs_says_how_far_each_is(waiting):
    step = {"event": "price", "time": 0.0, "done": 3, "total": 12, "unit": "prices"}
    listed = run_list.run_cards([replace(waiting, state="running", step=step)])
    assert "prices every head, 25%" in listed and "64 tokens" in listed and "best" in listed


def test_the_pace_of_a_few_tokens_is_not_told():
    assert "50.0" in chat_cards.head_card("student", 1, 1, 32, Side("", 32, 0.1, 50.0, 32, 1000))
    assert "50.0" not in chat_cards.head_card("student", 1, 1, 32, Side("", 3, 0.1, 50.0, 32, 1000))


def messages_of(turn, name="student"):
    talk = Chat(Settings(), turns=(Turn(Message(turn.prompt), {}, turn),))
    return [each["content"] for each in chat_cards.columns_of(talk, [Message("Next")])[name]["value"]]


def test_a_model_that_writes_nothing_ended_at_once():
    silent = replace(side(1, 0.0), text="")
    both, three = Comparison("Hi", 2, silent, silent), Comparison("Hi", 2, silent, silent, silent)
    assert messages_of(both) == ["Hi", "(ended at once)", "Next"] and messages_of(both, "window") == ["Hi", "", "Next"]
    assert "Both ended at once." in chat_cards.turn_note(both) and "All ended at once." in chat_cards.turn_note(three)


def test_what_the_others_write_as_the_teacher_does_is_told_in_one_line():
    teacher, student, window = (replace(side(8, 50.0), text="a b c"), *[replace(side(8, 50.0), text="a <d>")] * 2)
    student = replace(student, difference=Difference(2, "a ", "b", "<d>", ((0.5, 0.25), (0.125, 0.75))))
    now = Comparison("Hi", 2, teacher, student, window)
    note = chat_cards.turn_note(now)
    assert (
        "the student 2 of 8 (25%), the window 8 of 8 (100%). At token 3 the teacher writes “b”, the student “‹d›”"
        in note
    )
    assert "the teacher gives these 50.0% and 25.0%, the student 12.5% and 75.0%." in note
    assert "the teacher gives these" in chat_cards.turn_note(now, "a b")  # beside what is right, too
    assert messages_of(now)[1] == "a <d>"  # as it was written, so that it is copied so


def test_an_answer_is_right_or_wrong_and_says_nothing_where_the_teacher_is_wrong():
    knows, guesses = (replace(side(8, 50.0), text=text) for text in (" blue, and", "red"))
    note = chat_cards.turn_note(Comparison("Hi", 2, knows, knows, guesses), "blue")
    assert "the teacher right, the student right, the window wrong." in note and "nothing" not in note
    assert "says nothing of the student" in chat_cards.turn_note(Comparison("Hi", 2, guesses, knows, guesses), "blue")


def widths(heads):
    return [float(re.search(r"width:([\d.]+)%", card)[1]) for card in heads.values()]


def test_the_heads_say_what_each_model_holds_and_have_room_for_the_teachers_end():
    half, whole = (StateSizes(n, 100, {"teacher": 10_000 * n, "student": 50_000}) for n in (50, 100))
    assert widths(chat_cards.heads_of_reading(half, 0)) == [50, 5] and widths(
        chat_cards.heads_of_reading(whole, 0)
    ) == [
        100,
        5,
    ]
    assert "500 kB" in chat_cards.heads_of_reading(half, 0)["teacher_head"]
    after = chat_cards.heads_of_reading(replace(half, bytes={"teacher": 350 * 10_000, "student": 50_000}), 300)
    assert widths(after)[0] == 87.5 and "memory at 350 tokens" in after["student_head"]
    assert "Reading the text: 50 of 100" in chat_cards.reading_note(half, "the text")
    assert "Read the text: 100 of 100" in chat_cards.reading_note(whole, "the text")


def test_what_recurrent_layers_keep_is_named_and_does_not_grow():
    now = StateSizes(50, 200, {"teacher": 1_000_000, "student": 550_000}, recurrent_bytes=500_000)
    assert widths(chat_cards.heads_of_reading(now, 0)) == [40, 22]  # of 2.5 MB at 200 tokens
    assert "500 kB of each memory are in recurrent layers, and do not grow" in chat_cards.reading_note(now, "it")
    assert "recurrent" not in chat_cards.reading_note(replace(now, recurrent_bytes=0), "it")


def test_a_budget_is_stated_with_what_recurrent_layers_keep_beside_it():
    plan, layers = Plan("a/b", budget=64), (Layer(4, 2, 16, 16),)
    beside = "24 recurrent layers keep 150 MB beside it"
    assert f"whatever the length; {beside}" in plan_cards.budget_card(plan, layers, 4096, beside=beside)
    assert "recurrent" not in plan_cards.budget_card(plan, layers, 4096)


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


def test_the_lines_under_use_it_load_the_student_and_write(quick_run, capsys):
    ways = cards.write_causal_ways(Run(quick_run))
    exec(ways["Load it"], {})
    assert capsys.readouterr().out.startswith("Once")
    assert ("Serve it with vLLM" in ways) == (find_spec("vllm") is not None)


def test_two_runs_are_set_side_by_side_at_equal_lengths_alone(quick_run):
    other = Run(example_folder())
    both = [{result.length for result in run.results["language"].result.lengths} for run in (Run(quick_run), other)]
    card = run_list.comparison_card(Run(quick_run), other)
    assert both[0] ^ both[1]
    for length in both[0] | both[1]:
        row = card.partition(f"KL, texts of {length:,} tokens")[2].partition("</tr>")[0]
        assert row.count("–") == 2 - sum(length in lengths for lengths in both), row
    assert card.count("<svg") == 1 and "KL, nats per token by tokens of a text" in card


def test_the_losses_of_two_trainings_are_drawn_over_each_other(tmp_path):
    plan = Plan("demo", recipe="features", budget=32, steps=9)
    runs = [Run.create(tmp_path / name, plan) for name in ("one", "two")]
    for run, factor in zip(runs, (1.0, 2.0), strict=True):
        for step in range(1, 10):
            run.log("distill", done=step, total=9, unit="steps", layers={"0": factor / step, "1": 3 * factor / step})
        assert run_list.loss_points(run)[0] == (1.0, 2 * factor)
    drawn = run_list.draw_pair(runs, run_list.loss_points, "steps", "loss")
    assert drawn.count('class="lz-line') == 2 and ">one<" in drawn and ">two<" in drawn
    assert run_list.draw_pair(runs, lambda run: [(1.0, 1.0)], "steps", "loss") == "", "a point is no line"


def test_the_card_is_shown_as_the_hub_shows_it_before_it_is_sent(quick_run, root):
    shutil.copytree(quick_run, root / "run")
    _, _, card, place, _ = result_step.preview_publication({"run": "run"}, None, None, "ann", "student", True)
    facts, _, text = card.partition("```\n")
    assert (
        facts.startswith("```yaml\n")
        and "library_name" in facts
        and text.lstrip().startswith("# ")
        and "---" not in facts
    )
    assert place.visible
