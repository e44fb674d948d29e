"""How a process takes memory of the system, seen by the pages that the system has to clear for it."""

import os
import platform
import resource

import pytest
import torch

from linearizer.model.memory import keep_freed_memory, return_freed_memory

MEGABYTES, TIMES = 4, 100


def pages_cleared(change):
    """Count the pages that the system clears while a process takes and frees the same memory many times."""
    answers, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        change()
        torch.ones(MEGABYTES * 2**20, dtype=torch.uint8)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(TIMES):
            torch.ones(MEGABYTES * 2**20, dtype=torch.uint8)
        os.write(theirs, str(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before).encode())
        os._exit(0)
    os.waitpid(child, 0)
    os.close(theirs)
    with open(answers) as read:
        return int(read.read())


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library takes memory in its own way")
def test_freed_memory_is_kept_or_returned():
    returned = pages_cleared(return_freed_memory)
    assert returned >= TIMES * MEGABYTES * 2**20 // resource.getpagesize() > 10 * pages_cleared(keep_freed_memory)
