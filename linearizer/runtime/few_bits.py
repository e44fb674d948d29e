"""Vectors in few bits a number: what a state may hold in half of the bytes, or in fewer.

A vector becomes numbers of few digits times one scale. In 8 bits they are whole, from -127 to 127, and the scale is a
power of two, the least that lets its largest number fit: every such number is exact in bf16, fp16 and fp32. In 4 to 6
bits vectors come along the axes of their head (state_in_few_bits.py): along few axes they differ much, along most of
them little, so that numbers have bits by their axis, and 4 to 6 in the mean (LAYOUT). They lie half way between whole
ones, and the scale has 8 digits; the number that is largest beside what its bits hold is the last that they hold, or is
cut off, whichever moves the vector least.

What is rounded once stays what it is when it is rounded again: so a token is the same whether it is attended to in the
call that read it or out of the state of a later one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .kernel_in_c import codes_in_c, may_run_in_c, pack_in_c, unpack_in_c
from .state import made_once, number, working_dtype

MAX_CODE = 127
LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none
LAYOUT = {  # of the bytes that some numbers of a vector fill: the bits of each number in them
    4: ((6, 2), (5, 3)),
    5: ((8,), (8,), (6, 2), (5, 3), (4, 4)),
    6: ((8,), (8,), (8,), (8,), (5, 3), (4, 4)),
}
BY_AXIS = tuple(LAYOUT)  # bits in which vectors come along the axes of their head
SCALE_BYTES = 2  # of a vector that is
TRIED = (1.0, 0.85, 0.7)  # of the scale that lets all numbers fit: what is larger is cut off for the sake of the others
TINIEST = 2.0**-100  # the least scale: what is smaller is 0

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


def byte_count(bits: int, dim: int) -> int:
    """Count the bytes of the numbers of a vector."""
    return dim // sum(map(len, LAYOUT[bits])) * len(LAYOUT[bits])


def round_vectors(x: Tensor, bits: int = 8) -> Tensor:
    """Round vectors (…, dim) to what so many bits can hold."""
    if bits == 8 and x.numel() and not x.requires_grad:
        work = x.to(working_dtype(x))
        scale = scale_of(work)
        return (work / scale).round_().mul_(scale).to(x.dtype)
    return numbers_of(x, *codes_of(x.detach(), bits), bits)


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


def codes_of(x: Tensor, bits: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Give the whole numbers of vectors, and the scale of each or its exponent: (…, dim), (…, 1).

    Of several bits, 8 or fewer, each is that of a head: (…, heads, tokens, dim).
    """
    work, own = x.to(working_dtype(x)), bits if isinstance(bits, tuple) else (bits,)
    if not work.numel():
        return work, work.new_zeros(*work.shape[:-1], 1, dtype=torch.int32 if own[0] == 8 else work.dtype)
    if own[0] != 8:
        limits = limits_of_heads(own, work.shape[-1], work.dtype, work.device)
        return codes_in_c(work, limits) or codes_by_largest(work, limits)
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


@made_once
def places_in_bytes(bits: int, dim: int, device: torch.device) -> Tensor:
    """Say of each number of a vector in which byte it lies, how far from the low end, and what is its own there."""
    each, places = dim // sum(map(len, LAYOUT[bits])), []
    for group, counts in enumerate(LAYOUT[bits]):
        for index, count in enumerate(counts):
            shift = sum(counts[index + 1 :])
            places += [(group * each + byte, shift, 2**count - 1) for byte in range(each)]
    with torch.inference_mode(False):
        return torch.tensor(places, device=device).mT.contiguous()


def pack_codes(codes: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Write numbers and scales as bytes."""
    if bits == 8:
        return torch.cat([codes, scale.to(codes.dtype)], -1).to(torch.int8)
    dim, device = codes.shape[-1], codes.device
    limits = limits_of(bits, dim, codes.dtype, device)
    if may_run_in_c(codes, scale):
        width = byte_count(bits, dim) + SCALE_BYTES
        if (rows := pack_in_c(codes, scale, limits, places_in_bytes(bits, dim, device), width)) is not None:
            return rows
    whole = (codes + limits).to(torch.uint8)
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
    dim = (x.shape[-1] - SCALE_BYTES) // len(LAYOUT[bits]) * sum(map(len, LAYOUT[bits]))
    limits = limits_of(bits, dim, torch.float32, x.device)
    if may_run_in_c(x) and (codes := unpack_in_c(x, limits, places_in_bytes(bits, dim, x.device))) is not None:
        return codes
    whole: list[Tensor] = []
    for byte, counts in zip(x[..., :-SCALE_BYTES].chunk(len(LAYOUT[bits]), -1), LAYOUT[bits], strict=True):
        free = 8
        for count in counts:
            free -= count
            part = byte >> free if free else byte
            whole.append(part if free + count == 8 else part & ((1 << count) - 1))
    return torch.cat(whole, -1).float().sub_(limits)


def scales_in(x: Tensor, bits: int) -> Tensor:
    """Read the scales (…, 1), as fp32."""
    if bits == 8:
        return power(x[..., -1:])
    return view_scales(x).float()


def view_scales(x: Tensor) -> Tensor:
    """View the last bytes of rows as scales: a copy of them, as numbers of two bytes have to begin at an even one."""
    return x[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


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
