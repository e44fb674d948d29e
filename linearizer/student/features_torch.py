"""Attention to a few exact tokens and to a far field, in one softmax, which is linear in time and memory.

Row i attends to a key j ≤ i in one of two ways:
  exactly, with the logit q_i·k_j, if j is a sink (one of the first `sinks` tokens) or i - j < window;
  through a memory otherwise, which stores the keys and values that have left the window: features (feature_maps.py),
  or a matrix that a rule writes (matrix_rule.py).

Shapes: q (batch, heads, group, tokens, key_dim), already multiplied by the scale of the scores; k, v (batch, heads,
tokens, dim). Heads are KV heads; a group is the query heads that share one. real (batch, tokens) is false at padding,
which may be anywhere; None means that every token is real. A token's place is its rank among the real ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .attention_of_student import working_dtype
from .columns import EMPTY, Columns, ExactState, Text

CHUNK = 128

Tensor = torch.Tensor


@dataclass
class PartialSoftmax:
    """What rows read from some tokens, near or far, as part of one softmax: e^bound · total is the tokens' mass.

    If `exactly` is set, a row without a logit of at least `bound` may have lost terms, and uses those readings in place
    of this one. `is_share`: the mass is a share of what the row sees exactly.
    """

    bound: Tensor  # (batch, heads, group, rows, 1)
    total: Tensor  # Σ e^(logit - bound)
    sum: Tensor  # Σ e^(logit - bound) v
    exactly: Callable[[], list[PartialSoftmax]] | None = None
    is_share: bool = False

    @staticmethod
    def of(logits: Tensor, values: Tensor) -> PartialSoftmax:
        """Read tokens from their logits and values."""
        bound = logits.detach().amax(-1, keepdim=True)
        weights = exp_without_underflow(logits - bound)
        return PartialSoftmax(bound, weights.sum(-1, keepdim=True), multiply_by_head(weights, values.to(weights.dtype)))

    @staticmethod
    def of_nothing(q: Tensor, dim: int) -> PartialSoftmax:
        return PartialSoftmax(
            q.new_full((*q.shape[:-1], 1), EMPTY), q.new_zeros(*q.shape[:-1], 1), q.new_zeros(*q.shape[:-1], dim)
        )

    @property
    def lse(self) -> Tensor:
        """The logarithm of the mass."""
        return self.total.clamp_min(torch.finfo(self.total.dtype).tiny).log() + self.bound


class Memory(Protocol):
    """The far field of heads of one kind: it stores the tokens that leave their windows, and is read by queries.

    `incoming` (batch, rows) is false where a column is no token, or is a sink: the state stays bit for bit as it was.
    `place` (batch, rows) is the place of the row's query. Reading a chunk equals reading its tokens one by one.
    """

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> ExactState: ...

    def chunk(self, state: Any, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor) -> PartialSoftmax: ...


Near = Callable[[Tensor, Columns, ExactState, int], PartialSoftmax]


def attend_text_with_features(
    q: Tensor, k: Tensor, v: Tensor, memory: Memory, window: int, real: Tensor | None, state: Any, chunk: int = CHUNK,
    attend: Callable[[Tensor, Columns, Any, Any, int], Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """Attend to window, sinks and memory, and update the state: `chunk` rows at a time or as `attend` does it.

    The columns of a chunk are the window before it and its own tokens; all earlier tokens are in the state.
    """
    text = Text.of(q, k, v, window, real, state)
    return text.end((attend or attend_chunks)(text.q, text.columns, memory, state, chunk))


def attend_chunks(
    q: Tensor, columns: Columns, memory: Memory, state: Any, chunk: int = CHUNK, near: Near | None = None
) -> Tensor:
    """Attend chunk by chunk."""
    parts = []
    for start in range(0, q.shape[-2], chunk):
        rows = q[..., start : start + chunk, :].to(working_dtype(q))
        seen = (near or read_near)(rows, columns, state, start)
        parts.append(attend_chunk(rows, seen, columns, memory, state, start))
    return torch.cat(parts, -2)


def read_near(q: Tensor, columns: Columns, state: ExactState, start: int) -> PartialSoftmax:
    """Read windows and sinks.

    The row of token t has its own column `window` to the right of it. A column may be outside of what a row sees.
    """
    size, window, device = q.shape[-2], columns.window, q.device
    if not window and not state.sink_k.shape[-2]:
        return PartialSoftmax.of_nothing(q, columns.v.shape[-1])
    row = torch.arange(start, start + size, device=device)[:, None]
    column = torch.arange(start + 1, start + size + window, device=device)
    outside = torch.maximum(row + 1 - column, column - row - window)  # by how many places
    outside = torch.maximum(outside, (columns.empty[:, None] - column)[:, None])
    sinks = torch.arange(state.sink_k.shape[-2], device=device) - (columns.first[:, None, None] + row)
    k, v = (
        torch.cat([x[:, :, start + 1 : start + size + window], sink], -2)
        for x, sink in ((columns.k, state.sink_k), (columns.v, state.sink_v))
    )
    return PartialSoftmax.of(seen_logits(q, k, torch.cat([outside, sinks], -1)), v)


def attend_chunk(q: Tensor, near: PartialSoftmax, columns: Columns, memory: Memory, state: Any, start: int) -> Tensor:
    """Combine near and far tokens; move the columns that are then behind every window into the state.

    The row of token t has its own column `window` to the right of it; columns up to t are behind its window.
    """
    size = q.shape[-2]
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


def multiply_by_head(x: Tensor, y: Tensor) -> Tensor:
    """Multiply x (batch, heads, group, rows, dim) by y (batch, heads, dim, columns), which a group shares."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def exp_without_underflow(x: Tensor) -> Tensor:
    """Return e^x, and 0 where it would nearly underflow: a CPU is a hundred times slower with such numbers.

    Without gradients the result overwrites x: fresh memory takes longer than the computation.
    """
    lower_bound = math.log(torch.finfo(x.dtype).tiny) + 7
    final = not torch.is_grad_enabled()
    result = (x.clamp_min_(lower_bound) if final else x.clamp_min(lower_bound)).exp_()
    return torch.nn.functional.threshold(result, 1.1 * math.exp(lower_bound), 0.0, inplace=final)


def seen_logits(q: Tensor, k: Tensor, outside: Tensor) -> Tensor:
    """Return the logits of columns, near EMPTY where a row does not see the token."""
    logits = multiply_by_head(q, k.to(q.dtype).mT)
    penalty = outside.to(logits.dtype).clamp_min_(0).mul_(EMPTY)  # faster than torch.where
    logits[..., : outside.shape[-1]] += penalty[:, None, None]
    return logits


def combine(*readings: PartialSoftmax) -> Tensor:
    """Combine readings in one softmax: (…, rows, value_dim)."""
    top = functools.reduce(torch.maximum, [reading.lse.detach() for reading in readings])
    total, out = torch.zeros_like(top), torch.zeros_like(top)
    for reading in readings:
        share = (reading.bound - top).clamp_max(0).exp()  # above 0 only in rows that see nothing
        total, out = total + share * reading.total, out + share * reading.sum
    return out / total.clamp_min(torch.finfo(top.dtype).tiny)  # 0 for a row that sees nothing
