"""Work on a run: wait for a turn at the device, do what the plan asks for, and say how that ended.

python -m linearizer.jobs.worker RUN JOB TICKET FD FD is the process of a run in the background, or of its evaluation:
`jobs.start` hands it the locks of the run and of the ticket, as open files, and the token on standard input.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError, RequestError, Stopped
from linearizer.jobs.control import enter
from linearizer.jobs.queue import Ticket
from linearizer.model.devices import choose_device, device_name
from linearizer.progress import Progress, Steps, finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.locks import Lock
from linearizer.run.stopping import check, reported

Product = TypeVar("Product")
OFTEN = 0.3  # seconds between two looks at the queue


def main(arguments: Sequence[str]) -> int:
    """Work on a run that was handed over, and return an exit code; what there is to say is in the run's log."""
    folder, job, number, *fds = arguments
    lock, ticket_lock = (Lock(int(fd)) for fd in fds)
    for held in (lock, ticket_lock):
        os.set_inheritable(held.fd, False)
    token = sys.stdin.read() or None
    os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run(Path(folder), job or None)
    with lock, heeding_signals(run):
        try:
            with faults_kept(run, token):
                finish(in_turn(run, Ticket(Path(number), ticket_lock), lambda: work_on(run, token)))
        except LinearizerError as error:
            return error.exit_code
        except KeyboardInterrupt:
            return Stopped.exit_code
    return 0


def work_on(run: Run, token: str | None) -> Steps[Any]:
    """Begin to work, now that it is this run's turn: what is imported here takes memory."""
    if run.job is not None:
        from linearizer.pipeline import resume_evaluation

        return resume_evaluation(run, token)
    from linearizer.pipeline import linearize

    return linearize(run, token, held=True)


def foreground(run: Run, steps: Steps[Product], **asked: Any) -> Steps[Product]:
    """Work on a run in this process; a request that cannot be served leaves no run. What is asked is logged."""
    lock, ticket = enter(run, **asked)
    with lock, heeding_signals(run):
        try:
            with faults_logged(run):
                return (yield from in_turn(run, ticket, lambda: steps))
        except RequestError:
            if run.job is None and not run.has_file("profile.json"):
                run.remove_unstarted()
            raise


def in_turn(run: Run, ticket: Ticket, steps: Callable[[], Steps[Product]], device: str | None = None) -> Steps[Product]:
    """Work on a run when its device is free; the caller holds the run."""
    try:
        with reported(run):
            for waiting in turn(run, ticket, device):
                check(run)
                yield waiting
            check(run)
        return (yield from steps())
    finally:
        ticket.give_back()


def turn(run: Run, ticket: Ticket, device: str | None = None) -> Steps[None]:
    """Wait until a run's device, or the one named, is free."""
    ticket.at(device or device_name(choose_device(run.plan.device)))
    while before := ticket.before():
        yield Progress("queue", 0, before, "runs before")
        time.sleep(OFTEN)


@contextmanager
def faults_logged(run: Run, keep: Callable[[Exception], None] = lambda fault: None) -> Iterator[None]:
    """Let the log say of what kind a fault of our own was, and where to read on, once `keep` has kept it there."""
    try:
        yield
    except LinearizerError:
        raise
    except Exception as fault:
        keep(fault)
        run.log(
            EventName.FAILED,
            error=f"{type(fault).__name__}, a fault of Linearizer itself: its traceback is on standard error, which a "
            "run in the background keeps in its folder as worker.log",
        )
        raise


@contextmanager
def faults_kept(run: Run, token: str | None, file: Path | None = None) -> Iterator[None]:
    """Keep the traceback of a fault of our own, too: in a file, or on standard error, and never the token."""

    def keep(fault: Exception) -> None:
        text = "".join(traceback.format_exception(fault))
        with nullcontext(sys.stderr) if file is None else file.open("a") as kept:
            kept.write(text.replace(token, "…") if token else text)
            kept.flush()

    try:
        with faults_logged(run, keep):
            yield
    except LinearizerError:
        raise
    except Exception as fault:
        raise FaultError(f"{type(fault).__name__}, a fault of Linearizer itself") from None


@contextmanager
def heeding_signals(run: Run) -> Iterator[None]:
    """While this lasts, let SIGTERM stop the run as `jobs.stop` does."""
    before = signal.signal(signal.SIGTERM, lambda *_: run.make_request("stop"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(code)  # without waiting for the threads of a download that was given up
