"""Kernels as steps of graphs that torch.compile makes."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch


def is_traced() -> bool:
    """Whether a graph is being compiled: each value that Python reads breaks it in two."""
    return torch.compiler.is_compiling()


def is_compiled() -> bool:
    """Whether torch.compile makes a graph without gradients, whose steps may overwrite a state."""
    return torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()


def as_custom_op(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function one step of compiled graphs; its schema tells PyTorch what it overwrites."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        written = re.findall(r"!\)(?:\[\])? (\w+)", schema)
        step = torch.library.custom_op(
            f"linearizer::{function.__name__}", function, mutates_args=written, schema=schema
        )
        step.register_fake(lambda *args: None)

        @functools.wraps(function, updated=())  # else it might be excluded from graphs like the function
        def call(*args: Any) -> None:
            (step if is_traced() else function)(*args)

        return call

    return register
