"""Measures memory, and runs work that may run out of it."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import psutil
import torch

from linearizer.run.stopping import is_out_of_memory

Product = TypeVar("Product")
CONTAINER = Path("/sys/fs/cgroup")
HEAPS, MAPPED, ON_TOP = -8, -3, -1  # options of malloc.h: heaps, bytes that are mapped, and bytes kept on top
KNOWN_SHAPES = 64  # more than the products of a model have for one number of tokens
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def run_if_it_fits(work: Callable[[], Product]) -> Product | None:
    """Run a function; if memory runs out, free its memory and return None."""
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def free_bytes(device: torch.device) -> int:
    """Read how much memory of a device is free."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, container_bytes())


def container_bytes() -> int:
    """Read how much more memory the container of this process may take."""
    try:
        limit, used = (int((CONTAINER / name).read_text()) for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CONTAINER / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no container, or one without a limit
        return sys.maxsize
    return limit - used + int(statistics.get("inactive_file", 0))  # copies of files, which the system gives up


class PeakMemory:
    """Measures the most memory that is taken from here on, above what is taken now."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.before: int | None = torch.cuda.memory_allocated(device)
            return
        self.before = None
        if device.type == "cpu" and CLEAR.exists():
            trim_heaps()  # kept memory would hide what is taken next
            try:
                CLEAR.write_text("5")  # resets the high-water mark
                self.before = status_bytes("VmRSS")
            except OSError:
                return  # the system forbids the reset, so the peak stays unknown

    def taken(self) -> int | None:
        """Return the bytes so far; None if the system does not report them."""
        if self.before is None:
            return None
        peak = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else status_bytes("VmHWM")
        return max(0, peak - self.before)


def return_freed_memory() -> None:
    """Return freed memory to the system at once, with one heap for all threads: heaps keep much for later."""
    change_heap({HEAPS: 1, MAPPED: 2**18, ON_TOP: 2**18})


def trim_heaps() -> None:
    """Return memory that has been freed so far to the system, if the C library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def bound_shape_caches() -> None:
    """Let oneDNN, if it has not started yet, cache its code for products of only a few shapes.

    Its two caches hold 1,024 shapes each, at 0.3 MB each in bf16, and every length of a text is another shape.
    """
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KNOWN_SHAPES))


@contextmanager
def short_collections() -> Iterator[None]:
    """Let the garbage collector skip the objects that exist now: a full pass stops every thread for a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def change_heap(options: Mapping[int, int]) -> None:
    """Change how the C library allocates memory, if it can be changed."""
    for option, value in options.items() if hasattr(ctypes.CDLL(None), "mallopt") else ():
        ctypes.CDLL(None).mallopt(option, value)


def status_bytes(name: str) -> int:
    """Read one of the system's numbers about this process, in bytes."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
