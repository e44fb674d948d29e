"""The states of heads with features or memories, and the layout of new tokens next to their window.

real (batch, tokens) is false at padding, which may be anywhere; None means that every token is real. A token's place is
its rank among the real ones.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from .attention_of_student import working_dtype
from .other_heads import least_count

EMPTY = -1e30  # the logit of an unseen token, the level of an empty feature: finite, so that differences are finite
ABSENT = 2 * EMPTY  # the log-feature of an absent key, or of one that a feature ignores: vanishes beside an empty level
HEADROOM = 60.0  # fp32 spans e^±87: shifting by 60 leaves 147 below a stabiliser that a row may not have reached

Tensor = torch.Tensor


@dataclass
class ExactState:
    """Exact tokens of heads: sinks and window. The window is a ring: the token at place p is at p mod window."""

    count: Tensor  # (batch,) real tokens read so far
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor
    window_k: Tensor  # (batch, heads, window, dim)
    window_v: Tensor

    @staticmethod
    def nothing(k: Tensor, v: Tensor, window: int, sinks: int) -> dict[str, Tensor]:
        batch, heads = k.shape[:2]
        return {
            "count": torch.zeros(batch, dtype=torch.long, device=k.device),
            "sink_k": k.new_zeros(batch, heads, sinks, k.shape[-1]),
            "sink_v": v.new_zeros(batch, heads, sinks, v.shape[-1]),
            "window_k": k.new_zeros(batch, heads, window, k.shape[-1]),
            "window_v": v.new_zeros(batch, heads, window, v.shape[-1]),
        }


@dataclass
class FeatureState(ExactState):
    """The state of heads with a window and features."""

    level: Tensor  # (batch, heads, features)
    mean: Tensor  # (batch, heads, features, value_dim)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int, sinks: int, features: int) -> FeatureState:
        batch, heads = k.shape[:2]
        work = working_dtype(v)
        return cls(
            **ExactState.nothing(k, v, window, sinks),
            level=torch.full((batch, heads, features), EMPTY, dtype=work, device=v.device),
            mean=torch.zeros(batch, heads, features, v.shape[-1], dtype=work, device=v.device),
        )


@dataclass
class MatrixState(ExactState):
    """The state of heads with a window and a matrix; tensors that a rule does not use are empty."""

    matrix: Tensor  # (batch, heads, memories, rows, columns)
    key_mean: Tensor  # (batch, heads, key_dim)
    key_variance: Tensor
    value_mean: Tensor  # (batch, heads, value_dim)
    taps: Tensor  # (batch, heads, taps - 1, key_dim) the last keys
    query_taps: Tensor  # (batch, heads, group, taps - 1, key_dim) the last queries; no group before the first token


@dataclass
class Columns:
    """The stored window and the new tokens in one row, real tokens at the right end without gaps, so that distances in
    columns are distances in places."""

    k: Tensor  # (batch, heads, window + tokens, dim)
    v: Tensor
    first: Tensor  # (batch,) the place of column 0
    empty: Tensor  # (batch,) how many columns at the left have no token
    window: int

    def place(self, start: int, stop: int) -> Tensor:
        """Return the places of the columns start … stop - 1: (batch, columns)."""
        return self.first[:, None] + torch.arange(start, stop, device=self.k.device)

    def filled(self, start: int, stop: int) -> Tensor:
        """Return which of these columns have a token: (batch, columns)."""
        return torch.arange(start, stop, device=self.k.device) >= self.empty[:, None]


def lay_columns(k: Tensor, v: Tensor, window: int, real: Tensor | None, state: ExactState) -> Columns:
    """Lay the window before the new keys and values; move padding and empty places to the left end."""
    if window:
        slot = ring_slots(state.count, window)
        k = torch.cat([take_tokens(state.window_k, slot), k], -2)
        v = torch.cat([take_tokens(state.window_v, slot), v], -2)
    in_window = state.count.clamp(max=window)
    added = k.new_full(in_window.shape, k.shape[-2] - window, dtype=torch.long) if real is None else real.sum(-1)
    if real is not None:
        filled = torch.arange(window, device=k.device) >= window - in_window[:, None]
        order = torch.cat([filled, real], -1).to(torch.int8).argsort(dim=-1, stable=True)
        k, v = take_tokens(k, order), take_tokens(v, order)
    return Columns(k, v, state.count + added - k.shape[-2], k.shape[-2] - in_window - added, window)


@dataclass
class Text:
    """A text laid out for heads that read it."""

    q: Tensor  # (batch, heads, group, tokens, dim)
    columns: Columns
    state: Any
    order: Tensor | None  # (batch, tokens) of the tokens, if some are not real

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, window: int, real: Tensor | None, state: Any) -> Text:
        order = None if real is None else real.to(torch.int8).argsort(dim=-1, stable=True)
        columns = lay_columns(k, v, window, real, state)
        remember_sinks(state, columns)
        return cls(q if order is None else take_tokens(q, order), columns, state, order)

    def end(self, out: Tensor) -> Tensor:
        """Add the tokens to the state's count and window; return their outputs in the original order."""
        tokens = self.q.shape[-2]
        self.state.count = self.columns.first + self.columns.window + tokens
        remember_window(self.state, self.columns, tokens)
        return out if self.order is None else take_tokens(out, self.order.argsort(-1))


def ring_slots(count: Tensor, window: int) -> Tensor:
    """Return the slots of a ring, from the oldest to the newest token, after `count` tokens: (batch, window)."""
    return (count[:, None] + torch.arange(window, device=count.device)) % max(window, 1)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of x (batch, …, tokens, dim) by an index (batch, tokens); a gather would take single numbers."""
    shape, tokens = x.shape[:-2], x.shape[-2]
    start = (torch.arange(math.prod(shape), device=x.device) * tokens).view(*shape, 1)
    at = start + index.view(len(x), *[1] * (x.dim() - 3), -1)
    return x.reshape(-1, x.shape[-1]).index_select(0, at.flatten()).view(*shape, index.shape[1], x.shape[-1])


def remember_sinks(state: ExactState, columns: Columns) -> None:
    """Copy the first tokens of the text into the sinks, if they are among the columns."""
    sinks = state.sink_k.shape[-2]
    if least_count(state.count) >= sinks:
        return
    column = torch.arange(sinks, device=columns.k.device) - columns.first[:, None]
    length = columns.k.shape[-2]
    present = ((column >= columns.empty[:, None]) & (column < length))[:, None, :, None]
    column = column.clamp(0, length - 1)
    state.sink_k = torch.where(present, take_tokens(columns.k, column), state.sink_k)
    state.sink_v = torch.where(present, take_tokens(columns.v, column), state.sink_v)


def remember_window(state: ExactState, columns: Columns, tokens: int) -> None:
    """Write the last columns into the ring; the state's count must include the new tokens."""
    slot = ring_slots(state.count, columns.window).argsort(-1)
    state.window_k = take_tokens(columns.k[:, :, tokens:], slot)
    state.window_v = take_tokens(columns.v[:, :, tokens:], slot)
