"""Runs in processes of their own are seen, stopped, killed, resumed and deleted, and end in the same bits."""

import json
import os
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from linearizer import jobs, turns
from linearizer.errors import FolderError, RequestError
from linearizer.files import remove
from linearizer.hub import find_model
from linearizer.pipeline import linearize
from linearizer.plan import Plan
from linearizer.progress import finish
from linearizer.run import Run
from linearizer.worker import foreground
from tests.at_work import ENDED, LONG, PLAN, QUICK, log_of, process_of, wait_for, wait_for_event, wait_until

TOKEN = "hf_fake_visitor"


@pytest.fixture
def begin(tmp_path):
    """Begin runs that are over when the test is."""
    begun = []

    def run(name="run", plan=PLAN):
        begun.append(Run.begin(tmp_path / "runs" / name, plan))
        return begun[-1]

    yield run
    for run in begun:
        if run.folder.is_dir() and run.worked_on:
            run.request("stop")
            wait_for(run, *ENDED)


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A finished run that nothing interrupted; no test may change it."""
    run = Run.begin(tmp_path_factory.mktemp("done") / "run", PLAN)
    finish(foreground(run, linearize(run, held=True)))
    return run


def kill(run):
    os.kill(int(process_of(run).name), signal.SIGKILL)
    wait_for(run, "lost")


def student(run):
    return (run.checkpoint / "model.safetensors").read_bytes()


def test_a_finished_run_says_all_that_happened(done):
    events = done.events()
    assert [event for some in jobs.follow(done) for event in some] == events
    assert [event for some in jobs.follow(done, 3) for event in some] == events[3:]
    assert (events[0]["event"], events[-1]["event"]) == ("queued", "done")
    assert {event["event"] for event in events if "total" in event} == {"profile", "distill", "evaluate", "recall"}
    found = jobs.status(done)
    assert (found.state, found.place, found.error) == ("done", None, None)
    assert found.step == next(event for event in reversed(events) if "total" in event)
    assert (found.begun, found.changed) == (events[0]["time"], events[-1]["time"])
    assert found.begun < found.saved < found.changed
    assert found.disk_bytes == sum(path.stat().st_size for path in done.folder.rglob("*") if path.is_file())
    assert log_of(done) == ""
    with pytest.raises(RequestError, match="is done: its student is in"):
        jobs.start(done)
    with pytest.raises(RequestError, match="is done: there is nothing to stop"):
        jobs.stop(done)
    with pytest.raises(RequestError, match="is done: only a run that is at work"):
        jobs.use_now(done)


def test_a_killed_run_is_lost_and_resumes_to_the_same_bits(done, begin):
    run = begin()
    for step, at_least in (("profile", 1), ("distill", 27), ("evaluate", 1)):
        jobs.start(run)
        wait_for_event(run, step, at_least)
        kill(run)
        assert "its process is gone" in jobs.status(run).error
    jobs.start(run)
    wait_for(run, "done")
    assert student(run) == student(done)
    assert json.dumps(run.evaluation) == json.dumps(done.evaluation)
    steps = [event["done"] for event in run.events() if event["event"] == "distill"]
    assert steps.count(1) == 1 and (26 in steps or 51 in steps)  # it went on from a state that was written


def test_runs_take_turns_and_the_dead_hold_nobody_up(begin, tmp_path):
    first, second, third = (begin(name, LONG) for name in ("first", "second", "third"))
    for run in (first, second, third):
        jobs.start(run)
        time.sleep(0.01)
    assert [jobs.status(run).place for run in (first, second, third)] == [1, 2, 3]
    assert [one.run.folder.name for one in jobs.runs_in(tmp_path / "runs")] == ["third", "second", "first"]
    wait_for_event(first, "distill")
    assert [jobs.status(run).place for run in (first, second, third)] == [None, 1, 2]
    jobs.stop(third)
    wait_for(third, "stopped")
    assert not any("total" in event for event in third.events())
    kill(first)
    wait_for(second, "running")
    jobs.stop(second)
    wait_for(second, "stopped")
    turns.ask(first.folder).give_back()  # whoever asks removes the tickets of the dead
    assert [path.name for path in turns.folder().iterdir()] == ["lock"]


def test_one_of_many_starts_wins(begin):
    run, refused = begin(plan=LONG), []

    def start():
        try:
            jobs.start(run)
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
        jobs.delete(run)
    os.kill(int(process_of(run).name), signal.SIGTERM)
    wait_for(run, "stopped")


def test_a_token_reaches_the_run_and_nothing_else(begin, hub, tmp_path):
    hub.add("visitor/private", find_model("demo").folder, private=True)
    plan = Plan("visitor/private", steps=2, **QUICK)
    refused, run = begin("refused", plan), begin("run", plan)
    jobs.start(refused)
    jobs.start(run, TOKEN)
    seen, secret = 0, TOKEN.encode()
    while jobs.state_of(run) in jobs.LIVE:
        with suppress(FileNotFoundError, ProcessLookupError):
            process = process_of(run)
            assert secret not in (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
            seen += 1
        time.sleep(0.1)
    assert seen and jobs.status(run).state == "done", log_of(run)
    assert "'visitor/private' is no folder here and not on the Hub, or it is private" in jobs.status(refused).error
    for place in (tmp_path, turns.folder(), Path(os.environ["HF_HOME"])):
        assert not [path for path in place.rglob("*") if path.is_file() and secret in path.read_bytes()]


def test_a_token_that_cannot_be_one_is_refused_unsaid(begin):
    with pytest.raises(RequestError, match="the token holds characters that no token has") as refusal:
        jobs.start(begin(), "hf_copied\nwith more")
    assert "hf_copied" not in str(refusal.value)


@pytest.fixture
def torch_that(tmp_path, monkeypatch):
    """Let the processes that are started find another torch, which does what it is told."""

    def put(program):
        (tmp_path / "lib").mkdir(exist_ok=True)
        (tmp_path / "lib" / "torch.py").write_text(program)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"))

    return put


def test_a_fault_of_our_own_is_named_by_its_kind_and_its_traceback_is_kept(begin, torch_that):
    torch_that("raise ZeroDivisionError('in /home/somebody with hf_secret1')")
    run = begin()
    jobs.start(run, "hf_secret1")
    found = wait_for(run, "failed")
    assert found.error.startswith("ZeroDivisionError, a fault of Linearizer itself") and "worker.log" in found.error
    assert "somebody" not in found.error
    assert "Traceback" in log_of(run) and "hf_secret1" not in log_of(run)


def test_a_crash_is_told_by_its_last_words_without_folders_or_tokens(begin, torch_that):
    torch_that(
        "import os; os.write(2, b'begun\\nno driver in /home/somebody/lib.so for hf_secret2\\n\\n'); os._exit(9)"
    )
    run = begin()
    jobs.start(run)
    found = wait_for(run, "lost")
    assert found.error.endswith("its last words: no driver in lib.so for …")


def test_a_run_that_fails_keeps_its_reason_and_can_be_tried_again(begin):
    run = begin(plan=Plan("demo", device="magic", **QUICK))
    for _ in range(2):
        jobs.start(run)
        assert "device 'magic' is not to be had here" in wait_for(run, "failed").error
    assert log_of(run) == ""


def test_a_run_deleted_under_its_process_is_gone(begin):
    run = begin(plan=LONG)
    jobs.start(run)
    wait_for_event(run, "distill")
    process = process_of(run)
    remove(run.folder)
    with pytest.raises(FolderError, match="holds no run"):
        jobs.status(run)
    wait_until(lambda: not process.exists())
    assert not run.folder.exists() and list(jobs.follow(run)) == []


def test_deleting_takes_what_the_run_wrote_and_nothing_else(begin):
    run, other = begin(), begin("other")
    (run.folder / "state" / "training").mkdir()
    (run.folder / "allocation.json.unfinished").write_text("cut off wh")
    (other.folder / "notes.txt").write_text("mine")
    jobs.delete(run)
    jobs.delete(other)
    assert not run.folder.exists()
    assert [path.name for path in other.folder.iterdir()] == ["notes.txt"]
    with pytest.raises(FolderError, match="holds no run"):
        jobs.delete(run)


def test_a_folder_of_runs_is_listed_whatever_else_is_in_it(begin, tmp_path):
    run, broken = begin(), begin("broken")
    (broken.folder / "plan.json").write_text("{")
    (broken.folder / "events.jsonl").write_bytes(b"\xff\n{}\n")
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "file").write_text("")
    assert {one.run for one in jobs.runs_in(tmp_path / "runs")} == {run, broken}
    assert jobs.runs_in(tmp_path / "absent") == []


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
        found = jobs.status(run)
        assert (found.state, found.changed) == (state, run.events()[-1]["time"]), event
        assert (found.error == "because") == (state == "failed")
    with run.locked():
        run.log("started")
        assert jobs.status(run).state == "running"
        run.request("stop")
        assert jobs.status(run).state == "stopping"


def test_a_start_that_fails_holds_nobody_up(begin, tmp_path, monkeypatch):
    run = begin()
    (tmp_path / "file").write_text("")
    with monkeypatch.context() as broken:
        broken.setenv("LINEARIZER_QUEUE", str(tmp_path / "file" / "queue"))
        with pytest.raises(FolderError, match="set LINEARIZER_QUEUE to a folder that is yours to write"):
            jobs.start(run)
    (run.folder / "events.jsonl").mkdir()
    with pytest.raises(FolderError, match="cannot be written"):
        jobs.start(run)
    (run.folder / "events.jsonl").rmdir()
    monkeypatch.setattr("sys.executable", str(tmp_path / "absent"))
    with pytest.raises(FolderError, match="cannot be worked on"):
        jobs.start(run)
    assert jobs.status(run).state == "failed" and not run.worked_on
    assert [path.name for path in turns.folder().iterdir()] == ["lock"]
