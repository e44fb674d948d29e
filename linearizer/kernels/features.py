"""Reads with features and memories in PyTorch, faster than the definition: windows in blocks, a token at once.

Shapes as in student/features_torch.py.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from linearizer.student.attention_of_student import working_dtype
from linearizer.student.columns import ABSENT, EMPTY, Columns, ExactState, least_count, take_tokens
from linearizer.student.feature_maps import merge_into_state
from linearizer.student.features_torch import CHUNK, Memory, PartialSoftmax, attend_chunks, seen_logits

BLOCKS_AT_ONCE = 32  # of rows with windows: more need more memory
BLOCK = 32  # rows of windows next to a memory: each is compared with all columns of the block

Tensor = torch.Tensor
Part = tuple[Tensor, Tensor]  # logits and values


def attend_in_blocks(q: Tensor, columns: Columns, memory: Any, state: Any, chunk: int = CHUNK) -> Tensor:
    """Attend chunk by chunk, where all windows were read before, many blocks at once."""
    windows = read_windows(q, columns, state)

    def near(rows: Tensor, columns: Columns, state: ExactState, start: int) -> PartialSoftmax:
        bound, total, sums = (x[..., start : start + rows.shape[-2], :] for x in windows)
        return PartialSoftmax(bound, total, sums)

    return attend_chunks(q, columns, memory, state, chunk, near)


def read_windows(q: Tensor, columns: Columns, state: ExactState) -> list[Tensor]:
    """Read windows and sinks: the bounds, masses and sums of `PartialSoftmax`."""
    if not columns.window and not state.sink_k.shape[-2]:
        nothing = PartialSoftmax.of_nothing(q.to(working_dtype(q)), columns.v.shape[-1])
        return [nothing.bound, nothing.total, nothing.sum]
    parts = []
    for block in split_windows(q, columns, state, BLOCK):
        reading, blocks = PartialSoftmax.of(seen_logits(block.q, block.k, block.outside), block.v), len(block.q)
        parts.append([join_rows(x, blocks // len(q)) for x in (reading.bound, reading.total, reading.sum)])
    return [torch.cat(tensors, -2)[..., : q.shape[-2], :] for tensors in zip(*parts, strict=True)]


class Block(NamedTuple):
    """Rows, the columns and sinks that a row may see, and how many places each column is outside of what a row sees."""

    q: Tensor  # (batch · blocks, heads, group, rows, dim)
    k: Tensor  # (batch · blocks, heads, columns, dim)
    v: Tensor
    outside: Tensor  # (batch · blocks, rows, columns)


def split_windows(q: Tensor, columns: Columns, state: ExactState, size: int) -> Iterator[Block]:
    """Yield rows in blocks of `size`, many blocks at once; the last rows are repeated until a block is full.

    The row of token t has its own column `window` to the right of it.
    """
    tokens, window, device = q.shape[-2], columns.window, q.device
    row, offset = torch.arange(size, device=device), torch.arange(size + window - 1, device=device)
    outside_window = torch.maximum(row[:, None] - offset, offset - row[:, None] - window + 1)  # by how many columns
    sinks = torch.arange(state.sink_k.shape[-2], device=device)
    for begins in torch.arange(0, tokens, size, device=device).split(BLOCKS_AT_ONCE):
        count, rows = len(begins), begins[:, None] + row
        index = (begins[:, None] + 1 + offset).clamp(max=columns.k.shape[-2] - 1)
        missing = columns.empty[:, None, None] - index
        outside = torch.cat(
            [
                torch.maximum(outside_window, missing[:, :, None]),
                sinks - (columns.first[:, None, None] + rows)[..., None],
            ],
            -1,
        )
        k, v = (
            torch.cat([split_rows(x.index_select(-2, index.flatten()), count), sink.repeat_interleave(count, 0)], -2)
            for x, sink in ((columns.k, state.sink_k), (columns.v, state.sink_v))
        )
        queries = split_rows(q.index_select(-2, rows.flatten().clamp(max=tokens - 1)).to(working_dtype(q)), count)
        yield Block(queries, k, v, outside.flatten(0, 1))


def split_rows(x: Tensor, parts: int) -> Tensor:
    """(batch, …, parts · rows, dim) -> (batch · parts, …, rows, dim)"""
    return x.unflatten(-2, (parts, -1)).movedim(-3, 1).flatten(0, 1)


def join_rows(x: Tensor, parts: int) -> Tensor:
    """(batch · parts, …, rows, dim) -> (batch, …, parts · rows, dim)"""
    return x.unflatten(0, (-1, parts)).movedim(1, -3).flatten(-3, -2)


def attend_token(q: Tensor, k: Tensor, v: Tensor, memory: Memory, window: int, state: ExactState) -> Tensor:
    """Attend with one token, and update the state in place."""
    q, place, sinks = q.to(working_dtype(q)), state.count, state.sink_k.shape[-2]
    min_count, old_k, old_v = least_count(place), k, v
    if window:
        slot = (place % window)[:, None]
        old_k, old_v = take_tokens(state.window_k, slot), take_tokens(state.window_v, slot)
    incoming = (place - window >= sinks)[:, None] if min_count - window < sinks else None
    far, is_share = read_far(memory, state, q, old_k.to(q.dtype), old_v.to(q.dtype), incoming, place[:, None])
    remember_sink(state, k, v, min_count)
    remember_token(state, k, v)
    state.count = place + 1

    parts, rows = [], q[..., 0, :]
    if sinks:
        visible_sinks = None if min_count - window >= sinks - 1 else first_places(sinks, place - window)
        parts.append(exact_part(rows, state.sink_k, state.sink_v, visible_sinks))
    if window:
        filled = None if min_count >= window - 1 else first_places(window, place)
        parts.append(exact_part(rows, state.window_k, state.window_v, filled))
    logits, values = far
    parts.append((logits + log_mass(parts) if is_share and parts else logits, values))
    return softmax_over(parts)[..., None, :]


def read_far(
    memory: Any, state: Any, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor | None, place: Tensor
) -> tuple[Part, bool]:
    """Let a memory read one token: return its logits and values, and whether its mass is a share."""
    if not hasattr(memory, "queries"):  # a memory by a rule
        incoming = torch.ones_like(place, dtype=torch.bool) if incoming is None else incoming
        reading = memory.chunk(state, q, k, v, incoming, place)
        return (reading.bound[..., 0], reading.sum), reading.is_share
    w = memory.keys(k)
    if incoming is not None:
        w = w.masked_fill(~incoming[:, None, :, None], ABSENT)
    merge_into_state(state, w[:, :, 0], v)
    return (memory.queries(q)[..., 0, :] + state.level[:, :, None], state.mean), False


def exact_part(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> Part:
    """Return logits and values of exact tokens for q (batch, heads, rows, dim); `visible` (batch, tokens), else all."""
    logits = q @ k.to(q.dtype).mT
    if visible is not None:  # many times faster than filling
        logits = logits + torch.where(visible, 0.0, EMPTY).to(logits.dtype)[:, None, None]
    return logits, v.to(q.dtype)


def softmax_over(parts: list[Part]) -> Tensor:
    """Compute one softmax over parts, for rows that see something: (batch, heads, rows, dim).

    Values have one more dimension if they differ between rows.
    """
    weights = torch.cat([logits for logits, _ in parts], -1).softmax(-1).split([x.shape[-1] for x, _ in parts], -1)
    products = (
        x @ values if values.dim() == 4 else (x[..., None, :] @ values)[..., 0, :]
        for x, (_, values) in zip(weights, parts, strict=True)
    )
    return functools.reduce(torch.add, products)


def log_mass(parts: list[Part]) -> Tensor:
    """Return the logarithm of each row's softmax denominator over parts: (…, 1)."""
    return torch.cat([logits for logits, _ in parts], -1).logsumexp(-1, keepdim=True)


def remember_token(state: ExactState, k: Tensor, v: Tensor) -> None:
    """Write one token of every text into the ring, in place."""
    if not (window := state.window_k.shape[-2]):
        return
    make_writable(state, ("window_k", "window_v"))
    rows, slot = torch.arange(len(k), device=k.device), state.count % window
    state.window_k[rows, :, slot], state.window_v[rows, :, slot] = k[:, :, 0], v[:, :, 0]


def remember_sink(state: ExactState, k: Tensor, v: Tensor, min_count: int) -> None:
    """Write one token of every text into the sinks, in place, if it is one of them.

    Every text has read at least `min_count` tokens before it.
    """
    if min_count >= (sinks := state.sink_k.shape[-2]):
        return
    make_writable(state, ("sink_k", "sink_v"))
    rows, slot = torch.arange(len(k), device=k.device), state.count.clamp(max=sinks - 1)
    is_sink = (state.count < sinks)[:, None, None]
    for stored, x in ((state.sink_k, k), (state.sink_v, v)):
        stored[rows, :, slot] = torch.where(is_sink, x[:, :, 0].to(stored.dtype), stored[rows, :, slot])


def make_writable(state: ExactState, names: tuple[str, ...]) -> None:
    """Copy those tensors of a state that must not be overwritten."""
    for name in names:
        if must_be_copied(getattr(state, name)):
            setattr(state, name, getattr(state, name).clone())


def must_be_copied(x: Tensor) -> bool:
    """Whether x must not be overwritten: gradients may need it, a graph must not change its inputs, or x was made in
    inference mode, which has ended."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return True
    return x.is_inference() and not torch.is_inference_mode_enabled()


def first_places(size: int, last_place: Tensor) -> Tensor:
    """Return which of the places 0 … size - 1 are at most a text's `last_place` (batch,): (batch, size)."""
    return torch.arange(size, device=last_place.device) <= last_place[:, None]
