"""Locks on files, which the system frees when their process dies; a new process may inherit one.

A lock belongs to the open file, not to the process: it lasts until the last process that has the file open closes it.
A forked process closes the files that it inherited at once: its parent's locks remain its parent's.
Handing over leaves no gap without the lock. A process takes seconds to start. If it took its lock by itself, as with
the packages for locks, the run would look lost meanwhile, and another start could take it.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from linearizer.errors import FolderError

LOCK_SECONDS = 0.5  # seconds: a process that checks a lock holds it for a moment


OPEN: set[int] = set()  # files with locks
CHANGING = threading.Lock()  # of OPEN


@dataclass
class Lock:
    """A lock that this process holds, perhaps together with a process that inherited it."""

    fd: int

    def release(self) -> None:
        """Close the file; unless another process inherited it, that frees the lock."""
        if self.fd >= 0:
            close(self.fd)
        self.fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def inherit_lock(fd: int) -> Lock:
    """Hold a lock that the parent of this process took and handed over."""
    os.set_inheritable(fd, False)
    with CHANGING:
        OPEN.add(fd)
    return Lock(fd)


def take_lock(path: Path, seconds: float = LOCK_SECONDS) -> Lock | None:
    """Take a lock; None if another process keeps it for the whole time."""
    deadline = time.monotonic() + seconds
    while True:
        fd, taken = open_file(path, os.O_RDWR | os.O_CREAT), False
        try:
            with suppress(FileNotFoundError):  # the file was deleted meanwhile, and a lock on it excludes nobody
                taken = lock_file(fd, path, fcntl.LOCK_EX) and os.path.samestat(os.fstat(fd), path.stat())
        finally:
            if not taken:
                close(fd)
        if taken:
            return Lock(fd)
        if time.monotonic() >= deadline:
            return None
        time.sleep(0.01)


def is_held(path: Path) -> bool:
    """Whether a live process holds a lock."""
    try:
        fd = open_file(path, os.O_RDONLY)
    except OSError:  # there is no file, or a link, which no process of ours holds
        return False
    try:
        return not lock_file(fd, path, fcntl.LOCK_SH)  # shared: two checks do not disturb each other
    finally:
        close(fd)


def lock_file(fd: int, path: Path, kind: int) -> bool:
    """Lock an open file; return whether no other process keeps its lock."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise FolderError(
            f"{str(path)!r} cannot be locked ({error.strerror}), because its file system keeps no locks: name a folder "
            "on a local disk"
        ) from error
    return True


def open_file(path: Path, flags: int) -> int:
    """Open a file for a lock on it."""
    with CHANGING:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o644)
        OPEN.add(fd)
    return fd


def close(fd: int) -> None:
    """Close a file, which frees the lock on it."""
    with CHANGING:
        OPEN.discard(fd)
        os.close(fd)


def leave_to_parent() -> None:
    """Close the inherited files in a process that was just forked."""
    for fd in OPEN:
        os.close(fd)
    OPEN.clear()
    CHANGING.release()


os.register_at_fork(before=CHANGING.acquire, after_in_parent=CHANGING.release, after_in_child=leave_to_parent)
