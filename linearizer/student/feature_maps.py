"""Feature maps in log-features: u for queries and w for keys, with exp(q·k) ≈ Σ_m exp(u_m + w_m).

Inputs are scaled so that the kernel is exp(q·k). Parameters are one set per KV head, shared by its query group.

  prf        random features exp(z·x - |x|²/2), unbiased for z ~ N(0, I); z and the weights are learned
  performer  the same, orthogonal and fixed (Choromanski et al. 2021)
  dijiang    the same on signed cosine transforms with quasi-Monte-Carlo norms; weights learned (Chen et al. 2024)
  hedgehog   softmax(±Wx) with a W of its own for queries and keys (Zhang et al. 2024)
  mlp        prf, separate for queries and keys, plus a small network; starts as prf
  codebook   a key is its nearest centre, a query scores the centres exactly
  clusters   a key is shared among near centres, a query scores separate centres
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .columns import ABSENT

Tensor = torch.Tensor


class FeatureMap(nn.Module, ABC):
    """The methods of every feature map."""

    features: int

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Draw new parameters."""

    def forward(self, compute: Callable, x: Any) -> Any:
        """Call one of this map's methods with x: offloading libraries load parameters for a forward only."""
        return compute(x)

    @abstractmethod
    def queries(self, q: Tensor) -> Tensor:
        """Return u: (batch, heads, group, tokens, dim) -> (…, features)."""

    @abstractmethod
    def keys(self, k: Tensor) -> Tensor:
        """Return w: (batch, heads, tokens, dim) -> (…, features)."""


class PositiveFeatures(FeatureMap):
    """u = z·q - |q|²/2 + (log α - log M)/2, and the same for keys."""

    def __init__(self, heads: int, dim: int, features: int, draw: Callable, learn_z: bool, learn_weight: bool) -> None:
        super().__init__()
        self.features, self.draw = features, draw
        self.z = nn.Parameter(torch.zeros(heads, features, dim), requires_grad=learn_z)
        self.log_weight = nn.Parameter(torch.zeros(heads, features), requires_grad=learn_weight)

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.z.copy_(draw_heads(self.draw, self.z, generator))
        self.log_weight.zero_()

    def queries(self, q: Tensor) -> Tensor:
        return self.keys(q.flatten(2, 3)).unflatten(2, q.shape[2:4])

    def keys(self, k: Tensor) -> Tensor:
        bias = (self.log_weight - math.log(self.features)) / 2
        return k @ self.z.to(k.dtype).mT - half_square(k) + bias[:, None].to(k.dtype)


class Hedgehog(FeatureMap):
    """u = log softmax(±Wq) + gain; the gain sets the far field's weight relative to exact tokens."""

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.query_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.key_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.gain = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Start at the identity, as in the paper; further rows are random directions."""
        rows, dim = self.query_weight.shape[1:]
        weight = draw_heads(gaussian, self.query_weight, generator)
        weight[:, :dim] = torch.eye(dim)[:rows]
        weight *= dim**0.25  # scaling made the heads' inputs smaller by about this factor
        self.query_weight.copy_(weight)
        self.key_weight.copy_(weight)
        self.gain.zero_()

    def queries(self, q: Tensor) -> Tensor:
        x = self.both_signs(q.flatten(2, 3), self.query_weight) + self.gain[:, None, None].to(q.dtype)
        return x.unflatten(2, q.shape[2:4])

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

    @torch.no_grad()
    def reset(self, z: Tensor, generator: torch.Generator) -> None:
        self.z.copy_(z)
        self.norm.fill_(1.0)
        self.bias.fill_(-math.log(z.shape[1]) / 2)
        self.hidden.copy_(draw_heads(gaussian, self.hidden, generator) / math.sqrt(z.shape[-1]))
        self.out.zero_()

    def forward(self, x: Tensor) -> Tensor:
        z, norm, bias, hidden, out = (p.to(x.dtype) for p in (self.z, self.norm, self.bias, self.hidden, self.out))
        network = nn.functional.gelu(x @ hidden.mT) @ out.mT
        return x @ z.mT - norm[:, None, None] * half_square(x) + bias[:, None] + network


class MLP(FeatureMap):
    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.query_side, self.key_side = Side(heads, dim, features), Side(heads, dim, features)

    def reset(self, generator: torch.Generator) -> None:
        z = draw_heads(gaussian, self.query_side.z, generator)
        self.query_side.reset(z, generator)
        self.key_side.reset(z, generator)

    def queries(self, q: Tensor) -> Tensor:
        return self.query_side(q.flatten(2, 3)).unflatten(2, q.shape[2:4])

    def keys(self, k: Tensor) -> Tensor:
        return self.key_side(k)


class Codebook(FeatureMap):
    """u_m = q·c_m; w_m = 0 for the nearest centre, ABSENT for the others (soft in training)."""

    soft = False

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.centres = nn.Parameter(torch.zeros(heads, features, dim))
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim))  # distances are |metric·(k - c)|
        self.log_sharpness = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        self.centres.copy_(draw_heads(gaussian, self.centres, generator))
        self.metric.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.log_sharpness.zero_()

    def queries(self, q: Tensor) -> Tensor:
        return q @ self.centres.to(q.dtype)[:, None].mT

    def keys(self, k: Tensor) -> Tensor:
        metric, centres = self.metric.to(k.dtype), self.centres.to(k.dtype)
        k, centres = k @ metric.mT, centres @ metric.mT
        closeness = k @ centres.mT - half_square(centres).mT
        if self.training or self.soft:
            return (closeness * self.log_sharpness.exp().to(k.dtype)[:, None, None]).log_softmax(-1)
        nearest = closeness.argmax(-1, keepdim=True)
        return torch.full_like(closeness, ABSENT).scatter(-1, nearest, 0.0)


class Clusters(Codebook):
    """u_m = q·a_m + b_m; a and b start at c and 0. Keys are shared among centres after training, too."""

    soft = True

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__(heads, dim, features)
        self.query_centres = nn.Parameter(torch.zeros(heads, features, dim))
        self.bias = nn.Parameter(torch.zeros(heads, features))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        super().reset(generator)
        self.query_centres.copy_(self.centres)
        self.bias.zero_()

    def queries(self, q: Tensor) -> Tensor:
        return q @ self.query_centres.to(q.dtype)[:, None].mT + self.bias.to(q.dtype)[:, None, None]


def half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def gaussian(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, dim, generator=generator)


def orthogonal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw blocks of orthogonal directions with the norms of Gaussian vectors."""
    q, r = torch.linalg.qr(gaussian(-(-rows // dim) * dim, dim, generator).unflatten(0, (-1, dim)))
    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over rotations; without the signs biased
    return blocks.flatten(0, 1)[:rows] * gaussian(rows, dim, generator).norm(dim=-1, keepdim=True)


def cosine_transform(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw rows of sign-flipped cosine transforms; their norms are evenly spaced quantiles of a Gaussian's norm."""
    index = torch.arange(dim, dtype=torch.float32)
    transform = torch.cos(math.pi / dim * (index + 0.5) * index[:, None]) * math.sqrt(2 / dim)
    transform[0] /= math.sqrt(2)
    signs = torch.randint(0, 2, (-(-rows // dim), 1, dim), generator=generator) * 2.0 - 1
    directions = (transform * signs).flatten(0, 1)[:rows]
    norms = gaussian(4096, dim, generator).norm(dim=-1).quantile((torch.arange(rows) + 0.5) / rows)
    return directions * norms[torch.randperm(rows, generator=generator), None]


def draw_heads(draw: Callable, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw (rows, dim) for every head of a parameter (heads, rows, dim)."""
    return torch.stack([draw(*like.shape[1:], generator) for _ in range(like.shape[0])])


FEATURE_MAPS: dict[str, Callable[[int, int, int], FeatureMap]] = {
    "prf": lambda heads, dim, features: PositiveFeatures(heads, dim, features, gaussian, True, True),
    "performer": lambda heads, dim, features: PositiveFeatures(heads, dim, features, orthogonal, False, False),
    "dijiang": lambda heads, dim, features: PositiveFeatures(heads, dim, features, cosine_transform, False, True),
    "hedgehog": Hedgehog,
    "mlp": MLP,
    "codebook": Codebook,
    "clusters": Clusters,
}
