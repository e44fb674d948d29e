"""The trial of kernels before their first use, on a small problem that PyTorch also solves.

Tests cannot cover the chip, the driver and the compiler of every user. So before a family of kernels is first used in
given sizes on a device, it runs there on a small problem: its error against float64 may be at most twice that of
PyTorch in the same dtype. If the error is larger, or the kernels do not compile, PyTorch replaces them on that device
from then on, and a warning says why; if memory is full, PyTorch replaces them for this call only.
LINEARIZER_KERNELS=0 in the environment turns all kernels off.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from linearizer.student.feature_maps import PositiveFeatures, ScaledMap

DEVICES = {"cuda"}  # that Triton compiles for; PyTorch calls AMD's GPUs so, too
DTYPES = (torch.bfloat16, torch.float32)

Tensor = torch.Tensor
Compute = Callable[[bool, torch.dtype], Sequence[Tensor]]  # (by kernels?, the dtype to compute in)

NO_MEMORY = torch.OutOfMemoryError, MemoryError  # of a GPU, and of a kernel in C

_verdicts: dict[tuple, bool] = {}  # by family and device, or by family, device, dtype and sizes
_lock = threading.RLock()


def kernels_accept(x: Tensor, *tensors: Tensor) -> bool:
    """Whether kernels accept the inputs: all on one GPU, all in bf16 or all in fp32."""
    if x.device.type not in DEVICES or x.dtype not in DTYPES:
        return False
    if os.environ.get("LINEARIZER_KERNELS") == "0":
        return False
    return all(tensor.dtype == x.dtype and tensor.device == x.device for tensor in tensors)


def passes_trial(family: str, x: Tensor, sizes: tuple, compute: Compute) -> bool:
    """Whether a family of kernels is right for inputs like x on its device; the first call runs the trial."""
    place, case = (family, x.device), (family, x.device, x.dtype, sizes)
    if place not in _verdicts and case not in _verdicts:
        if is_recorded(x):  # or the graph would contain the trial: CUDA requires a call before the capture anyway
            return False
        with _lock:
            run_trial(place, case, x, compute)
    return _verdicts.get(place, case in _verdicts)


def verdicts_on(device: torch.device) -> list[bool]:
    """List whether each family and case that was tried on a device is right."""
    return [is_right for case, is_right in list(_verdicts.items()) if case[1] == device]  # others may try meanwhile


def is_recorded(x: Tensor) -> bool:
    """Whether this call is being captured or compiled for later replay."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def run_trial(place: tuple, case: tuple, x: Tensor, compute: Compute) -> None:
    """Try the kernels unless another thread just did; store the verdict, and warn if they are wrong."""
    if place in _verdicts or case in _verdicts:
        return
    try:
        fault = find_fault(compute, x)
    except NO_MEMORY:  # which says nothing about the kernels: the next call tries them again
        return
    if fault is None:
        _verdicts[case] = True
        return
    _verdicts[place] = False
    name = f"{torch.cuda.get_device_name(x.device)} ({x.device})" if x.is_cuda else str(x.device)
    warnings.warn(
        f"on {name} PyTorch does the work of the kernels for {place[0]}, because {fault}",
        RuntimeWarning,
        stacklevel=4,
    )


def find_fault(compute: Compute, x: Tensor) -> str | None:
    """Describe what is wrong with kernels, or return None; compute(by_kernels, dtype) returns results."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            with torch.device("cpu"):  # a trial draws its numbers there, whatever device tensors have by default
                cases = (True, x.dtype), (False, x.dtype), (False, torch.float64)
                results = [compute(*case) for case in cases]
    except NO_MEMORY:
        raise
    except Exception as error:  # compilers, drivers and launches raise many kinds of errors with one meaning
        return f"they failed there with {type(error).__name__}: {shorten(error)}"
    floor = max(1e-5, 2 * torch.finfo(x.dtype).eps)  # products in kernels round to bf16; PyTorch's sums do not
    for by_kernels, by_pytorch, exact in zip(*results, strict=True):
        kernel_error, pytorch_error = relative_error(by_kernels, exact), relative_error(by_pytorch, exact)
        if not kernel_error <= 2 * pytorch_error + floor:  # also if it is not a number
            return f"they err by {kernel_error:.1e} of a result where PyTorch errs by {pytorch_error:.1e}"
    return None


def shorten(error: Exception) -> str:
    """Return the begin of an error's message, on one line."""
    return " ".join(str(error).split())[:200]


def relative_error(x: Tensor, exact: Tensor) -> float:
    """|x - true| / |true|."""
    x, exact = x.detach().double(), exact.detach()
    return float((x - exact).norm() / exact.norm().clamp_min(1e-30))


class TrialSizes(NamedTuple):
    """The sizes for which kernels are compiled and tried."""

    group: int
    key_dim: int
    value_dim: int
    sinks: int
    features: int


@dataclass
class TrialText:
    """A fixed text of two KV heads for trials, with scores of variance 1."""

    q: Tensor  # (1, 2, group, tokens, key_dim)
    k: Tensor  # (1, 2, tokens, key_dim)
    v: Tensor
    features: ScaledMap

    @classmethod
    def of(cls, like: Tensor, sizes: TrialSizes, tokens: int, dtype: torch.dtype) -> TrialText:
        """Draw the text for the device and precision of a tensor, to compute in a dtype."""
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(scale: float, *shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cpu") * scale).to(like.device)

        root = sizes.key_dim**-0.25
        q = draw(root, 1, 2, sizes.group, tokens, sizes.key_dim)
        k = draw(root, 1, 2, tokens, sizes.key_dim)
        v = draw(1.0, 1, 2, tokens, sizes.value_dim)
        with torch.device(like.device):
            features = PositiveFeatures(2, sizes.key_dim, sizes.features, "performer")
        features.z.data = draw(1.0, *features.z.shape)
        q, k, v = (x.to(like.dtype).to(dtype) for x in (q, k, v))
        return cls(q, k, v, ScaledMap(features))

    def piece(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries, keys and values of the tokens from start to stop."""
        return self.q[..., start:stop, :], self.k[:, :, start:stop], self.v[:, :, start:stop]
