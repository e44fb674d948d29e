"""Chooses a device, and gives it a name that all processes of this machine agree on."""

from __future__ import annotations

import os

from linearizer.errors import RequestError


def choose_device(device: str) -> str:
    """Check that a device exists; "auto" chooses the best."""
    if device == "cpu":
        return device
    import torch

    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.ones((), device=device).item()  # the device "meta" holds no numbers
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"device {device!r} is not to be had here: name cpu, or leave it out") from error
    return device


def device_kind(asked: str) -> str:
    """Tell whether a device is a GPU ("cuda") or anything slower ("cpu"), without asking for it."""
    if asked == "auto":
        asked = choose_device(asked)
    return "cuda" if asked.partition(":")[0] == "cuda" else "cpu"


def device_name(device: str) -> str:
    """Name a device like all processes do, whichever devices of the machine they see: cpu, cuda:0, cuda:GPU-…"""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return kind
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    number = int(index or 0)
    return f"cuda:{visible[number] if number < len(visible) else number}".replace("/", "-")
