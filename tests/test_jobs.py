"""Runs in processes of their own are seen, stopped, killed and resumed, and end in the same bits."""

import time

import pytest

from linearizer import jobs
from linearizer.errors import FolderError, RequestError
from linearizer.plan import Plan
from linearizer.run import Run

PLAN = Plan("demo", budget=64, texts=2, length=64, samples=128, steps=6)
LONG = Plan("demo", budget=64, texts=2, length=64, samples=128, steps=100000)


@pytest.fixture
def begin(tmp_path):
    """Begin runs of the demo model that are over when the test is."""
    begun = []

    def run(name="run", plan=PLAN):
        begun.append(Run.begin(tmp_path / name, plan))
        return begun[-1]

    yield run
    for run in begun:
        if run.worked_on:
            run.request("stop")
            wait_for(run, *ENDED)


ENDED = ("stopped", "failed", "done", "lost")


def wait_for(run, *states, seconds=60):
    """Wait until a run is in one of some states, and give its status."""
    last = time.monotonic() + seconds
    while (found := jobs.status(run)).state not in states:
        assert time.monotonic() < last and found.state not in ENDED, (found, log_of(run))
        time.sleep(0.02)
    return found


def wait_for_event(run, name, seconds=60):
    last = time.monotonic() + seconds
    while not any(event["event"] == name for event in run.events()):
        found = jobs.status(run)
        assert time.monotonic() < last and found.state not in ENDED, (found, log_of(run))
        time.sleep(0.01)


def log_of(run):
    return (run.folder / "worker.log").read_text() if run.has("worker.log") else ""


def test_a_run_works_in_a_process_of_its_own_and_ends_in_a_checkpoint(begin):
    run = begin()
    assert jobs.status(run).state == "stopped"
    jobs.start(run)
    assert jobs.status(run).state == "queued" and jobs.status(run).place == 1
    with pytest.raises(FolderError, match="is being written by another process"):
        jobs.start(run)
    events = [event for some in jobs.follow(run) for event in some]
    assert events == run.events()
    assert events[0]["event"] == "queued" and events[-1]["event"] == "done"
    assert {"profile", "distill", "evaluate", "recall"} <= {event["event"] for event in events if "total" in event}
    found = jobs.status(run)
    assert (found.state, found.place, found.error) == ("done", None, None)
    assert found.begun == events[0]["time"] and found.changed == events[-1]["time"]
    assert found.begun < found.saved < found.changed
    assert found.disk_bytes == sum(path.stat().st_size for path in run.folder.rglob("*") if path.is_file())
    assert log_of(run) == ""
    with pytest.raises(RequestError, match="is done"):
        jobs.start(run)
    with pytest.raises(RequestError, match="is done: there is nothing to stop"):
        jobs.stop(run)


def test_a_run_is_stopped_at_its_step_and_goes_on_from_there(begin, tmp_path):
    run = begin(plan=LONG)
    jobs.start(run)
    wait_for_event(run, "distill")
    jobs.stop(run)
    assert jobs.status(run).state in ("stopping", "stopped")
    found = wait_for(run, "stopped")
    reached = found.step["done"]
    assert not run.requested("stop") and found.saved is not None
    jobs.start(run)
    wait_for(run, "running")
    resumed = next(event for some in jobs.follow(run, len(run.events())) for event in some if "total" in event)
    assert resumed["event"] == "distill" and resumed["done"] == reached + 1
    assert [one.run.folder.name for one in jobs.runs_in(tmp_path)] == ["run"]
