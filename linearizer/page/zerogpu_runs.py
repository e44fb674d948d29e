"""Runs and evaluations on ZeroGPU: a thread of the server asks for the device, one slice of time after the other.

A slice resumes what is saved, works until its time is nearly over, and saves. In the end the student has the same bits
as from a single piece of work, and finished parts of an evaluation are kept. The time counts against the visitor who
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
from linearizer.jobs.worker import keep_faults, work_in_turn, work_on
from linearizer.page import zerogpu
from linearizer.progress import Progress, Steps, finish
from linearizer.run import events
from linearizer.run import folder as folder_module
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.locks import Lock
from linearizer.run.stopping import SliceOver, check_stop, log_end

SLICE_SECONDS = int(os.environ.get("LINEARIZER_SLICE") or 60)  # for which the device is asked
WORKED_SHARE = float(
    os.environ.get("LINEARIZER_SLICE_SHARE") or 0.7
)  # of a slice; the rest is for its start, and to save
MAX_VAIN_SLICES = 2  # in a row that finish nothing before a run fails
DEVICE = "zerogpu"
FILES_WITHOUT_PROGRESS = ("stop", "use", "worker.log")  # that change although nothing is finished


def start(run: Run, token: str | None = None, **details: Any) -> None:
    """Queue a run, and work on it from where it stands; the time counts against the visitor of this request.

    Other arguments go into the log, where the slices read them.
    """
    control.check_start(run, token)
    lock, ticket = control.lock_and_queue(run, **details)
    context = copy_context()  # tells ZeroGPU the visitor
    threading.Thread(target=context.run, args=(work_in_slices, run, token, lock, ticket), daemon=True).start()


def work_in_slices(run: Run, token: str | None, lock: Lock, ticket: Ticket) -> None:
    """Work on a run until it ends; errors go into its log."""
    with lock:
        with suppress(LinearizerError), keep_faults(run, token, run.folder / "worker.log"):
            finish(work_in_turn(run, ticket, lambda: run_slices(run, token), DEVICE))


def run_slices(run: Run, token: str | None) -> Steps[None]:
    """Work on a run in slices, as long as they finish something."""
    count, vain, over = 0, 0, False
    while not over:
        with log_end(run):
            check_stop(run)
        before = read_progress(run, saved_steps(run))
        try:
            over = work_one_slice(str(run.folder), run.job, token)
        except zerogpu.DeviceTaken:  # it worked too long; what it saved before is kept
            run.log(EventName.SLICE)
        except zerogpu.DeviceRefused as refusal:
            run.log(EventName.STOPPED, error=f"{refusal}; what was finished is kept: resume it later")
            raise
        count, vain = count + 1, vain + 1 if read_progress(run, saved_steps(run)) == before else 0
        yield Progress("slice", count, count + (not over), "slices")
        with log_end(run):
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
    with keep_faults(run, token, run.folder / "worker.log"):
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
            ):  # a longer step would be done again
                steps.throw(SliceOver())
    except SliceOver:
        return False
    return True


def read_progress(run: Run, steps: int) -> tuple[frozenset[str], int, int]:
    """Describe what of a run is finished; the result changes with any work that need not be done again."""
    if run.job is not None:
        return frozenset(folder_module.newest_request(run)[2]), 0, 0
    files = {path.relative_to(run.folder).as_posix(): stat for path, stat in control.files_of(run.folder).items()}
    priced = [stat.st_mtime_ns for name, stat in files.items() if name.startswith("state/prices/")]
    names = frozenset(name for name in files if name not in FILES_WITHOUT_PROGRESS)
    return names, max(priced, default=0), steps


def saved_steps(run: Run) -> int:
    """Count the steps of training that are saved."""
    from linearizer.train.state_file import step_in

    return sum(map(step_in, (run.folder / "state" / "training").glob("*")))


def logged_steps(run: Run) -> int:
    """Read the last step of training from the log; where a slice ends, that step is saved."""
    return next(
        (event["done"] for event in events.newest_events(run.log_file) if event["event"] == EventName.DISTILL), 0
    )


def current_step(run: Run) -> str:
    """Name the step at which a run was last."""
    step = control.status(run).step
    return str(step["event"]) if step else "load"
