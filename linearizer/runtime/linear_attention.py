"""Attention to a few exact tokens and to a far field of features, all in one softmax.

Row i attends to a key j ≤ i in one of two ways:
  exactly, with the logit q_i·k_j, if j is a sink (one of the first `sinks` tokens) or i - j < window;
  through features otherwise, with the logit log Σ_m exp(u_im + w_jm), where a feature map gives u and w.
Far keys enter a row only as sums, so a feature keeps two things about all keys that have left the window:
  level_m = log Σ_j exp(w_jm)    and    mean_m = Σ_j exp(w_jm - level_m) v_j.
To a query the feature is then one more token, with the logit u_m + level_m and the value mean_m. Everything that is
exponentiated is at most zero, so nothing overflows; a feature that has seen nothing has level EMPTY.

The same attention three times: `reference` (clear, quadratic), `chunked` (linear in time and memory, takes and
leaves a state), `step` (one token, state in place). `linear_attention` is the door.

Shapes: q (batch, heads, group, tokens, key_dim), already multiplied by the scale of the scores; k, v (batch, heads,
tokens, dim). Heads are KV heads, a group is the query heads that share one. real (batch, tokens) is false at padding,
which may stand anywhere; None means that every token is real. A token's place is its rank among the real ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from .state import (
    ABSENT,
    EMPTY,
    HEADROOM,
    Columns,
    State,
    change_tensors,
    lay_columns,
    remember_sinks,
    remember_window,
    take,
    tensors,
    working_dtype,
)

try:
    from .kernel_gradients import Attention
    from .kernel_step import run_step
except ImportError as missing:
    if missing.name != "triton":
        raise
    Attention = run_step = None  # type: ignore[assignment, misc]

CHUNK = 128

Tensor = torch.Tensor


class Features(Protocol):
    """What attention asks of a feature map."""

    features: int

    def queries(self, q: Tensor) -> Tensor: ...  # (batch, heads, group, tokens, dim) -> (…, features), log-features u

    def keys(self, k: Tensor) -> Tensor: ...  # (batch, heads, tokens, dim) -> (…, features), log-features w


Attend = Callable[[Tensor, "Columns", Features | None, "State", int], Tensor]


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, real: Tensor | None, state: State
) -> Tensor:
    """Attend and bring the state up to date; the one door to the ways of doing so."""
    fused = kernels_serve(q, k, v)
    if q.shape[-2] == 1 and real is None:
        in_place = fused and not torch.is_grad_enabled()
        return (fused_step if in_place else step)(q, k, v, feature_map, window, state)
    attend = attend_fused if fused else attend_chunks
    return chunked(q, k, v, feature_map, window, real, state, attend=attend)


def kernels_wanted() -> bool:
    """Tell whether to use the kernels on a GPU; none has run them yet, so they have to be asked for."""
    return os.environ.get("LINEARIZER_KERNELS") == "1"


def kernels_serve(*inputs: Tensor) -> bool:
    """Tell whether the kernels take such tensors: on a GPU, bf16 or fp32, all alike."""
    x = inputs[0]
    served = kernels_wanted() and Attention is not None and x.is_cuda and x.dtype in (torch.bfloat16, torch.float32)
    return served and all(other.dtype == x.dtype and other.device == x.device for other in inputs)


def reference(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, sinks: int, real: Tensor | None = None
) -> Tensor:
    """softmax over j ≤ i of (q_i·k_j where j is near, log Σ_m exp(u_im + w_jm) elsewhere), times v."""
    tokens = q.shape[-2]
    real = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device) if real is None else real
    place = real.cumsum(-1) - 1
    near = (place[:, None, :] < sinks) | (place[:, :, None] - place[:, None, :] < window)
    seen = real[:, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    logits = q @ k[:, :, None].mT
    if feature_map is None:
        seen = seen & near
    else:
        logits = torch.where(
            near[:, None, None], logits, far_logits_exactly(feature_map.queries(q), feature_map.keys(k))
        )
    return logits.masked_fill(~seen[:, None, None], EMPTY).softmax(-1) @ v[:, :, None]


def far_logits_exactly(u: Tensor, w: Tensor) -> Tensor:
    """log Σ_m exp(u_im + w_jm) at any magnitude: tokens × tokens × features in memory."""
    return torch.logsumexp(u[..., :, None, :] + w[:, :, None, None], -1)


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Features | None,
    window: int,
    real: Tensor | None,
    state: State,
    chunk: int = CHUNK,
    attend: Attend | None = None,
) -> Tensor:
    """Attend to the state and to the new tokens, `chunk` rows at a time or as `attend` does it.

    A chunk of rows sees as columns the window before it and itself; what lies further left is in the state.
    """
    tokens, order = q.shape[-2], None
    if real is not None:
        order = real.to(torch.int8).argsort(dim=-1, stable=True)
        q = take(q, order)
    columns = lay_columns(k, v, window, real, state)
    remember_sinks(state, columns)
    out = (attend or attend_chunks)(q, columns, feature_map, state, chunk)
    state.count = columns.first + window + tokens
    remember_window(state, columns, tokens)
    return out if order is None else take(out, order.argsort(-1))


def attend_chunks(
    q: Tensor, columns: Columns, feature_map: Features | None, state: State, chunk: int = CHUNK
) -> Tensor:
    """Attend in PyTorch, one chunk after the other."""
    parts = enumerate(q.split(chunk, -2))
    return torch.cat([attend_chunk(part, columns, feature_map, state, i * chunk) for i, part in parts], -2)


def attend_fused(q: Tensor, columns: Columns, feature_map: Features | None, state: State, chunk: int = CHUNK) -> Tensor:
    """Attend by kernels, all chunks at once."""
    u = w = None
    if feature_map is not None:
        tokens, work, sinks = q.shape[-2], working_dtype(q), state.sink_k.shape[-2]
        leaving = columns.filled(0, tokens) & (columns.place(0, tokens) >= sinks)
        u, w = feature_map.queries(q.to(work)), feature_map.keys(columns.k[:, :, :tokens].to(work))
        w = w.masked_fill(~leaving[:, None, :, None], ABSENT)
    held = [state.sink_k, state.sink_v, columns.first, columns.empty, u, w, state.level, state.mean]
    inputs = [None if x is None else x.contiguous() for x in (q, columns.k, columns.v, *held)]
    out, state.level, state.mean = Attention.apply(columns.window, *inputs)
    return out


def attend_chunk(q: Tensor, columns: Columns, feature_map: Features | None, state: State, start: int) -> Tensor:
    """Attend with the rows from `start`; leave in the state the columns that are then behind every window.

    The row of token t has its own column `window` to the right of it; columns up to t are behind its window.
    """
    q, size = q.to(working_dtype(q)), q.shape[-2]
    near = [sinks_of(q, columns, state, start)] if state.sink_k.shape[-2] else []
    near += [window_of(q, columns, start)] if columns.window else []
    if feature_map is None:
        return combine(near) if near else columns.v.new_zeros(*q.shape[:-1], columns.v.shape[-1])
    k, v = (x[:, :, start : start + size].to(q.dtype) for x in (columns.k, columns.v))
    leaving = columns.filled(start, start + size) & (columns.place(start, start + size) >= state.sink_k.shape[-2])
    u, w = feature_map.queries(q), feature_map.keys(k)
    if not leaving.all():
        w = w.masked_fill(~leaving[:, None, :, None], ABSENT)
    far = Far.of(u, w, v, state)
    filled = columns.filled(start + columns.window, start + columns.window + size)[:, None, None, :, None]
    if ((torch.maximum(largest(near), far.lse) if near else far.lse) < far.bound)[filled.expand_as(far.total)].any():
        far_away = far_logits_exactly(u, w).masked_fill(~behind(size, size, 0, q), EMPTY)
        out = combine([*near, (far_away, v), (u + state.level[:, :, None, None], state.mean)])
    else:
        out = combine(near, far)
    total = far.key.sum(-2).clamp_min(torch.finfo(q.dtype).tiny)
    merge(state, total.log() + far.ceiling[:, :, 0] - HEADROOM, far.key.mT @ v / total[..., None])
    return out


@dataclass
class Far:
    """What the rows of one chunk see of the state and, through features, of the keys that they have behind them.

    A row none of whose logits reaches `bound`, HEADROOM below what its features could give with the largest keys, has
    lost terms to underflow: the stabilisers look at all keys of the chunk, also at those that come after the row.
    """

    key: Tensor  # e^(w - ceiling + HEADROOM): (batch, heads, tokens, features)
    ceiling: Tensor  # (batch, heads, 1, features)
    bound: Tensor  # (batch, heads, group, tokens, 1)
    total: Tensor  # Σ e^(logit - bound)
    sum: Tensor  # Σ e^(logit - bound) v

    @classmethod
    def of(cls, u: Tensor, w: Tensor, v: Tensor, state: State) -> Far:
        ceiling = torch.maximum(w.detach().amax(-2), state.level.detach())[:, :, None]
        key, held = exp(w - (ceiling - HEADROOM)), exp(state.level - (ceiling[:, :, 0] - HEADROOM))[..., None]
        u = u + ceiling[:, :, None]
        bound = u.detach().amax(-1, keepdim=True)
        query = exp(u - bound)
        product = by_head(query, key.mT).tril()
        total = product.sum(-1, keepdim=True) + by_head(query, held)
        return cls(key, ceiling, bound - HEADROOM, total, by_head(product, v) + by_head(query, held * state.mean))

    @property
    def lse(self) -> Tensor:
        return self.total.detach().log() + self.bound


def by_head(x: Tensor, y: Tensor) -> Tensor:
    """x (batch, heads, group, rows, dim) times y (batch, heads, dim, columns), which a group shares."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def behind(rows: int, columns: int, shift: int, like: Tensor) -> Tensor:
    """Which columns are at most `shift` to the right of the diagonal: (rows, columns)."""
    return torch.ones(rows, columns, dtype=torch.bool, device=like.device).tril(shift)


def only(logits: Tensor, seen: Tensor) -> Tensor:
    """Logits (batch, heads, group, rows, columns) where a mask (batch, rows, columns) is true, and EMPTY elsewhere."""
    return logits + torch.where(seen, 0.0, EMPTY).to(logits.dtype)[:, None, None]  # many times faster than filling


def sinks_of(q: Tensor, columns: Columns, state: State, start: int) -> tuple[Tensor, Tensor]:
    """Logits and values of the sinks, for the rows that they are behind the window of."""
    gone = torch.arange(state.sink_k.shape[-2], device=q.device) <= columns.place(start, start + q.shape[-2])[..., None]
    return only(by_head(q, state.sink_k.to(q.dtype).mT), gone), state.sink_v


def window_of(q: Tensor, columns: Columns, start: int) -> tuple[Tensor, Tensor]:
    """Logits and values of the windows of all rows: of the columns from the one after `start`."""
    size, window = q.shape[-2], columns.window
    start, stop = start + 1, start + size + window if window else start + 1
    inside = behind(size, stop - start, window - 1, q) & ~behind(size, stop - start, -1, q)
    inside = inside & columns.filled(start, stop)[:, None]
    return only(by_head(q, columns.k[:, :, start:stop].to(q.dtype).mT), inside), columns.v[:, :, start:stop]


def exp(x: Tensor) -> Tensor:
    """e^x, and 0 for what would nearly underflow: a CPU takes a hundred times as long for what does."""
    least = math.log(torch.finfo(x.dtype).tiny) + 7
    return torch.nn.functional.threshold(x.clamp_min(least).exp(), 1.1 * math.exp(least), 0.0)


def largest(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The largest logit of each row: (batch, heads, group, rows, 1)."""
    empty = parts[0][0].new_full((*parts[0][0].shape[:-1], 1), EMPTY)
    return torch.stack([empty, *(x.detach().amax(-1, keepdim=True) for x, _ in parts if x.shape[-1])]).amax(0)


def combine(parts: list[tuple[Tensor, Tensor]], far: Far | None = None) -> Tensor:
    """One softmax over all parts, given as logits and values, and what is far: (…, rows, value_dim)."""
    tops = ([largest(parts)] if parts else []) + ([far.lse] if far is not None else [])
    top = torch.maximum(tops[0], tops[-1])
    total, out = torch.zeros_like(top), torch.zeros_like(top)
    if far is not None:
        scale = (far.bound - top).clamp_max(0).exp()  # only above 0 in rows that see nothing
        total, out = scale * far.total, scale * far.sum
    for logits, values in parts:
        weights = exp(logits - top)
        total = total + weights.sum(-1, keepdim=True)
        out = out + by_head(weights, values.to(weights.dtype))
    return out / total.clamp_min(torch.finfo(top.dtype).tiny)  # a head that holds nothing gives nothing


def merge(state: State, level: Tensor, mean: Tensor) -> None:
    """Take keys into the state, given as their own levels and means."""
    new = torch.logaddexp(state.level, level)
    state.mean = (state.level - new).exp()[..., None] * state.mean + (level - new).exp()[..., None] * mean
    state.level = new


def step(q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, state: State) -> Tensor:
    """Attend with one token; the state is changed in place."""
    work, place = working_dtype(q), state.count
    sinks, rows = state.sink_k.shape[-2], torch.arange(q.shape[0], device=q.device)
    old_k, old_v = k, v
    if window:
        slot = place % window
        old_k, old_v = state.window_k[rows, :, slot][:, :, None], state.window_v[rows, :, slot][:, :, None]
        state.window_k[rows, :, slot], state.window_v[rows, :, slot] = k[:, :, 0], v[:, :, 0]
    if sinks:
        slot, first = place.clamp(max=sinks - 1), (place < sinks)[:, None, None]
        state.sink_k[rows, :, slot] = torch.where(first, k[:, :, 0], state.sink_k[rows, :, slot])
        state.sink_v[rows, :, slot] = torch.where(first, v[:, :, 0], state.sink_v[rows, :, slot])
    if feature_map is not None:
        w = feature_map.keys(old_k.to(work))
        merge(state, w.masked_fill((place - window < sinks)[:, None, None, None], ABSENT)[:, :, 0], old_v.to(work))
    state.count = place + 1

    q = q.to(work)
    gone = torch.arange(sinks, device=q.device) <= (place - window)[:, None]
    held = torch.arange(window, device=q.device) <= place[:, None]
    parts = [
        (only(by_head(q, k.to(work).mT), seen[:, None]), v)
        for k, v, seen in ((state.sink_k, state.sink_v, gone), (state.window_k, state.window_v, held))
    ]
    if feature_map is not None:
        parts.append((feature_map.queries(q) + state.level[:, :, None, None], state.mean))
    return combine(parts)


@torch.no_grad()
def fused_step(q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, state: State) -> Tensor:
    """Attend with one token by one kernel; nothing waits for the device, and no tensor of the state is exchanged.

    A feature map whose log-features are affine in x and |x|² says so by `affine()` and is computed inside the kernel.
    """
    u = w = None
    affine = getattr(feature_map, "affine", lambda: None)()
    if feature_map is not None and affine is None:
        work, old = working_dtype(q), k
        if window:
            slot = (state.count % window)[:, None, None, None].expand(*k.shape)
            old = state.window_k.gather(2, slot)
        u, w = feature_map.queries(q.to(work)).contiguous(), feature_map.keys(old.to(work)).contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    change_tensors(state, Tensor.contiguous)
    out = run_step(q, k, v, u, w, affine, **tensors(state))
    state.count += 1
    return out
