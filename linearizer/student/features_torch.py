"""Attention to a few exact tokens and to a far field of features, in one softmax.

Row i attends to a key j ≤ i in one of two ways:
  exactly, with the logit q_i·k_j, if j is a sink (one of the first `sinks` tokens) or i - j < window;
  through features otherwise, with the logit log Σ_m exp(u_im + w_jm), where a feature map computes u and w.
A row sees far keys only as sums, so a feature stores two things about all keys that have left the window:
  level_m = log Σ_j exp(w_jm)    and    mean_m = Σ_j exp(w_jm - level_m) v_j.
To a query the feature is then one more token, with the logit u_m + level_m and the value mean_m. Every exponent is at
most zero, so nothing overflows; a feature that has seen nothing has level EMPTY.

This is linear in time and memory. Callers use `linear_attention`, which also takes every other memory
(softmax_parts.py).

Shapes: q (batch, heads, group, tokens, key_dim), already multiplied by the scale of the scores; k, v (batch, heads,
tokens, dim). Heads are KV heads; a group is the query heads that share one. real (batch, tokens) is false at padding,
which may be anywhere; None means that every token is real. A token's place is its rank among the real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from .attention_of_student import working_dtype
from .columns import (
    ABSENT,
    EMPTY,
    HEADROOM,
    Columns,
    ExactState,
    FeatureState,
    Text,
    first_places,
    least_count,
    remember_sink,
    remember_token,
    take_tokens,
)
from .feature_maps import FeatureMap
from .softmax_parts import (
    Memory,
    PartialSoftmax,
    combine,
    exact_part,
    exp_without_underflow,
    far_logits_exactly,
    join_rows,
    log_mass,
    multiply_by_head,
    seen_logits,
    softmax_over,
    split_rows,
)

CHUNK = 128
BLOCKS_AT_ONCE = 32  # of rows with windows: more need more memory
BLOCK = 32  # rows of windows next to a memory: each is compared with all columns of the block

Tensor = torch.Tensor
Attend = Callable[[Tensor, Columns, Any, Any, int], Tensor]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, window: int, real: Tensor | None, state: Any,
    attend: Attend | None = None,
) -> Tensor:  # fmt: skip
    """Attend to window, sinks and memory, and update the state."""
    if q.shape[-2] == 1 and real is None:
        return attend_token_with_features(q, k, v, memory, window, state)
    return attend_text_with_features(q, k, v, memory, window, real, state, attend=attend)


def attend_text_with_features(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    memory: Memory,
    window: int,
    real: Tensor | None,
    state: Any,
    chunk: int = CHUNK,
    attend: Attend | None = None,
) -> Tensor:
    """Attend to the state and to the new tokens, `chunk` rows at a time or as `attend` does it.

    The columns of a chunk are the window before it and its own tokens; all earlier tokens are in the state.
    """
    text = Text.of(q, k, v, window, real, state)
    return text.end((attend or attend_chunks)(text.q, text.columns, memory, state, chunk))


def attend_chunks(q: Tensor, columns: Columns, memory: Memory, state: Any, chunk: int = CHUNK) -> Tensor:
    """Attend in PyTorch, chunk by chunk."""
    near, starts = read_windows(q, columns, state), range(0, q.shape[-2], chunk)
    parts = (attend_chunk(q[..., i : i + chunk, :], near.rows(i, i + chunk), columns, memory, state, i) for i in starts)
    if torch.is_grad_enabled():
        return torch.cat(list(parts), -2)
    out = q.new_empty(*q.shape[:-1], columns.v.shape[-1], dtype=working_dtype(q))
    for start, part in zip(starts, parts, strict=True):
        out[..., start : start + chunk, :] = part
    return out


def read_windows(q: Tensor, columns: Columns, state: ExactState) -> PartialSoftmax:
    """Read windows and sinks, to be combined with the far field."""
    if not columns.window and not state.sink_k.shape[-2]:
        return PartialSoftmax.of_nothing(q.to(working_dtype(q)), columns.v.shape[-1])
    parts = []
    for block in split_windows(q, columns, state, BLOCK):
        reading = PartialSoftmax.of(seen_logits(block.q, block.k, block.outside), block.v)
        parts.append(reading.changed(partial(join_rows, parts=len(block.q) // len(q))))
    return PartialSoftmax.joined(parts).rows(0, q.shape[-2])


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


def attend_chunk(q: Tensor, near: PartialSoftmax, columns: Columns, memory: Memory, state: Any, start: int) -> Tensor:
    """Combine near and far tokens; move the columns that are then behind every window into the state.

    The row of token t has its own column `window` to the right of it; columns up to t are behind its window.
    """
    q, size = q.to(working_dtype(q)), q.shape[-2]
    k, v = (x[:, :, start : start + size].to(q.dtype) for x in (columns.k, columns.v))
    incoming = columns.filled(start, start + size) & (columns.place(start, start + size) >= state.sink_k.shape[-2])
    place = columns.place(start + columns.window, start + columns.window + size)
    far = memory.chunk(state, q, k, v, incoming, place)
    if far.is_share:
        far.bound = far.bound + near.lse
    if far.exactly is None:
        return combine(near, far)
    exactly, filled = far.exactly, columns.filled(start + columns.window, start + columns.window + size)
    low = torch.maximum(near.bound, far.lse) < far.bound
    lost = (low & filled[:, None, None, :, None]).any()
    return combine(near, *exactly()) if lost else combine(near, far)


@dataclass(frozen=True)
class ScaledMap:
    """The memory of features, for queries multiplied by the scale of the scores and unscaled keys.

    For each feature it stores the logarithm of its weight, and the mean of its values.
    """

    feature_map: FeatureMap
    scale: float = 1.0

    def queries(self, q: Tensor) -> Tensor:
        return self.feature_map(self.feature_map.queries, q / self.scale**0.5)

    def keys(self, k: Tensor) -> Tensor:
        return self.feature_map(self.feature_map.keys, k * self.scale**0.5)

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> FeatureState:
        return FeatureState.empty(k, v, window, sinks, self.feature_map.features)

    def chunk(
        self, state: FeatureState, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor
    ) -> PartialSoftmax:
        """Read and merge keys; the bound is HEADROOM below what a row's features could reach with the largest keys.

        The stabilisers depend on all keys of the chunk, also on those after the row.
        """
        u, w, level = self.queries(q), self.keys(k), state.level[:, :, None]
        if not incoming.all():
            w = w.masked_fill(~incoming[:, None, :, None], ABSENT)
        causal = torch.ones(w.shape[-2], w.shape[-2], dtype=w.dtype, device=w.device).tril()
        exactly = partial(read_features_exactly, u, w, v, causal, state.level, state.mean)
        ceiling = torch.maximum(w.detach().amax(-2, keepdim=True), level.detach())
        key, stored = (exp_without_underflow(x - (ceiling - HEADROOM)) for x in (w, level))
        u = u + ceiling[:, :, None]
        bound = u.detach().amax(-1, keepdim=True)
        query = exp_without_underflow(u.sub_(bound))
        product = multiply_by_head(query, key.mT).mul_(causal)  # several times faster than two calls of tril
        total = product.sum(-1, keepdim=True) + multiply_by_head(query, stored.mT)
        sums = multiply_by_head(product, v).add_(multiply_by_head(query, stored.mT * state.mean))
        mass = key.sum(-2).clamp_min(torch.finfo(q.dtype).tiny)
        merge_into_state(state, mass.log() + ceiling[:, :, 0] - HEADROOM, key.mT @ v / mass[..., None])
        return PartialSoftmax(bound - HEADROOM, total, sums, exactly)

    def token(
        self, state: FeatureState, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor | None, place: Tensor
    ) -> tuple[Tensor, Tensor, bool]:
        w = self.keys(k)
        if incoming is not None:
            w = w.masked_fill(~incoming[:, None, :, None], ABSENT)
        merge_into_state(state, w[:, :, 0], v)
        return self.queries(q)[..., 0, :] + state.level[:, :, None], state.mean, False


def read_features_exactly(
    u: Tensor, w: Tensor, v: Tensor, mask: Tensor, level: Tensor, mean: Tensor
) -> list[PartialSoftmax]:
    """Read each key of a chunk by itself, and the features of the state: right at any magnitude, and slow."""
    logits = far_logits_exactly(u, w).masked_fill(mask == 0, EMPTY)
    return [PartialSoftmax.of(logits, v), PartialSoftmax.of(u + level[:, :, None, None], mean)]


def merge_into_state(state: FeatureState, level: Tensor, mean: Tensor) -> None:
    """Merge keys, given as levels and means, into the state."""
    total = torch.logaddexp(state.level, level)
    state.mean = (state.level - total).exp()[..., None] * state.mean + (level - total).exp()[..., None] * mean
    state.level = total


def attend_token_with_features(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, window: int, state: ExactState
) -> Tensor:
    """Attend with one token, and update the state in place."""
    q, place, sinks = q.to(working_dtype(q)), state.count, state.sink_k.shape[-2]
    min_count, old_k, old_v = least_count(place), k, v
    if window:
        slot = (place % window)[:, None]
        old_k, old_v = take_tokens(state.window_k, slot), take_tokens(state.window_v, slot)
    incoming = (place - window >= sinks)[:, None] if min_count - window < sinks else None
    logits, values, is_share = memory.token(state, q, old_k.to(q.dtype), old_v.to(q.dtype), incoming, place[:, None])
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
    parts.append((logits + log_mass(parts) if is_share and parts else logits, values))
    return softmax_over(parts)[..., None, :]
