"""What heads hold in few bits: the axes of their keys and values, and their state as bytes.

Heads of 8 bits round what they take and keep it as bytes (few_bits.py). In 4 to 6 bits a vector is taken apart along
axes of its head first, less the mean of what the head holds (`Axes`): a softmax does not see that all keys are shifted
alike, and the mean of the values is added to what it gives. Such heads hold all they hold so, queries are turned to see
the same, and compute in at least fp32; what their slots count takes two bytes each. Where one token attends, the axes
are part of the products that read and write bytes (`AxisBytes`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .few_bits import (
    BY_AXIS,
    SCALE_BYTES,
    Rounded,
    bits_by_number,
    byte_count,
    codes_by_largest,
    codes_of,
    limits_of_heads,
    numbers_of,
    pack_vectors,
    places_in_bytes,
    rotation,
    round_vectors,
    unpack_vectors,
    view_scales,
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

    def turned(self, dtype: torch.dtype) -> list[Tensor]:
        """Give what takes keys apart, what puts them together, (heads, dim, dim), and their middle; then of values."""
        parts = []
        for axes, steps, middle in (
            (self.key_axes, self.key_steps, self.key_middle),
            (self.value_axes, self.value_steps, self.value_middle),
        ):
            axes, steps = axes.to(dtype), steps.to(dtype)[:, None]
            parts += [axes / steps, (axes * steps).mT.contiguous(), middle.to(dtype).contiguous()]
        return parts

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


@dataclass(frozen=True)
class AxisBytes:
    """How heads of 4 to 6 bits take a token, in a few operations; all that depends on their axes is computed once.

    Their bytes lie at the end of as many as the most take. A byte holds a high and a low number, of which the low may
    have no bits; read, the high numbers of a vector come before the low, and queries and what is put out are turned so.
    """

    sides: tuple[AxisSide, ...]  # of keys and values together, or of each where they differ in size
    ask: Tensor  # (heads, key_dim, numbers) what queries become, by the scale of the scores
    key_middle: Tensor  # (heads, numbers, 1) of the numbers read, which begin at 0
    back: Tensor  # (heads, numbers, value_dim)
    middle: Tensor  # (heads, 1, value_dim) the mean of values
    value_middle: Tensor  # (heads, 1, value_dim)

    @staticmethod
    def of(axes: Axes, heads: list[int], bits: tuple[int, ...], scale: float, dtype: torch.dtype) -> AxisBytes:
        root = scale**0.5
        of_keys, of_values = (
            [x[heads].to(dtype) for x in side]
            for side in (
                (axes.key_axes, axes.key_steps, axes.key_middle),
                (axes.value_axes, axes.value_steps, axes.value_middle),
            )
        )
        (key_side, key_spread), (value_side, value_spread) = (
            AxisSide.of(own, bits, factor) for own, factor in ((of_keys, root), (of_values, 1.0))
        )
        turned = (of_values[0] * of_values[1][:, None]).mT
        alike = key_side.share.shape == value_side.share.shape
        return AxisBytes(
            (key_side.beside(value_side),) if alike else (key_side, value_side),
            (of_keys[0] * (of_keys[1] * (scale / root))[:, None]) @ key_spread,
            (key_side.limits[0, 0] @ key_spread).mT.contiguous(),
            value_spread.mT @ turned,
            of_values[2][:, None],
            value_side.limits[0, 0] @ turned,
        )

    def attend(self, q: Tensor, buffers: list[Tensor], level: Tensor) -> Tensor:
        """One softmax over rows of bytes (sides, batch, heads, rows, …): (batch, heads, group, value_dim)."""
        shape = q.shape[:2]
        read = [side.read(x) for side, x in zip(self.sides, buffers, strict=True)]
        keys, values = (x.flatten(0, 1) for x in (read[0][0][0], read[-1][0][-1]))
        key_scale, value_scale = (x.flatten(0, 1).mT for x in (read[0][1][0], read[-1][1][-1]))
        asks = q @ self.ask
        begin = (asks @ self.key_middle).flatten(0, 1)
        logits = torch.baddbmm(begin, asks.flatten(0, 1), keys.mT, beta=-1)
        weights = torch.addcmul(level.flatten(0, 1)[:, None], logits, key_scale).softmax(-1).mul_(value_scale)
        out = torch.bmm(weights, values).unflatten(0, shape) @ self.back + self.middle
        return torch.addcmul(out, weights.sum(-1, keepdim=True).unflatten(0, shape), self.value_middle, value=-1)


@dataclass(frozen=True)
class AxisSide:
    """How keys, values or both become bytes: tensors (sides, 1, heads, …)."""

    factor: Tensor  # (…, 1, 1) of keys as they come
    middle: Tensor  # (…, 1, dim) less
    enter: Tensor  # (…, dim, dim)
    limits: Tensor  # (…, 1, dim)
    pack: Tensor  # (…, dim, bytes) what a number, from 0 on, adds to bytes
    share: Tensor  # (…, 1, bytes) of a byte that is its high number
    base: Tensor  # (…, 1, bytes) the inverse

    @staticmethod
    def of(own: list[Tensor], bits: tuple[int, ...], factor: float) -> tuple[AxisSide, Tensor]:
        """Give that of keys or values, of their axes, steps and middle; and where their numbers lie when they are read
        (heads, dim, numbers)."""
        axes, steps, middle = own
        heads, dim = steps.shape
        width = max(byte_count(own, dim) for own in bits)
        plans = [plan_bytes(own, dim, width) for own in bits]
        pack, spread, base = (torch.stack(each).to(axes) for each in zip(*plans, strict=True))
        given = axes.new_full((heads, 1, 1), factor), -middle[:, None], axes / steps[:, None]
        limits = limits_of_heads(bits, dim, axes.dtype, axes.device).expand(heads, 1, dim)
        parts = (*given, limits, pack, 1 / base, base)
        return AxisSide(*(x[None, None] for x in parts)), spread

    def beside(self, other: AxisSide) -> AxisSide:
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return AxisSide(*(torch.cat(pair) for pair in pairs))

    def pack_vectors(self, x: Tensor) -> Tensor:
        """Write vectors (sides, batch, heads, tokens, dim) as bytes."""
        numbers = torch.addcmul(self.middle, x.to(self.middle.dtype), self.factor) @ self.enter
        codes, scale = codes_by_largest(numbers, self.limits)
        bytes = (codes.add_(self.limits) @ self.pack).to(torch.uint8)
        return torch.cat([bytes, scale.to(torch.bfloat16).view(torch.uint8)], -1)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Read the numbers of bytes, the high before the low, and their scales."""
        whole = x[..., :-SCALE_BYTES].to(self.base.dtype)
        high = (whole * self.share).floor_()
        scales = view_scales(x).to(self.base.dtype)
        return torch.cat([high, torch.addcmul(whole, high, self.base, value=-1)], -1), scales


@functools.cache
def plan_bytes(bits: int, dim: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Say what each number adds to so many bytes (dim, width), where it is read (dim, 2 · width), and by what each
    byte is divided then (1, width)."""
    byte, shift, largest = places_in_bytes(bits, dim, torch.device("cpu"))
    number, place = torch.arange(dim), byte + width - byte_count(bits, dim)
    is_low = (largest + 1 << shift) < 2**8
    with torch.inference_mode(False):  # so that a later training may use it, too
        pack, spread, base = torch.zeros(dim, width), torch.zeros(dim, 2 * width), torch.ones(1, width)
        pack[number, place] = 2.0**shift
        spread[number, place + width * is_low] = 1.0
        base[0, place[~is_low]] = 2.0 ** shift[~is_low]
        return pack, spread, base
