"""An evaluation is a job of its run: in a process of its own, seen, stopped, killed, resumed; the run stays done."""

import json
import os
import shutil
import signal

import pytest

from linearizer import pipeline
from linearizer.cli.main import main
from linearizer.errors import FolderError, RequestError, TextError
from linearizer.pipeline import evaluate_run, linearize
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.results import Request
from linearizer.workers import control
from linearizer.workers.worker import work_in_foreground
from tests.support.runs import QUICK, end_runs, process_of, wait_for

PLAN = Plan("demo", steps=2, **QUICK)
LONG = {"parts": ["language", "speed"], "texts": 2, "lengths": [64, 96], "seconds": 0.5}
SHORT = {"parts": ["language", "recall"], "texts": 2}


@pytest.fixture
def run(quick_run, tmp_path, monkeypatch):
    """A copy of a finished run, at which nothing works when the test is over."""
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    yield Run(shutil.copytree(quick_run, tmp_path / "run"))
    end_runs(tmp_path)


def said(capsys, *arguments):
    code = main([str(argument) for argument in arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, ""), err
    return out


def reached(run, part):
    """Follow an evaluation until it works on a part."""
    for events in control.follow(run.evaluating):
        if any(event.get("part") == part for event in events):
            return
    raise AssertionError(control.status(run.evaluating))


def examined(run):
    return [event["part"] for event in run.events() if event["event"] == "examined"]


def test_it_works_in_the_background_and_the_run_stays_done(run, capsys):
    assert control.status(run).evaluation is None
    out = said(capsys, "evaluate", run.folder, "--parts", "language,recall", "--texts", "2", "--detach", "--json")
    assert json.loads(out) == {"run": str(run.folder), "state": "queued"}
    assert os.getsid(int(process_of(run).name)) != os.getsid(0)
    result = control.status(run)
    assert result.state == "done" and result.live and result.evaluation.state in ("queued", "running")
    assert "evaluation" in said(capsys, "runs").splitlines()[1]
    with pytest.raises(FolderError, match="is being written by another process"):
        control.delete(run)
    with pytest.raises(FolderError, match="is being written by another process"):
        control.evaluate(run, SHORT)
    out = said(capsys, "runs", "attach", "run")
    assert "calibration" in out and "loss the second time, after" in out
    result = control.status(run)
    assert (result.state, result.evaluation.state, result.live) == ("done", "done", False)
    step = result.evaluation.step
    assert (step["part"], step["place"], step["parts"]) == ("recall", 2, 2)
    assert set(run.evaluation_parts) == {"language", "recall"} and run.done
    assert not [event for events in control.follow(run) for event in events if "job" in event]


def test_it_is_killed_and_stopped_in_the_middle_of_a_part_and_goes_on_at_it_even_if_all_was_asked_anew(run, capsys):
    finish(evaluate_run(run, Request(("language",), texts=2)))
    control.evaluate(run, LONG, again=True)
    reached(run, "speed")
    os.kill(int(process_of(run).name), signal.SIGKILL)
    result = wait_for(run.evaluating, "lost")
    assert "its process is gone" in result.error and control.status(run).state == "done"
    parts = run.evaluation_parts
    said(capsys, "runs", "resume", "run")
    reached(run, "speed")
    said(capsys, "runs", "stop", "run")
    assert control.state_of(run.evaluating) in ("stopping", "stopped")
    wait_for(run.evaluating, "stopped")
    assert examined(run) == ["language", "language"] and control.state_of(run) == "done"
    finish(work_in_foreground(run.evaluating, pipeline.resume_evaluation(run)))
    assert control.state_of(run.evaluating) == "done" and examined(run) == ["language", "language", "speed"]
    assert run.evaluation_parts["language"] == parts["language"]
    assert run.evaluation_parts["speed"]["asked"]["lengths"] == LONG["lengths"]


def test_one_that_cannot_be_served_says_why_and_harms_nothing(run, tmp_path):
    asked = {"parts": ["language"], "text": f"file:{tmp_path}/nothing.txt"}
    with pytest.raises(TextError):
        finish(work_in_foreground(run.evaluating, evaluate_run(run, Request.of(asked), locked=True), request=asked))
    result = control.status(run.evaluating)
    assert result.state == "failed" and "nothing.txt" in result.error
    assert control.status(run).state == "done" and run.done
    with pytest.raises(RequestError, match="has no student yet"):
        control.evaluate(pipeline.begin(tmp_path / "new", PLAN), SHORT)
    with pytest.raises(RequestError, match="is done: there is nothing to stop"):
        control.stop(run)
    control.delete(run)
    assert not run.folder.exists()


def test_a_run_resumed_after_its_evaluation_keeps_it(run):
    lines = run.log_file.read_text().splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "done"
    run.log_file.write_text("".join(lines[:-1]))  # as if killed when its student was made
    finish(work_in_foreground(run.evaluating, evaluate_run(run, Request.of(SHORT), locked=True), request=SHORT))
    assert (control.status(run).state, control.status(run).evaluation.state) == ("lost", "done")
    finish(work_in_foreground(run, linearize(run, locked=True)))
    result = control.status(run).evaluation
    assert control.state_of(run) == "done"
    assert (result.state, result.step["part"], examined(run)) == ("done", "recall", ["language", "recall"])
