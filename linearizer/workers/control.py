"""Starts, watches, stops and deletes runs, which are processes of their own, for the page, command line and Python.

The state of a run is read from its log, and from whether a live process holds its lock: nothing is kept in memory, so
all processes see the same.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from heapq import nlargest
from pathlib import Path
from typing import Any, NoReturn

from linearizer.errors import TOKEN, FolderError, RequestError
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.plan import Plan
from linearizer.run.events import STEPS, Event, EventName, first_event, newest_events, read_events
from linearizer.run.files import UNFINISHED, open_in_place, remove, writing
from linearizer.run.folder import ENCODER_PLAN, PLAN, Run, newest_request
from linearizer.run.locks import Lock
from linearizer.run.names import refuse_encoder
from linearizer.run.results import PARTS

STATE_AFTER = {
    EventName.QUEUED: "queued",
    EventName.STARTED: "running",
    EventName.STOPPED: "stopped",
    EventName.FAILED: "failed",
    EventName.DONE: "done",
}
LIVE = ("queued", "running", "stopping")
LOG_POLL_SECONDS = 0.25  # seconds between two reads of a log
MAX_QUOTED_CHARACTERS = 200  # letters of a log that are quoted
DAMAGED = "damaged"  # a file of the run cannot be read
LOST_ERROR = "its process is gone (killed, or the machine stopped): resume it, and it continues from its last save"


@dataclass(frozen=True)
class Status:
    """The state of a run, and how far it has come."""

    run: Run
    plan: Plan | EncoderPlan | None  # None if the run is damaged
    state: str
    step: dict[str, Any] | None  # the newest progress: {"event", "done", "total", "unit", "time", …}
    error: str | None  # why it failed, was stopped by someone else, or is not published, in a sentence
    begun: float  # seconds since 1970
    changed: float
    disk_bytes: int
    saved: float | None  # when the state of training was last written
    published: Event | None = None  # the last publication of its student: place, revision, and how to load it
    evaluation: Status | None = None  # of the evaluation of its student; None if none was requested

    @property
    def live(self) -> bool:
        """Whether a process works on the run or its evaluation, or waits to."""
        return self.state in LIVE or (self.evaluation is not None and self.evaluation.live)


def start(run: Run, token: str | None = None, **details: Any) -> None:
    """Queue a run and start its process, which continues the run and outlives this process.

    The process reads the details in the log.
    """
    check_start(run, token)
    with lock_and_queue(run, **details) as lock:  # the new process also holds it
        request = {"folder": str(run.folder), "task": run.task, "token": token, "lock": lock.fd}
        try:
            with open(run.folder / "worker.log", "wb", opener=open_in_place) as log:
                streams: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": log, "pass_fds": (lock.fd,)}
                process = start_process("linearizer.workers.worker", request, **streams)
        except OSError as error:
            run.log(EventName.FAILED, error=f"no process could be started ({error.strerror}): free memory, then resume")
            raise FolderError(f"{str(run.folder)!r} cannot be worked on ({error.strerror}): free memory") from error
    with suppress(BrokenPipeError):
        process.stdin.close()  # type: ignore[union-attr]
    threading.Thread(target=process.wait, daemon=True).start()  # leave no zombie


def evaluate(
    run: Run,
    request: Mapping[str, Any] | None = None,
    again: bool = False,
    token: str | None = None,
    begin: Callable[..., None] = start,
) -> None:
    """Begin to evaluate a run's student, by default in a process; without a request continue the newest."""
    if not run.checkpoint.is_dir():
        raise RequestError(f"{str(run.folder)!r} has no student yet: wait until it is done, or end its training")
    if request is None:
        newest_request(run)  # raises if there is none
        begin(run.evaluating, token)
    else:
        begin(run.evaluating, token, request=dict(request), again=again)


def check_start(run: Run, token: str | None) -> None:
    """Refuse a finished run, and a text that cannot be a token."""
    if run.task is None and run.done:
        raise RequestError(f"{str(run.folder)!r} is done: its student is in {run.checkpoint}")
    if token and not re.fullmatch(r"[!-~]+", token):
        raise RequestError("the token contains characters that no token has: copy it again")


def lock_and_queue(run: Run, **details: Any) -> Lock:
    """Lock a run, and log that it waits for its turn."""
    with ExitStack() as undo:
        lock = undo.enter_context(run.take_lock())
        remove(run.folder / "worker.log")
        run.log(EventName.QUEUED, **details)
        undo.pop_all()
    return lock


def start_process(
    module: str, request: Mapping[str, Any], variables: Mapping[str, str] | None = None, **streams: Any
) -> subprocess.Popen[str]:
    """Start a process that works on the folder of a request, which only that process can read; it outlives this one.

    It can import this package, but nothing from the working directory.
    """
    home, paths = Path(__file__).parents[2], os.environ.get("PYTHONPATH", "")
    if home.name not in ("site-packages", "dist-packages"):  # a process searches these after the standard library
        paths = os.pathsep.join(filter(None, (str(home), paths)))
    process = subprocess.Popen(
        [sys.executable, "-m", module, request["folder"]],  # the folder is for readers of a list of processes
        stdin=subprocess.PIPE,
        text=True,
        start_new_session=True,  # ctrl-C is for this process alone
        env={**os.environ, "PYTHONPATH": paths, "PYTHONSAFEPATH": "1", **(variables or {})},
        **streams,
    )
    with suppress(BrokenPipeError):  # a process that died at once shows as lost
        process.stdin.write(json.dumps(request) + "\n")  # type: ignore[union-attr]
        process.stdin.flush()  # type: ignore[union-attr]
    return process


def end_process(work: Callable[[], int]) -> NoReturn:
    """Do the work of a started process, and end it with the exit code of the work."""
    code = 1
    try:
        code = work()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without waiting for threads of an abandoned download, or listening threads


def stop(run: Run, why: str = "") -> None:
    """Request that a run, or its evaluation, finishes its step, saves and stops; `why` is shown to its owner."""
    state = state_of(run)
    if state not in LIVE and (run.task or state_of(run.evaluating) not in LIVE):
        task = "the evaluation of " if run.task else ""
        raise RequestError(f"{task}{str(run.folder)!r} is {state}: there is nothing to stop")
    run.make_request("stop", why)


def use_now(run: Run) -> None:
    """Request that training ends at this step; the student is then judged and saved."""
    refuse_encoder(run)
    current = status(run)
    if current.state not in ("queued", "running"):
        raise RequestError(f"{str(run.folder)!r} is {current.state}: only a running run can end its training")
    if current.step is None or current.step["event"] != EventName.DISTILL:
        raise RequestError(f"{str(run.folder)!r} is not training: it has not begun to train, or has ended training")
    run.make_request("use")


def delete(run: Run) -> None:
    """Remove the files of a run, and its folder if nothing else is in it."""
    Run.open(run.folder)
    with run.take_lock():
        run.remove()


def rename(run: Run, name: str) -> Run:
    """Give a run that is not running another name in its folder of runs; replace nothing."""
    Run.open(run.folder)
    if name in ("", "..") or name != Path(name).name:
        raise RequestError(f"{name!r} is not the name of a folder: choose a name without /")
    folder = run.folder.with_name(name)
    with run.take_lock(), writing(folder):
        if os.path.lexists(folder):
            raise RequestError(f"there is a {name!r} beside this run already: choose another name")
        run.folder.rename(folder)
    return replace(run, folder=folder)


def status(run: Run) -> Status:
    """Return the status of a run."""
    Run.open(run.folder)
    log = read_state(run)
    first, files = first_event(run.log_file), files_of(run.folder)
    begun = first["time"] if first else max((stat.st_mtime for stat in files.values()), default=0.0)
    training = run.folder / "state" / "training"
    states = (path for path in files if training in path.parents and path.parent.suffix != UNFINISHED)
    saved = (files[path].st_mtime for path in states)
    evaluation = status(run.evaluating) if run.task is None and read_log_state(run.evaluating).newest else None
    return Status(
        run=run,
        plan=run.any_plan,
        state=log.state,
        step=log.step,
        error=run.unpublished if log.state == "done" and run.task is None else log.error,
        begun=begun,
        changed=log.newest["time"] if log.newest else begun,
        disk_bytes=sum(stat.st_size for stat in files.values() if stat.st_nlink == 1),  # linked: the teacher's
        saved=max(saved, default=None),
        published=run.published if run.checkpoint.is_dir() else None,
        evaluation=evaluation,
    )


def state_of(run: Run) -> str:
    """Return the state of a run in one word."""
    return read_state(run).state


@dataclass(frozen=True)
class LogState:
    """The state of a run, its error, its newest event and its newest progress."""

    state: str
    error: str | None
    newest: Event | None
    step: Event | None


def read_state(run: Run) -> LogState:
    """Read the state of a run from its lock and its log."""
    while True:
        locked = run.is_locked
        log = read_log_state(run)
        if log.state not in LIVE:
            return log
        if locked == run.is_locked:  # otherwise the run began or ended meanwhile
            break
    if locked:
        return replace(log, state="stopping" if run.has_request("stop") else log.state)
    file = run.folder / "worker.log"
    lines = list[str]()
    with suppress(OSError):  # there is none, or the run is started again
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    return replace(log, state="lost", error=LOST_ERROR + quote_last(lines))


def read_log_state(run: Run) -> LogState:
    """Read the log from its end until the state and the newest progress are known; progress implies a start."""
    newest = decisive = step = None
    steps = STEPS if run.task is None else PARTS
    for event in newest_events(run.log_file):
        if not run.owns_event(event):
            if run.task is not None and event["event"] in STEPS:
                break  # an evaluation starts once the student exists; resuming a finished run does nothing
            continue
        newest = newest or event
        if event["event"] in steps and "done" in event and "total" in event:
            step = event
        if event["event"] in STATE_AFTER or step:
            decisive = decisive or event
        if step:
            break
    state = "stopped" if decisive is None else STATE_AFTER.get(decisive["event"], "running")
    error = decisive.get("error") if decisive and state in ("failed", "stopped") else None
    return LogState(state, error, newest, step)


def quote_last(lines: Sequence[str]) -> str:
    """Quote the last line of a process or a job, without folders, signed addresses and tokens."""
    text = next((line.strip() for line in reversed(lines) if line.strip()), "")
    text = re.sub(rf"\?\S+|{TOKEN}", "…", re.sub(r"[^\s'\"=:(]*/", "", text))
    return f"; its last words: {text[:MAX_QUOTED_CHARACTERS]}" if text else ""


def files_of(folder: Path) -> dict[Path, os.stat_result]:
    """List the files of a run, without those that vanish meanwhile."""
    files = {}
    for place, _, names in os.walk(folder):
        for path in (Path(place) / name for name in names):
            with suppress(OSError):
                files[path] = path.lstat()
    return files


def runs_in(root: Path, newest: int | None = None) -> list[Status]:
    """Return the status of all runs under a folder, or of the `newest` ones by their plans; the newest first."""
    plans = [path for name in (PLAN, ENCODER_PLAN) for path in root.glob(f"*/{name}")]
    plans = plans if newest is None else nlargest(newest, plans, modified)
    statuses = (status_or_damage(Run(file.parent)) for file in plans)
    return sorted(filter(None, statuses), key=lambda status: status.begun, reverse=True)


def modified(path: Path) -> float:
    """Return when a file was written; 0: it was deleted."""
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


def status_or_damage(run: Run) -> Status | None:
    """Return the status of a run, even if its files are damaged; None: it was deleted meanwhile, or is hidden."""
    with suppress(FileNotFoundError, PermissionError):
        try:
            return status(run)
        except FolderError as error:
            changed = (run.folder / run.plan_file).stat().st_mtime
            sizes = sum(stat.st_size for stat in files_of(run.folder).values())
            return Status(run, None, DAMAGED, None, str(error), changed, changed, sizes, None)
    return None


def follow(run: Run) -> Iterator[list[Event]]:
    """Yield the events of a run, or of its evaluation, as they are logged, until it has ended."""
    place = 0
    while True:
        ended = not run.is_locked and state_of(run) not in LIVE  # read before the log, so that no event is missed
        events, place = read_events(run.log_file, place)
        if events := [event for event in events if run.owns_event(event)]:
            yield events
        if ended:
            return
        time.sleep(LOG_POLL_SECONDS)
