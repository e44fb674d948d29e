"""The queues of the devices of this machine: each device works on one run at a time, in the order of tickets.

Every process that waits or works holds the lock of a ticket: a file with the folder of its run, named NUMBER, then
NUMBER@DEVICE; a run on several devices, NUMBER@DEVICE+DEVICE, stands in the queue of each. A run works once it is the
first in all of its queues: numbers only grow, so none comes before it later. A ticket without a lock belongs to a dead
process and does not count. A run whose device is not known yet counts for every device.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.run.files import writing
from linearizer.run.locks import Lock, is_held, take_lock

AND = "+"  # between the devices of a ticket
WAIT_SECONDS = 30.0  # the longest wait for other processes; each holds the lock for a moment


@dataclass
class Ticket:
    """A place in the queue; the process that holds its lock works once no live ticket is before it."""

    path: Path
    lock: Lock

    def set_devices(self, devices: Sequence[str]) -> None:
        """Name the devices that the run will use."""
        with lock_queue(), writing(self.path):
            names = AND.join(dict.fromkeys(devices))
            self.path = self.path.rename(self.path.with_name(f"{number_of(self.path)}@{names}"))

    def count_before(self) -> int:
        """Count the live tickets before this one."""
        with lock_queue():  # a ticket that is being renamed would be missed
            return len(tickets_before(self.path))

    def remove(self) -> None:
        """Let the next run work."""
        self.path.unlink(missing_ok=True)
        self.lock.release()


def queue_folder() -> Path:
    """Give the folder of the tickets, which all servers and terminals of a user share."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LINEARIZER_QUEUE") or Path(cache) / "linearizer" / "queue")


def take_ticket(run: Path) -> Ticket:
    """Take the next number for a run."""
    try:
        queue_folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"{str(queue_folder())!r}, where runs wait for their turn, cannot be made ({error.strerror}): set "
            "LINEARIZER_QUEUE to a folder that is yours to write"
        ) from error
    with lock_queue():
        present = sorted(tickets())
        for path in present:
            if not is_held(path):
                path.unlink(missing_ok=True)
        path = queue_folder() / f"{int(number_of(present[-1])) + 1 if present else 1:08d}"
        with writing(path):
            path.write_text(str(run.resolve()), encoding="utf-8")
            lock = take_lock(path, WAIT_SECONDS)
        assert lock is not None  # a check whether it is held takes a moment only
        return Ticket(path, lock)


def place_of(run: Path) -> int | None:
    """Give the place of a waiting run in the queue of its device: 1 is next."""
    for path in sorted(tickets()):
        with suppress(FileNotFoundError):  # removed meanwhile
            if path.read_text(encoding="utf-8") == str(run.resolve()) and is_held(path):
                return 1 + sum(bool(tickets_before(other)) for other in tickets_before(path))  # the first are at work
    return None


def tickets_before(own: Path) -> list[Path]:
    """List the live tickets before a ticket that may be for one of the same devices."""
    devices = devices_of_ticket(own)
    return [
        path
        for path in sorted(tickets())
        if number_of(path) < number_of(own)
        and (not devices or not devices_of_ticket(path) or devices & devices_of_ticket(path))
        and is_held(path)
    ]


def tickets() -> Iterator[Path]:
    """List all tickets, also the tickets of dead processes."""
    return (path for path in queue_folder().glob("[0-9]*") if number_of(path).isdigit())


def number_of(ticket: Path) -> str:
    return ticket.name.partition("@")[0]


def devices_of_ticket(ticket: Path) -> set[str]:
    """Name the devices of a ticket; none while they are unknown."""
    return set(filter(None, ticket.name.partition("@")[2].split(AND)))


@contextmanager
def lock_queue() -> Iterator[None]:
    """Keep other processes from changing the tickets."""
    with writing(queue_folder()):
        lock = take_lock(queue_folder() / "lock", WAIT_SECONDS)
    if lock is None:
        raise FolderError(
            f"{str(queue_folder())!r} has been locked for {WAIT_SECONDS:.0f} seconds: stop the process that holds it"
        )
    with lock:
        yield
