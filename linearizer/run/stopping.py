"""Logs the progress and the end of a run, and stops it on request.

Nothing here imports torch before it is used: a run that waits for its turn needs little memory.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from types import FrameType
from typing import TypeVar

from linearizer.errors import FaultError, FolderError, LinearizerError, Stopped
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.folder import Run

Product = TypeVar("Product")
NO_MEMORY = ("not enough memory", "can't allocate memory")  # PyTorch says so on a CPU
MIN_EVENT_SECONDS = 0.25  # seconds between two events of a step, and more in a long one:
EVENT_SHARE = 1e-3  # of the time that the step has taken
DRAWN = "events", "freedoms", "kl_of_heads", "layers"  # details of progress that the page shows one by one
MIN_GUESS_SECONDS = 2.0  # seconds of a step after which its remaining seconds can be estimated
STOP_POLL_SECONDS = 0.2  # seconds between two checks for a request while nothing is yielded
INTERRUPT_SECONDS = 1.0  # seconds until work that did not stop is interrupted again
YIELD_SECONDS = 3.0  # seconds that a step has to yield, and to save its state, before it is interrupted
INTERRUPT = signal.SIGUSR1  # not SIGINT, which a shell lets its background jobs ignore


@contextmanager
def log_end(run: Run) -> Iterator[None]:
    """Log the stop of a run, or its failure with a sentence."""
    try:
        with memory_explained():
            yield
    except (Stopped, KeyboardInterrupt, GeneratorExit):
        reason = run.request_reason("stop")
        run.log(EventName.STOPPED, **({"error": reason} if reason else {}))
        run.clear_request("stop")
        raise
    except LinearizerError as error:
        check_present(run)
        with suppress(FolderError):  # the disk is full, and the error says so
            run.log(EventName.FAILED, error=str(error))
        raise


@contextmanager
def memory_explained() -> Iterator[None]:
    """Turn a device's error about full memory into a sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, MemoryError) and not is_out_of_memory(error):
            raise
        raise FaultError(
            "the memory of the device is full: free it, or begin again with a smaller --length or --batch; "
            "finished steps are kept"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Recognise the error by its name and words, without importing torch."""
    return type(error).__name__ == "OutOfMemoryError" or any(words in str(error) for words in NO_MEMORY)


def log_progress(
    run: Run, steps: Steps[Product], patience: float = YIELD_SECONDS, step: str | None = None, **details: object
) -> Steps[Product]:
    """Yield a step's progress, write it into the run's log, and end it early if the run is to stop.

    The step has `patience` seconds to end by itself. `step` replaces its name, `details` are added to its progress.
    """
    pace = LogPace()
    with closing(steps):  # a step that is stopped saves its state
        while True:
            try:
                with interruptible(run, patience):
                    progress = next(steps)
            except StopIteration as end:
                return end.value
            progress = replace(progress, step=step or progress.step, details={**progress.details, **details})
            stop = run.has_request("stop")
            if pace.due(progress) or stop:
                counts = {"done": progress.done, "total": progress.total, "unit": progress.unit}
                run.log(progress.step, **counts, **pace.remaining(progress), **progress.details)
            yield progress
            check_stop(run)


def check_stop(run: Run) -> None:
    """End the work if a stop is requested, or if the folder of the run was deleted."""
    if run.has_request("stop"):
        reason = run.request_reason("stop")
        raise Stopped(f"stopped{f': {reason}' if reason else ' on request'}; finished steps are kept in {run.folder}")
    check_present(run)


def check_present(run: Run) -> None:
    """Refuse a run whose folder was deleted; other errors would name one of its files."""
    if not run.has_file(run.plan_file):
        raise FolderError(f"{str(run.folder)!r} was deleted during the run: start a new run")


class LogPace:
    """Chooses the events of a step to log, so that the log of a long run stays small."""

    def __init__(self) -> None:
        self.part, self.begin, self.last = ("", ""), 0.0, 0.0
        self.first, self.done = 0, 0

    def due(self, progress: Progress) -> bool:
        """Whether to log an event: the first, the last, every warning and what is drawn, and some between."""
        now, part = time.monotonic(), (progress.step, progress.unit)
        if part != self.part or progress.done < self.done:
            self.part, self.begin, self.last, self.first = part, now, -math.inf, progress.done
        self.done = progress.done
        news = any(map(progress.details.get, DRAWN)) or progress.done == progress.total
        due = news or now - self.last >= max(MIN_EVENT_SECONDS, EVENT_SHARE * (now - self.begin))
        self.last = now if due else self.last
        return bool(due)

    def remaining(self, progress: Progress) -> dict[str, float]:
        """Estimate the remaining seconds of a step that has lasted for a while and does not report them itself."""
        seconds, count = time.monotonic() - self.begin, progress.done - self.first
        if seconds < MIN_GUESS_SECONDS or count <= 0 or "seconds_left" in progress.details:
            return {}
        return {"seconds_left": seconds * (progress.total - progress.done) / count}


def interruptible(run: Run, patience: float = 0.0) -> AbstractContextManager[None]:
    """Let a request to stop act like ctrl-C while the context lasts: for long work that yields nothing.

    The work has `patience` seconds to end by itself.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()  # only there signals are handled
    return Interruption(run, patience) if in_main_thread else nullcontext()


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off requests to stop, and ctrl-C, while the context lasts: a state is being written."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {INTERRUPT, signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Interruption(AbstractContextManager[None]):
    """Watches for a request to stop, and interrupts the work between `__enter__` and `__exit__`, never these two."""

    def __init__(self, run: Run, patience: float) -> None:
        self.run, self.patience = run, patience
        self.over, self.main = threading.Event(), threading.get_ident()
        self.watcher = threading.Thread(target=self.watch, daemon=True)

    def __enter__(self) -> None:
        self.before = signal.signal(INTERRUPT, self.interrupt)
        self.watcher.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.over.set()
        self.watcher.join()
        signal.signal(INTERRUPT, self.before)
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            check_stop(self.run)

    def watch(self) -> None:
        """Send the signal repeatedly: a download waits for its threads after the first."""
        while not self.over.wait(STOP_POLL_SECONDS):
            if self.run.has_request("stop") and not self.over.wait(self.patience):
                signal.pthread_kill(self.main, INTERRUPT)
                self.over.wait(INTERRUPT_SECONDS)

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """Interrupt the work, but not its start or end: without a complete `__exit__` the signals would never end."""
        while frame is not None:
            if frame.f_code in (Interruption.__enter__.__code__, Interruption.__exit__.__code__):
                return  # the next check finds the request again
            frame = frame.f_back
        raise KeyboardInterrupt
