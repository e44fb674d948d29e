"""One softmax over parts: exact tokens, as logits and values, and a far field, as sums over features.

Shapes as in features_torch.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .columns import EMPTY, ExactState

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

    def rows(self, start: int, stop: int) -> PartialSoftmax:
        """Return the readings of some of the rows."""
        return self.changed(lambda x: x[..., start:stop, :])

    def changed(self, change: Callable[[Tensor], Tensor]) -> PartialSoftmax:
        """Apply `change` to the three tensors."""
        return PartialSoftmax(change(self.bound), change(self.total), change(self.sum))

    @staticmethod
    def joined(parts: list[PartialSoftmax]) -> PartialSoftmax:
        """Join the readings of successive rows."""
        bound, total, sums = ([getattr(part, name) for part in parts] for name in ("bound", "total", "sum"))
        return PartialSoftmax(torch.cat(bound, -2), torch.cat(total, -2), torch.cat(sums, -2))


class Memory(Protocol):
    """The far field of heads of one kind: it stores the tokens that leave their windows, and is read by queries.

    `incoming` (batch, rows) is false where a column is no token, or is a sink: the state stays bit for bit as it was.
    `place` (batch, rows) is the place of the row's query. Reading a chunk equals reading its tokens one by one.
    """

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> ExactState: ...

    def chunk(self, state: Any, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor) -> PartialSoftmax: ...

    def token(
        self, state: Any, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor | None, place: Tensor
    ) -> tuple[Tensor, Tensor, bool]: ...  # logits (batch, heads, group, n), values ([…, group], n, dim), is_share


def far_logits_exactly(u: Tensor, w: Tensor) -> Tensor:
    """Return log Σ_m exp(u_im + w_jm) at any magnitude, with tokens × tokens × features numbers in memory."""
    return torch.logsumexp(u[..., :, None, :] + w[:, :, None, None], -1)


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


def exact_part(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return logits and values of exact tokens for q (batch, heads, rows, dim); `visible` (batch, tokens), else all."""
    logits = q @ k.to(q.dtype).mT
    if visible is not None:  # many times faster than filling
        logits = logits + torch.where(visible, 0.0, EMPTY).to(logits.dtype)[:, None, None]
    return logits, v.to(q.dtype)


def softmax_over(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Compute one softmax over parts (logits, values), for rows that see something: (batch, heads, rows, dim).

    Values have one more dimension if they differ between rows.
    """
    weights = torch.cat([logits for logits, _ in parts], -1).softmax(-1).split([x.shape[-1] for x, _ in parts], -1)
    products = (
        x @ values if values.dim() == 4 else (x[..., None, :] @ values)[..., 0, :]
        for x, (_, values) in zip(weights, parts, strict=True)
    )
    return functools.reduce(torch.add, products)


def split_rows(x: Tensor, parts: int) -> Tensor:
    """(batch, …, parts · rows, dim) -> (batch · parts, …, rows, dim)"""
    return x.unflatten(-2, (parts, -1)).movedim(-3, 1).flatten(0, 1)


def join_rows(x: Tensor, parts: int) -> Tensor:
    """(batch · parts, …, rows, dim) -> (batch, …, parts · rows, dim)"""
    return x.unflatten(0, (-1, parts)).movedim(1, -3).flatten(-3, -2)


def seen_logits(q: Tensor, k: Tensor, outside: Tensor) -> Tensor:
    """Return the logits of columns, near EMPTY where a row does not see the token."""
    logits = multiply_by_head(q, k.to(q.dtype).mT)
    penalty = outside.to(logits.dtype).clamp_min_(0).mul_(EMPTY)  # faster than torch.where
    logits[..., : outside.shape[-1]] += penalty[:, None, None]
    return logits


def log_mass(parts: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the logarithm of each row's softmax denominator over parts: (…, 1)."""
    return torch.cat([logits for logits, _ in parts], -1).logsumexp(-1, keepdim=True)


def combine(*readings: PartialSoftmax) -> Tensor:
    """Combine readings in one softmax: (…, rows, value_dim)."""
    top = functools.reduce(torch.maximum, [reading.lse.detach() for reading in readings])
    total, out = torch.zeros_like(top), torch.zeros_like(top)
    for reading in readings:
        share = (reading.bound - top).clamp_max(0).exp()  # above 0 only in rows that see nothing
        total, out = total + share * reading.total, out + share * reading.sum
    return out / total.clamp_min(torch.finfo(top.dtype).tiny)  # 0 for a row that sees nothing
