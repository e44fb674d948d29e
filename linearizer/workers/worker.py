"""Works on a run: waits for the device, takes the steps of the plan, and logs the end.

python -m linearizer.workers.worker FOLDER is the process of a run, or of its evaluation. It reads its request, with the
token and the number of the lock that it inherits, from standard input.
"""

from __future__ import annotations

import json
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from linearizer.errors import FaultError, FolderError, LinearizerError, RequestError, Stopped
from linearizer.progress import Progress, Steps, finish
from linearizer.run.events import EventName
from linearizer.run.files import open_in_place
from linearizer.run.folder import Run
from linearizer.run.hub_job import read_hub_job
from linearizer.run.locks import inherit_lock
from linearizer.run.stopping import check_stop, log_end
from linearizer.workers.control import end_process, lock_and_queue
from linearizer.workers.device_queue import Ticket, take_ticket, tickets
from linearizer.workers.launch import LAUNCH_ENDED, devices_to_hold, launched, ranks_for

Product = TypeVar("Product")
FIRST_PRODUCTS = ("profile.json", "ways.json", "checkpoint")  # of runs of any kind
QUEUE_POLL_SECONDS = 0.3  # between two reads of the queue


def work(lock: int, folder: str, task: str | None, token: str | None) -> int:
    """Work on a run with an inherited lock, and return an exit code; errors are in the run's log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run(Path(folder), task)
    try:
        with inherit_lock(lock), stop_on_sigterm(run), keep_faults(run, token):
            if read_hub_job(run) is None:
                finish(work_in_turn(run, lambda: work_on(run, token), token=token))
            else:
                from linearizer.workers.hub_jobs import follow_job

                follow_job(run, token)
    except LinearizerError as error:
        return error.exit_code
    except KeyboardInterrupt:
        return Stopped.exit_code
    return 0


def work_on(run: Run, token: str | None = None) -> Steps[Any]:
    """Begin to work."""
    from linearizer import pipeline

    return linearize_together(run, token) if run.task is None else pipeline.resume_evaluation(run, token)


def linearize_together(run: Run, token: str | None = None) -> Steps[None]:
    """Make the student of a run, with other ranks where there are several devices."""
    from linearizer import pipeline

    with ranks_for(run, token) as ranks:
        yield from pipeline.linearize(run, token, locked=True, ranks=ranks)


def work_in_foreground(run: Run, steps: Steps[Product], **details: Any) -> Steps[Product]:
    """Work on a run in this process; a new run that cannot be served is removed. The log holds the details."""
    is_new = run.task is None and not run.log_file.exists()
    with lock_and_queue(run, **details), stop_on_sigterm(run), keep_faults(run):
        try:
            return (yield from work_in_turn(run, lambda: steps))
        except RequestError:
            if is_new and not any(map(run.has_file, FIRST_PRODUCTS)):
                run.remove()
            raise


def work_in_turn(
    run: Run, steps: Callable[[], Steps[Product]], device: str | None = None, token: str | None = None
) -> Steps[Product]:
    """Work on a run when its devices, or the named one, are free; the caller holds its lock."""
    with ExitStack() as undo:
        with log_end(run):
            short = device is None and goes_first(run, token)
            ticket = take_ticket(run.folder, [device] if device else devices_to_hold(run), short)
            undo.callback(ticket.remove)
            yield from wait_for_turn(run, ticket)
        return (yield from give_way(run, ticket, steps()))


def goes_first(run: Run, token: str | None) -> bool:
    """Whether a run, or its evaluation, is so short and small that other runs may pause for it."""
    if run.is_encoder_run or not tickets():  # nothing needs to go before others where there are none
        return False
    from linearizer.workers.forecast import is_short

    with suppress(LinearizerError):  # the Hub may not say whether the model is here
        return is_short(run, token)
    return False


def wait_for_turn(run: Run, ticket: Ticket) -> Steps[None]:
    while not ticket.begin_work():
        check_stop(run)
        yield Progress("queue", 0, max(1, ticket.count_before()), "runs before")
        time.sleep(QUEUE_POLL_SECONDS)
    check_stop(run)


def give_way(run: Run, ticket: Ticket, steps: Steps[Product]) -> Steps[Product]:
    """Take steps, and pause between two of them while short work goes first."""
    checked = time.monotonic()
    with closing(steps):  # a step that is stopped in a pause saves its state
        while True:
            try:
                yield next(steps)
            except StopIteration as end:
                return end.value
            if (now := time.monotonic()) - checked > QUEUE_POLL_SECONDS:
                if ticket.count_before():
                    ticket.pause()
                    yield from wait_for_turn(run, ticket)
                    run.log(EventName.WAITED, seconds=round(time.monotonic() - now, 3))
                checked = time.monotonic()


@contextmanager
def keep_faults(run: Run, token: str | None = None, file: Path | None = None) -> Iterator[None]:
    """Log an unexpected exception; keep its traceback in a file or on standard error, never the token."""
    try:
        yield
    except LinearizerError:
        raise
    except Exception as fault:
        text = "".join(traceback.format_exception(fault))
        error = f"{type(fault).__name__}, a fault of Linearizer itself"
        place = "on standard error, which a run in the background stores in its folder as worker.log"
        with suppress(OSError, FolderError):  # neither can be written
            with nullcontext(sys.stderr) if file is None else open(file, "a", opener=open_in_place) as target:
                target.write(text.replace(token, "…") if token else text)
                target.flush()
            run.log(EventName.FAILED, error=f"{error}: its traceback is {place}")
        raise FaultError(error) from None


@contextmanager
def stop_on_sigterm(run: Run) -> Iterator[None]:
    """Let SIGTERM stop the run like `control.stop` while the context lasts."""
    reason = LAUNCH_ENDED if launched("WORLD_SIZE") > 1 else ""
    before = signal.signal(signal.SIGTERM, lambda *_: run.make_request("stop", reason))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    end_process(lambda: work(**json.loads(sys.stdin.readline())))
