"""Runs and evaluations on ZeroGPU: a thread of the server asks for the device, for one step of a run after the other.

The time counts against the visitor who started or resumed the work. A step that takes longer than the device is lent
ends in a sentence; what it saved is kept. The owner of a Space sets by LINEARIZER_SLICE how many seconds a step has.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

from linearizer.errors import FaultError, LinearizerError
from linearizer.page import zerogpu
from linearizer.progress import Progress, Steps, finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run, newest_request
from linearizer.run.locks import Lock
from linearizer.run.prices import CANDIDATES
from linearizer.run.stopping import SliceOver, check_stop, log_end
from linearizer.workers import control
from linearizer.workers.device_queue import Ticket
from linearizer.workers.worker import keep_faults, work_in_turn, work_on

SECONDS = int(os.environ.get("LINEARIZER_SLICE") or 120)  # for which the device is asked
DEVICE = "zerogpu"
PRODUCTS = ("profile.json", "prices.json", "gates.json", "allocation.json", CANDIDATES, "evaluation.json")  # of steps


def start(run: Run, token: str | None = None, **details: Any) -> None:
    """Queue a run, and work on it from where it stands; the time counts against the visitor of this request.

    Other arguments go into the log, where the steps read them.
    """
    control.check_start(run, token)
    lock, ticket = control.lock_and_queue(run, **details)
    context = copy_context()  # tells ZeroGPU the visitor
    threading.Thread(target=context.run, args=(work_in_steps, run, token, lock, ticket), daemon=True).start()


def work_in_steps(run: Run, token: str | None, lock: Lock, ticket: Ticket) -> None:
    """Work on a run until it ends; errors go into its log."""
    with lock, suppress(LinearizerError), keep_faults(run, token, run.folder / "worker.log"):
        finish(work_in_turn(run, ticket, lambda: run_steps(run, token), DEVICE))


def run_steps(run: Run, token: str | None) -> Steps[None]:
    """Work on a run, asking for the device for each of its steps."""
    over = False
    while not over:
        with log_end(run):
            check_stop(run)
        try:
            over = work_one_step(str(run.folder), run.job, token)
        except zerogpu.DeviceTaken as error:
            with log_end(run):
                raise FaultError(
                    f"{current_step(run)!r} is a step that takes longer than the {SECONDS} seconds for which ZeroGPU "
                    "was asked: resume the run, and it goes on from what was saved, or ask for fewer or shorter texts, "
                    "or for a smaller model, or do this at your own machine"
                ) from error
        except zerogpu.DeviceRefused as refusal:
            run.log(EventName.STOPPED, error=f"{refusal}; what was finished is kept: resume it later")
            raise
        yield Progress(EventName.SLICE, 1, 1, "steps")


@zerogpu.with_device(SECONDS)
def work_one_step(folder: str, job: str | None, token: str | None) -> bool:
    """Work on a run until a step is finished, while the device is lent; tell whether the run has ended."""
    run = Run(Path(folder), job)
    with keep_faults(run, token, run.folder / "worker.log"):
        before, steps = finished_steps(run), work_on(run, token)
        with suppress(SliceOver):
            for _ in steps:
                if finished_steps(run) != before:
                    steps.throw(SliceOver())
            return True
    return False


def finished_steps(run: Run) -> Collection[str]:
    """Name what is finished: products of a run, or parts of its evaluation."""
    if run.job is not None:
        return set(newest_request(run)[2])
    return {name for name in PRODUCTS if run.has_file(name)}


def current_step(run: Run) -> str:
    """Name the step at which a run was last."""
    step = control.status(run).step
    return str(step["event"]) if step else "load"
