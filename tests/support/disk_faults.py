"""A disk on which one call that writes into a folder fails: opening, making, renaming, removing or syncing a file."""

import errno
import hashlib
import os
import sys
from contextlib import contextmanager
from pathlib import Path

from linearizer.cli.main import main

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
EVENTS = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link")  # as Python's audit calls them
ERRORS = (errno.ENOSPC, errno.EIO)


class Disk:
    """Counts the calls that write into a folder, and lets one of them fail."""

    def __init__(self, folder, failing=None, error=errno.ENOSPC):
        self.folder, self.failing, self.error, self.calls = os.path.realpath(folder), failing, error, []

    def see(self, event, path):
        """Count a call, and fail if it is the one."""
        try:
            path = os.path.realpath(os.fspath(path))
        except TypeError:  # a number of an open file
            return
        if isinstance(path, bytes) or not path.startswith(self.folder):
            return
        self.calls.append(f"{event} {path[len(self.folder) :]}")
        if len(self.calls) - 1 == self.failing:
            raise OSError(self.error, os.strerror(self.error), path)


_disks = []


def watch(event, details):
    """Hear of each call before it is made; an error that is raised here is that of the call."""
    if not _disks:
        return
    if event == "open" and isinstance(details[2], int) and details[2] & WRITING:
        _disks[-1].see(event, details[0])
    elif event in EVENTS:
        _disks[-1].see(event, details[0])


sys.addaudithook(watch)  # cannot be removed


@contextmanager
def disk(folder, failing=None, error=errno.ENOSPC):
    """While this lasts, count the calls that write into a folder, or let the one of that number fail."""
    _disks.append(own := Disk(folder, failing, error))
    sync = os.fsync

    def fsync(file):
        own.see("fsync", Path(f"/proc/self/fd/{file if isinstance(file, int) else file.fileno()}"))
        sync(file)

    os.fsync = fsync
    try:
        yield own
    finally:
        os.fsync = sync
        _disks.pop()


SMALL = ["--texts", "2", "--length", "64", "--dtype", "float32", "--recipe", "features"]
COMMAND = ["run", "demo", "--budget", "64", *SMALL, "--steps", "2"]


def run_whole(folder):
    """Make a run; return its product, and the calls that write into it."""
    with disk(folder) as calls:
        assert main([*COMMAND, "--out", str(folder)]) == 0
    return product_of(folder), calls.calls


def fail_and_resume(folder, number, error):
    """Make a run on a disk where the call of that number fails, and resume it; return its exit code and the product."""
    with disk(folder, number, error):
        code = main([*COMMAND, "--out", str(folder)])
    again = ["--resume"] if (folder / "plan.json").exists() else []
    assert main([*COMMAND, "--out", str(folder), *again]) == 0
    return code, product_of(folder)


def product_of(folder):
    """Hash what a run made."""
    left = [path.name for path in folder.rglob("*.unfinished")]
    assert not left, f"{left} were left behind"
    files = [folder / "allocation.json", folder / "profile.json", *sorted(folder.glob("checkpoint/*.safetensors"))]
    return [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
