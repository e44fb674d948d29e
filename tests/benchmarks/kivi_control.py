"""A control: the whole cache in few bits, the usual remedy for a large cache. It grows with the text.

Keys are rounded per channel, in groups of tokens; values per token; both after a rotation, with a scale and an offset
of 16 bits each (after KIVI, 2402.02750, and QuaRot, 2404.00456). The newest tokens are exact: at least RECENT, and more
until a group is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from linearizer.evaluate.subjects import Subject
from linearizer.plan.allocation import Allocation, heads_replaced
from linearizer.plan.head_bytes import Head, Layer, token_bytes
from linearizer.student.layer_student import rotate
from linearizer.student.modeling_linearized import LinearizedForCausalLM

RIVAL_BITS = (2, 3, 4)
RECENT = 16  # tokens
GROUP = 32  # tokens whose keys share a scale and an offset in each channel
OFFSET_BYTES = 4  # of a scale and an offset

Tensor = torch.Tensor


@dataclass
class ReadTokens:
    """The rotated keys and values of one layer, as they are attended to: (batch, KV heads, tokens, dim)."""

    rounded_k: Tensor
    rounded_v: Tensor
    k: Tensor  # of the tokens after the rounded tokens
    v: Tensor


class CacheInFewBits(nn.Module):
    """Replaces a layer's student; every token is rounded once."""

    def __init__(self, bits: int, group: int = GROUP) -> None:
        super().__init__()
        self.bits, self.group = bits, group

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Let every row attend to the tokens that were rounded before it, and exactly to the newer ones."""
        if real is not None:
            raise ValueError("the control reads texts without padding")
        dtype, (q, k, v) = v.dtype, (rotate(x) for x in (q, k, v))
        read = memory[0] if memory else ReadTokens(k[:, :, :0], v[:, :, :0], k[:, :, :0], v[:, :, :0])
        before = read.rounded_k.shape[2]
        k, v = torch.cat([read.k, k], 2), torch.cat([read.v, v], 2)
        place = torch.arange(before, before + k.shape[2], device=k.device)[-q.shape[2] :]
        rounded = (place + 1 - RECENT).clamp_min(0) // self.group * self.group  # for each row: groups, none recent
        leaving = int(rounded[-1]) - before
        channels = k[:, :, :leaving].unflatten(2, (leaving // self.group, self.group)).mT  # of groups of tokens
        rounded_k = torch.cat([read.rounded_k, round_rows(channels, self.bits).mT.flatten(2, 3)], 2)
        rounded_v = torch.cat([read.rounded_v, round_rows(v[:, :, :leaving], self.bits)], 2)
        attended, begin = [], 0
        for count, rows in zip(*(x.tolist() for x in rounded.unique_consecutive(return_counts=True)), strict=True):
            row_places, begin = place[begin : begin + rows], begin + rows
            exact = slice(count - before, int(row_places[-1]) + 1 - before)
            keys = torch.cat([rounded_k[:, :, :count], k[:, :, exact]], 2)
            values = torch.cat([rounded_v[:, :, :count], v[:, :, exact]], 2)
            visible = torch.arange(keys.shape[2], device=k.device) <= row_places[:, None]
            queries = q[:, :, begin - rows : begin]
            attended.append(scaled_dot_product_attention(queries, keys, values, visible, scale=scale, enable_gqa=True))
        if memory is not None:
            memory[:] = [ReadTokens(rounded_k, rounded_v, k[:, :, leaving:], v[:, :, leaving:])]
        return rotate(torch.cat(attended, 2)).to(dtype)


def round_rows(x: Tensor, bits: int) -> Tensor:
    """Round rows (…, numbers) to integers of a few bits, times a scale, plus an offset."""
    if not x.numel():
        return x
    low, high = x.aminmax(dim=-1, keepdim=True)
    offset, step = low.bfloat16().to(x.dtype), ((high - low) / (2**bits - 1)).bfloat16().to(x.dtype)
    codes = ((x - offset) / torch.where(step > 0, step, 1.0)).round().clamp(0, 2**bits - 1)
    return codes * step + offset


def caches_in_few_bits(
    model: LinearizedForCausalLM, layers: Sequence[Layer], bits: Sequence[int] = RIVAL_BITS
) -> list[Subject]:
    """Make a subject for each number of bits from a student that has its teacher's weights."""
    rows = tuple((Head(softmax=True),) * heads_replaced(layer) for layer in layers)
    return [
        Subject(
            f"cache, {count} bits",
            model,
            CacheAllocation(f"cache, {count} bits", 0, rows, count),
            tuple(CacheInFewBits(count) for _ in model.students()),
        )
        for count in bits
    ]


@dataclass(frozen=True)
class CacheAllocation(Allocation):
    """The contents of the control: every token, rounded to a few bits."""

    rounded_to: int = 16

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Count the bytes of the rounded and of the exact tokens, scales and offsets included."""
        rounded, total = max(length - RECENT, 0) // GROUP * GROUP, 0
        for row, layer in zip(self.heads, layers, strict=True):
            numbers = rounded * (layer.key_dim + layer.value_dim) * self.rounded_to // 8
            offsets = OFFSET_BYTES * (rounded // GROUP * layer.key_dim + rounded)
            total += len(row) * (numbers + offsets + (length - rounded) * token_bytes(layer))
        return total
