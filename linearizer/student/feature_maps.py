"""Heads with features: u for queries and w for keys, with exp(q·k) ≈ Σ_m exp(u_m + w_m).

Inputs are scaled so that the kernel is exp(q·k). Parameters are one set per KV head, shared by its query group.

  prf        random features exp(z·x - |x|²/2), unbiased for z ~ N(0, I); z and the weights are learned
  performer  the same, orthogonal and fixed (Choromanski et al. 2021)
  dijiang    the same on signed cosine transforms with quasi-Monte-Carlo norms; weights learned (Chen et al. 2024)
  hedgehog   softmax(±Wx) with a W of its own for queries and keys (Zhang et al. 2024)
  mlp        prf, separate for queries and keys, plus a small network; starts as prf
  clusters   a key is shared among near centres, a query scores centres of its own

A row sees far keys only as sums, so a feature stores two things about all keys that have left the window:
  level_m = log Σ_j exp(w_jm)    and    mean_m = Σ_j exp(w_jm - level_m) v_j.
To a query the feature is then one more token, with the logit u_m + level_m and the value mean_m. Every exponent is at
most zero, so nothing overflows; a feature that has seen nothing has level EMPTY.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .attention_of_student import Scores
from .columns import ABSENT, EMPTY, HEADROOM, ExactState, FeatureState
from .features_torch import (
    PartialSoftmax,
    attend_text_with_features,
    exp_without_underflow,
    multiply_by_head,
)
from .layer_student import find_kernels
from .modeling_linearized import LinearizedConfig, LinearizedForCausalLM
from .other_heads import OtherGroup

__all__ = ["LinearizedConfig", "LinearizedForCausalLM", "make_group"]

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

    def of_queries(self, q: Tensor) -> Tensor:
        """Return u: (batch, heads, rows, dim) -> (…, features)."""
        return self.keys(q)

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

    def queries(self, q: Tensor) -> Tensor:
        return q @ self.query_centres.to(q.dtype)[:, None].mT + self.bias.to(q.dtype)[:, None, None]

    def keys(self, k: Tensor) -> Tensor:
        metric, centres = self.metric.to(k.dtype), self.centres.to(k.dtype)
        k, centres = k @ metric.mT, centres @ metric.mT
        closeness = k @ centres.mT - half_square(centres).mT
        return (closeness * self.log_sharpness.exp().to(k.dtype)[:, None, None]).log_softmax(-1)


def half_square(x: Tensor) -> Tensor:
    return x.square().sum(-1, keepdim=True) / 2


@dataclass(frozen=True)
class ScaledMap:
    """The memory of features, for queries multiplied by the scale of the scores and unscaled keys.

    For each feature it stores the logarithm of its weight, and the mean of its values.
    """

    feature_map: FeatureMap
    scale: float = 1.0

    def queries(self, q: Tensor) -> Tensor:
        return self.feature_map(self.feature_map.queries, q / self.scale**0.5)

    def keys(self, k: Tensor) -> Tensor:
        return self.feature_map(self.feature_map.keys, k * self.scale**0.5)

    def empty(self, k: Tensor, v: Tensor, window: int, sinks: int) -> FeatureState:
        return FeatureState.empty(k, v, window, sinks, self.feature_map.features)

    def chunk(
        self, state: FeatureState, q: Tensor, k: Tensor, v: Tensor, incoming: Tensor, place: Tensor
    ) -> PartialSoftmax:
        """Read and merge keys; the bound is HEADROOM below what a row's features could reach with the largest keys.

        The stabilisers depend on all keys of the chunk, also on those after the row.
        """
        u, w, level = self.queries(q), self.keys(k), state.level[:, :, None]
        if not incoming.all():
            w = w.masked_fill(~incoming[:, None, :, None], ABSENT)
        causal = torch.ones(w.shape[-2], w.shape[-2], dtype=w.dtype, device=w.device).tril()
        exactly = partial(read_features_exactly, u, w, v, causal, state.level, state.mean)
        ceiling = torch.maximum(w.detach().amax(-2, keepdim=True), level.detach())
        key, stored = (exp_without_underflow(x - (ceiling - HEADROOM)) for x in (w, level))
        u = u + ceiling[:, :, None]
        bound = u.detach().amax(-1, keepdim=True)
        query = exp_without_underflow(u.sub_(bound))
        product = multiply_by_head(query, key.mT).mul_(causal)  # several times faster than two calls of tril
        total = product.sum(-1, keepdim=True) + multiply_by_head(query, stored.mT)
        sums = multiply_by_head(product, v).add_(multiply_by_head(query, stored.mT * state.mean))
        mass = key.sum(-2).clamp_min(torch.finfo(q.dtype).tiny)
        merge_into_state(state, mass.log() + ceiling[:, :, 0] - HEADROOM, key.mT @ v / mass[..., None])
        return PartialSoftmax(bound - HEADROOM, total, sums, exactly)


def read_features_exactly(
    u: Tensor, w: Tensor, v: Tensor, mask: Tensor, level: Tensor, mean: Tensor
) -> list[PartialSoftmax]:
    """Read each key of a chunk by itself, and the features of the state: right at any magnitude, and slow."""
    logits = far_logits_exactly(u, w).masked_fill(mask == 0, EMPTY)
    return [PartialSoftmax.of(logits, v), PartialSoftmax.of(u + level[:, :, None, None], mean)]


def merge_into_state(state: FeatureState, level: Tensor, mean: Tensor) -> None:
    """Merge keys, given as levels and means, into the state."""
    total = torch.logaddexp(state.level, level)
    state.mean = (state.level - total).exp()[..., None] * state.mean + (level - total).exp()[..., None] * mean
    state.level = total


def far_logits_exactly(u: Tensor, w: Tensor) -> Tensor:
    """Return log Σ_m exp(u_im + w_jm) at any magnitude, with tokens × tokens × features numbers in memory."""
    return torch.logsumexp(u[..., :, None, :] + w[:, :, None, None], -1)


FEATURE_MAPS: dict[str, Callable[[int, int, int], FeatureMap]] = {
    **{kind: partial(PositiveFeatures, kind=kind) for kind in ("prf", "performer", "dijiang")},
    "hedgehog": Hedgehog,
    "mlp": MLP,
    "clusters": Clusters,
}


def make_group(head: dict, heads: list[int], sinks: int, dims: tuple[int, int], feature_map: str) -> FeatureGroup:
    """Make the group of KV heads with these features."""
    made = FEATURE_MAPS[feature_map](len(heads), dims[0], head["features"])
    return FeatureGroup(heads, head.get("window", 0), sinks, head.get("bits", 16), made)


class FeatureGroup(OtherGroup):
    """KV heads with a window and a far field: features here, a memory by a rule in matrix_rule.py."""

    def __init__(self, heads: list[int], window: int, sinks: int, bits: int, feature_map: Any) -> None:
        super().__init__(heads, window, sinks, bits, False)  # features need keys as they are
        self.features, self.feature_map = feature_map.features, feature_map

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: ExactState | None,
        scores: Scores | None,
    ) -> tuple[Tensor, ExactState]:  # fmt: skip
        if scores is not None:
            raise ValueError("features and rules follow neither capped scores nor learned sinks: let heads hold slots")
        state = self.empty(k, v, self.window, scale) if state is None else state
        kernels = find_kernels()
        attend = attend_text_with_features if kernels is None else kernels.linear_attention
        return attend(q * scale, k, v, self.memory(scale), self.window, real, state), state

    def memory(self, scale: float) -> Any:
        """Return the far field for queries multiplied by the scale of the scores."""
        return ScaledMap(self.feature_map, scale)

    def empty(self, k: Tensor, v: Tensor, window: int, scale: float) -> ExactState:
        state: ExactState = self.memory(scale).empty(k, v, window, self.sinks)
        return state
