"""Locks on files, which the system frees when their process dies; a process that is started may be handed one.

A lock belongs to the open file, not to the process: it lasts until the last process that has the file open closes it.
"""

from __future__ import annotations

import fcntl
import os
import time
from dataclasses import dataclass
from pathlib import Path

PATIENCE = 0.5  # seconds: whoever asks whether a lock is held holds it for a moment


@dataclass
class Lock:
    """A lock that this process holds, alone or since it was handed over."""

    fd: int

    def release(self) -> None:
        """Close the file; without a process that was handed it, that frees the lock."""
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def take(path: Path, seconds: float = PATIENCE) -> Lock | None:
    """Take a lock; None if another process keeps it for so many seconds."""
    last = time.monotonic() + seconds
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
        else:
            if same_file(fd, path):
                return Lock(fd)
            os.close(fd)  # it was deleted meanwhile, and a lock on it excludes nobody
        if time.monotonic() >= last:
            return None
        time.sleep(0.01)


def same_file(fd: int, path: Path) -> bool:
    """Tell whether an open file is still what its name stands for."""
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False


def held(path: Path) -> bool:
    """Tell whether a live process holds a lock."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError):
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that ask do not meet each other
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
