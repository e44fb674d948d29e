"""Work on a run: wait for the device, do what the plan asks for, and log how that ended.

python -m linearizer.jobs.worker FD is the process that forks the processes of runs, of their evaluations and of their
helpers: for each, `processes.start_process` sends the open files through the socket FD. A process reads the token,
which is in its request, only once it was forked: the process that forks never holds it.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from linearizer.errors import FaultError, LinearizerError, RequestError, Stopped
from linearizer.jobs.children import Children, devices_to_hold, help_watched, may_have_helpers
from linearizer.jobs.control import lock_and_queue
from linearizer.jobs.processes import CAN_FORK, fork_from, replace_own_environment
from linearizer.jobs.queue import Ticket
from linearizer.progress import Progress, Steps, finish
from linearizer.run.events import EventName
from linearizer.run.files import open_in_place
from linearizer.run.folder import Run
from linearizer.run.hub_job import read_hub_job
from linearizer.run.locks import Lock
from linearizer.run.stopping import check_stop, log_end

Product = TypeVar("Product")
QUEUE_POLL_SECONDS = 0.3  # between two reads of the queue
MAX_FILES = 4  # of a process: its request, two locks or its answers, its log


def main(fd: int) -> None:
    """Import what runs need, and fork a process for each that is sent."""
    with suppress(Exception):  # a run that needs the import says what is wrong with it
        import_module("linearizer.pipeline")
    gc.freeze()  # what was imported stays shared
    serve(socket.socket(fileno=fd))
    os._exit(0)  # the bindings of libraries that end with the process would write into the log of a run


def serve(connection: socket.socket) -> None:
    """Fork a process for each that is sent, until the process at the other end has ended."""
    with connection:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leave no zombies
        while (sent := socket.recv_fds(connection, 1, MAX_FILES))[0]:
            files = sent[1]
            if CAN_FORK and fork(files[-1]):
                for file in files:
                    os.close(file)
                continue
            connection.close()
            work_and_exit(*files)


def fork(log: int) -> int:
    """Fork this process, and give the number of the new one, here; where none can be made, write so into a log."""
    try:
        return os.fork()
    except OSError as error:
        os.write(log, f"no process could be started ({error.strerror}): free memory\n".encode())
        return -1


def work_and_exit(request: int, *files: int) -> NoReturn:
    """Do what is requested in this process; the arguments are open files, the last of them for standard error."""
    code = 1
    try:
        *own, log = files
        for file in (request, *own):
            os.set_inheritable(file, False)
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        pipe = open(request)
        details = json.loads(pipe.readline())
        replace_own_environment(details.pop("environment"))
        if "number" in details:
            code = help_watched(pipe, *own, **details)
        else:
            pipe.close()
            lock, ticket_lock = own
            code = work(Lock(lock), Lock(ticket_lock), **details)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)  # without waiting for the threads of an abandoned download


def keep_fork(run: Run, locks: Sequence[Lock]) -> None:
    """Keep a fork of this process, which has done nothing yet, for the helpers of a run; it holds no lock."""
    if run.job is not None or not CAN_FORK or not may_have_helpers(run.plan):
        return
    connection, theirs = socket.socketpair()
    if fork(sys.stderr.fileno()):
        theirs.close()
        fork_from(connection)
        return
    try:
        connection.close()
        for lock in locks:
            lock.release()
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        serve(theirs)
    finally:
        os._exit(0)


def work(lock: Lock, ticket_lock: Lock, folder: str, job: str | None, ticket: str, token: str | None) -> int:
    """Work on a run that was handed over, and return an exit code; errors are in the run's log."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    run = Run(Path(folder), job)
    with lock, stop_on_sigterm(run):
        try:
            with keep_faults(run, token):
                keep_fork(run, (lock, ticket_lock))
                with suppress(OSError):  # other systems than Linux have none
                    Path("/proc/self/comm").write_text(f"run {run.folder.name}")  # its name in a list of processes
                own = Ticket(Path(ticket), ticket_lock)
                if read_hub_job(run) is None:
                    finish(work_in_turn(run, own, lambda: work_on(run, token)))
                else:
                    follow_in_hub(run, own, token)
        except LinearizerError as error:
            return error.exit_code
        except KeyboardInterrupt:
            return Stopped.exit_code
    return 0


def follow_in_hub(run: Run, ticket: Ticket, token: str | None) -> None:
    """Follow a run that works in a job of the Hub, and so waits for no device of this machine."""
    from linearizer.jobs.hub_follow import follow_job

    ticket.remove()
    follow_job(run, token)


def work_on(run: Run, token: str | None) -> Steps[Any]:
    """Begin to work."""
    if run.job is not None:
        from linearizer.pipeline import resume_evaluation

        return resume_evaluation(run, token)
    from linearizer.pipeline import linearize

    return linearize(run, token, held=True, helpers=Children(run, token))


def work_in_foreground(run: Run, steps: Steps[Product], **details: Any) -> Steps[Product]:
    """Work on a run in this process; a request that cannot be served leaves no run. The log holds the details."""
    lock, ticket = lock_and_queue(run, **details)
    with lock, stop_on_sigterm(run):
        try:
            with log_faults(run):
                return (yield from work_in_turn(run, ticket, lambda: steps))
        except RequestError:
            if run.job is None and not run.has_file("profile.json"):
                run.remove_unstarted()
            raise


def work_in_turn(
    run: Run, ticket: Ticket, steps: Callable[[], Steps[Product]], device: str | None = None
) -> Steps[Product]:
    """Work on a run when its device is free; the caller holds the run."""
    try:
        with log_end(run):
            for waiting in wait_for_turn(run, ticket, device):
                check_stop(run)
                yield waiting
            check_stop(run)
        return (yield from steps())
    finally:
        ticket.remove()


def wait_for_turn(run: Run, ticket: Ticket, device: str | None = None) -> Steps[None]:
    """Wait until a run's devices, or the one named, are free; an evaluation has the first alone."""
    ticket.set_devices([device] if device else devices_to_hold(run))
    while before := ticket.count_before():
        yield Progress("queue", 0, before, "runs before")
        time.sleep(QUEUE_POLL_SECONDS)


@contextmanager
def log_faults(run: Run, keep: Callable[[Exception], None] = lambda fault: None) -> Iterator[None]:
    """Log the type of an unexpected exception and where its traceback is, once `keep` has written it there."""
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
def keep_faults(run: Run, token: str | None, file: Path | None = None) -> Iterator[None]:
    """Keep the traceback of an unexpected exception, in a file or on standard error, never the token."""

    def keep(fault: Exception) -> None:
        text = "".join(traceback.format_exception(fault))
        with nullcontext(sys.stderr) if file is None else open(file, "a", opener=open_in_place) as kept:
            kept.write(text.replace(token, "…") if token else text)
            kept.flush()

    try:
        with log_faults(run, keep):
            yield
    except LinearizerError:
        raise
    except Exception as fault:
        raise FaultError(f"{type(fault).__name__}, a fault of Linearizer itself") from None


@contextmanager
def stop_on_sigterm(run: Run) -> Iterator[None]:
    """While this lasts, let SIGTERM stop the run as `control.stop` does."""
    before = signal.signal(signal.SIGTERM, lambda *_: run.make_request("stop"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    main(int(sys.argv[1]))
