"""What a Space lets a visitor use: each limit is kept, said in words, and set by the Space's owner."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from linearizer.errors import RequestError
from linearizer.page import actions, limits, plan_step, planning, run_list, sending
from linearizer.page.chat import answers
from linearizer.page.chat.chats import Message, Settings
from linearizer.page.limits import LIMITS, MAX_OF_PLAN, Limits
from linearizer.page.visitors import find_visitor
from linearizer.plan.plan import Plan
from linearizer.run.results import Request
from linearizer.workers import control
from tests.support.runs import begin_for

ANN, BOB = "a" * 16, "b" * 16


def begun(secret=ANN):
    return begin_for(find_visitor(secret=secret), Plan("demo", budget=64))


def test_the_time_that_a_run_waited_or_worked_before_is_not_counted(on_space):
    run = begun()
    with run.take_lock():
        for event, at in (("queued", 0), ("started", 10), ("stopped", 50), ("queued", 100), ("started", 160)):
            run.log(event)
            lines = run.log_file.read_text().splitlines()
            lines[-1] = f'{{"time": {at}, "event": "{event}"}}'
            run.log_file.write_text("\n".join(lines) + "\n")
        run.log("started")  # again, of a run that works in slices
        limits.enforce_limits(160 + 60 * LIMITS.minutes)
        assert not run.has_request("stop")
        limits.enforce_limits(161 + 60 * LIMITS.minutes)
        assert run.has_request("stop")


def test_a_space_removes_what_nobody_has_looked_after(on_space):
    run = begun()
    run.log("stopped")
    limits.enforce_limits(time.time())
    assert run.folder.exists()
    limits.enforce_limits(time.time() + LIMITS.days * 24 * 3600 + 60)
    assert not run.folder.exists()


def test_a_space_keeps_an_old_run_while_its_student_is_on_its_way(on_space, monkeypatch):
    run, late = begun(), time.time() + LIMITS.days * 24 * 3600 + 60
    run.log("stopped")
    (run.checkpoint).mkdir()
    (run.checkpoint / "config.json").write_text("{}")
    monkeypatch.setitem(sending.PUBLICATIONS, run.key, publication := sending.Publication(run, "ann/student"))
    limits.enforce_limits(late)
    publication.error = "it was interrupted"
    address = sending.offer_download(run)
    limits.enforce_limits(late)
    sending.OFFERED.pop(address[8:-4])
    download = sending.fetch(run, "student")
    next(download)
    limits.enforce_limits(late)
    assert run.folder.exists()
    list(download)
    limits.enforce_limits(late)
    assert not run.folder.exists()


def examined(**given):
    """A plan for the demo model, and what is known of the model, as if it could read texts of any length."""
    plan = Plan.of(given.pop("recipe", "best"), model="demo", **{"budget": 64, **given})
    return plan, replace(planning.examine_model(find_visitor(secret=ANN), "demo").inspection, max_positions=None)


OTHERS = {"features": {"budget": None}} | dict.fromkeys(("window", "sinks"), {"budget": None, "features": 64})


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        *(
            ({"recipe": "features", name: most + 8, **OTHERS.get(name, {})}, f"{name} .* more than this Space serves")
            for name, most in MAX_OF_PLAN.items()
        ),
        ({"budget": 512}, "length 8192 is more than this Space serves"),  # 16 times the budget
    ],
)
def test_a_space_says_what_is_too_much(on_space, given, sentence):
    with pytest.raises(RequestError, match=sentence):
        limits.check_plan(*examined(**given))


def test_every_way_to_a_run_refuses_a_budget_beyond_the_spaces_in_one_sentence(on_space):
    ann, options = find_visitor(secret=ANN), {"recipe": "swa", "length": 512}
    chosen, most = planning.examine_model(ann, "demo"), limits.budget_reach()[1]
    assert chosen.plan("demo", most, "Quick", options).budget == most == MAX_OF_PLAN["budget"]
    refused = f"^budget {most + 8} is more than this Space serves: ask for at most {most}, or do this"
    for ask in (chosen.plan, partial(actions.estimate_run, ann), partial(actions.start_run, ann)):
        with pytest.raises(RequestError, match=refused):
            ask("demo", most + 8, "Quick", options)


def test_a_space_accepts_whatever_its_slider_offers_also_for_a_model_that_reads_long_texts(on_space):
    ann = find_visitor(secret=ANN)
    demo = planning.examine_model(ann, "demo")
    chosen = replace(demo, inspection=replace(demo.inspection, max_positions=32_768))
    least, most = limits.budget_reach(32_768)
    for budget in (least, 512, most):
        assert chosen.plan("demo", budget, "Quick", {}).resolved_length(32_768) <= MAX_OF_PLAN["length"]
    with pytest.raises(RequestError, match="length 8192 is more than this Space serves"):
        chosen.plan("demo", 512, "Quick", {"length": 8192})


def test_a_slider_reaches_what_a_plan_already_asks_for(on_space, monkeypatch):
    assert limits.budget_reach(512, 256) == (32, 512) and limits.budget_reach(512, 1024) == (32, 512)
    assert limits.budget_reach(512, 8192) == (32, 8192) and limits.budget_reach(None, 16) == (16, 2048)
    monkeypatch.delenv("SPACE_ID")
    assert limits.budget_reach() == (32, 4096) and limits.budget_reach(4096, 8192) == (32, 8192)
    slider = plan_step.take_plan(Plan("demo", budget=8192).to_json().encode())[1]
    assert (slider.value, slider.maximum) == (8192, 8192)


def test_a_plan_that_would_take_the_memory_of_all_is_refused(on_space):
    few, many = examined(recipe="features", steps=60), examined(recipe="features", steps=60, batch=8, length=2048)
    limits.check_plan(*few, Limits(memory=2))
    with pytest.raises(RequestError, match="would take some .* GB of memory, and this Space gives a run 2 GB"):
        limits.check_plan(*many, Limits(memory=2))


def test_a_model_that_is_too_large_is_refused_before_it_is_read(on_space):
    plan, inspection = examined()
    limits.check_plan(plan, inspection, Limits(gigabytes=inspection.weight_bytes / 1e9))
    with pytest.raises(RequestError, match=r"GB of weights, and this Space serves up to 0.001 GB: choose a smaller"):
        limits.check_plan(plan, inspection, Limits(gigabytes=0.001))


@pytest.mark.parametrize("path", ["~/private", "/etc", "./linearizer", "."])
def test_a_space_takes_no_path_for_a_data_set(on_space, path):
    with pytest.raises(RequestError, match="on a Space text comes from"):
        planning.make_plan("demo", 64, "Quick", {"text": f"dataset:{path}"})
    with pytest.raises(RequestError, match="on a Space pictures come from"):
        planning.make_encoder_plan("org/name", 64, {"pictures": f"dataset:{path}"})


def take_turn(secret, few):
    with limits.turn(find_visitor(secret=secret), few):
        pass


def test_a_visitor_whose_runs_fill_their_share_of_the_disk_is_refused_and_nobody_else(on_space):
    run = begun()
    (run.folder / "state" / "large").write_bytes(b"x" * 2000)
    take_turn(ANN, Limits(disk=1e-5))
    with pytest.raises(RequestError, match="your runs fill 1e-06 GB: delete a run under `Runs`"):
        take_turn(ANN, Limits(disk=1e-6))
    take_turn(BOB, Limits(disk=1e-6))


def test_a_visitor_and_all_together_have_only_so_many_runs_at_work(on_space):
    first, second = begun(), begun(BOB)
    few = Limits(runs=1, queue=2)
    take_turn(ANN, few)
    with first.take_lock():
        first.log("queued")
        with pytest.raises(RequestError, match="at most 1 of your runs may run or wait"):
            take_turn(ANN, few)
        take_turn(BOB, few)
        with second.take_lock():
            second.log("queued")
            with pytest.raises(RequestError, match="the queue is full, with 2 of 2: try again later"):
                take_turn("c" * 16, few)


def test_a_run_that_is_being_started_counts_before_it_is_at_work(on_space):
    few = Limits(runs=1, queue=2)
    with limits.turn(find_visitor(secret=ANN), few):
        with pytest.raises(RequestError, match="at most 1 of your runs may run or wait"):
            take_turn(ANN, few)
        with limits.turn(find_visitor(secret=BOB), few):
            with pytest.raises(RequestError, match="the queue is full, with 2 of"):
                take_turn("c" * 16, few)
    take_turn(ANN, few)


def test_others_runs_are_counted_without_reading_their_logs(on_space):
    other = begun(BOB)
    with other.take_lock():
        other.log_file.mkdir()
        with pytest.raises(RequestError, match="the queue is full, with 1 of"):
            take_turn(ANN, Limits(queue=1))


@pytest.mark.parametrize("name", limits.MAX_OF_REQUEST)
def test_a_space_says_what_is_too_much_of_an_evaluation(on_space, name):
    most = limits.MAX_OF_REQUEST[name]
    options = {"tasks": ["piqa"] * (most + 1), "limit": 1} if name == "tasks" else {name: most + 1}
    options = {"lengths": [64] * (most + 1)} if name == "lengths" else options
    with pytest.raises(RequestError, match=f"{name} .* is more than this Space serves"):
        limits.check_request(Request.of(options))
    with pytest.raises(RequestError, match="set a limit up to"):
        limits.check_request(Request(("tasks",), tasks=("piqa",)))


def test_an_evaluation_that_works_too_long_is_stopped_and_its_run_is_kept(on_space):
    run = begun()
    run.checkpoint.mkdir()
    for event in ("started", "evaluated", "done"):
        run.log(event)
    evaluation = run.evaluating
    with evaluation.take_lock():
        evaluation.log("queued", request={})
        evaluation.log("started")
        result = control.status(run)
        assert result.state == "done" and result.live and result.evaluation.state == "running"
        at = run.events()[-1]["time"]
        limits.enforce_limits(at + 1)
        assert not run.has_request("stop")
        limits.enforce_limits(at + 30 * 24 * 3600)
        assert run.has_request("stop") and control.state_of(evaluation) == "stopping" and run.has_file("plan.json")
        assert control.status(run).live


TOO_LONG = "a prompt of {} characters and {} tokens cannot be compared here"
EMPTY = "the prompt is empty: write a text to continue"


@pytest.mark.parametrize(
    ("prompt", "tokens", "sentence"),
    [("x" * 199_997, 8, TOO_LONG), ("x", 300, TOO_LONG), ("x", 0, TOO_LONG), ("", 8, EMPTY), ("\n ", 8, EMPTY)],
)
def test_a_comparison_that_is_too_long_or_of_nothing_is_refused(on_space, prompt, tokens, sentence):
    run = begun()
    run.checkpoint.mkdir()
    asked = Message(prompt), tokens, 0, False, Settings(system="1234")  # which counts
    with pytest.raises(RequestError, match=sentence.format(len(prompt) + 4, tokens)):
        next(answers.compare_models(find_visitor(secret=ANN), run.folder.name, *asked))


def test_the_owner_of_a_space_sets_its_limits_by_variables():
    assert Limits.of({}) == Limits()
    result = Limits.of({"LINEARIZER_SPACE_MINUTES": "90", "LINEARIZER_SPACE_QUEUE": "3"})
    assert (result.minutes, result.queue, result.runs) == (90, 3, Limits().runs)
    assert "90 minutes each" in result.in_words()
    with pytest.raises(RequestError, match="LINEARIZER_SPACE_DAYS 'many' is not allowed: it should be a valid number"):
        Limits.of({"LINEARIZER_SPACE_DAYS": "many"})
    for endless in ("nan", "-1"):  # nothing is more than nan
        with pytest.raises(RequestError, match=f"LINEARIZER_SPACE_MINUTES '{endless}' is not allowed"):
            Limits.of({"LINEARIZER_SPACE_MINUTES": endless})


def test_runs_that_are_started_at_once_have_folders_of_their_own(root, monkeypatch):
    monkeypatch.setattr(actions, "choose_start", lambda run: lambda *_: None)
    with ThreadPoolExecutor(4) as pool:
        names = {*pool.map(lambda _: actions.start_run(find_visitor(), "demo", 64, "Try it"), range(4))}
    assert names == {"demo-64", "demo-64-2", "demo-64-3", "demo-64-4"}


def test_nothing_is_limited_at_ones_own_machine(root):
    limits.check_model("/some/folder", "file:text")
    limits.check_plan(Plan("demo", budget=64, steps=10**6), None)
    with limits.turn(find_visitor(), Limits(runs=0)):
        pass


def damage(run, name, content):
    path = run.folder / name
    if path.is_file():
        path.unlink()
    path.mkdir() if content is None else path.write_text(content)


@pytest.mark.parametrize(
    "name, content",
    [
        ("plan.json", "[" * 100_000),
        ("plan.json", '{"model": 3}'),
        ("events.jsonl", None),
        ("events.jsonl", '{"time": null, "event": "started"}\n' * 2),
        ("events.jsonl", '{"time": 1, "event": "profile", "done": "x", "total": {}}\n' * 2),
        ("evaluation.json", "[" * 100_000),
        ("begun.json", None),
        ("lock", None),
    ],
)
def test_a_damaged_run_is_listed_and_the_guard_still_stops_the_others(on_space, name, content):
    damaged, long = begun(), begun(BOB)
    damage(damaged, name, content)
    for secret, run in ((ANN, damaged), (BOB, long)):
        listed = control.runs_in(find_visitor(secret=secret).home)
        assert [status.run.folder for status in listed] == [run.folder]
        assert run_list.run_cards(listed).count("<article") == 1
    with long.take_lock():
        long.log("queued")
        long.log("started")
        limits.enforce_limits(time.time() + 61 * LIMITS.minutes)
        assert long.has_request("stop")
