"""The curves of a training go on over all its losses, also where it was stopped in one of them; its time is told."""

import json
import shutil
from dataclasses import replace

from linearizer.page import cards
from linearizer.page.run_state import RunState
from linearizer.plan.plan import Plan
from linearizer.run.events import EventName, append_line
from linearizer.run.folder import Run
from linearizer.workers import control

PLAN = Plan("demo", recipe="features", strategy="common-lambda", budget=64, steps=3)


def take_steps(run, first, last):
    for step in range(first, last + 1):
        run.log(EventName.DISTILL, done=step, total=3, unit="steps")


def test_a_second_loss_goes_on_where_the_first_ended(tmp_path):
    run = Run.create(tmp_path / "run", PLAN)
    watched = RunState(run)
    run.log(EventName.STARTED)
    take_steps(run, 1, 3)
    run.log(EventName.DISTILLED, phase=0, steps=3)
    take_steps(run, 1, 2)
    watched.read()
    assert [event["done"] for event in watched.training] == [1, 2, 3, 4, 5]
    run.log(EventName.STARTED)  # resumed from the first step of the second loss
    run.log(EventName.DISTILLED, phase=0, steps=3)
    take_steps(run, 2, 3)
    watched.read()
    assert [event["done"] for event in watched.training] == [1, 2, 3, 4, 5, 6]
    assert watched.training[-1]["total"] == 6


def test_a_student_that_is_written_after_its_verdict_can_be_used(tmp_path, quick_run):
    shutil.copytree(quick_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint"))
    watched = RunState(run := Run(tmp_path / "run"))
    assert "usage" not in (pieces := watched.read_pieces(10.0)) and "verdict" in pieces
    shutil.copytree(quick_run / "checkpoint", run.checkpoint)
    assert "Load it" in watched.read_pieces(20.0)["usage"].value


def test_the_time_that_a_run_took_is_without_that_in_which_it_waited_or_was_stopped(tmp_path):
    watched = RunState(run := Run.create(tmp_path / "run", PLAN))
    for time, name in (
        (0, "queued"),
        (50, "started"),
        (60, "stopped"),
        (300, "started"),
        (310, "waited"),
        (311, "done"),
    ):
        append_line(run.log_file, json.dumps({"event": name, "time": float(time), "seconds": 8.0}).encode())
    append_line(run.log_file, b'{"event": "started", "time": 400.0, "job": "evaluate"}')  # of another task
    watched.read()
    assert watched.worked.seconds == 13.0
    for time, name in ((500, "started"), (520, "price"), (900, "queued"), (910, "started"), (915, "done")):  # killed
        watched.worked.add({"event": name, "time": float(time)})
    assert watched.worked.seconds == 13.0 + 20.0 + 5.0
    status = replace(control.status(run), state="done")
    assert "took 13 s" in cards.run_card(status, "run", 999.0, 13.0)
    assert "took" not in cards.run_card(replace(status, state="running"), "run", 999.0, 13.0)
