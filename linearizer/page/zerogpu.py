"""ZeroGPU lends a Space its device for about a minute at a time, only while a function decorated here works.

Such a function works in a process that `spaces` forks from the server: arguments and results go through a pipe, what it
keeps in memory is lost, and of an exception only the name of its class arrives. So it works on files, and returns
errors as values. The time counts against the visitor whose request this is, or whose context a thread was given a copy
of. Without ZeroGPU functions stay as they are.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from linearizer.errors import FaultError, LinearizerError, RequestError

BROKEN_TITLE = "ZeroGPU worker error"  # of the error that `spaces` raises if its process broke off
Function = TypeVar("Function", bound=Callable[..., Any])


def on_zerogpu() -> bool:
    """Tell whether this is a Space on ZeroGPU."""
    return os.environ.get("SPACES_ZERO_GPU", "").lower() in ("1", "t", "true")


def import_spaces() -> Any:
    """Import the package that lends the device."""
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
        return lend(function, seconds)  # type: ignore[return-value]

    return decorate


def lend(function: Callable, seconds: int) -> Callable:
    """Lend the device to a function, or to a generator for as long as it yields."""
    yields = inspect.isgeneratorfunction(function)

    @wraps(function)
    def work(*args: Any) -> Any:
        use_one_thread()
        try:
            if yields:
                yield from function(*args)
            else:
                yield function(*args)
        except LinearizerError as error:
            yield error

    borrowed = import_spaces().GPU(duration=seconds)(work)

    @wraps(function)
    def values(*args: Any) -> Any:
        steps, over = borrowed(*args), object()
        error = None
        try:
            while (result := explain_refusal(lambda: next(steps, over))) is not over:
                if isinstance(result, LinearizerError):
                    error = result  # raised after the last value, when the process is free for others
                else:
                    yield result
        finally:
            steps.close()
        if error is not None:
            raise error

    return values if yields else wraps(function)(lambda *args: list(values(*args))[-1])


def use_one_thread() -> None:
    """Compute with one thread on the CPU, because a forked process lacks the threads of the server."""
    import torch

    torch.set_num_threads(1)


def explain_refusal(call: Callable[[], Any]) -> Any:
    """Raise an error of ZeroGPU as one of ours, in a sentence."""
    import gradio as gr

    try:
        return call()
    except gr.Error as error:
        reason = str(error.message).rstrip(". ")
        if error.title == BROKEN_TITLE:
            raise DeviceTaken(
                f"ZeroGPU took its device back ({reason}): try again, with less to do at a time"
            ) from error
        raise DeviceRefused(f"ZeroGPU lends no device ({error.title}: {reason})") from error
