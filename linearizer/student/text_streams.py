"""A long text on a GPU, in parts that are read at the same time, each on a stream of its own.

Heads with slots merge the blocks of a text one after the other, and leave most of a GPU idle. But of the part before, a
layer needs no more than its own state: while the second layer reads the first part, the first layer reads the second.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import Any, TypeGuard

import torch
from transformers.cache_utils import Cache

from .attention_interface import restarts
from .cache import CACHE, LinearizedCache, keeps_state
from .state import change_tensors, tensors

PART_TOKENS, LONGEST_PART = 2048, 8192  # the host takes as long to launch fewer; more take more memory
PARTS = 12  # of a text of a length between
MOST_STREAMS = 16  # parts at a time: as many layers read at once, and each part takes memory

Tensor = torch.Tensor


class StatesInTurn(list):
    """The states of a layer while parts of a text wait for each other there."""

    def __init__(self, states: list) -> None:
        super().__init__(states)
        self.ready = torch.cuda.Event()  # once the last part has changed them


@functools.cache
def streams_of(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(MOST_STREAMS)]


def read_in_parts(
    model: Any, ids: Tensor | None, mask: Tensor | None, positions: Tensor | None, cache: Cache | None,
    keep: int | Tensor, given: dict,
) -> Any | None:  # fmt: skip
    """Answer a call of a model with new tokens (texts, tokens) by reading them in parts; None where that does not
    serve. `given` are the other arguments of the call."""
    if ids is None or not ids.is_cuda or ids.shape[1] < 2 * PART_TOKENS or not isinstance(keep, int):
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling() or torch.cuda.is_current_stream_capturing():
        return None
    asked = [value for name, value in given.items() if name != "return_dict"] + [given.get("return_dict") is False]
    if any(value is not None and value is not False for value in asked):
        return None
    if (mask is not None and not mask.all()) or (positions is not None and restarts(positions)):
        return None
    return read_parts(model.base, ids, positions, cache, keep) if reads_in_parts(cache, model) else None


def reads_in_parts(cache: Any, model: Any) -> TypeGuard[LinearizedCache]:
    """Whether parts of a text may be read at the same time: on one GPU, where layers need nothing of other parts but
    states."""
    known = isinstance(cache, LinearizedCache) and all(keeps_state(layer) for layer in cache.layers)
    return known and {(x.device.type, x.device.index) for x in model.parameters()} == {("cuda", model.device.index)}


def read_parts(read: Any, ids: Tensor, positions: Tensor | None, cache: LinearizedCache, keep: int) -> Any:
    """Let `read` read new tokens part by part; return what it gives for the last, with the logits of all, or of the
    last `keep` tokens."""
    here, tokens = torch.cuda.current_stream(ids.device), ids.shape[1]
    first = tokens - (keep or tokens)  # the first token whose logits are wanted
    size = min(max(PART_TOKENS, tokens // PARTS), LONGEST_PART)
    outs: list[Any] = []
    under_way: deque[tuple[torch.cuda.Event, list]] = deque()
    for layer in cache.layers:
        layer.memory = StatesInTurn(layer.memory)
    try:
        for number, begin in enumerate(range(0, tokens, size)):
            if len(under_way) == MOST_STREAMS:
                under_way.popleft()[0].synchronize()
            end, stream = min(begin + size, tokens), streams_of(ids.device)[number % MOST_STREAMS]
            # other streams than theirs read these: until then their memory must not be used again
            before = [[*tensors(state).values()] for layer in cache.layers for state in layer.memory]
            stream.wait_stream(here)
            with torch.cuda.stream(stream):
                place = None if positions is None else positions[:, begin:end]
                given = {"position_ids": place, "use_cache": True, "logits_to_keep": max(1, end - max(begin, first))}
                outs = outs * (begin > first) + [read(input_ids=ids[:, begin:end], **given, **{CACHE: cache})]
                under_way.append((stream.record_event(), before))
    finally:
        for event, _ in under_way:
            event.synchronize()
        for layer in cache.layers:
            layer.memory = [*layer.memory]
            for state in layer.memory:
                change_tensors(state, torch.clone)  # into memory of this stream
    outs[-1].logits = torch.cat([out.logits for out in outs], 1)
    here.synchronize()  # what was copied goes back to the streams
    return outs[-1]
