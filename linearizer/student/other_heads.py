"""Heads that keep all tokens, and what all heads without slots share: the entry of checkpoints with such heads.

Their windows and caches may have few bits a number. Sinks are then stored apart, exactly, and take their places in the
window again when it is unpacked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from .attention_of_student import SINK_TYPE, Scores, as_sink, pack, round_vectors, tensors, unpack, working_dtype
from .layer_student import has_stored_basis
from .modeling_linearized import LinearizedConfig, LinearizedForCausalLM

__all__ = ["LinearizedConfig", "LinearizedForCausalLM", "make_group"]

Tensor = torch.Tensor
PACKED = ("window_k", "window_v", "k", "v")
SINKS = ("sink_k", "sink_v")
UNSEEN = -1e30  # the logit of an unseen token: finite, so that a row of padding is a number


def make_group(head: dict, heads: list[int], sinks: int, dims: tuple[int, int], feature_map: str) -> OtherGroup:
    """Make the group of KV heads that keep all tokens."""
    return SoftmaxGroup(heads, head.get("bits", 16), sinks, *dims)


@dataclass
class SoftmaxState:
    """The cache of softmax heads; those of few bits also store their sinks exactly."""

    k: Tensor  # (batch, heads, tokens, dim)
    v: Tensor
    real: Tensor  # (batch, tokens)
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor


class OtherGroup(nn.Module):
    """KV heads of one layer that keep the same; `heads` are their places in the layer."""

    kind = None  # kernels serve windows and slots alone
    merger = None

    def __init__(self, heads: list[int], window: int, sinks: int, bits: int, has_basis: bool) -> None:
        super().__init__()
        self.heads, self.window, self.sinks, self.bits, self.has_basis = heads, window, sinks, bits, has_basis

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: Any,
        scores: Scores | None = None,
    ) -> tuple[Tensor, Any]:  # fmt: skip
        if self.bits == 16:
            return self.attend(q, k, v, scale, real, state, scores)
        is_sink = find_sinks(state, q.shape[-2], real, self.sinks, k.device)
        k, v = (torch.where(is_sink, as_sink(x, self.bits), round_vectors(x, self.bits)) for x in (k, v))
        opened = state and unpack_state(state, self.bits, k.dtype)
        part, after = self.attend(q, k, v, scale, real, opened, scores)
        return part, pack_state(after, self.bits, state)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: Any, scores: Scores | None
    ) -> tuple[Tensor, Any]:
        raise NotImplementedError


class SoftmaxGroup(OtherGroup):
    """KV heads that keep their whole cache, for softmax."""

    def __init__(self, heads: list[int], bits: int, sinks: int, key_dim: int, value_dim: int) -> None:
        exact_sinks = sinks if bits < 16 else 0  # stored apart from the other tokens
        super().__init__(heads, 0, exact_sinks, bits, has_stored_basis(bits, key_dim, value_dim or key_dim))

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, state: SoftmaxState | None,
        scores: Scores | None,
    ) -> tuple[Tensor, SoftmaxState]:  # fmt: skip
        tokens, padded = q.shape[-2], real is not None or (state is not None and not state.real.all())
        real = torch.ones(k.shape[0], tokens, dtype=torch.bool, device=k.device) if real is None else real
        if state is not None:
            k, v = torch.cat([state.k, k], -2), torch.cat([state.v, v], -2)
            real = torch.cat([state.real, real], -1)
        mask, after = None, SoftmaxState(k, v, real, *first_columns(k, v, real, self.sinks))
        if padded or scores is not None or (state is not None and tokens > 1):
            causal = torch.ones(tokens, k.shape[-2], dtype=torch.bool, device=k.device).tril(k.shape[-2] - tokens)
            mask = (causal & real[:, None])[:, None]
        if scores is not None and mask is not None:
            return weigh_all(q * scale, k, v, mask, scores), after
        causal_alone = mask is None and bool(tokens > 1)
        out = scaled_dot_product_attention(
            q.flatten(1, 2), k, v, attn_mask=mask, is_causal=causal_alone, scale=scale, enable_gqa=True
        )
        return out.unflatten(1, q.shape[1:3]), after


def weigh_all(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Attend to all tokens that the mask (batch, 1, tokens, columns) shows."""
    work = working_dtype(v)
    logits = (q.to(work) @ k.to(work)[:, :, None].mT).flatten(0, 1)
    bias = torch.where(mask, 0.0, UNSEEN).to(work).repeat_interleave(k.shape[1], 0)
    weights = scores.of_heads(len(q)).weights(logits, bias, slice(None))
    return weights.unflatten(0, k.shape[:2]) @ v.to(work)[:, :, None]


def find_sinks(state: Any, tokens: int, real: Tensor | None, sinks: int, device: torch.device) -> Tensor:
    """Return which of the new tokens are sinks: (batch, 1, tokens, 1)."""
    place = torch.arange(tokens, device=device)[None] if real is None else real.cumsum(-1) - 1
    place = place if state is None else place + tokens_read(state)[:, None]
    is_sink = place < sinks if real is None else (place < sinks) & real
    return is_sink[:, None, :, None]


def tokens_read(state: Any) -> Tensor:  # (batch,)
    return state.count if hasattr(state, "window_k") else state.real.sum(-1)


def least_count(count: Tensor) -> int:
    """Return the least count on a CPU, and 0 elsewhere: waiting for a device would take longer."""
    return min(count.tolist()) if count.device.type == "cpu" and not torch.compiler.is_compiling() else 0


def pack_state(state: Any, bits: int, before: Any = None) -> Any:
    """Return a state with keys and values packed, except sinks; in a softmax cache only new rows change."""
    rows = 0 if before is None or hasattr(state, "window_k") else before.k.shape[-2]
    packed = {name: pack(x[:, :, rows:], bits) for name, x in tensors(state).items() if name in PACKED}
    if rows:
        packed = {name: torch.cat([getattr(before, name), x], -2) for name, x in packed.items()}
    return replace(state, **packed, **{name: getattr(state, name).to(SINK_TYPE) for name in SINKS})


def unpack_state(state: Any, bits: int, dtype: torch.dtype) -> Any:
    """Return a state with unpacked keys and values, and exact sinks in its window or softmax cache."""
    vectors = {name: unpack(x, bits, dtype) for name, x in tensors(state).items() if name in PACKED}
    state = replace(state, **vectors, **{name: getattr(state, name).to(dtype) for name in SINKS})
    sinks, rows = state.sink_k.shape[-2], next(iter(vectors.values())).shape[-2]
    if not sinks or not rows:
        return state
    if hasattr(state, "window_k"):
        if least_count(state.count) >= rows + sinks:
            return state
        row, newest = torch.arange(rows, device=state.sink_k.device), state.count[:, None] - 1
        place = newest - (newest - row) % rows  # of the newest token in each row of the ring; below 0: none
    else:
        place = torch.where(state.real, state.real.cumsum(-1) - 1, sinks)
    is_sink = ((place >= 0) & (place < sinks))[:, None, :, None]
    at = place.clamp(0, sinks - 1)[:, None, :, None]
    exact = {}
    for name, x in vectors.items():
        sink = getattr(state, f"sink_{name[-1]}")
        exact[name] = torch.where(is_sink, sink.gather(2, at.expand(*x.shape[:2], -1, x.shape[-1])), x)
    return replace(state, **exact)


def first_columns(k: Tensor, v: Tensor, real: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
    """Take the first real tokens of a softmax cache (batch, heads, tokens, dim); any others if there are fewer."""
    if not sinks:
        return k[:, :, :0], v[:, :, :0]
    order = (~real).to(torch.int8).argsort(dim=-1, stable=True)
    at = order[:, torch.arange(sinks, device=k.device).clamp(max=k.shape[-2] - 1)][:, None, :, None]
    return k.take_along_dim(at, 2), v.take_along_dim(at, 2)
