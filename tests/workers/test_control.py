"""Runs in processes of their own are seen, stopped, killed, resumed and deleted, and end in the same bits."""

import os
import shutil
import signal
import threading

import pytest

from linearizer import pipeline
from linearizer.cli.runs import describe_runs
from linearizer.errors import FolderError, RequestError
from linearizer.page.cards import run_card
from linearizer.page.run_list import run_cards
from linearizer.pipeline import linearize
from linearizer.progress import finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.workers import control, device_queue
from linearizer.workers.worker import work_in_foreground
from tests.support.runs import (
    LONG,
    PLAN,
    log_of,
    process_of,
    wait_for,
    wait_for_event,
    wait_until,
    weights_of,
)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run that nothing interrupted; no test may change it."""
    run = pipeline.begin(tmp_path_factory.mktemp("done") / "run", PLAN)
    finish(work_in_foreground(run, linearize(run, locked=True)))
    return run


def test_a_student_that_a_job_could_not_publish_is_said_until_it_is_published(done, tmp_path):
    run, reason = Run(shutil.copytree(done.folder, tmp_path / "run")), "the Hub has no room"
    run.log(EventName.UNPUBLISHED, error=reason)
    status = control.status(run)
    assert status.state == "done" and reason in status.error and reason in describe_runs([status])
    assert reason in run_cards([status]) and reason in run_card(status, "run", 0.0)
    run.log(EventName.PUBLISHED, repo_id="me/student")
    assert control.status(run).error is None


def kill(run):
    os.kill(int(process_of(run).name), signal.SIGKILL)
    wait_for(run, "lost")


def test_a_finished_run_says_all_that_happened(done):
    events = done.events()
    assert [event for some in control.follow(done) for event in some] == events
    assert (events[0]["event"], events[-1]["event"]) == ("queued", "done")
    assert {event["event"] for event in events if "total" in event} == {"profile", "distill", "evaluate"}
    result = control.status(done)
    assert (result.state, result.error) == ("done", None)
    assert result.step == next(event for event in reversed(events) if "total" in event)
    assert (result.begun, result.changed) == (events[0]["time"], events[-1]["time"])
    assert result.begun < result.saved < result.changed
    own = [path.stat() for path in done.folder.rglob("*") if path.is_file() and not path.name.startswith("teacher-")]
    assert result.disk_bytes == sum(stat.st_size for stat in own)
    assert log_of(done) == ""
    with pytest.raises(RequestError, match="is done: its student is in"):
        control.start(done)
    with pytest.raises(RequestError, match="is done: there is nothing to stop"):
        control.stop(done)
    with pytest.raises(RequestError, match="is done: only a running run"):
        control.use_now(done)


def test_a_killed_run_is_lost_and_resumes_to_the_same_bits(done, begin):
    run = begin()
    control.start(run)
    wait_for_event(run, "distill", 27)
    kill(run)
    assert "its process is gone" in control.status(run).error
    before = len(run.events())
    control.start(run)
    wait_for(run, "done")
    assert weights_of(run.checkpoint) == weights_of(done.checkpoint)
    assert run.evaluation_parts == done.evaluation_parts
    steps = [event["done"] for event in run.events()[before:] if event["event"] == "distill"]
    assert 1 not in steps and 26 in steps  # it went on from a state that was written


def test_runs_take_turns_and_the_dead_hold_nobody_up(begin, tmp_path):
    first, second = (begin(name, LONG) for name in ("first", "second"))
    for run in (first, second):
        control.start(run)
        wait_until(lambda folder=run.folder: any(path.read_text() == str(folder) for path in device_queue.tickets()))
    assert [status.run.folder.name for status in control.runs_in(tmp_path / "runs")] == ["second", "first"]
    wait_for_event(first, "distill")
    assert [control.state_of(run) for run in (first, second)] == ["running", "queued"]
    assert not any("total" in event for event in second.events())
    kill(first)
    wait_for(second, "running")
    control.stop(second)
    wait_for(second, "stopped")
    device_queue.take_ticket(first.folder, ["cpu"]).remove()  # taking a ticket removes those of dead processes
    names = {path.name for path in device_queue.queue_folder().iterdir()}
    assert not names - {"working@zerogpu"}  # tests of another device, in the same process, leave that one


def test_one_of_many_starts_wins(begin):
    run, refused = begin(plan=LONG), []

    def start():
        try:
            control.start(run)
        except FolderError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 7 and all("is being written by another process" in text for text in refused)
    assert [event["event"] for event in run.events()].count("queued") == 1
    with pytest.raises(FolderError, match="is being written by another process"):
        control.delete(run)
    wait_for(run, "running")  # before it listens, a signal would end it unsaid
    os.kill(int(process_of(run).name), signal.SIGTERM)
    wait_for(run, "stopped")


def test_deleting_takes_what_the_run_wrote_and_nothing_else(begin):
    run, other = begin(), begin("other")
    (run.folder / "state" / "training").mkdir()
    (run.folder / "allocation.json.unfinished").write_text("cut off wh")
    (other.folder / "notes.txt").write_text("mine")
    control.delete(run)
    control.delete(other)
    assert not run.folder.exists()
    assert [path.name for path in other.folder.iterdir()] == ["notes.txt"]
    with pytest.raises(FolderError, match="holds no run"):
        control.delete(run)


def test_deleting_a_run_behind_a_link_takes_the_link_too(begin, tmp_path):
    run = begin()
    (link := tmp_path / "link").symlink_to(run.folder)
    control.delete(Run(link))
    assert not run.folder.exists() and not link.is_symlink()


def test_a_folder_of_runs_is_listed_whatever_else_is_in_it(begin, tmp_path):
    run, broken = begin(), begin("broken")
    (broken.folder / "plan.json").write_text("{")
    (broken.folder / "events.jsonl").write_bytes(b"\xff\n{}\n")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    assert {status.run for status in control.runs_in(tmp_path / "runs")} == {run, broken}
    assert control.runs_in(tmp_path / "absent") == []


def test_what_others_log_changes_no_state(begin):
    run = begin()
    for event, details, state in (
        ("started", {}, "lost"),
        ("distill", {"done": 1, "total": 2}, "lost"),
        ("distilled", {}, "lost"),
        ("failed", {"error": "because"}, "failed"),
        ("allocated", {}, "failed"),
        ("upload", {"done": 1, "total": 2}, "failed"),
        ("queued", {}, "lost"),
        ("done", {}, "done"),
        ("upload", {"done": 2, "total": 2}, "done"),
    ):
        run.log(event, **details)
        result = control.status(run)
        assert (result.state, result.changed) == (state, run.events()[-1]["time"]), event
        assert (result.error == "because") == (state == "failed")
    with run.take_lock():
        run.log("started")
        assert control.status(run).state == "running"
        run.make_request("stop")
        assert control.status(run).state == "stopping"


def test_a_start_that_fails_holds_nobody_up(begin, tmp_path, monkeypatch):
    run = begin()
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as broken:
        broken.setenv("LINEARIZER_QUEUE", str(tmp_path / "file" / "queue"))
        control.start(run)
        assert "set LINEARIZER_QUEUE to a folder that you may write to" in wait_for(run, "failed").error
    (run.folder / "events.jsonl").unlink()
    (run.folder / "events.jsonl").mkdir()
    with pytest.raises(FolderError, match="cannot be written"):
        control.start(run)
    (run.folder / "events.jsonl").rmdir()
    monkeypatch.setattr("sys.executable", str(tmp_path / "absent"))
    with pytest.raises(FolderError, match="cannot be worked on"):
        control.start(run)
    assert control.status(run).state == "failed" and not run.is_locked
