"""The queues of the devices of this machine: each device works on one run at a time, in the order of tickets.

Everyone who waits or works holds the lock of a ticket, a file that names the run and is itself named NUMBER, then
NUMBER@DEVICE, and NUMBER@DEVICE@now while the run works. A ticket that nobody holds is that of a dead process, and does
not count. Until a run knows its device it stands in everybody's way.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.run.files import writing
from linearizer.run.locks import Lock, is_held, take_lock

WORKING = "now"
LOCK_SECONDS = 30.0  # to wait for the others who take a number, which takes each of them a moment


@dataclass
class Ticket:
    """A place in the queue; the process that holds its lock works once no live ticket is before it."""

    path: Path
    lock: Lock

    def at(self, device: str) -> None:
        """Say which device it is for."""
        with lock_queue(), writing(self.path):
            self.path = self.path.rename(self.path.with_name(f"{number_of(self.path)}@{device}"))

    def before(self) -> int:
        """Count the live ones before this; if there is none, its turn begins."""
        with lock_queue(), writing(self.path):  # nobody is overlooked while a ticket is renamed
            count = len(tickets_before(self.path))
            if not count:
                self.path = self.path.rename(self.path.with_name(f"{self.path.name}@{WORKING}"))
        return count

    def give_back(self) -> None:
        """Let the next one work."""
        self.path.unlink(missing_ok=True)
        self.lock.release()


def folder() -> Path:
    """Give the folder of the tickets, which all servers and terminals of one user share."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LINEARIZER_QUEUE") or Path(cache) / "linearizer" / "queue")


def take_ticket(run: Path) -> Ticket:
    """Take the next number for a run."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"{str(folder())!r}, where runs wait for their turn, cannot be made ({error.strerror}): set "
            "LINEARIZER_QUEUE to a folder that is yours to write"
        ) from error
    with lock_queue():
        there = sorted(tickets())
        for path in there:
            if not is_held(path):
                path.unlink(missing_ok=True)
        path = folder() / f"{int(number_of(there[-1])) + 1 if there else 1:08d}"
        with writing(path):
            path.write_text(str(run.resolve()), encoding="utf-8")
            lock = take_lock(path, LOCK_SECONDS)
        assert lock is not None  # who asks whether it is held takes a moment only
        return Ticket(path, lock)


def place_of(run: Path) -> int | None:
    """Say where a run that waits stands in the queue of its device: 1 is next."""
    for path in sorted(tickets()):
        if run_of(path) == str(run.resolve()) and is_held(path):
            return 1 + sum(not other.name.endswith(f"@{WORKING}") for other in tickets_before(path))
    return None


def tickets_before(own: Path) -> list[Path]:
    """List the live tickets before one, as far as they may be for the same device."""
    device = device_of(own)
    return [
        path
        for path in sorted(tickets())
        if number_of(path) < number_of(own) and (not device or device_of(path) in ("", device)) and is_held(path)
    ]


def tickets() -> Iterator[Path]:
    """List all tickets, of the living and the dead."""
    return (path for path in folder().glob("[0-9]*") if number_of(path).isdigit())


def number_of(ticket: Path) -> str:
    return ticket.name.partition("@")[0]


def device_of(ticket: Path) -> str:
    """Name the device of a ticket; nothing while it is not known."""
    return ticket.name.removesuffix(f"@{WORKING}").partition("@")[2]


def run_of(ticket: Path) -> str:
    """Name the run that a ticket is of; nothing if it was given back meanwhile."""
    try:
        return ticket.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


@contextmanager
def lock_queue() -> Iterator[None]:
    """Let no other process change the tickets while this lasts."""
    with writing(folder()):
        lock = take_lock(folder() / "lock", LOCK_SECONDS)
    if lock is None:
        raise FolderError(
            f"{str(folder())!r} has been locked for {LOCK_SECONDS:.0f} seconds: stop the process that does it"
        )
    with lock:
        yield
