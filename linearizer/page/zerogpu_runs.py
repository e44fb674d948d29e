"""Runs on ZeroGPU, and evaluations of their students: a thread of the server asks for the device, slice by slice.

A slice goes on from what is saved, works until its time is nearly over, and saves: in the end the student has the same
bits as in one piece, and of an evaluation each part that was finished is kept. The device's time is that of whoever
started or resumed the work. The owner of a Space sets by LINEARIZER_SLICE how many seconds a slice has, and by
LINEARIZER_SLICE_SHARE what share of them is worked.
"""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

from linearizer.errors import FaultError, LinearizerError
from linearizer.jobs import control
from linearizer.jobs.queue import Ticket
from linearizer.jobs.worker import faults_kept, in_turn, work_on
from linearizer.page import zerogpu
from linearizer.progress import Progress, Steps, finish
from linearizer.run import events
from linearizer.run import folder as folder_module
from linearizer.run.folder import Run
from linearizer.run.locks import Lock
from linearizer.run.stopping import SliceOver, check, reported

SLICE_SECONDS = int(os.environ.get("LINEARIZER_SLICE") or 60)  # seconds that the device is asked for at a time
WORKED_SHARE = float(os.environ.get("LINEARIZER_SLICE_SHARE") or 0.7)  # the rest is for its start, and to save
MAX_VAIN_SLICES = 2  # slices in a row that finish nothing, after which it is given up
DEVICE = "zerogpu"
FILES_WITHOUT_PROGRESS = ("stop", "use", "worker.log")  # files of a run that tell nothing of how far it is


def start(run: Run, token: str | None = None, **asked: Any) -> None:
    """Queue a run, and work on it from where it stands in the name of whose request this is.

    What is asked besides goes into the log, where the slices read it.
    """
    control.check_start(run, token)
    lock, ticket = control.enter(run, **asked)
    context = copy_context()  # by this ZeroGPU knows who pays
    threading.Thread(target=context.run, args=(work_in_slices, run, token, lock, ticket), daemon=True).start()


def work_in_slices(run: Run, token: str | None, lock: Lock, ticket: Ticket) -> None:
    """Work on a run until it ends; what there is to say is in its log."""
    with lock:
        with suppress(LinearizerError), faults_kept(run, token, run.folder / "worker.log"):
            finish(in_turn(run, ticket, lambda: run_slices(run, token), DEVICE))


def run_slices(run: Run, token: str | None) -> Steps[None]:
    """Let slices work on a run, as long as they finish something."""
    count, vain, over = 0, 0, False
    while not over:
        with reported(run):
            check(run)
        before = read_progress(run, saved_steps(run))
        try:
            over = work_one_slice(str(run.folder), run.job, token)
        except zerogpu.DeviceTaken:  # it took longer than was asked for: what it saved by then is there
            run.log("slice")
        except zerogpu.DeviceRefused as refusal:
            run.log("stopped", error=f"{refusal}; what was finished is kept: resume it later")
            raise
        count, vain = count + 1, vain + 1 if read_progress(run, saved_steps(run)) == before else 0
        yield Progress("slice", count, count + (not over), "slices")
        with reported(run):
            if not over and vain == MAX_VAIN_SLICES:
                raise FaultError(
                    f"{current_step(run)!r} is a step that takes longer than the {SLICE_SECONDS} seconds that ZeroGPU "
                    "lends at a time: ask for fewer or shorter texts, or for a smaller model, or do this at your own "
                    "machine; what was finished is kept"
                )


@zerogpu.with_device(SLICE_SECONDS)
def work_one_slice(folder: str, job: str | None, token: str | None) -> bool:
    """Work on a run while the device is lent, in a process of its own; tell whether the run has ended."""
    run = Run(Path(folder), job)
    with faults_kept(run, token, run.folder / "worker.log"):
        return work_until_time(run, token)


def work_until_time(run: Run, token: str | None) -> bool:
    """Work until the time is nearly over, and no longer than it takes to finish something."""
    last, longest, before = time.monotonic(), 0.0, read_progress(run, logged_steps(run))
    end = last + WORKED_SHARE * SLICE_SECONDS
    steps = work_on(run, token)
    try:
        for number, _ in enumerate(steps):
            now = time.monotonic()
            longest, last = max(longest, now - last if number else 0.0), now
            if (
                now + longest > end and read_progress(run, logged_steps(run)) != before
            ):  # the rest would have to be done again
                steps.throw(SliceOver())
    except SliceOver:
        return False
    return True


def read_progress(run: Run, steps: int) -> tuple[frozenset[str], int, int]:
    """Tell what of a run is finished, such that any work that need not be done again changes it."""
    if run.job is not None:
        return frozenset(folder_module.newest_request(run)[2]), 0, 0
    files = {path.relative_to(run.folder).as_posix(): stat for path, stat in control.files_of(run.folder).items()}
    priced = files.get("state/prices.json")
    return (
        frozenset(name for name in files if name not in FILES_WITHOUT_PROGRESS),
        priced.st_size if priced else 0,
        steps,
    )


def saved_steps(run: Run) -> int:
    """Count the steps of training that are saved."""
    from linearizer.train.state_file import step_in

    return sum(map(step_in, (run.folder / "state" / "training").glob("*")))


def logged_steps(run: Run) -> int:
    """Say at which step of training a run was last: where it ends, the step is saved."""
    return next((event["done"] for event in events.newest_events(run.log_file) if event["event"] == "distill"), 0)


def current_step(run: Run) -> str:
    """Name what a run was last at."""
    found = control.status(run).step
    return str(found["event"]) if found else "load"
