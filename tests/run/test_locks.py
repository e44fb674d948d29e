"""A lock belongs to its process and to those that it is handed to, and to no other."""

import errno
import fcntl
import os
import time

import pytest

from linearizer.errors import FolderError
from linearizer.plan.plan import Plan
from linearizer.run import locks
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.runs import wait_until


def handed_over(path):
    """Take a lock as the process of a run does, which inherits an open file."""
    lock = locks.take_lock(path)
    inherited = os.dup(lock.fd)
    lock.release()
    return locks.inherit_lock(inherited)


@pytest.mark.parametrize("take", [locks.take_lock, handed_over])
def test_a_process_that_is_forked_holds_no_lock_of_its_parent(take, tmp_path):
    lock = take(tmp_path / "lock")
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    try:
        assert locks.is_held(tmp_path / "lock")
        lock.release()
        wait_until(lambda: not locks.is_held(tmp_path / "lock"), 50)
        with locks.take_lock(tmp_path / "lock"):
            pass
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))

    def refuse(fd, kind):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    opened = {*locks.OPEN}
    with pytest.raises(FolderError, match="run/lock' cannot be locked .No locks available.*: name a folder on a local"):
        run.take_lock()
    assert opened == locks.OPEN
    (listed,) = control.runs_in(tmp_path)
    assert listed.state == control.DAMAGED and "keeps no locks" in listed.error
