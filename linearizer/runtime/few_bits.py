"""Keys and values in few bits a number: what a state may hold in half of the bytes, or in fewer.

A vector becomes numbers of few digits times one scale. In 8 bits they are whole, from -127 to 127, and the scale is a
power of two, the least that lets its largest number fit: every such number is exact in bf16, fp16 and fp32. In 4 to 6
bits a vector is taken apart along axes of its head first, less the mean of what the head holds (`Axes`): a softmax does
not see that all keys are shifted alike, and the mean of the values is added to what it gives. Along few axes vectors
differ much, along most of them little, so that numbers have bits by their axis, and 4 to 6 in the mean (LAYOUT). They
lie half way between whole ones, and the scale has 8 digits; the number that is largest beside what its bits hold is
the last that they hold, or is cut off, whichever moves the vector least. Heads of so few bits hold all they hold so,
queries are turned to see the same, and compute in at least fp32.

What is rounded once stays what it is when it is rounded again: so a token is the same whether it is attended to in the
call that read it or out of the state of a later one.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .state import as_slice, is_exact, least_count, made_once, number, remember_token, tensors, working_dtype

MAX_CODE = 127
LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none
LAYOUT = {  # of the bytes that some numbers of a vector fill: the bits of each number in them
    4: ((6, 2), (5, 3)),
    5: ((8,), (8,), (6, 2), (5, 3), (4, 4)),
    6: ((8,), (8,), (8,), (8,), (5, 3), (4, 4)),
}
BY_AXIS = tuple(LAYOUT)  # bits in which vectors are taken apart along axes
SCALE_BYTES = 2  # of a vector that is
TRIED = (1.0, 0.85, 0.7)  # of the scale that lets all numbers fit: what is larger is cut off for the sake of the others
TINIEST = 2.0**-100  # the least scale: what is smaller is 0

KEPT_AS_BYTES = (torch.int8, torch.uint8, torch.int16)
MOST_TOKENS = 32767  # that a slot of two bytes counts; more tokens make it no heavier
KEYS_AND_VALUES = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v")

Tensor = torch.Tensor


@dataclass(frozen=True)
class Rounded:
    """Vectors of so many bits a number, to compute with and to keep."""

    exact: Tensor  # (…, dim) what was rounded
    codes: Tensor  # (…, dim)
    scale: Tensor  # (…, 1) of 8 bits its exponent
    bits: int

    @staticmethod
    def of(x: Tensor, bits: int | tuple[int, ...]) -> Rounded:
        """Round vectors (…, dim), or (…, heads, tokens, dim) to the bits of each head, all 8 or none."""
        return Rounded(x, *codes_of(x.detach(), bits), bits if isinstance(bits, int) else bits[0])

    @staticmethod
    def unrounded(x: Tensor) -> Rounded:
        return Rounded(x, x, x[..., :1], 16)

    @cached_property
    def numbers(self) -> Tensor:  # (…, dim)
        return self.exact if self.bits == 16 else numbers_of(self.exact, self.codes, self.scale, self.bits)

    @cached_property
    def bytes(self) -> Tensor:  # (…, bytes)
        return pack_codes(self.codes, self.scale, self.bits)

    def part(self, heads: Any, bits: int) -> Rounded:
        """Give some heads, which have so many bits."""
        own = bits if self.bits < 16 else 16
        return Rounded(self.exact[:, heads], self.codes[:, heads], self.scale[:, heads], own)


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


@functools.cache
def plan_bytes(bits: int, dim: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Say what each number adds to so many bytes (dim, width), where it is read (dim, 2 · width), and by what each
    byte is divided then (1, width)."""
    pack, spread, base = [[0.0] * width for _ in range(dim)], [[0.0] * 2 * width for _ in range(dim)], [1.0] * width
    number, byte, each = 0, width - byte_count(bits, dim), dim // sum(map(len, LAYOUT[bits]))
    for counts in LAYOUT[bits]:
        for place in range(byte, byte + each):
            base[place] = 2.0 ** sum(counts[1:])
            for index in range(len(counts)):
                at = number + index * each + place - byte
                pack[at][place], spread[at][index * width + place] = 1.0 if index else base[place], 1.0
        number, byte = number + each * len(counts), byte + each
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.tensor(pack), torch.tensor(spread), torch.tensor([base])


def byte_count(bits: int, dim: int) -> int:
    """Count the bytes of the numbers of a vector."""
    return dim // sum(map(len, LAYOUT[bits])) * len(LAYOUT[bits])


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


def round_vectors(x: Tensor, bits: int = 8) -> Tensor:
    """Round vectors (…, dim) to what so many bits can hold."""
    if bits == 8 and x.numel() and not x.requires_grad:
        work = x.to(working_dtype(x))
        scale = scale_of(work)
        return (work / scale).round_().mul_(scale).to(x.dtype)
    return numbers_of(x, *codes_of(x.detach(), bits), bits)


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


def numbers_of(x: Tensor, codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Give the numbers that x became; gradients pass as if nothing were rounded."""
    numbers = (codes * (power(scale) if bits == 8 else scale)).to(x.dtype)
    return numbers + (x - x.detach()) if x.requires_grad else numbers


def pack_vectors(x: Tensor, bits: int = 8) -> Tensor:
    """Write vectors (…, dim) as bytes: their whole numbers, then the scale."""
    return Rounded.of(x, bits).bytes


def unpack_vectors(x: Tensor, dtype: torch.dtype, bits: int = 8) -> Tensor:
    """Read what `pack_vectors` wrote."""
    return (codes_in(x, bits) * scales_in(x, bits)).to(dtype)


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


def unpack_state(state: Any, bits: int, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Give a state whose keys and values can be computed with."""
    dtypes = {"k": key_dtype, "v": value_dtype}
    vectors = {name: unpack_vectors(x, dtypes[name[-1]], bits) for name, x in keys_and_values(state).items()}
    return replace(state, **vectors, **unpack_counts(state, key_dtype))


def pack_token(held: Any, before: Any, after: Any, k: Rounded, v: Rounded) -> Any:
    """Pack what a token has changed beside window and sinks: `held` is `before`, packed, which became `after`."""
    changed = {name: x for name, x in tensors(after).items() if name not in KEYS_AND_VALUES}
    if not is_exact(held):
        return replace(held, k=torch.cat([held.k, k.bytes], -2), v=torch.cat([held.v, v.bytes], -2), **changed)
    merged = [name for name in ("slot_k", "slot_v") if getattr(after, name, None) is not getattr(before, name, None)]
    changed |= pack_counts(after, k.bits)
    return replace(held, **changed, **{name: pack_vectors(getattr(after, name), k.bits) for name in merged})


def keys_and_values(state: object) -> dict[str, Tensor]:
    return {name: x for name, x in tensors(state).items() if name in KEYS_AND_VALUES}


def codes_of(x: Tensor, bits: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Give the whole numbers of vectors, and the scale of each or its exponent: (…, dim), (…, 1).

    Of several bits, 8 or fewer, each is that of a head: (…, heads, tokens, dim).
    """
    work, own = x.to(working_dtype(x)), bits if isinstance(bits, tuple) else (bits,)
    if not work.numel():
        return work, work.new_zeros(*work.shape[:-1], 1, dtype=torch.int32 if own[0] == 8 else work.dtype)
    if own[0] != 8:
        return codes_by_largest(work, limits_of_heads(own, work.shape[-1], work.dtype, work.device))
    exponent = exponents_of(work)
    return (work * power_of(whole(127, x) - exponent)).round_(), exponent


def exponents_of(x: Tensor) -> Tensor:
    """Give the exponent of the scale of each vector in 8 bits: (…, 1)."""
    return largest_bits(x, 133).bitwise_right_shift_(whole(23, x)).clamp_(LOWEST, HIGHEST)


def scale_of(x: Tensor) -> Tensor:
    """Give the scale of each vector in 8 bits: (…, 1)."""
    scale = largest_bits(x).bitwise_and_(whole(0x7F800000, x)).view(torch.float32)
    return scale.mul_(number(2.0**-6, torch.float32, x.device)).clamp_(2.0**LOWEST, 2.0**HIGHEST)


def largest_bits(x: Tensor, less: int = 0) -> Tensor:
    """Give each vector's largest number as the bits of an fp32 number, which has its exponent in those from 23 on.

    What is above 127/128 of a power of two takes the next; exponents are so much `less`.
    """
    return x.abs().amax(-1, keepdim=True).float().view(torch.int32) + whole(0x1FFFF - (less << 23), x)


def whole(value: int, like: Tensor) -> Any:
    return number(value, torch.int32, like.device)


def codes_by_largest(x: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Give numbers half way between whole ones, none beyond its limit, and the scale that was best of those tried."""
    top = (x.abs() / limits).amax(-1, keepdim=True)[..., None]
    tried = (top * shares_tried(x.dtype, x.device)).to(torch.bfloat16).to(x.dtype)
    tried, limits = torch.nn.functional.threshold(tried, TINIEST, 0.0), limits[..., None, :]
    codes = (x[..., None, :] / tried.clamp_min(TINIEST)).floor_().add_(0.5).clamp_(-limits, limits)
    best = (codes * tried).sub_(x[..., None, :]).square_().sum(-1).argmin(-1)[..., None, None]
    codes = codes.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))[..., 0, :]
    return codes, tried.gather(-2, best)[..., 0]


@made_once
def shares_tried(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(TRIED, dtype=dtype, device=device)[:, None]


@made_once
def bits_by_number(bits: int, dim: int) -> Tensor:
    """Give the bits of each number of a vector, as its bytes hold them."""
    each = [count for byte in LAYOUT[bits] for count in byte]
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.tensor(each).repeat_interleave(dim // len(each))


@made_once
def limits_of(bits: int, dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give the largest number that each number of a vector may be."""
    with torch.inference_mode(False):
        return ((2.0 ** bits_by_number(bits, dim) - 1) / 2).to(dtype).to(device)


@made_once
def limits_of_heads(bits: tuple[int, ...], dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give the same for heads of several bits: (heads, 1, dim), or (dim,)."""
    with torch.inference_mode(False):
        limits = torch.stack([limits_of(own, dim, dtype, device) for own in bits])
        return limits[0] if len(bits) == 1 else limits[:, None]


def pack_codes(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Write numbers and scales as bytes."""
    if bits == 8:
        return torch.cat([codes, scale.to(codes.dtype)], -1).to(torch.int8)
    whole = (codes + limits_of(bits, codes.shape[-1], codes.dtype, codes.device)).to(torch.uint8)
    parts, bytes = iter(whole.chunk(sum(map(len, LAYOUT[bits])), -1)), []
    for counts in LAYOUT[bits]:
        joined = next(parts)
        for count in counts[1:]:
            joined = joined << count | next(parts)
        bytes.append(joined)
    return torch.cat([*bytes, scale.to(torch.bfloat16).view(torch.uint8)], -1)


def codes_in(x: Tensor, bits: int) -> Tensor:
    """Read the numbers (…, dim) of what `pack_codes` wrote."""
    if bits == 8:
        return x[..., :-1]
    whole: list[Tensor] = []
    for byte, counts in zip(x[..., :-SCALE_BYTES].chunk(len(LAYOUT[bits]), -1), LAYOUT[bits], strict=True):
        free = 8
        for count in counts:
            free -= count
            part = byte >> free if free else byte
            whole.append(part if free + count == 8 else part & ((1 << count) - 1))
    codes = torch.cat(whole, -1).float()
    return codes.sub_(limits_of(bits, codes.shape[-1], codes.dtype, codes.device))


def scales_in(x: Tensor, bits: int) -> Tensor:
    """Read the scales (…, 1), as fp32."""
    if bits == 8:
        return power(x[..., -1:])
    return x[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()


def power(exponent: Tensor) -> Tensor:
    """2 to a whole number, exactly."""
    return power_of(exponent.to(torch.int32) + whole(127, exponent))


def power_of(biased: Tensor) -> Tensor:
    """2 to whole numbers that are 127 less, exactly: written over as the exponents of fp32 numbers."""
    return biased.bitwise_left_shift_(whole(23, biased)).view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Rotate vectors (…, dim) so that no few of their numbers are large; rotated twice they are what they were."""
    x = x.to(working_dtype(x))
    return x @ rotation(x.shape[-1], x.dtype, x.device)


@made_once
def rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hadamard's matrix, or several along the diagonal where the size is no power of two; its own inverse."""
    size = dim & -dim
    with torch.inference_mode(False):  # so that a later training may use it, too
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * math.sqrt(0.5)
        return torch.block_diag(*[matrix] * (dim // size))
