"""What numbers were made with: without it nobody can tell why theirs are different."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import linearizer

PACKAGES = ("torch", "transformers", "lm_eval")


def environment(model: torch.nn.Module) -> dict[str, Any]:
    """Name versions, device and type of number of a model that is measured."""
    weight = next(model.parameters())
    versions = {"python": platform.python_version(), "linearizer": linearizer.__version__}
    return {
        "versions": {**versions, **{name: version for name in PACKAGES if (version := find_version(name))}},
        "device": describe_device(weight.device),
        "dtype": str(weight.dtype).removeprefix("torch."),
    }


def find_version(package: str) -> str | None:
    """Give the version of a package, or None where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe_device(device: torch.device) -> str:
    """Name a device as its maker does."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type} ({platform.machine()}, {threads} thread{'s' * (threads > 1)})"
