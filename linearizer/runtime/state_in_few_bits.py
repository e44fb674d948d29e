"""What heads hold in few bits: the axes of their keys and values, and their state as bytes.

Heads of 8 bits round what they take and keep it as bytes (few_bits.py). In 4 to 6 bits a vector is taken apart along
axes of its head first, less the mean of what the head holds (`Axes`): a softmax does not see that all keys are shifted
alike, and the mean of the values is added to what it gives. Such heads hold all they hold so, queries are turned to see
the same, and compute in at least fp32; what their slots count takes two bytes each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .few_bits import (
    BY_AXIS,
    Rounded,
    bits_by_number,
    codes_of,
    numbers_of,
    pack_vectors,
    rotation,
    round_vectors,
    unpack_vectors,
)
from .state import as_slice, is_exact, least_count, remember_token, tensors, working_dtype

MOST_TOKENS = 32767  # that a slot of two bytes counts; more tokens make it no heavier
KEPT_AS_BYTES = (torch.int8, torch.uint8, torch.int16)
KEYS_AND_VALUES = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v")

Tensor = torch.Tensor


class Axes(nn.Module):
    """The axes along which heads of few bits keep keys and values, and what vectors are measured by along them.

    A key x that is multiplied by `root` is kept as (x - middle)·axes / steps, a value likewise; bits are those of each
    head, and a head of another number of bits has no use for its axes.
    """

    key_axes: Tensor  # (heads, dim, dim) an axis in a column
    key_steps: Tensor  # (heads, dim)
    key_middle: Tensor
    value_axes: Tensor
    value_steps: Tensor
    value_middle: Tensor

    def __init__(self, bits: list[int], key_dim: int, value_dim: int) -> None:
        super().__init__()
        self.bits = bits
        for kind, dim in (("key", key_dim), ("value", value_dim)):
            for name, shape in (("axes", (dim, dim)), ("steps", (dim,)), ("middle", (dim,))):
                begin = torch.ones if name == "steps" else torch.zeros  # other heads are divided by their steps, too
                parameter = nn.Parameter(begin(len(bits), *shape), requires_grad=False)
                self.register_parameter(f"{kind}_{name}", parameter)

    def forward(self, compute: Any, *inputs: Any) -> Any:
        """Compute one of the methods: what offloads parameters brings them for a forward."""
        return compute(*inputs)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start with axes along which no few numbers are large, for vectors that differ alike in all directions."""
        for axes, steps, middle in (
            (self.key_axes, self.key_steps, self.key_middle),
            (self.value_axes, self.value_steps, self.value_middle),
        ):
            axes.copy_(rotation(axes.shape[-1], axes.dtype, axes.device).expand_as(axes))
            middle.zero_()
            steps.fill_(1.0)
            for head, count in enumerate(self.bits):
                if count in BY_AXIS:
                    steps[head] = 2.0 ** (1 - bits_by_number(count, steps.shape[-1])).to(steps)

    def along(
        self, q: Tensor, k: Tensor, v: Tensor | None, root: float, heads: Any = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Give queries (batch, heads, group, tokens, dim), keys and values (batch, heads, tokens, dim) by the axes."""
        q, k = (x.to(working_dtype(x)) for x in (q, k))
        axes, steps, middle = (x[heads].to(k.dtype) for x in (self.key_axes, self.key_steps, self.key_middle))
        query = (q @ axes[:, None]) * (steps / root)[:, None, None]
        key = (k * root - middle[:, None]) @ (axes / steps[:, None])
        if v is None:
            return query, key, None
        v = v.to(working_dtype(v))
        axes, steps, middle = (x[heads].to(v.dtype) for x in (self.value_axes, self.value_steps, self.value_middle))
        return query, key, (v - middle[:, None]) @ (axes / steps[:, None])

    def back(self, out: Tensor, heads: Any) -> Tensor:
        """Give what some heads put out, (batch, heads, group, tokens, dim), of the mean of values that they kept."""
        axes, steps, middle = (x[heads].to(out.dtype) for x in (self.value_axes, self.value_steps, self.value_middle))
        return out @ (axes * steps[:, None]).mT[:, None] + middle[:, None, None]

    def metric_along(self, metric: Tensor, head: int) -> Tensor:
        """Give a metric of keys that are multiplied by `root` for keys as a head keeps them."""
        return (metric.to(self.key_axes) @ self.key_axes[head]) * self.key_steps[head]


@dataclass(frozen=True)
class FewBits:
    """Queries, keys and values of some heads of a layer as they take them in so many bits."""

    query: Tensor
    key: Rounded
    value: Rounded

    @staticmethod
    def of(
        query: Tensor, key: Tensor, value: Tensor, groups: dict[int, tuple[list[int], int]], axes: Axes | None,
        root: float, exact_values: bool,
    ) -> dict[int, FewBits]:  # fmt: skip
        """Round what groups of heads take, given by their heads and bits, those of 4 to 6 bits in one go."""
        result: dict[int, FewBits] = {}
        for by_axis in (False, True):
            bits = {head: own for heads, own in groups.values() for head in heads if (own in BY_AXIS) == by_axis}
            order = sorted(bits)
            if not order:
                continue
            at = as_slice(order)
            q, k, v = query[:, at], key[:, at], value[:, at]
            if by_axis and axes is not None:
                q, k, turned = axes(axes.along, q, k, None if exact_values else v, root, at)
                v = v if exact_values else turned
            limits = tuple(bits[head] for head in order)
            whole = Rounded.of(k, limits), Rounded.unrounded(v) if exact_values else Rounded.of(v, limits)
            for index, (heads, own) in groups.items():
                if (own in BY_AXIS) == by_axis:
                    spot = as_slice([order.index(head) for head in heads])
                    result[index] = FewBits(q[:, spot], *(x.part(spot, own) for x in whole))
        return result


def attend_in_few_bits(
    group: nn.Module, q: Tensor, k: Rounded, v: Rounded, scale: float, real: Tensor | None, held: Any, keep: bool
) -> tuple[Tensor, Any]:
    """Let heads attend whose state is kept as bytes; give the state, too, where it is to be kept."""
    before = None if held is None else unpack_state(held, k.bits, k.numbers.dtype, v.numbers.dtype)
    alone = keep and before is not None and real is None and q.shape[-2] == 1 and not torch.compiler.is_exporting()
    if alone and is_exact(held):
        remember_token(held, k.bytes, v.bytes, least_count(held.count))  # before the group counts the token, in place
    out, after = group(q, k.numbers, v.numbers, scale, real, None if before is None else replace(before))
    if not keep:
        return out, None
    return out, pack_token(held, before, after, k, v) if alone else pack_state(after, k.bits)


def pack_state(state: Any, bits: int = 8) -> Any:
    """Give a state whose keys and values are bytes."""
    vectors = keys_and_values(state)
    together = [vectors] if is_exact(state) else [{name: x} for name, x in vectors.items()]  # a whole cache is large
    packed = {name: x for some in together for name, x in pack_together(some, bits).items()}
    return replace(state, **packed, **pack_counts(state, bits))


def pack_together(vectors: dict[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Write vectors as bytes, those of one size in one go: a call of an operation takes longer than its work."""
    packed = {}
    for kind in {(x.shape[-1], x.dtype) for x in vectors.values()}:
        some = {name: x for name, x in vectors.items() if (x.shape[-1], x.dtype) == kind}
        held = pack_vectors(torch.cat([x.reshape(-1, kind[0]) for x in some.values()]), bits)
        parts = held.split([x.shape[:-1].numel() for x in some.values()])
        for (name, x), part in zip(some.items(), parts, strict=True):
            packed[name] = part.clone().view(*x.shape[:-1], held.shape[-1])
    return packed


def pack_token(held: Any, before: Any, after: Any, k: Rounded, v: Rounded) -> Any:
    """Pack what a token has changed beside window and sinks: `held` is `before`, packed, which became `after`."""
    changed = {name: x for name, x in tensors(after).items() if name not in KEYS_AND_VALUES}
    if not is_exact(held):
        return replace(held, k=torch.cat([held.k, k.bytes], -2), v=torch.cat([held.v, v.bytes], -2), **changed)
    merged = [name for name in ("slot_k", "slot_v") if getattr(after, name, None) is not getattr(before, name, None)]
    changed |= pack_counts(after, k.bits)
    return replace(held, **changed, **{name: pack_vectors(getattr(after, name), k.bits) for name in merged})


def unpack_state(state: Any, bits: int, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Give a state whose keys and values can be computed with."""
    dtypes = {"k": key_dtype, "v": value_dtype}
    vectors = {name: unpack_vectors(x, dtypes[name[-1]], bits) for name, x in keys_and_values(state).items()}
    return replace(state, **vectors, **unpack_counts(state, key_dtype))


def keys_and_values(state: object) -> dict[str, Tensor]:
    return {name: x for name, x in tensors(state).items() if name in KEYS_AND_VALUES}


def round_slots(
    k: Tensor, v: Tensor, weight: Tensor, spread: Tensor, bits: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round slots (batch, heads, slots, dim), and what they count, to what the bits of each head can hold."""
    kinds: dict[int, list[int]] = {}
    for head, own in enumerate(bits):
        if own < 16:
            kinds.setdefault(min(BY_AXIS) if own in BY_AXIS else own, []).append(head)
    alike = k.shape == v.shape and k.dtype == v.dtype  # in one go: a call of an operation takes longer than its work
    vectors = [torch.stack([k, v])] if alike else [k.clone()[None], v.clone()[None]]
    for kind, heads in kinds.items():
        at, all_bits = as_slice(heads), tuple(bits[head] for head in heads)
        if len(heads) == len(bits):
            vectors = [round_heads(x, bits) for x in vectors]
        else:
            for x in vectors:
                x[:, :, at] = round_heads(x[:, :, at], all_bits)
        if kind in BY_AXIS:
            counted = round_counts(weight[:, at], spread[:, at])
            if len(heads) == len(bits):
                weight, spread = counted
            else:
                weight, spread = weight.clone(), spread.clone()
                weight[:, at], spread[:, at] = counted
    return vectors[0][0], vectors[-1][-1], weight, spread


def round_heads(x: Tensor, bits: tuple[int, ...]) -> Tensor:
    """Round vectors (…, heads, slots, dim) to the bits of each head, all 8 or none."""
    return round_vectors(x) if bits[0] == 8 else numbers_of(x, *codes_of(x.detach(), bits), bits[0])


def pack_counts(state: Any, bits: int) -> dict[str, Tensor]:
    """Give what slots count in two bytes each, where they have few bits: rounded before, nothing changes."""
    if bits not in BY_AXIS or not hasattr(state, "weight"):
        return {}
    return {"weight": state.weight.to(torch.int16), "spread": state.spread.to(torch.bfloat16).view(torch.int16)}


def unpack_counts(state: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read what `pack_counts` gave."""
    if getattr(state, "weight", None) is None or state.weight.dtype != torch.int16:
        return {}
    return {"weight": state.weight.to(dtype), "spread": state.spread.view(torch.bfloat16).to(dtype)}


def round_counts(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Round what slots count to what two bytes hold."""
    return weight.clamp(max=MOST_TOKENS), spread.to(torch.bfloat16).to(spread.dtype)
