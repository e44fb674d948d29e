"""What to do where memory ends, and how much of it was taken."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch

from linearizer.run.stopping import is_out_of_memory

Result = TypeVar("Result")
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def fits(work: Callable[[], Result]) -> Result | None:
    """Do something that may take more memory than there is: then give None, and free what it had taken."""
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
    """Tell how much memory a device has left."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if Path("/proc/meminfo").exists():
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


class Peak:
    """The most memory that is taken from here on, above what is taken now; None where the system does not tell."""

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
            give_back()
            try:
                CLEAR.write_text("5")  # lets the high-water mark begin anew
                self.before = status_bytes("VmRSS")
            except OSError:
                return  # a system that does not let a process do this tells nothing

    def taken(self) -> int | None:
        """Give the bytes by now."""
        if self.before is None:
            return None
        most = torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else status_bytes("VmHWM")
        return max(0, most - self.before)


def give_back() -> None:
    """Let the system have what was freed: what is kept for later would hide what is taken next."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def status_bytes(name: str) -> int:
    """Read a number of kilobytes that the system keeps of this process."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024
