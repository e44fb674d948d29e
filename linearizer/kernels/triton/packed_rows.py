"""How Triton kernels read, round and write vectors in few bits; the reference is attention_of_student.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from linearizer.kernels.triton.common import Constants
from linearizer.student.attention_of_student import HIGHEST, LOWEST, TINIEST, TRIED

LEAST, MOST, TINY = tl.constexpr(2.0**LOWEST), tl.constexpr(2.0**HIGHEST), tl.constexpr(TINIEST)
SECOND, THIRD = tl.constexpr(TRIED[1]), tl.constexpr(TRIED[2])  # of the scales tried; the first is 1
SIGNED, TWO_BYTES = tl.constexpr(tl.pointer_type(tl.int8)), tl.constexpr(tl.pointer_type(tl.int16))
# The fields of a head in a pool of bytes (state_pool.py): its index in the layer, its sizes, offsets of its tensors.
HEAD, BITS_KEPT, WINDOW, SLOTS, BLOCK, MERGER = (tl.constexpr(field) for field in range(6))
KEYS, VALUES, SINK_K, SINK_V, LEVEL, WEIGHT, SPREAD = (tl.constexpr(field) for field in range(6, 13))
FIELDS = tl.constexpr(13)
FEW = tl.constexpr(4)  # the kind of rows of fewer than 8 bits a number; the other kinds are 8 and 16
ALIGNED = tl.constexpr(16)  # in bytes: where rows begin
TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32, torch.float64: tl.float64}
HALVES = tl.constexpr(12582912.0)  # 1.5 · 2^23: adding and subtracting it rounds half to even


@dataclass(frozen=True)
class PackedConstants(Constants):
    """The compile-time constants of a kernel that reads packed rows."""

    KEPT: Any = None  # type of rows of 16 bits: Triton 3.6 accepts types as constants, but not pointer types
    SUMS: Any = None  # type of levels and counts
    LEAST: Any = None  # the smallest kind of rows
    TURNED: Any = None  # whether rows of fewer bits hold turned vectors
    MP: Any = None  # slots of a block, or of those that are removed, at a time
    RM: Any = None  # most rows of a workspace, a power of two
    ORDERED: Any = None  # whether a list orders the tokens of a text, since some are padding
    TWO: Any = None  # whether queries are split into two terms of type KEPT
    RS: Any = None  # rows of pair costs read at a time
    DW: Any = None  # dimensions multiplied at a time where rows merge
    CODES: Any = None  # type of codes in a workspace
    SCORED: Any = None  # whether the model caps its scores, or has learned sinks
    CAPPED: Any = None  # whether it caps them

    __hash__ = Constants.__hash__  # since dataclasses do not inherit it


def kind_of(bits: int) -> int:
    """Return the kind of rows with the given bits."""
    return bits if bits >= 8 else int(FEW.value)


def kinds_of_rows(row_type: torch.dtype, least: int) -> dict[str, Any]:
    """Return the types of rows of 16 bits and of sums, and the smallest kind of rows: few kernels serve all layers."""
    work = torch.promote_types(row_type, torch.float32)
    return {
        "KEPT": TYPES[row_type],
        "SUMS": TYPES[work],
        "LEAST": kind_of(least),
    }


@triton.jit
def call_for_kind(function: tl.constexpr, arguments, bits, C: tl.constexpr):
    """Call a function with its arguments, the bits of a head, and the kind of its rows."""
    if bits == 16:
        function(*arguments, bits, 16, C)
    if C.LEAST <= 8:
        if bits == 8:
            function(*arguments, bits, 8, C)
    if C.LEAST < 8:
        if bits < 8:
            function(*arguments, bits, FEW, C)


@triton.jit
def count_for_kind(function: tl.constexpr, arguments, bits, C: tl.constexpr):
    """Call a function as `call_for_kind` does, and return the number that it returns."""
    count = bits * 0
    if bits == 16:
        count = function(*arguments, bits, 16, C)
    if C.LEAST <= 8:
        if bits == 8:
            count = function(*arguments, bits, 8, C)
    if C.LEAST < 8:
        if bits < 8:
            count = function(*arguments, bits, FEW, C)
    return count


@triton.jit
def load_codes(rows_ptr, rows, live, bits, DIM: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr):
    """Load the codes of rows, (rows, WP), and their scales, (rows,)."""
    od = tl.arange(0, WP)
    inside = live[:, None] & (od < DIM)[None, :]
    if KIND == 16:
        row_ptr = rows_ptr.to(tl.pointer_type(C.KEPT)) + rows.to(tl.int64) * DIM
        return tl.load(row_ptr[:, None] + od[None, :], mask=inside, other=0.0).to(C.ACC), tl.where(live, 1.0, 0.0)
    if KIND == 8:
        row_ptr = rows_ptr.to(SIGNED) + rows.to(tl.int64) * (DIM + 1)
        codes = tl.load(row_ptr[:, None] + od[None, :], mask=inside, other=0).to(C.ACC)
        exponent = tl.load(row_ptr + DIM, mask=live, other=0).to(tl.int32)
        return codes, ((exponent + 127) << 23).to(tl.float32, bitcast=True)
    half: tl.constexpr = DIM // 2
    high_bits, high_bytes = bits - 4, (bits - 4) * DIM // 8
    row_ptr = rows_ptr + rows.to(tl.int64) * (half + high_bytes + 2)
    low = tl.load(row_ptr[:, None] + (od % half)[None, :], mask=inside, other=0).to(tl.int32)
    safe_bytes = tl.maximum(high_bytes, 1)
    high_ptr = row_ptr[:, None] + (od % safe_bytes + half)[None, :]
    high = tl.load(high_ptr, mask=inside & (od < high_bits * DIM)[None, :], other=0).to(tl.int32)
    codes = (low >> (od // half * 4)[None, :]) & 15
    codes |= ((high >> (od // safe_bytes * high_bits)[None, :]) & ((1 << high_bits) - 1)) << 4
    first = tl.load(row_ptr + half + high_bytes, mask=live, other=0).to(tl.int32)
    second = tl.load(row_ptr + half + high_bytes + 1, mask=live, other=0).to(tl.int32)
    scale = ((first | second << 8) << 16).to(tl.float32, bitcast=True)
    return tl.where(inside, codes.to(C.ACC) - ((1 << bits) - 1) / 2, 0.0), scale


@triton.jit
def as_bf16(x):
    """Round fp32 numbers to 8 bits of precision, half to even: conversion to bf16 does not in every version."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def round_at_scale(x, scale, inside, limit):
    """Return codes of few bits, the scales in bf16, and the squared error of each row."""
    scale = as_bf16(scale)
    scale = tl.where(scale > TINY, scale, 0.0)
    codes = tl.minimum(tl.maximum(tl.floor(x / tl.maximum(scale, TINY)[:, None]) + 0.5, -limit), limit)
    error = tl.where(inside, codes * scale[:, None] - x, 0.0)
    return codes, scale, tl.sum(error * error, 1)


@triton.jit
def round_rows(x, bits, levels, DIM: tl.constexpr, WP: tl.constexpr):
    """Return the codes (rows, WP) and scales of rows; rows of 16 bits are not rounded."""
    inside = (tl.arange(0, WP) < DIM)[None, :]
    codes, top = x, tl.max(tl.where(inside, tl.abs(x), 0.0), 1).to(tl.float32)
    scale = tl.full(top.shape, 1.0, tl.float32)
    if bits == 8:
        power = (top.to(tl.int32, bitcast=True) + 0x1FFFF) & 0x7F800000
        scale = tl.minimum(tl.maximum(power.to(tl.float32, bitcast=True) * 0.015625, LEAST), MOST)
        codes = ((x / scale[:, None]).to(tl.float32) + HALVES - HALVES).to(x.dtype)
    elif bits < 8:
        limit = (levels - 1) / 2
        top /= limit
        codes, scale, error = round_at_scale(x, top, inside, limit)
        for trial in tl.static_range(2):
            new_codes, new_scale, new_error = round_at_scale(x, top * (SECOND if trial == 0 else THIRD), inside, limit)
            codes = tl.where((new_error < error)[:, None], new_codes, codes)
            scale, error = tl.where(new_error < error, new_scale, scale), tl.minimum(error, new_error)
        codes = tl.where(inside, codes, 0.0)
    return codes, scale


@triton.jit
def store_rows(
    rows_ptr, rows, live, x, bits, codes_ptr, DIM: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr
):
    """Write vectors into rows, as rounding.pack_vectors does, and return the rounded vectors."""
    codes, scale = round_rows(x, KIND, 1 << bits, DIM, WP)
    store_codes(rows_ptr, rows, live, codes, scale, bits, codes_ptr, DIM, WP, KIND, C)
    return codes * scale[:, None]


@triton.jit
def store_codes(
    rows_ptr, rows, live, codes, scale, bits, codes_ptr, DIM: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write codes and their scales into rows.

    `codes_ptr` has room for the codes, a byte each, from which numbers are packed that share a byte.
    """
    od = tl.arange(0, WP)
    inside = live[:, None] & (od < DIM)[None, :]
    if KIND == 16:
        row_ptr = rows_ptr.to(tl.pointer_type(C.KEPT)) + rows.to(tl.int64) * DIM
        tl.store(row_ptr[:, None] + od[None, :], codes.to(row_ptr.dtype.element_ty), mask=inside)
    elif KIND == 8:
        row_ptr = rows_ptr.to(SIGNED) + rows.to(tl.int64) * (DIM + 1)
        tl.store(row_ptr[:, None] + od[None, :], codes.to(tl.int8), mask=inside)
        tl.store(row_ptr + DIM, ((scale.to(tl.int32, bitcast=True) >> 23) - 127).to(tl.int8), mask=live)
    else:
        half: tl.constexpr = DIM // 2
        high_bits, high_bytes = bits - 4, (bits - 4) * DIM // 8
        row_ptr = rows_ptr + rows.to(tl.int64) * (half + high_bytes + 2)
        from_ptr = codes_ptr + tl.arange(0, codes.shape[0])[:, None] * WP
        tl.store(from_ptr + od[None, :], (codes + ((1 << bits) - 1) / 2).to(tl.uint8), mask=inside)
        tl.debug_barrier()
        is_stored = live[:, None] & (od < half)[None, :]
        low = tl.load(from_ptr + od[None, :], mask=is_stored, other=0).to(tl.int32) & 15
        bytes = low | (tl.load(from_ptr + half + od[None, :], mask=is_stored, other=0).to(tl.int32) & 15) << 4
        tl.store(row_ptr[:, None] + od[None, :], bytes.to(tl.uint8), mask=is_stored)
        is_stored = live[:, None] & (od < high_bytes)[None, :]
        bytes = tl.zeros([codes.shape[0], WP], tl.int32)
        for place in tl.static_range(8):
            is_part = is_stored & (high_bytes * place + od < DIM)[None, :]
            high = tl.load(from_ptr + high_bytes * place + od[None, :], mask=is_part, other=0).to(tl.int32) >> 4
            bytes |= high << high_bits * place
        tl.store(row_ptr[:, None] + half + od[None, :], bytes.to(tl.uint8), mask=is_stored)
        scale_bits = scale.to(tl.int32, bitcast=True) >> 16
        tl.store(row_ptr + half + high_bytes, (scale_bits & 255).to(tl.uint8), mask=live)
        tl.store(row_ptr + half + high_bytes + 1, ((scale_bits >> 8) & 255).to(tl.uint8), mask=live)
        tl.debug_barrier()
