"""Feature maps in log-features: u for queries and w for keys, with exp(q·k) ≈ Σ_m exp(u_m + w_m).

Inputs are scaled so that the kernel is exp(q·k). Parameters are one set per KV head, shared by its query group.

  prf        random features exp(z·x - |x|²/2), unbiased for z ~ N(0, I); z and the weights are learned
  performer  the same, orthogonal and fixed (Choromanski et al. 2021)
  dijiang    the same on signed cosine transforms with quasi-Monte-Carlo norms; weights learned (Chen et al. 2024)
  hedgehog   softmax(±Wx) with a W of its own for queries and keys (Zhang et al. 2024)
  mlp        prf, apart for queries and keys, plus a small network; starts as prf
  codebook   a key is its nearest centre, a query scores the centres exactly
  clusters   a key is shared among near centres, a query scores centres of its own

Most are one product with a query or a key, folded once and used for many single tokens: u = query·q + query_bias,
w = key·k + key_bias, and further

  NONE       u is less query_norm |q|²/2, and w is less key_norm |k|²/2
  KEYS       w is the log of a softmax over all features
  NEAREST    w is 0 for the largest, the first of equal ones, and nothing for the others
  HALVES     u and w are logs of softmaxes over the first half and over the second, before u's bias is added
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .state import ABSENT, is_traced

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


class FeatureMap(nn.Module, ABC):
    """The methods of every feature map."""

    features: int
    _folded: tuple[tuple, Folded | None] | None = None

    @abstractmethod
    def reset(self, generator: torch.Generator) -> None:
        """Draw new parameters."""

    def forward(self, compute: Callable, x: Any) -> Any:
        """Compute one of this map's methods of x: what offloads parameters brings them for a forward."""
        return compute(x)

    @abstractmethod
    def queries(self, q: Tensor) -> Tensor:
        """Return u: (batch, heads, group, tokens, dim) -> (…, features)."""

    @abstractmethod
    def keys(self, k: Tensor) -> Tensor:
        """Return w: (batch, heads, tokens, dim) -> (…, features)."""

    def fold(self, root: float) -> Folded | None:
        """Return the map of q / root and of k root as one product with each, or None if it is more than that."""
        return None

    def forget_folded(self) -> None:
        self._folded = None

    def train(self, mode: bool = True) -> FeatureMap:
        self.forget_folded()
        return super().train(mode)

    @torch.no_grad()
    def folded(self, root: float = 1.0) -> Folded | None:
        """Fold, or return the last result while no parameter has changed.

        Fused optimizers and writes to `.data` change parameters unseen: therefore a pass with gradients, and the begin
        and end of training, discard the result.
        """
        held = list(self.parameters(recurse=False))
        if is_traced() or any(p.is_inference() for p in held):  # which do not count their changes
            return self.exactly_folded(root)
        stamp = root, self.training, *((p.data_ptr(), p._version) for p in held)
        if self._folded is None or self._folded[0] != stamp:
            self._folded = stamp, self.exactly_folded(root)
        return self._folded[1]

    def exactly_folded(self, root: float) -> Folded | None:
        """Fold without autocast, which multiplies in bf16: the result outlasts it."""
        with torch.autocast(next(self.parameters()).device.type, enabled=False):
            return self.fold(root)


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
        return k @ self.z.to(k.dtype).mT - half_square(k) + self.bias()[:, None].to(k.dtype)

    def bias(self) -> Tensor:
        return (self.log_weight - math.log(self.features)) / 2

    def fold(self, root: float) -> Folded:
        square = torch.full_like(self.z[:, 0, 0], root**2)
        return Folded(self.z / root, self.bias(), self.z * root, self.bias(), NONE, 1 / square, square)


class Hedgehog(FeatureMap):
    """u = log softmax(±Wq) + gain: the gain sets the far field's scale beside exact tokens."""

    def __init__(self, heads: int, dim: int, features: int) -> None:
        super().__init__()
        self.features = features
        self.query_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.key_weight = nn.Parameter(torch.zeros(heads, features // 2, dim))
        self.gain = nn.Parameter(torch.zeros(heads))

    @torch.no_grad()
    def reset(self, generator: torch.Generator) -> None:
        """Start at the identity, as its authors do; further rows are random directions."""
        rows, dim = self.query_weight.shape[1:]
        weight = draw_heads(gaussian, self.query_weight, generator)
        weight[:, :dim] = torch.eye(dim)[:rows]
        weight *= dim**0.25  # the scaled inputs are about this much smaller than the heads' own
        self.query_weight.copy_(weight)
        self.key_weight.copy_(weight)
        self.gain.zero_()

    def queries(self, q: Tensor) -> Tensor:
        x = self.both_signs(q.flatten(2, 3), self.query_weight) + self.gain[:, None, None].to(q.dtype)
        return x.unflatten(2, q.shape[2:4])

    def keys(self, k: Tensor) -> Tensor:
        return self.both_signs(k, self.key_weight)

    def fold(self, root: float) -> Folded:
        query, key = (torch.cat([x, -x], 1) for x in (self.query_weight / root, self.key_weight * root))
        none = torch.zeros_like(query[..., 0])
        return Folded(query, self.gain[:, None] + none, key, none, HALVES)

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

    def folded(self, root: float = 1.0) -> None:
        return None


class Codebook(FeatureMap):
    """u_m = q·c_m; w_m = 0 for the nearest centre and nothing for the others (while training: soft)."""

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

    def scorers(self) -> tuple[Tensor, Tensor]:
        """Return the centres and biases for queries."""
        return self.centres, torch.zeros_like(self.centres[..., 0])

    def fold(self, root: float) -> Folded:
        """Let the metric, and the sharpness where keys are shared, be part of the centres."""
        shared = self.training or self.soft
        centres = self.centres @ self.metric.mT
        sharpness = self.log_sharpness.exp() if shared else torch.ones_like(self.log_sharpness)
        key, bias = centres @ self.metric * root, -half_square(centres)[..., 0]
        query, query_bias = self.scorers()
        key, bias = key * sharpness[:, None, None], bias * sharpness[:, None]
        return Folded(query / root, query_bias, key, bias, KEYS if shared else NEAREST)


class Clusters(Codebook):
    """u_m = q·a_m + b_m with a, b that begin as c, 0; keys are shared as in training, so nothing changes after it."""

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

    def scorers(self) -> tuple[Tensor, Tensor]:
        return self.query_centres, self.bias


def half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


def gaussian(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, dim, generator=generator)


def orthogonal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Blocks of orthogonal directions with the norms of Gaussian vectors."""
    q, r = torch.linalg.qr(gaussian(-(-rows // dim) * dim, dim, generator).unflatten(0, (-1, dim)))
    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over rotations; without the signs biased
    return blocks.flatten(0, 1)[:rows] * gaussian(rows, dim, generator).norm(dim=-1, keepdim=True)


def cosine_transform(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Rows of sign-flipped cosine transforms; their norms are evenly spaced quantiles of a Gaussian vector's norm."""
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
