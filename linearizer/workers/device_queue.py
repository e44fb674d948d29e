"""The queue of this machine: each device works on one run at a time, in the order of tickets.

A process that waits or works holds the lock of a ticket: a file named NUMBER@DEVICE, or NUMBER@DEVICE+DEVICE for a run
on several devices, with the folder of the run. A ticket without a lock belongs to a dead process and does not count.
NUMBER-short@DEVICE is the ticket of short work, which goes before the OVERTAKEN tickets that were taken before it. A
run works once no live ticket for one of its devices is before its own, and it holds the locks of its devices. It gives
these back, and pauses, while short work with a later ticket is before it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.run.files import writing
from linearizer.run.locks import Lock, is_held, take_lock

SHORT, OVERTAKEN = "-short", 20  # so a run waits for at most 20 pieces of short work with later tickets


@dataclass
class Ticket:
    """A place in the queue, and the locks of its devices while its process works."""

    path: Path
    lock: Lock
    devices: dict[Path, Lock] = field(default_factory=dict)

    def count_before(self) -> int:
        """Count the live tickets before this one that share a device with it."""
        return len(tickets_before(self.path))

    def begin_work(self) -> bool:
        """Take the devices, unless a live ticket is before this one, or another process still works on one of them."""
        if self.count_before():
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)  # a cache may be cleared meanwhile
        for device in sorted(parse_ticket(self.path)[1]):
            path = self.path.with_name(f"working@{device}")
            if (lock := take_lock(path, 0.0)) is None:
                self.pause()
                return False
            self.devices[path] = lock
        return True

    def pause(self) -> None:
        """Release the devices, and stay in the queue."""
        for path, lock in self.devices.items():
            path.unlink(missing_ok=True)
            lock.release()
        self.devices.clear()

    def remove(self) -> None:
        """Let the next run work."""
        self.path.unlink(missing_ok=True)
        self.pause()
        self.lock.release()


def queue_folder() -> Path:
    """Return the folder of the tickets, which all servers and terminals of a user share."""
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.environ.get("LINEARIZER_QUEUE") or Path(cache) / "linearizer" / "queue")


def take_ticket(run: Path, devices: Sequence[str], short: bool = False) -> Ticket:
    """Take the next number for a run on some devices, and remove the tickets of dead processes."""
    folder = queue_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FolderError(
            f"{str(folder)!r}, where runs wait for their turn, cannot be made ({error.strerror}): set LINEARIZER_QUEUE "
            "to a folder that you may write to"
        ) from error
    lock = None
    with writing(folder):
        for path in tickets():
            if (dead := take_lock(path, 0.0)) is not None:
                with dead:  # so that no other process takes it meanwhile
                    path.unlink(missing_ok=True)
        while lock is None:  # another process took the same number, or is checking for a moment whether it is held
            newest = max((number_of(path) for path in tickets()), default=0)
            path = folder / f"{newest + 1:08d}{SHORT * short}@{'+'.join(dict.fromkeys(devices))}"
            lock = take_lock(path, 0.0)
        path.write_bytes(os.fsencode(run.resolve()))
    return Ticket(path, lock)


def tickets() -> list[Path]:
    """List all tickets, also those of dead processes."""
    return list(queue_folder().glob("[0-9]*@*"))


def tickets_before(path: Path) -> list[Path]:
    """List the live tickets before a ticket that share a device with it, in their order."""
    own_place, own_devices = parse_ticket(path)
    queue = sorted((*parse_ticket(ticket), ticket) for ticket in tickets())
    before = [ticket for place, devices, ticket in queue if place < own_place and devices & own_devices]
    return [ticket for ticket in before if is_held(ticket)]


def runs_before(run: Path) -> list[Path]:
    """List the folders of the runs that a run waits for, the running one first."""
    folders = {path: Path(os.fsdecode(path.read_bytes())) for path in tickets()}
    ticket = max((path for path, folder in folders.items() if folder == run.resolve()), default=None)
    return [] if ticket is None else [folders[path] for path in tickets_before(ticket) if path in folders]


def parse_ticket(path: Path) -> tuple[tuple[int, int], set[str]]:
    """Return the place of a ticket in the queue, by which tickets are ordered, and its devices."""
    name, _, devices = path.name.partition("@")
    number = number_of(path)
    return (number - OVERTAKEN * name.endswith(SHORT), number), set(devices.split("+"))


def number_of(path: Path) -> int:
    return int(path.name.partition("@")[0].removesuffix(SHORT))
