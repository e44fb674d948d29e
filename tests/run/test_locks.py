"""A lock belongs to its process and to those that it is handed to, and to no other."""

import os
import time

import pytest

from linearizer.run import locks
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
