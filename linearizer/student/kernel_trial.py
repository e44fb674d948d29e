"""Kernels are used only after a trial: a small problem that PyTorch solves, too.

Tests cannot know the chip, the driver and the compiler of every user. So before a family of kernels is used in some
sizes on a device for the first time, it runs there on a small problem: it may err at most twice as much as PyTorch does
in the same dtype, both against float64. Where it errs more, or does not compile, PyTorch does its work on that device
from then on, and a warning says why; where the memory is full, PyTorch does so for this call alone.
LINEARIZER_KERNELS=0 in the environment keeps all kernels off.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .feature_maps import PositiveFeatures, gaussian
from .features_torch import ScaledMap

DEVICES = {"cuda"}  # what Triton compiles for; PyTorch says so of AMD's chips, too
DTYPES = (torch.bfloat16, torch.float32)

Tensor = torch.Tensor
Compute = Callable[[bool, torch.dtype], Sequence[Tensor]]  # (by kernels?, the dtype to compute in)

_verdicts: dict[tuple, bool] = {}  # by family and device, and also by dtype and sizes
_lock = threading.RLock()


def kernels_accept(x: Tensor, *others: Tensor) -> bool:
    """Whether kernels accept the inputs: on a GPU, bf16 or fp32, all alike."""
    if x.device.type not in DEVICES or x.dtype not in DTYPES:
        return False
    if os.environ.get("LINEARIZER_KERNELS") == "0":
        return False
    return all(other.dtype == x.dtype and other.device == x.device for other in others)


def passes_trial(family: str, x: Tensor, sizes: tuple, compute: Compute) -> bool:
    """Whether a family of kernels is right for inputs like x on its device; the first call tries it."""
    here, case = (family, x.device), (family, x.device, x.dtype, sizes)
    if here not in _verdicts and case not in _verdicts:
        if is_recorded(x):  # a graph would hold the trial: attend once before capturing, as CUDA asks for anyway
            return False
        with _lock:
            run_trial(here, case, x, compute)
    return _verdicts.get(here, case in _verdicts)


def is_recorded(x: Tensor) -> bool:
    """Whether this call is being captured or compiled, to be repeated later."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())


def run_trial(here: tuple, case: tuple, x: Tensor, compute: Compute) -> None:
    """Try the kernels, unless another thread just did; keep the verdict, and warn where they are wrong."""
    if here in _verdicts or case in _verdicts:
        return
    try:
        fault = find_fault(compute, x)
    except torch.OutOfMemoryError:  # says nothing about the kernels: the next call tries them again
        return
    if fault is None:
        _verdicts[case] = True
        return
    _verdicts[here] = False
    name = f"{torch.cuda.get_device_name(x.device)} ({x.device})" if x.is_cuda else str(x.device)
    warnings.warn(
        f"on {name} PyTorch does the work of the kernels for {here[0]}, because {fault}", RuntimeWarning, stacklevel=4
    )


def find_fault(compute: Compute, x: Tensor) -> str | None:
    """Return what is wrong with kernels, or None; compute(by_kernels, dtype) returns their results and PyTorch's."""
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.autocast(x.device.type, enabled=False):
            results = [compute(*way) for way in ((True, x.dtype), (False, x.dtype), (False, torch.float64))]
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers, drivers and launches raise many kinds of errors, which all mean the same
        said = " ".join(str(error).split())
        return f"they failed there with {type(error).__name__}: {said[:200]}"
    floor = max(1e-5, 2 * torch.finfo(x.dtype).eps)  # PyTorch's sums round nothing to bf16; products of kernels do
    for mine, other, true in zip(*results, strict=True):
        own, plain = relative_error(mine, true), relative_error(other, true)
        if not own <= 2 * plain + floor:  # nor if it is not a number
            return f"they err by {own:.1e} of a result where PyTorch errs by {plain:.1e}"
    return None


def relative_error(x: Tensor, true: Tensor) -> float:
    """|x - true| / |true|."""
    x, true = x.detach().double(), true.detach()
    return float((x - true).norm() / true.norm().clamp_min(1e-30))


class TrialSizes(NamedTuple):
    """The sizes for which kernels are compiled and tried."""

    group: int
    key_dim: int
    value_dim: int
    sinks: int
    features: int


@dataclass
class TrialText:
    """A text of two KV heads for trials, always the same, with scores of variance 1."""

    q: Tensor  # (1, 2, group, tokens, key_dim)
    k: Tensor  # (1, 2, tokens, key_dim)
    v: Tensor
    features: ScaledMap

    @classmethod
    def of(cls, like: Tensor, sizes: TrialSizes, tokens: int, dtype: torch.dtype) -> TrialText:
        """Draw it for the device and precision of a tensor, to compute in a dtype."""
        generator = torch.Generator("cpu").manual_seed(0)

        def draw(scale: float, *shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, device="cpu") * scale).to(like.device)

        root = sizes.key_dim**-0.25
        q = draw(root, 1, 2, sizes.group, tokens, sizes.key_dim)
        k = draw(root, 1, 2, tokens, sizes.key_dim)
        v = draw(1.0, 1, 2, tokens, sizes.value_dim)
        with torch.device(like.device):
            features = PositiveFeatures(2, sizes.key_dim, sizes.features, gaussian, learn_z=False, learn_weight=False)
        features.z.data = draw(1.0, *features.z.shape)
        q, k, v = (x.to(like.dtype).to(dtype) for x in (q, k, v))
        return cls(q, k, v, ScaledMap(features))

    def piece(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return some tokens."""
        return self.q[..., start:stop, :], self.k[:, :, start:stop], self.v[:, :, start:stop]
