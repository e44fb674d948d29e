"""ZeroGPU, a device that a Space is lent for a minute at a time: only while a function works that was made for it.

Such a function works in a process that `spaces` forks from the server: what it is given and gives goes through a pipe,
what it keeps in memory is lost, and what it raises arrives as the name of its class. So it works on files, and what it
has to say comes back as a value. A request of a visitor pays with their share of the device's time, and so do threads
that were given a copy of its context. Anywhere else nothing here does anything.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError, RequestError

BROKEN_TITLE = "ZeroGPU worker error"  # the title of what `spaces` raises where a process broke off
Function = TypeVar("Function", bound=Callable[..., Any])


def on_zerogpu() -> bool:
    """Tell whether this is a Space on ZeroGPU."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def import_spaces() -> Any:
    """Import what lends the device."""
    try:
        import spaces
    except ModuleNotFoundError as error:
        if error.name != "spaces":
            raise
        raise RequestError(
            "SPACES_ZERO_GPU is set, and the package `spaces`, which lends the device, is not installed: "
            "pip install spaces, or unset SPACES_ZERO_GPU"
        ) from error
    return spaces


class DeviceRefused(FaultError):
    """The device was not lent."""


class DeviceTaken(FaultError):
    """The device was lent, and its process ended before its work."""


def with_device(seconds: int) -> Callable[[Function], Function]:
    """Let ZeroGPU lend its device to a function while it works; anywhere else the function stays as it is."""

    def decorate(function: Function) -> Function:
        if not on_zerogpu():
            return function
        if inspect.isgeneratorfunction(function):
            return lend_generator(function, seconds)  # type: ignore[return-value]
        return lend(function, seconds)  # type: ignore[return-value]

    return decorate


def lend(function: Callable, seconds: int) -> Callable:
    @wraps(function)
    def told(*args: Any) -> Any:
        use_one_thread()
        try:
            return function(*args)
        except LinearizerError as error:
            return error

    borrowed = import_spaces().GPU(duration=seconds)(told)

    @wraps(function)
    def served(*args: Any) -> Any:
        found = explain_refusal(lambda: borrowed(*args))
        if isinstance(found, LinearizerError):
            raise found
        return found

    return served


def lend_generator(function: Callable, seconds: int) -> Callable:
    @wraps(function)
    def told(*args: Any) -> Any:
        use_one_thread()
        try:
            yield from function(*args)
        except LinearizerError as error:
            yield error

    borrowed = import_spaces().GPU(duration=seconds)(told)

    @wraps(function)
    def served(*args: Any) -> Any:
        steps, over = borrowed(*args), object()
        error = None
        try:
            while (found := explain_refusal(lambda: next(steps, over))) is not over:
                if isinstance(found, LinearizerError):
                    error = found  # the last that comes: the process is free for others when it has ended
                else:
                    yield found
        finally:
            steps.close()
        if error is not None:
            raise error

    return served


def use_one_thread() -> None:
    """Compute with one thread on the CPU: those of the server are not there in a process that was forked from it."""
    import torch

    torch.set_num_threads(1)


def explain_refusal(call: Callable[[], Any]) -> Any:
    """Turn what ZeroGPU says when it lends nothing into a sentence."""
    import gradio as gr

    try:
        return call()
    except gr.Error as error:
        said = str(error.message).rstrip(". ")
        if error.title == BROKEN_TITLE:
            raise DeviceTaken(f"ZeroGPU took its device back ({said}): try again, with less to do at a time") from error
        raise DeviceRefused(f"ZeroGPU lends no device ({error.title}: {said})") from error
