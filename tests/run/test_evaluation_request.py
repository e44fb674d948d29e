"""A Space limits what an evaluation may ask for, and how long it works."""

import json

import pytest

from linearizer.errors import RequestError
from linearizer.page import limits
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.results import Request
from linearizer.workers import control
from tests.support.runs import inspection_of


@pytest.fixture
def run(tmp_path):
    """A run that looks as if it were done."""
    result = Run.create(tmp_path / "ann" / "run", Plan("demo", budget=64, length=256))
    result.checkpoint.mkdir()
    result.write("inspection.json", inspection_of([]).to_json())
    lines = [("started", 0), ("evaluate", 100), ("evaluated", 112), ("done", 113)]
    details = {"done": 1, "total": 2, "unit": "batches"}
    events = ({"time": time, "event": name, **(details if name in control.STEPS else {})} for name, time in lines)
    result.log_file.write_text("".join(json.dumps(event) + "\n" for event in events))
    return result


@pytest.mark.parametrize("name", limits.MAX_OF_REQUEST)
def test_a_space_says_what_is_too_much_of_an_evaluation(tmp_path, monkeypatch, name):
    monkeypatch.setenv("SPACE_ID", "owner/name")
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    most = limits.MAX_OF_REQUEST[name]
    options = {"tasks": ["piqa"] * (most + 1), "limit": 1} if name == "tasks" else {name: most + 1}
    options = {"lengths": [64] * (most + 1)} if name == "lengths" else options
    with pytest.raises(RequestError, match=f"{name} .* is more than this Space serves"):
        limits.check_request(Request.of(options))
    with pytest.raises(RequestError, match="give a limit up to"):
        limits.check_request(Request(("tasks",), tasks=("piqa",)))


def test_an_evaluation_that_works_too_long_is_stopped_and_its_run_is_kept(run, tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    evaluation = run.evaluating
    with evaluation.take_lock():
        evaluation.log("queued", request={})
        evaluation.log("started")
        result = control.status(run)
        assert result.state == "done" and result.live and result.evaluation.state == "running"
        begun = run.events()[-1]["time"]
        limits.enforce_limits(begun + 1)
        assert not run.has_request("stop")
        limits.enforce_limits(begun + 30 * 24 * 3600)
        assert run.has_request("stop") and control.state_of(evaluation) == "stopping" and run.has_file("plan.json")
        assert control.status(run).live
