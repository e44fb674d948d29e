"""Devices: which one is meant, and one name for it that all processes of this machine agree on."""

from __future__ import annotations

import os

from linearizer.errors import RequestError


def device_of(asked: str) -> str:
    """Give the device asked for, or the best there is."""
    if asked == "cpu":
        return asked
    import torch

    if asked == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=asked)
    except (RuntimeError, AssertionError) as error:
        raise RequestError(f"device {asked!r} is not to be had here: name cpu, or leave it out") from error
    return asked


def device_name(device: str) -> str:
    """Name a device as a process that sees other ones of the machine names it, too: cpu, cuda:0, cuda:GPU-…"""
    kind, _, index = device.partition(":")
    if kind != "cuda":
        return kind
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    number = int(index or 0)
    return f"cuda:{visible[number] if number < len(visible) else number}".replace("/", "-")
