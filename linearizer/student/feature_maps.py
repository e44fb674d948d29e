"""Feature maps in log-features: u for queries and w for keys, with exp(q·k) ≈ Σ_m exp(u_m + w_m).

Inputs are scaled so that the kernel is exp(q·k). Parameters are one set per KV head, shared by its query group.

  prf        random features exp(z·x - |x|²/2), unbiased for z ~ N(0, I); z and the weights are learned
  performer  the same, orthogonal and fixed (Choromanski et al. 2021)
  dijiang    the same on signed cosine transforms with quasi-Monte-Carlo norms; weights learned (Chen et al. 2024)
  hedgehog   softmax(±Wx) with a W of its own for queries and keys (Zhang et al. 2024)
  mlp        prf, separate for queries and keys, plus a small network; starts as prf
  clusters   a key is shared among near centres, a query scores centres of its own
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor


class FeatureMap(nn.Module, ABC):
    """The methods of every feature map."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, compute: Callable, x: Any) -> Any:
        """Call one of this map's methods with x: offloading libraries load parameters for a forward only."""
        return compute(x)

    def queries(self, q: Tensor) -> Tensor:
        """Return u: (batch, heads, group, tokens, dim) -> (…, features)."""
        return self.of_queries(q.flatten(2, 3)).unflatten(2, q.shape[2:4])

    @abstractmethod
    def of_queries(self, q: Tensor) -> Tensor:
        """Return u: (batch, heads, rows, dim) -> (…, features)."""

    @abstractmethod
    def keys(self, k: Tensor) -> Tensor:
        """Return w: (batch, heads, tokens, dim) -> (…, features)."""


class PositiveFeatures(FeatureMap):
    """u = z·q - |q|²/2 + (log α - log M)/2, and the same for keys."""

    def __init__(self, heads: int, dim: int, features: int, kind: str) -> None:
        super().__init__(features)
        self.kind = kind
        self.z = nn.Parameter(torch.zeros(heads, features, dim), requires_grad=kind == "prf")
        self.log_weight = nn.Parameter(torch.zeros(heads, features), requires_grad=kind != "performer")

    def keys(self, k: Tensor) -> Tensor:
        bias = (self.log_weight - math.log(self.features)) / 2
        return k @ self.z.to(k.dtype).mT - half_square(k) + bias[:, None].to(k.dtype)

    def of_queries(self, q: Tensor) -> Tensor:
        return self.keys(q)


class Hedgehog(FeatureMap):
    """u = log softmax(±Wq) + gain; the gain sets the far field's weight relative to exact tokens."""

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__(features)
        self.query_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.key_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.gain = nn.Parameter(torch.zeros(heads))

    def of_queries(self, q: Tensor) -> Tensor:
        return self.both_signs(q, self.query_weight) + self.gain[:, None, None].to(q.dtype)

    def keys(self, k: Tensor) -> Tensor:
        return self.both_signs(k, self.key_weight)

    @staticmethod
    def both_signs(x: Tensor, weight: Tensor) -> Tensor:
        x = x @ weight.to(x.dtype).mT
        return torch.cat([x.log_softmax(-1), (-x).log_softmax(-1)], -1)


class Side(nn.Module):
    """One side of `mlp`: z·x - norm·|x|²/2 + bias + W₂ gelu(W₁ x)."""

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.zeros(heads, features, dim))
        self.norm = nn.Parameter(torch.zeros(heads))
        self.bias = nn.Parameter(torch.zeros(heads, features))
        self.hidden = nn.Parameter(torch.zeros(heads, 2 * dim, dim))
        self.out = nn.Parameter(torch.zeros(heads, features, 2 * dim))

    def forward(self, x: Tensor) -> Tensor:
        z, norm, bias, hidden, out = (p.to(x.dtype) for p in (self.z, self.norm, self.bias, self.hidden, self.out))
        network = nn.functional.gelu(x @ hidden.mT) @ out.mT
        return x @ z.mT - norm[:, None, None] * half_square(x) + bias[:, None] + network


class MLP(FeatureMap):
    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__(features)
        self.query_side, self.key_side = Side(heads, dim, features), Side(heads, dim, features)

    def of_queries(self, q: Tensor) -> Tensor:
        out: Tensor = self.query_side(q)
        return out

    def keys(self, k: Tensor) -> Tensor:
        out: Tensor = self.key_side(k)
        return out


class Clusters(FeatureMap):
    """u_m = q·a_m + b_m; w is the logarithm of a key's shares among centres c, by how near each is; a starts at c."""

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__(features)
        self.centres = nn.Parameter(torch.zeros(heads, features, dim))
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim))  # distances are |metric·(k - c)|
        self.log_sharpness = nn.Parameter(torch.zeros(heads))
        self.query_centres = nn.Parameter(torch.zeros(heads, features, dim))
        self.bias = nn.Parameter(torch.zeros(heads, features))

    def of_queries(self, q: Tensor) -> Tensor:
        return q @ self.query_centres.to(q.dtype).mT + self.bias.to(q.dtype)[:, None]

    def keys(self, k: Tensor) -> Tensor:
        metric, centres = self.metric.to(k.dtype), self.centres.to(k.dtype)
        k, centres = k @ metric.mT, centres @ metric.mT
        closeness = k @ centres.mT - half_square(centres).mT
        return (closeness * self.log_sharpness.exp().to(k.dtype)[:, None, None]).log_softmax(-1)


def half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


FEATURE_MAPS: dict[str, Callable[[int, int, int], FeatureMap]] = {
    **{kind: partial(PositiveFeatures, kind=kind) for kind in ("prf", "performer", "dijiang")},
    "hedgehog": Hedgehog,
    "mlp": MLP,
    "clusters": Clusters,
}
