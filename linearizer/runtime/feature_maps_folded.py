"""Feature maps whose log-features are one product with a query or a key: folded once, used for many single tokens.

u = query·q + query_bias, w = key·k + key_bias, and further:

  NONE     u is less query_norm |q|²/2, and w is less key_norm |k|²/2
  KEYS     w is the log of a softmax over all features
  NEAREST  w is 0 for the largest, the first of equal ones, and nothing for the others
  HALVES   u and w are logs of softmaxes over the first half and over the second, before u's bias is added
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .state import ABSENT

Tensor = torch.Tensor
NONE, KEYS, NEAREST, HALVES = range(4)


@dataclass(frozen=True)
class Folded:
    """The products and biases, for queries and keys with the scale that they carry in attention."""

    query: Tensor  # (heads, features, dim)
    query_bias: Tensor  # (heads, features)
    key: Tensor
    key_bias: Tensor
    shares: int
    query_norm: Tensor | None = None  # (heads,)
    key_norm: Tensor | None = None

    @property
    def features(self) -> int:
        return self.query.shape[1]

    def folded(self) -> Folded:
        return self

    def queries(self, q: Tensor) -> Tensor:
        u = product(q.flatten(2, 3), self.query, self.query_norm)
        if self.shares == HALVES:
            u = halves(u)
        return u.add_(self.query_bias[:, None].to(u.dtype)).unflatten(2, q.shape[2:4])

    def keys(self, k: Tensor) -> Tensor:
        w = product(k, self.key, self.key_norm).add_(self.key_bias[:, None].to(k.dtype))
        if self.shares == NEAREST:
            return torch.full_like(w, ABSENT).scatter(-1, w.argmax(-1, keepdim=True), 0.0)
        return {NONE: lambda x: x, KEYS: lambda x: x.log_softmax(-1), HALVES: halves}[self.shares](w)


def product(x: Tensor, weight: Tensor, norm: Tensor | None) -> Tensor:
    result = x @ weight.to(x.dtype).mT
    if norm is None:
        return result
    return result.sub_(x.square().sum(-1, keepdim=True) * (norm / 2)[:, None, None].to(x.dtype))


def halves(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, -1)).log_softmax(-1).flatten(-2)
