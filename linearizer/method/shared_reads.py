"""Runs passes over a streamed model in step: each block's weights are read once for all passes that wait for it.

A pass is any code that runs the model, as often as it likes: it is stopped where it enters a block, until all passes
stand there. Each has a thread of its own, and one thread runs at a time, so the passes compute the bits that they
compute one after the other. What attends in the model is put back as the pass left it before it goes on. Passes of a
pass run one after the other.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.blockwise_pass import hold_weights
from linearizer.method.substitute import is_fixed
from linearizer.student.attention_interface import attention_modules
from linearizer.teacher import streaming
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.logits import vocabulary
from linearizer.teacher.streaming import is_streamed

T = TypeVar("T")
MIN_BYTES = 2**24  # that passes may hold while they wait for each other
FREE_SHARE = 0.25  # of free memory that they may hold, if that is more
COPIES = 4  # of its hidden states that a pass may hold
NOT_SET = object()


class Abandoned(BaseException):
    """Ends the thread of a pass that is not needed any more."""


class Attending:
    """The state of a model's attention just now, which can be put back."""

    def __init__(self, model: nn.Module) -> None:
        configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
        modules = attention_modules(model)
        self.places: list[tuple[dict, str]] = [
            (config.__dict__, "_attn_implementation_internal") for config in configs.values()
        ]
        self.places += [(module._modules, "student") for module in modules]
        self.places += [(module.__dict__, "observe") for module in modules]
        self.places += [(block.__dict__, "forward") for block in blocks_of(model)]

    def now(self) -> list[Any]:
        """List what stands in all places."""
        return [values.get(name, NOT_SET) for values, name in self.places]

    def put_back(self, values: Sequence[Any]) -> None:
        """Put what stood there back into all places."""
        for (place, name), value in zip(self.places, values, strict=True):
            if value is NOT_SET:
                place.pop(name, None)
            else:
                place[name] = value


class Pass(threading.Thread, Generic[T]):
    """A pass in a thread of its own, which runs only while `go_on` lasts."""

    def __init__(self, work: Callable[[], T], attending: list[Any]) -> None:
        super().__init__(daemon=True)
        self.work, self.attending = work, attending
        self.go, self.stopped = threading.Lock(), threading.Event()
        self.go.acquire()
        self.block: nn.Module | None = None  # that it waits for
        self.done = self.abandoned = False
        self.result: T | None = None
        self.error: BaseException | None = None
        self.modes = torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.get_num_threads()

    def run(self) -> None:
        inference, gradients, threads = self.modes
        self.go.acquire()
        try:
            if not self.abandoned:
                torch.set_num_threads(threads)
                with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                    self.result = self.work()
        except Abandoned:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.done = True
            self.stopped.set()

    def wait_for(self, block: nn.Module) -> None:
        """Let the others go on until all stand at a block (called in the pass's thread)."""
        self.block = block
        self.stopped.set()
        self.go.acquire()
        if self.abandoned:
            raise Abandoned

    def go_on(self, attending: Attending) -> None:
        """Let the pass run, with what attended when it stopped, until it waits again or ends."""
        attending.put_back(self.attending)
        self.stopped.clear()
        self.go.release()
        try:
            self.stopped.wait()
        except BaseException:  # such as a request to stop: nothing is put back under a pass that runs
            self.stopped.wait()
            raise
        finally:
            self.attending = attending.now()
        if self.error is not None:
            raise self.error

    def end(self) -> None:
        """End the thread, wherever it stands."""
        if self.ident is None:
            return
        if not self.done:
            self.abandoned = True
            self.go.release()
        self.join()


def in_step(model: PreTrainedModel, passes: Sequence[Callable[[], T]]) -> list[T]:
    """Run passes over a model, in step where it is streamed; list their results."""
    if len(passes) < 2 or not is_streamed(model) or isinstance(threading.current_thread(), Pass):
        return [work() for work in passes]
    attending, blocks = Attending(model), blocks_of(model)
    before = attending.now()
    threads = [Pass(work, before) for work in passes]
    try:
        with stopped_at_blocks(model):
            for thread in threads:
                thread.start()
                thread.go_on(attending)
            while waiting := [thread for thread in threads if not thread.done]:
                # the last: a run of the model ends before others begin, which then go together
                last = max((thread.block for thread in waiting if thread.block is not None), key=blocks.index)
                with hold_weights(last):
                    for thread in waiting:
                        if thread.block is last:
                            thread.go_on(attending)
    finally:
        for thread in threads:
            attending.put_back(thread.attending)
            thread.end()
        attending.put_back(before)
    return [thread.result for thread in threads]  # type: ignore[misc]


@contextmanager
def stopped_at_blocks(model: nn.Module) -> Iterator[None]:
    """Stop every pass where it enters a block that computes."""

    def enter(block: nn.Module, args: tuple) -> None:
        current = threading.current_thread()
        if isinstance(current, Pass) and not is_fixed(block):
            current.wait_for(block)

    with ExitStack() as stack:
        for block in blocks_of(model):
            stack.callback(block.register_forward_pre_hook(enter).remove)
        yield


def passes_at_once(model: PreTrainedModel, tokens: int, logits: int = 0) -> int:
    """Compute how many passes over so many tokens may wait for each other; one, where nothing is won by it.

    A pass holds hidden states, and the logits of some models.
    """
    if not is_streamed(model):
        return 1
    most = max(MIN_BYTES, int(FREE_SHARE * streaming.free_bytes(model.device)))
    numbers = COPIES * model.config.get_text_config().hidden_size + logits * vocabulary(model)
    return max(1, most // (4 * tokens * numbers))
