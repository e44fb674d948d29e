"""Chooses a device and the type that it computes in, and gives devices the same names in all processes."""

from __future__ import annotations

import inspect
import os
import platform
import sys
import time
from collections.abc import Callable
from functools import cache, wraps
from typing import TYPE_CHECKING, Any

from linearizer.errors import RequestError

if TYPE_CHECKING:
    import torch
    from torch import nn

TRIED_SIZE, TRIES = 256, 9  # of a product of matrices that is timed, alternately in each type: 30 milliseconds
SLOWER = 1.25  # times as long as in float32: with instructions for a type it is at most 0.9, without at least 2


def choose_device(device: str) -> str:
    """Check that a device exists; "auto" chooses the best."""
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    unavailable = RequestError(f"device {device!r} is not available here: name cpu, or leave it out")
    if device.startswith("cpu:"):  # PyTorch would accept any number
        raise unavailable
    try:
        torch.ones((), device=device).item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise unavailable from error
    return device


def choose_dtype(dtype: str, stored: torch.dtype | None, device: str) -> str:
    """Choose float32 for weights of a smaller type in which a CPU is slower; else return `dtype`."""
    if dtype != "auto" or stored is None or choose_device(device) != "cpu":
        return dtype
    return "float32" if stored.itemsize < 4 and slowness(stored) > SLOWER else dtype


@cache
def slowness(dtype: torch.dtype) -> float:
    """Measure how many times as long as in float32 a CPU takes for a product: its reported features are not enough.

    oneDNN serves types that the CPU has no instructions for, and PyTorch reports instructions that oneDNN may not use.
    """
    import torch

    seconds: dict[torch.dtype, list[float]] = {torch.float32: [], dtype: []}
    for _ in range(TRIES):
        for kind, times in seconds.items():
            matrix = torch.ones(TRIED_SIZE, TRIED_SIZE, dtype=kind)
            begin = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - begin)
    return min(seconds[dtype]) / min(seconds[torch.float32])


def describe_device(device: torch.device) -> str:
    """Return the product name of a device."""
    import torch

    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"


def describe_kernels(device: torch.device) -> str:
    """Name what reads with a student on a device: Triton, and how many kernels passed their trial, C, or PyTorch."""
    from linearizer.kernels import trial
    from linearizer.kernels.c.compiler import find_compiler
    from linearizer.kernels.triton.dispatch import launch_token

    verdicts = trial.verdicts_on(device)
    if os.environ.get("LINEARIZER_KERNELS") == "0" or not all(verdicts):
        return "none: PyTorch"
    if device.type in trial.DEVICES and launch_token is not None:
        return f"Triton, {len(verdicts)} compiled" if verdicts else "Triton"
    return "C" if device.type == "cpu" and find_compiler() else "none: PyTorch"


def device_kind(device: str) -> str:
    """Return "cuda" for a GPU or "cpu" for anything slower, without using the device."""
    if device == "auto":
        device = choose_device(device)
    return "cuda" if device.partition(":")[0] == "cuda" else "cpu"


def device_name(device: str) -> str:
    """Name a device the same in all processes, whichever devices of the machine they see: cpu, cuda:0, cuda:GPU-…"""
    kind, _, index = device.partition(":")
    return f"cuda:{visible_name(int(index or 0))}".replace("/", "-") if kind == "cuda" else kind


def visible_name(number: int) -> str:
    """Name one of the GPUs that this process sees as in CUDA_VISIBLE_DEVICES: by its index, or by the name there.

    A process with this name in the variable sees this GPU alone.
    """
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[number] if number < len(names) else str(number)


def compute_anywhere(model: nn.Module) -> None:
    """Let recurrent layers compute in PyTorch where their tensors lie on no GPU.

    transformers chooses a kernel for a GPU wherever its package is installed, even for a model on a CPU.
    """
    for name in {type(module).__module__ for module in model.modules()}:
        functions = vars(sys.modules[name])
        for key, function in list(functions.items()):
            if "is_new_implementation" in getattr(getattr(function, "__code__", None), "co_freevars", ()):
                functions[key] = choose_by_place(function, inspect.unwrap(function))


def choose_by_place(kernel: Callable[..., Any], formula: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function that calls a kernel with tensors of a GPU, and the same formula in PyTorch with any others."""
    import torch

    @wraps(formula)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        tensors = (x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        return (kernel if next(tensors).is_cuda else formula)(*args, **kwargs)

    return chosen
