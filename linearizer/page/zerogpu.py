"""ZeroGPU lends a Space its device for about a minute at a time, only while a function decorated here runs.

Such a function runs in a process that `spaces` forks from the server: arguments and results go through a pipe, its
memory is lost, and of an exception only the name of the class arrives. So it works on files, and returns errors as
values. The time counts against the visitor of the request, or of the context that a thread got a copy of. Without
ZeroGPU, functions stay as they are.

For a run or an evaluation, a thread of the server asks for the device once for each step. A step that takes longer than
the device is lent ends with an error message; what it saved is kept. The owner of a Space sets the seconds of a step by
LINEARIZER_SLICE.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager, suppress
from contextvars import copy_context
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError, RequestError
from linearizer.progress import Progress, Steps, finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run, newest_request
from linearizer.run.locks import Lock
from linearizer.run.measured import CANDIDATES
from linearizer.run.stopping import check_stop, log_end
from linearizer.workers import control
from linearizer.workers.worker import keep_faults, work_in_turn, work_on

SECONDS = int(os.environ.get("LINEARIZER_SLICE") or 120)  # for which a step asks for the device
DEVICE = "zerogpu"
PRODUCTS = ("profile.json", "prices.json", "gates.json", "allocation.json", CANDIDATES, "evaluation.json")  # of steps
BROKEN_TITLE = "ZeroGPU worker error"  # of the error that `spaces` raises if its process ended early
Function = TypeVar("Function", bound=Callable[..., Any])


def on_zerogpu() -> bool:
    """Whether this is a Space on ZeroGPU."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def import_spaces() -> Any:
    """Import the package that lends the device."""
    try:
        import spaces
    except ModuleNotFoundError as error:
        if error.name != "spaces":
            raise
        raise RequestError(
            "SPACES_ZERO_GPU is set, and the package `spaces`, which lends the device, is not installed: "
            "pip install spaces, or unset SPACES_ZERO_GPU"
        ) from error
    return spaces


class DeviceRefused(FaultError):
    """The device was not lent."""


class StepOver(Exception):
    """Ends the work after a finished step; the next call goes on from what was saved."""


class DeviceTaken(FaultError):
    """The device was lent, and its process ended before the work was done."""


def with_device(seconds: int) -> Callable[[Function], Function]:
    """Let ZeroGPU lend its device to a generator while it runs; elsewhere the generator stays as it is."""
    return partial(lend, seconds) if on_zerogpu() else lambda function: function


def lend(seconds: int, function: Callable[..., Iterator[Any]]) -> Any:
    @wraps(function)
    def work(*args: Any) -> Iterator[Any]:
        import torch

        torch.set_num_threads(1)  # on the CPU: a forked process lacks the threads of the server
        try:
            yield from function(*args)
        except LinearizerError as error:
            yield error

    borrowed = import_spaces().GPU(duration=seconds)(work)

    @wraps(function)
    def values(*args: Any) -> Iterator[Any]:
        error = None
        with explained_refusals(), closing(borrowed(*args)) as steps:
            for result in steps:
                if isinstance(result, LinearizerError):
                    error = result  # raised after the last value, when the process is free for others
                else:
                    yield result
        if error is not None:
            raise error

    return values


@contextmanager
def explained_refusals() -> Iterator[None]:
    """Raise an error of ZeroGPU as one of ours, in a sentence."""
    import gradio as gr

    try:
        yield
    except gr.Error as error:
        reason = str(error.message).rstrip(". ")
        if error.title == BROKEN_TITLE:
            raise DeviceTaken(
                f"ZeroGPU took its device back ({reason}): try again, with less to do at a time"
            ) from error
        raise DeviceRefused(f"ZeroGPU lends no device ({error.title}: {reason})") from error


def start(run: Run, token: str | None = None, **details: Any) -> None:
    """Queue a run, and work on what it lacks; the time counts against the visitor of this request.

    Other arguments go into the log, where the steps read them.
    """
    control.check_start(run, token)
    lock = control.lock_and_queue(run, **details)
    context = copy_context()  # by which ZeroGPU knows the visitor
    threading.Thread(target=context.run, args=(work_in_steps, run, token, lock), daemon=True).start()


def work_in_steps(run: Run, token: str | None, lock: Lock) -> None:
    """Work on a run until it ends; errors go into its log."""
    with lock, suppress(LinearizerError), keep_faults(run, token, run.folder / "worker.log"):
        finish(work_in_turn(run, lambda: run_steps(run, token), DEVICE))


def run_steps(run: Run, token: str | None) -> Steps[None]:
    """Work on a run, asking for the device for each of its steps."""
    goes_on = True
    while goes_on:
        with log_end(run):
            check_stop(run)
        try:
            (goes_on,) = work_one_step(str(run.folder), run.task, token)
        except DeviceTaken as error:
            step = control.status(run).step or {"event": "load"}
            with log_end(run):
                raise FaultError(
                    f"the step {str(step['event'])!r} takes longer than the {SECONDS} seconds for which ZeroGPU lends "
                    "its device: resume the run, and it goes on from what was saved, or ask for fewer or shorter "
                    "texts, or for a smaller model, or do this on your own machine"
                ) from error
        except DeviceRefused as refusal:
            run.log(EventName.STOPPED, error=f"{refusal}; what was finished is kept: resume it later")
            raise
        yield Progress("device", 1, 1, "steps")


@with_device(SECONDS)
def work_one_step(folder: str, task: str | None, token: str | None) -> Iterator[bool]:
    """Work on a run until a step is finished, while the device is lent; yield whether more steps remain."""
    run = Run(Path(folder), task)
    with keep_faults(run, token, run.folder / "worker.log"):
        finished_before, steps = finished_steps(run), work_on(run, token)
        try:
            for _ in steps:
                if finished_steps(run) != finished_before:
                    steps.throw(StepOver())
        except StepOver:
            yield True
            return
    yield False


def finished_steps(run: Run) -> Collection[str]:
    """Name the finished products of a run, or the finished parts of its evaluation."""
    if run.task is not None:
        return set(newest_request(run)[2])
    return {name for name in PRODUCTS if run.has_file(name)}
