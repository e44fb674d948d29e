"""The machine that work runs on: its device, the type that it computes in, its kernels, and what is free."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from linearizer.plan.plan import Plan
from linearizer.student.kernel_dispatch import FeatureAttention
from linearizer.student.kernel_in_c import find_compiler
from linearizer.teacher.devices import choose_device, choose_dtype, describe_device
from linearizer.teacher.ram import free_bytes
from linearizer.teacher.streaming import rooms_for_weights
from linearizer.workers.forecast import RunForecast


@dataclass(frozen=True)
class Machine:
    """The device of a plan, with what is free on it."""

    device: str  # as its maker names it
    has_gpu: bool
    dtype: str  # that is computed in
    kernels: str  # whether kernels serve, in words
    free_memory: int  # bytes, of the device, or of all GPUs where any will do
    free_disk: int  # bytes, where runs are

    def fits(self, forecast: RunForecast) -> bool:
        """Tell whether there is room for what a run is forecast to take."""
        return forecast.memory_bytes <= self.free_memory and forecast.disk_bytes <= self.free_disk


def describe_machine(plan: Plan, stored: torch.dtype | None, runs: Path) -> Machine:
    """Describe what a plan would run on; `stored` is the type of the model's weights."""
    device = torch.device(choose_device(plan.device))
    dtype = choose_dtype(plan.dtype, stored, plan.device)
    if dtype == "auto":
        dtype = str(stored or torch.float32).removeprefix("torch.")
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.is_dir())
    return Machine(
        describe_device(device),
        torch.cuda.is_available(),
        dtype,
        describe_kernels(device),
        sum(free_bytes(torch.device(place)) for place in rooms_for_weights(plan.device)),
        shutil.disk_usage(place).free,
    )


def describe_kernels(device: torch.device) -> str:
    """Say whether kernels serve on a device, and why not."""
    if os.environ.get("LINEARIZER_KERNELS") == "0":
        return "none: LINEARIZER_KERNELS=0 keeps them off"
    if device.type == "cpu":
        return "in C, each tried on first use" if find_compiler() else "none: there is no C compiler"
    if device.type != "cuda":
        return "none: they need a GPU"
    if FeatureAttention is None:
        return "none: Triton is not installed"
    return "Triton's for heads of 8 and 16 bits, each tried on first use; PyTorch for those of fewer bits"
