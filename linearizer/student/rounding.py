"""Vectors in 4 to 8 bits a number, for states of half the bytes or fewer.

A vector becomes codes of few digits times one scale. In 8 bits codes are integers from -127 to 127, and the scale is
the smallest power of two at which the largest number fits: all products are exact in bf16, fp16 and fp32. In 4 to 6
bits codes lie half way between integers, and the scale has 8 digits: of a few scales, which clip more or fewer of the
largest numbers, the one with the smallest error is taken. Vectors of about equally large numbers lose least, so heads
turn them first (packed_state.py).

A rounded vector does not change when it is rounded again: so a token is the same in the call that read it and in the
state of later calls.
"""

from __future__ import annotations

import math

import torch

from .state import cached_tensor, is_traced, working_dtype

LOWEST, HIGHEST = -24, 121  # exponents: below the first fp16 has no numbers, above the second fp32 has none
FEWER = (4, 5, 6)  # bits of a number: the lowest four lie two numbers to a byte, the others in bytes after them
SCALE_BYTES = 2  # after the numbers of such a vector
TRIED = (1.0, 0.85, 0.7)  # of the scale at which all numbers fit: smaller ones clip the largest numbers
TINIEST = 2.0**-100  # the smallest scale: below it numbers are 0

Tensor = torch.Tensor


def can_turn(bits: int, *dims: int) -> bool:
    """Whether vectors are turned before rounding: if the bits of their numbers fill bytes."""
    return bits < 16 and not any(dim % 8 for dim in dims)


def round_vectors(x: Tensor, bits: int = 8) -> Tensor:
    """Round vectors (…, dim) to a number of bits; gradients pass unchanged."""
    codes, scale = codes_of(x.detach(), bits)
    rounded = codes.mul_(scale).to(x.dtype)
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def pack_vectors(x: Tensor, bits: int = 8) -> Tensor:
    """Pack vectors (…, dim) into bytes: the low four bits of two numbers in each, the high bits, then the scale.

    In 8 bits each number takes a byte, and the exponent of the scale another.
    """
    codes, scale = codes_of(x.detach(), bits)
    if bits == 8:
        exponent = scale.view(torch.int32).bitwise_right_shift(23).sub_(127)
        return torch.cat([codes, exponent.to(codes.dtype)], -1).to(torch.int8)
    numbers = (codes + limit_of(bits)).to(torch.uint8)
    even, odd = (numbers & 15).chunk(2, -1)
    bytes = [even | odd << 4]
    if bits > 4:
        place = places_in_byte(bits, codes.device)
        bytes.append(((numbers >> 4).unflatten(-1, (len(place), -1)) << place).sum(-2, dtype=torch.uint8))
    return torch.cat([*bytes, scale.to(torch.bfloat16).view(torch.uint8)], -1)


def packed_bytes(dim: int, bits: int) -> int:
    """Return the bytes that `pack_vectors` writes for a vector."""
    return dim + 1 if bits == 8 else dim * bits // 8 + SCALE_BYTES


def unpack_vectors(x: Tensor, dtype: torch.dtype, bits: int = 8) -> Tensor:
    """Read what `pack_vectors` wrote."""
    return (codes_in(x, bits) * scales_in(x, bits)).to(dtype)


def codes_of(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of vectors and the scale of each: (…, dim), (…, 1)."""
    work = x.to(working_dtype(x))
    if bits != 8:
        return codes_by_error(work, limit_of(bits))
    scale = scale_of(work)
    return (work / scale).round_(), scale


def scale_of(x: Tensor) -> Tensor:
    """Return the scale of each vector in 8 bits, from the bits of its largest number as fp32: (…, 1).

    Above 127/128 of a power of two it is the next one.
    """
    largest = x.abs().amax(-1, keepdim=True).float()
    if is_traced():  # other runtimes cannot reinterpret bits
        scales = torch.arange(LOWEST, HIGHEST + 1, dtype=torch.float32, device=x.device).exp2()
        return scales[(largest > 127 * scales[:-1]).sum(-1, keepdim=True)]
    scale = (largest.view(torch.int32) + 0x1FFFF).bitwise_and_(0x7F800000).view(torch.float32)
    return scale.mul_(2.0**-6).clamp_(2.0**LOWEST, 2.0**HIGHEST)


def codes_by_error(x: Tensor, limit: float) -> tuple[Tensor, Tensor]:
    """Return codes half way between integers, within a limit, and the best of the scales tried."""
    top = x.abs().amax(-1, keepdim=True)[..., None] / limit
    if is_traced():  # a branch of a graph cannot make constants
        tried = torch.cat([top * share for share in TRIED], -2)
    else:
        tried = top * shares_tried(x.dtype, x.device)
    tried = tried.to(torch.bfloat16).to(x.dtype)
    tried = torch.nn.functional.threshold(tried, TINIEST, 0.0)
    codes = (x[..., None, :] / tried.clamp_min(TINIEST)).floor_().add_(0.5).clamp_(-limit, limit)
    best = (codes * tried).sub_(x[..., None, :]).square_().sum(-1).argmin(-1)[..., None, None]
    codes = codes.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))[..., 0, :]
    return codes, tried.gather(-2, best)[..., 0]


def limit_of(bits: int) -> float:
    """Return the largest code of 4 to 6 bits."""
    return (2**bits - 1) / 2


@cached_tensor
def shares_tried(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.tensor(TRIED, dtype=dtype, device=device)[:, None]


@cached_tensor
def places_in_byte(bits: int, device: torch.device) -> Tensor:
    """Return the shift of each part of a byte with the high bits of codes, above the lowest four."""
    return torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=device)[:, None]


def codes_in(x: Tensor, bits: int) -> Tensor:
    """Read the codes (…, dim) that `pack_vectors` wrote."""
    if bits == 8:
        return x[..., :-1]
    half = (x.shape[-1] - SCALE_BYTES) * 4 // bits
    low, high = x[..., :half], x[..., half:-SCALE_BYTES]
    numbers = torch.cat([low & 15, low >> 4], -1)
    if bits > 4:
        parts = high[..., None, :] >> places_in_byte(bits, x.device) & 2 ** (bits - 4) - 1
        numbers |= parts.flatten(-2) << 4
    return numbers.float().sub_(limit_of(bits))


def scales_in(x: Tensor, bits: int) -> Tensor:
    """Read the scales (…, 1), as fp32."""
    if bits == 8:
        return (x[..., -1:].to(torch.int32) + 127).bitwise_left_shift_(23).view(torch.float32)
    return view_scales(x).float()


def view_scales(x: Tensor) -> Tensor:
    """Read the last bytes of rows as scales, from a copy: numbers of two bytes must begin at an even address."""
    return x[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16)


def rotate(x: Tensor) -> Tensor:
    """Rotate vectors (…, dim) so that no few of their numbers are large; a second rotation undoes the first."""
    x = x.to(working_dtype(x))
    return x @ rotation(x.shape[-1], x.dtype, x.device)


def rotated_at_once(dim: int) -> int:
    """Return how many numbers of a vector are rotated together: the largest power of two that divides its size."""
    return dim & -dim


@cached_tensor
def rotation(dim: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return Hadamard's matrix, or several along the diagonal if the size is no power of two; it is its own inverse."""
    size = rotated_at_once(dim)
    matrix = torch.ones(1, 1, dtype=dtype, device=device)
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)]) * math.sqrt(0.5)
    return torch.block_diag(*[matrix] * (dim // size))
