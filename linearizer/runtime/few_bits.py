"""Keys and values in few bits a number: what a state may hold in half of the bytes, or in fewer.

A vector becomes whole numbers times one scale. In 8 bits they go from -127 to 127, and the scale is a power of two, the
least that lets its largest number fit: every such number is exact in bf16, fp16 and fp32. In 4 to 6 bits a vector is
rotated first (`rotate`), so that no few of its numbers are large. Its scale has 8 digits and a sign: the largest number
becomes -8 (of 4 bits), which has no counterpart, or 7, or is cut off, whichever moves the vector least. Heads of so
few bits hold all they hold rotated, in which queries see the same, and compute in at least fp32.

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

from .state import is_exact, least_count, remember_token, tensors, working_dtype

MAX_CODE = 127
LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none
ROTATED = (4, 5, 6)  # bits in which vectors are rotated
SCALE_BYTES = 2  # of a vector that is
CUT = 0.93  # of the largest number, beyond which numbers may be cut off for the sake of the others
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
    def of(x: Tensor, bits: int) -> Rounded:
        return Rounded(x, *codes_of(x.detach(), bits), bits)

    @cached_property
    def numbers(self) -> Tensor:  # (…, dim)
        return numbers_of(self.exact, self.codes, self.scale, self.bits)

    @cached_property
    def bytes(self) -> Tensor:  # (…, bytes)
        return pack_codes(self.codes, self.scale, self.bits)

    def __getitem__(self, heads: Any) -> Rounded:
        return Rounded(self.exact[:, heads], self.codes[:, heads], self.scale[:, heads], self.bits)


@dataclass(frozen=True)
class FewBits:
    """Queries, keys and values of a layer as heads of so many bits take them."""

    query: Tensor
    key: Rounded
    value: Rounded

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, bits: int) -> FewBits:
        if bits in ROTATED:
            query, key, value = rotate(query), rotate(key), rotate(value)
        return FewBits(query, Rounded.of(key, bits), Rounded.of(value, bits))


def attend_in_few_bits(
    group: nn.Module, q: Tensor, k: Rounded, v: Rounded, scale: float, real: Tensor | None, held: Any, keep: bool
) -> tuple[Tensor, Any]:
    """Let heads attend whose state is kept as bytes; give the state, too, where it is to be kept."""
    before = None if held is None else unpack_state(held, k.bits, k.numbers.dtype, v.numbers.dtype)
    alone = keep and before is not None and real is None and q.shape[-2] == 1
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
        scale = power(exponents_of(work))
        return (work / scale).round_().mul_(scale).to(x.dtype)
    return numbers_of(x, *codes_of(x.detach(), bits), bits)


def round_together(k: Tensor, v: Tensor, bits: int = 8) -> tuple[Tensor, Tensor]:
    """Round keys and values, in one go where they are alike: a call of an operation takes longer than its work."""
    if k.shape != v.shape or k.dtype != v.dtype:
        return round_vectors(k, bits), round_vectors(v, bits)
    k, v = round_vectors(torch.stack([k, v]), bits)
    return k, v


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
    packed = {name: pack_vectors(x, bits) for name, x in keys_and_values(state).items()}
    return replace(state, **packed, **pack_counts(state, bits))


def pack_counts(state: Any, bits: int) -> dict[str, Tensor]:
    """Give what slots count in two bytes each, where they have few bits: rounded before, nothing changes."""
    if bits not in ROTATED or not hasattr(state, "weight"):
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


def codes_of(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Give the whole numbers of vectors, and the scale of each or its exponent: (…, dim), (…, 1)."""
    work = x.to(working_dtype(x))
    if not work.numel():
        return work, work.new_zeros(*work.shape[:-1], 1, dtype=torch.int32 if bits == 8 else work.dtype)
    if bits != 8:
        return codes_by_largest(work, 1 << (bits - 1))
    exponent = exponents_of(work)
    return (work * power(-exponent)).round_(), exponent


def exponents_of(x: Tensor) -> Tensor:
    """Give the exponent of the scale of each vector in 8 bits: (…, 1)."""
    largest = x.abs().amax(-1, keepdim=True).float().view(torch.int32)
    # an fp32 number has its exponent in the bits from 23 on; what is above 127/128 of a power of two takes the next
    return (largest + (0x1FFFF - (133 << 23))).bitwise_right_shift_(23).clamp_(LOWEST, HIGHEST)


def codes_by_largest(x: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Give whole numbers from -most to most - 1, and the scale of those that are tried with the least squared error."""
    least, largest = x.aminmax(dim=-1, keepdim=True)
    top = torch.where(largest > -least, largest, least)
    scales = (top * tried_scales(most, x.dtype, x.device)).to(torch.bfloat16).to(x.dtype)[..., None]
    there = scales.abs() > TINIEST
    codes = (x[..., None, :] / torch.where(there, scales, 1.0)).round_().clamp_(-most, most - 1)
    best = (codes * scales - x[..., None, :]).square_().sum(-1).argmin(-1)[..., None, None]
    codes = codes.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))[..., 0, :]
    scale, there = scales.gather(-2, best)[..., 0], there.gather(-2, best)[..., 0]
    return codes * there, torch.where(there, scale, 0.0)  # of nothing the scale has no sign


@functools.lru_cache(maxsize=16)
def tried_scales(most: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Give scales to try, as shares of a vector's largest number: each gives one number the code -most or most - 1."""
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.tensor([-1 / most, 1 / (most - 1), -CUT / most], dtype=dtype, device=device)


def pack_codes(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Write whole numbers and scales as bytes."""
    if bits == 8:
        return torch.cat([codes, scale.to(codes.dtype)], -1).to(torch.int8)
    whole = (codes + (1 << (bits - 1))).to(torch.uint8)
    parts = list(whole.unflatten(-1, (-1, 8 // math.gcd(8, bits))).unbind(-1))  # as many as fill whole bytes
    count, free = whole_bytes(bits), 8 - bits
    rest = torch.stack([part.int() << place * bits for place, part in enumerate(parts[count:])]).sum(0)
    joined = [part | (rest >> place * free << bits & 255).to(torch.uint8) for place, part in enumerate(parts[:count])]
    return torch.cat([*joined, scale.to(torch.bfloat16).view(torch.uint8)], -1)


def codes_in(x: Tensor, bits: int) -> Tensor:
    """Read the whole numbers (…, dim) of what `pack_codes` wrote: each byte begins with one, and shares others."""
    if bits == 8:
        return x[..., :-1]
    parts, most, free = x[..., :-SCALE_BYTES].chunk(whole_bytes(bits), -1), (1 << bits) - 1, 8 - bits
    if bits == 4:
        whole = [parts[0] & most, parts[0] >> 4]
    else:
        rest = torch.stack([(part >> bits).int() << place * free for place, part in enumerate(parts)]).sum(0)
        shared = [(rest >> place * bits & most).to(torch.uint8) for place in range(len(parts) * free // bits)]
        whole = [*(part & most for part in parts), *shared]
    return torch.stack(whole, -1).flatten(-2).float() - (1 << (bits - 1))


def whole_bytes(bits: int) -> int:
    """Count the bytes that the fewest numbers take which fill whole bytes."""
    return bits // math.gcd(8, bits)


def scales_in(x: Tensor, bits: int) -> Tensor:
    """Read the scales (…, 1), as fp32."""
    if bits == 8:
        return power(x[..., -1:])
    return x[..., -SCALE_BYTES:].contiguous().view(torch.bfloat16).float()


def power(exponent: Tensor) -> Tensor:
    """2 to a whole number, exactly: its exponent is written into an fp32 number."""
    return (exponent.to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)


def rotate(x: Tensor) -> Tensor:
    """Rotate vectors (…, dim) so that no few of their numbers are large; rotated twice they are what they were."""
    x = x.to(working_dtype(x))
    return x @ rotation(x.shape[-1], x.dtype, x.device)


@functools.lru_cache(maxsize=64)
def rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Hadamard's matrix, or several along the diagonal where the size is no power of two; its own inverse."""
    size = dim & -dim
    with torch.inference_mode(False):  # so that a later training may use it, too
        matrix = torch.ones(1, 1, dtype=dtype, device=device)
        while len(matrix) < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * math.sqrt(0.5)
        return torch.block_diag(*[matrix] * (dim // size))
