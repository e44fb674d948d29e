"""One softmax over parts: exact tokens, given as logits and values, and a far field, given as sums over features.

Shapes as in features_torch.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .state import EMPTY, ExactState

Tensor = torch.Tensor


@dataclass
class Reading:
    """What rows see of some tokens, near or far, to meet others in one softmax: e^bound · total is their mass.

    Where `exactly` is given, a row none of whose logits reaches `bound` may have lost terms, and takes those readings
    in place of this one. `is_share`: the mass is a share of what the row sees exactly.
    """

    bound: Tensor  # (batch, heads, group, rows, 1)
    total: Tensor  # Σ e^(logit - bound)
    sum: Tensor  # Σ e^(logit - bound) v
    exactly: Callable[[], list[Reading]] | None = None
    is_share: bool = False

    @staticmethod
    def of(logits: Tensor, values: Tensor) -> Reading:
        """Read tokens, given as logits and values."""
        bound = logits.detach().amax(-1, keepdim=True)
        weights = exp_without_underflow(logits - bound)
        return Reading(bound, weights.sum(-1, keepdim=True), multiply_by_head(weights, values.to(weights.dtype)))

    @staticmethod
    def of_nothing(q: Tensor, dim: int) -> Reading:
        return Reading(
            q.new_full((*q.shape[:-1], 1), EMPTY), q.new_zeros(*q.shape[:-1], 1), q.new_zeros(*q.shape[:-1], dim)
        )

    @property
    def lse(self) -> Tensor:
        """The logarithm of the mass."""
        return self.total.clamp_min(torch.finfo(self.total.dtype).tiny).log() + self.bound

    def rows(self, start: int, stop: int) -> Reading:
        """Return the readings of some of the rows."""
        return self.changed(lambda x: x[..., start:stop, :])

    def changed(self, change: Callable[[Tensor], Tensor]) -> Reading:
        """Change the three tensors alike."""
        return Reading(change(self.bound), change(self.total), change(self.sum))

    @staticmethod
    def joined(parts: list[Reading]) -> Reading:
        """Join the readings of rows that follow each other."""
        bound, total, sums = ([getattr(part, name) for part in parts] for name in ("bound", "total", "sum"))
        return Reading(torch.cat(bound, -2), torch.cat(total, -2), torch.cat(sums, -2))


class Memory(Protocol):
    """A far field of heads that hold alike: what it makes of the tokens that leave their windows.

    `comes` (batch, rows) is false where a column is not a token, or is a sink: it leaves the state bit for bit. `place`
    (batch, rows) is that of the row's query. A chunk is the same as its tokens, one after the other.
    """

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> ExactState: ...

    def chunk(self, state: Any, q: Tensor, k: Tensor, v: Tensor, comes: Tensor, place: Tensor) -> Reading: ...

    def token(
        self, state: Any, q: Tensor, k: Tensor, v: Tensor, comes: Tensor | None, place: Tensor
    ) -> tuple[Tensor, Tensor, bool]: ...  # logits (batch, heads, group, n), values ([…, group], n, dim), is_share


def far_logits_exactly(u: Tensor, w: Tensor) -> Tensor:
    """log Σ_m exp(u_im + w_jm) at any magnitude: tokens × tokens × features in memory."""
    return torch.logsumexp(u[..., :, None, :] + w[:, :, None, None], -1)


def multiply_by_head(x: Tensor, y: Tensor) -> Tensor:
    """x (batch, heads, group, rows, dim) times y (batch, heads, dim, columns), which a group shares."""
    return (x.flatten(2, 3) @ y).unflatten(2, x.shape[2:4])


def exp_without_underflow(x: Tensor) -> Tensor:
    """e^x, and 0 for what would nearly underflow: a CPU takes a hundred times as long for what does.

    Written over x where nothing needs its gradient: fresh memory for each result takes longer than the result.
    """
    least = math.log(torch.finfo(x.dtype).tiny) + 7
    final = not torch.is_grad_enabled()
    result = (x.clamp_min_(least) if final else x.clamp_min(least)).exp_()
    return torch.nn.functional.threshold(result, 1.1 * math.exp(least), 0.0, inplace=final)


def exact_part(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Logits and values of exact tokens for q (batch, heads, rows, dim); all are seen, or `seen` (batch, tokens)."""
    logits = q @ k.to(q.dtype).mT
    if seen is not None:  # many times faster than filling
        logits = logits + torch.where(seen, 0.0, EMPTY).to(logits.dtype)[:, None, None]
    return logits, v.to(q.dtype)


def softmax_over(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One softmax over parts, given as logits and values, for rows that see something: (batch, heads, rows, dim).

    Values have one more dimension where each row has its own.
    """
    weights = torch.cat([logits for logits, _ in parts], -1).softmax(-1).split([x.shape[-1] for x, _ in parts], -1)
    read = (
        x @ values if values.dim() == 4 else (x[..., None, :] @ values)[..., 0, :]
        for x, (_, values) in zip(weights, parts, strict=True)
    )
    return functools.reduce(torch.add, read)


def split_rows(x: Tensor, parts: int) -> Tensor:
    """(batch, …, parts · rows, dim) -> (batch · parts, …, rows, dim)"""
    return x.unflatten(-2, (parts, -1)).movedim(-3, 1).flatten(0, 1)


def join_rows(x: Tensor, parts: int) -> Tensor:
    """(batch · parts, …, rows, dim) -> (batch, …, parts · rows, dim)"""
    return x.unflatten(0, (-1, parts)).movedim(1, -3).flatten(-3, -2)


def attend_seen(q: Tensor, k: Tensor, v: Tensor, late: Tensor, level: Tensor | None = None) -> Tensor:
    """One softmax over tokens, of which rows see some, and slots behind them, whose logits have a level added.

    q (batch, heads, group, rows, dim); k, v (batch, heads, columns, dim); late (batch, rows, tokens) how many places a
    token comes too late to be seen, 0 or less where it is; level (batch, heads, slots). A row that sees nothing gets a
    mean of something.
    """
    logits = seen_logits(q, k, late)
    if level is not None:
        logits[..., late.shape[-1] :] += level[:, :, None, None]
    return multiply_by_head(logits.softmax(-1), v.to(q.dtype))


def seen_logits(q: Tensor, k: Tensor, late: Tensor) -> Tensor:
    """Logits of columns, near EMPTY where a token comes too late."""
    logits = multiply_by_head(q, k.to(q.dtype).mT)
    more = late.to(logits.dtype).clamp_min_(0).mul_(EMPTY)  # faster than to choose
    logits[..., : late.shape[-1]] += more[:, None, None]
    return logits


def log_mass(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The logarithm of what the softmax over parts sums up, for each row: (…, 1)."""
    return torch.cat([logits for logits, _ in parts], -1).logsumexp(-1, keepdim=True)


def combine(*readings: Reading) -> Tensor:
    """One softmax over all that was read: (…, rows, value_dim)."""
    top = functools.reduce(torch.maximum, [each.lse.detach() for each in readings])
    total, out = torch.zeros_like(top), torch.zeros_like(top)
    for each in readings:
        share = (each.bound - top).clamp_max(0).exp()  # only above 0 in rows that see nothing
        total, out = total + share * each.total, out + share * each.sum
    return out / total.clamp_min(torch.finfo(top.dtype).tiny)  # a row that sees nothing gets 0
