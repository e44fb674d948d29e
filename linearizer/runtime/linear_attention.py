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

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import torch

EMPTY = -1e30  # the logit of what is not seen, the level of what has seen nothing: finite, so that differences are
ABSENT = 2 * EMPTY  # the log-feature of a key that is not there: vanishes even beside an empty level
HEADROOM = 60.0  # fp32 spans e^±87: shifting by 60 leaves 147 below a stabiliser that a row may not have reached
CHUNK = 128

Tensor = torch.Tensor


class Features(Protocol):
    """What attention asks of a feature map."""

    features: int

    def queries(self, q: Tensor) -> Tensor: ...  # (batch, heads, group, tokens, dim) -> (…, features), log-features u

    def keys(self, k: Tensor) -> Tensor: ...  # (batch, heads, tokens, dim) -> (…, features), log-features w


@dataclass
class State:
    """What some heads remember. The window is a ring: the token at place p lies in slot p mod window."""

    count: Tensor  # (batch,) real tokens read so far
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor
    window_k: Tensor  # (batch, heads, window, dim)
    window_v: Tensor
    level: Tensor  # (batch, heads, features)
    mean: Tensor  # (batch, heads, features, value_dim)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int, sinks: int, features: int) -> State:
        batch, heads = k.shape[:2]
        work = working_dtype(v)
        return cls(
            count=torch.zeros(batch, dtype=torch.long, device=k.device),
            sink_k=k.new_zeros(batch, heads, sinks, k.shape[-1]),
            sink_v=v.new_zeros(batch, heads, sinks, v.shape[-1]),
            window_k=k.new_zeros(batch, heads, window, k.shape[-1]),
            window_v=v.new_zeros(batch, heads, window, v.shape[-1]),
            level=torch.full((batch, heads, features), EMPTY, dtype=work, device=v.device),
            mean=torch.zeros(batch, heads, features, v.shape[-1], dtype=work, device=v.device),
        )


def tensors(state: object) -> dict[str, Tensor]:
    """The tensors of a state by name; each has the batch first."""
    return {field.name: getattr(state, field.name) for field in fields(state)}  # type: ignore[arg-type]


def change_tensors(state: object, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of a state by what `change` makes of it."""
    for name, tensor in tensors(state).items():
        setattr(state, name, change(tensor))


def working_dtype(x: Tensor) -> torch.dtype:
    """Sums and exponentials are taken in at least fp32: a bf16 sum loses every term below 1/512 of it."""
    return torch.promote_types(x.dtype, torch.float32)


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, real: Tensor | None, state: State
) -> Tensor:
    """Attend and bring the state up to date; the one door to the ways of doing so."""
    if q.shape[-2] == 1 and real is None:
        return step(q, k, v, feature_map, window, state)
    return chunked(q, k, v, feature_map, window, real, state)


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


def far_logits(u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """log Σ_m exp(u_im + w_jm) by a product, and each row's bound (…, rows, 1).

    A row none of whose own logits comes within HEADROOM of its bound has lost terms to underflow: the stabiliser
    looks at all keys, also at those that come after the row.
    """
    ceiling = w.amax(-2, keepdim=True).detach()
    u = u + ceiling[:, :, None]
    bound = u.amax(-1, keepdim=True).detach()
    product = (u - bound).exp() @ (w - ceiling + HEADROOM).exp()[:, :, None].mT
    return product.clamp_min(torch.finfo(product.dtype).tiny).log() + (bound - HEADROOM), bound


@dataclass
class Columns:
    """The remembered window and the new tokens in one row, real tokens at the right end without gaps, so that
    distances in columns are distances in places."""

    k: Tensor  # (batch, heads, window + tokens, dim)
    v: Tensor
    first: Tensor  # (batch,) the place of column 0
    empty: Tensor  # (batch,) how many columns at the left hold nothing
    window: int

    def place(self, start: int, stop: int) -> Tensor:
        """Places of the columns start … stop - 1: (batch, columns)."""
        return self.first[:, None] + torch.arange(start, stop, device=self.k.device)

    def filled(self, start: int, stop: int) -> Tensor:
        """Which of these columns hold a token: (batch, columns)."""
        return torch.arange(start, stop, device=self.k.device) >= self.empty[:, None]


def chunked(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    feature_map: Features | None,
    window: int,
    real: Tensor | None,
    state: State,
    chunk: int = CHUNK,
) -> Tensor:
    """Attend to the state and to the new tokens, `chunk` rows at a time.

    A chunk of rows sees as columns the window before it and itself; what lies further left is in the state.
    """
    tokens, order = q.shape[-2], None
    if real is not None:
        order = real.to(torch.int8).argsort(dim=-1, stable=True)
        q = take(q, order)
    columns = lay_columns(k, v, window, real, state)
    remember_sinks(state, columns)
    out = torch.cat(
        [attend_chunk(part, columns, feature_map, state, i * chunk) for i, part in enumerate(q.split(chunk, -2))], -2
    )
    state.count = columns.first + window + tokens
    slot = ring_slots(state.count, window)
    state.window_k = take(columns.k[:, :, tokens:], slot.argsort(-1))
    state.window_v = take(columns.v[:, :, tokens:], slot.argsort(-1))
    return out if order is None else take(out, order.argsort(-1))


def lay_columns(k: Tensor, v: Tensor, window: int, real: Tensor | None, state: State) -> Columns:
    """Lay the remembered window before the new keys and values; move what is no token to the left end."""
    slot = ring_slots(state.count, window)
    k = torch.cat([take(state.window_k, slot), k], -2)
    v = torch.cat([take(state.window_v, slot), v], -2)
    held = state.count.clamp(max=window)
    new = k.new_full(held.shape, k.shape[-2] - window, dtype=torch.long) if real is None else real.sum(-1)
    if real is not None:
        old = torch.arange(window, device=k.device) >= window - held[:, None]
        order = torch.cat([old, real], -1).to(torch.int8).argsort(dim=-1, stable=True)
        k, v = take(k, order), take(v, order)
    return Columns(k, v, state.count + new - k.shape[-2], k.shape[-2] - held - new, window)


def ring_slots(count: Tensor, window: int) -> Tensor:
    """The slots of a ring from the oldest to the newest token, once `count` tokens were read: (batch, window)."""
    return (count[:, None] + torch.arange(window, device=count.device)) % max(window, 1)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of x (batch, …, tokens, dim) by an index (batch, tokens)."""
    shape = (index.shape[0], *[1] * (x.dim() - 3), index.shape[1], 1)
    return x.gather(-2, index.view(shape).expand(*x.shape[:-2], -1, x.shape[-1]))


def remember_sinks(state: State, columns: Columns) -> None:
    """Copy the first tokens of the text to where they stay, if they are among the columns."""
    sinks = state.sink_k.shape[-2]
    column = torch.arange(sinks, device=columns.k.device) - columns.first[:, None]
    length = columns.k.shape[-2]
    here = ((column >= columns.empty[:, None]) & (column < length))[:, None, :, None]
    column = column.clamp(0, length - 1)
    state.sink_k = torch.where(here, take(columns.k, column), state.sink_k)
    state.sink_v = torch.where(here, take(columns.v, column), state.sink_v)


def attend_chunk(q: Tensor, columns: Columns, feature_map: Features | None, state: State, start: int) -> Tensor:
    """Attend with the rows from `start`; leave in the state the columns that are then behind every window."""
    work, size, device = working_dtype(q), q.shape[-2], q.device
    stop = start + columns.window + size
    k, v = columns.k[:, :, start:stop].to(work), columns.v[:, :, start:stop].to(work)
    place, filled = columns.place(start, stop), columns.filled(start, stop)
    sinks = state.sink_k.shape[-2]
    q = q.to(work)

    # The row of token t has its own column `window` to the right of it; columns up to `t` are behind its window.
    behind = torch.ones(size, k.shape[-2], dtype=torch.bool, device=device).tril()
    causal = torch.ones(size, k.shape[-2], dtype=torch.bool, device=device).tril(columns.window)
    sink = (place < sinks)[:, None]
    near = filled[:, None] & causal & (~behind | sink)
    near_logits = (q @ k[:, :, None].mT).masked_fill(~near[:, None, None], EMPTY)
    gone = torch.arange(sinks, device=device) < (columns.first + columns.empty.clamp(min=start))[:, None]
    sink_logits = (q @ state.sink_k.to(work)[:, :, None].mT).masked_fill(~gone[:, None, None, None], EMPTY)
    if feature_map is None:
        return combine([sink_logits, near_logits], [state.sink_v, v])

    u, w = feature_map.queries(q), feature_map.keys(k[:, :, :size])
    leaving = (filled & ~sink[:, 0])[:, :size]
    w = w.masked_fill(~leaving[:, None, :, None], ABSENT)
    far = (behind[:, :size] & leaving[:, None])[:, None, None]
    feature_logits = u + state.level[:, :, None, None]
    approximate, bound = far_logits(u, w)

    def logits(approximate: Tensor) -> list[Tensor]:
        left = torch.where(far, approximate, near_logits[..., :size])
        return [sink_logits, left, near_logits[..., size:], feature_logits]

    top = torch.stack([part.amax(-1) for part in logits(approximate) if part.shape[-1]]).amax(0)
    lost = (top < bound[..., 0] - HEADROOM) & filled[:, None, None, columns.window :]
    exact = far_logits_exactly(u, w) if lost.any() else approximate
    out = combine(logits(exact), [state.sink_v, v, state.mean])
    absorb(state, w, v[:, :, :size])
    return out


def combine(logits: list[Tensor], values: list[Tensor]) -> Tensor:
    """One softmax over all parts: (batch, heads, group, rows, value_dim)."""
    weights = torch.cat(logits, -1).softmax(-1)
    return weights @ torch.cat([value.to(weights.dtype) for value in values], -2)[:, :, None]


def absorb(state: State, w: Tensor, v: Tensor) -> None:
    """Take keys with the log-features w (batch, heads, tokens, features) into the levels and means."""
    level = torch.logaddexp(state.level, torch.logsumexp(w, -2))
    mean = (state.level - level).exp()[..., None] * state.mean
    state.mean = mean + (w - level[:, :, None]).exp().mT @ v
    state.level = level


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
        absorb(state, w.masked_fill((place - window < sinks)[:, None, None, None], ABSENT), old_v.to(work))
    state.count = place + 1

    q = q.to(work)
    gone = torch.arange(sinks, device=q.device) <= (place - window)[:, None]
    held = torch.arange(window, device=q.device) <= place[:, None]
    sink_logits = (q @ state.sink_k.to(work)[:, :, None].mT).masked_fill(~gone[:, None, None, None], EMPTY)
    near_logits = (q @ state.window_k.to(work)[:, :, None].mT).masked_fill(~held[:, None, None, None], EMPTY)
    logits, values = [sink_logits, near_logits], [state.sink_v, state.window_v]
    if feature_map is not None:
        logits.append(feature_map.queries(q) + state.level[:, :, None, None])
        values.append(state.mean)
    return combine(logits, values)
