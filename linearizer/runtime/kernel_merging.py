"""Merging slots as a Triton kernel; slots.py and merging.py say what it computes. Forward only.

One program does the blocks of one text and head, one after the other: a turn fills rows with the slots and a block,
merges them in rounds (kernel_rounds.py), and leaves the slots that are held then. A row holds metric·k, v and k side by
side; a round reads one of two copies of the rows and writes the other.
"""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_rounds import choose, join, ranks
from .kernel_tiles import load_part, load_rows, load_tile, padded, precision

Tensor = torch.Tensor
SIZE = 32  # rows at a time; sums of products go over 16 numbers at a time, or they would fill the registers


@triton.jit
def fill(
    x_ptr, weight_ptr, spread_ptr, k_ptr, v_ptr, metric_ptr, held_k_ptr, held_v_ptr, held_weight_ptr,
    held_spread_ptr, index_ptr, comes_ptr, N, W, S, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr,
    VP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Lay the slots that are held and a block of tokens into rows."""
    for i0 in range(0, N, B):
        i, od, ov = i0 + tl.arange(0, B), tl.arange(0, DP), tl.arange(0, VP)
        new = (i >= S) & (i < N)
        column = tl.load(index_ptr + i - S, mask=new, other=0)
        new_k, new_v = new[:, None] & (od < D)[None, :], new[:, None] & (ov < DV)[None, :]
        k = load_tile(held_k_ptr, i, od, S, D).to(ACC)
        k += tl.load(k_ptr + column[:, None] * D + od[None, :], mask=new_k, other=0.0).to(ACC)
        v = load_tile(held_v_ptr, i, ov, S, DV).to(ACC)
        v += tl.load(v_ptr + column[:, None] * DV + ov[None, :], mask=new_v, other=0.0).to(ACC)
        row = x_ptr + i[:, None] * W
        tl.store(row + D + ov[None, :], v, mask=(i < N)[:, None] & (ov < DV)[None, :])
        tl.store(row + D + DV + od[None, :], k, mask=(i < N)[:, None] & (od < D)[None, :])
        weight = load_rows(held_weight_ptr, i, S) + tl.load(comes_ptr + i - S, mask=new, other=0).to(ACC)
        tl.store(weight_ptr + i, weight, mask=i < N)
        tl.store(spread_ptr + i, load_rows(held_spread_ptr, i, S), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        for d0 in range(0, D, B):
            o = d0 + tl.arange(0, B)
            seen = tl.zeros([B, B], ACC)
            for e0 in range(0, D, K):
                oe = e0 + tl.arange(0, K)
                k = load_part(x_ptr + D + DV, i, oe, N, W, D)
                metric = load_tile(metric_ptr, o, oe, D, D).to(ACC)
                seen = tl.dot(k, tl.trans(metric), acc=seen, out_dtype=ACC, input_precision="ieee")
            tl.store(x_ptr + i[:, None] * W + o[None, :], seen, mask=(i < N)[:, None] & (o < D)[None, :])
    tl.debug_barrier()


@triton.jit
def in_8_bits(x):
    """Round rows as rounding.py does. Adding and taking away a number whose last digit is 1 rounds to whole ones."""
    bits = tl.max(tl.abs(x), 1).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 133 + tl.where((bits & 0x7FFFFF) > 0x7E0000, 1, 0)  # the latter: above 127/128 of it
    exponent = tl.minimum(tl.maximum(exponent, -24), 121)
    large = 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0
    codes = (x * ((127 - exponent) << 23).to(tl.float32, bitcast=True)[:, None] + large) - large
    return codes * ((127 + exponent) << 23).to(tl.float32, bitcast=True)[:, None]


@triton.jit
def keep(
    x_ptr, weight_ptr, spread_ptr, value_ptr, held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr, N, W, S,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Leave the first S slots that hold something, in order."""
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        weight = load_rows(weight_ptr, i, N)
        tl.store(value_ptr + i, tl.where(weight == 0, 1.0, 0.0).to(weight.dtype), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i, od, ov = i0 + tl.arange(0, B), tl.arange(0, DP), tl.arange(0, VP)
        weight, to = load_rows(weight_ptr, i, N), ranks(value_ptr, i, N, B)
        here, full = (i < N) & (to < S), (weight > 0)[:, None]
        k = tl.where(full, load_part(x_ptr + D + DV, i, od, N, W, D), 0.0)
        v = tl.where(full, load_part(x_ptr + D, i, ov, N, W, DV), 0.0)
        if BITS == 8:
            k = in_8_bits(k.to(held_k_ptr.dtype.element_ty).to(k.dtype))
            v = in_8_bits(v.to(held_v_ptr.dtype.element_ty).to(v.dtype))
        tl.store(held_k_ptr + to[:, None] * D + od[None, :], k.to(held_k_ptr.dtype.element_ty),
                 mask=here[:, None] & (od < D)[None, :])  # fmt: skip
        tl.store(held_v_ptr + to[:, None] * DV + ov[None, :], v.to(held_v_ptr.dtype.element_ty),
                 mask=here[:, None] & (ov < DV)[None, :])  # fmt: skip
        tl.store(held_weight_ptr + to, weight, mask=here)
        tl.store(held_spread_ptr + to, tl.where(weight > 0, load_rows(spread_ptr, i, N), 0.0), mask=here)
    tl.debug_barrier()


@triton.jit
def merge_turns(
    k_ptr, v_ptr, metric_ptr, index_ptr, comes_ptr, merges_ptr, held_k_ptr, held_v_ptr, weight_ptr, spread_ptr,
    rows_ptr, numbers_ptr, places_ptr, C, H, TURNS, S, BLOCK, ROUNDS, WAITING,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
    JUMPS: tl.constexpr, ACC: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Grid (heads, batch). held_… (batch, TURNS + 1, heads, S, …) begin with the slots that there are."""
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, N, W = batch * H + head, S + BLOCK, 2 * D + DV
    rows_ptr += pair * 2 * N * W
    numbers_ptr += pair * 4 * N
    places_ptr += pair * 2 * N
    own_weight, own_spread, value, total = numbers_ptr, numbers_ptr + N, numbers_ptr + 2 * N, numbers_ptr + 3 * N
    for turn in range(0, TURNS):
        at = (batch * (TURNS + 1) + turn) * H + head
        block = (batch * TURNS + turn) * BLOCK
        fill(
            rows_ptr, own_weight, own_spread, k_ptr + pair * C * D, v_ptr + pair * C * DV, metric_ptr + head * D * D,
            held_k_ptr + at * S * D, held_v_ptr + at * S * DV, weight_ptr + at * S, spread_ptr + at * S,
            index_ptr + block, comes_ptr + block, N, W, S, D, DP, DV, VP, B, K, ACC,
        )  # fmt: skip
        side = 0
        for step in range(0, tl.where(tl.load(merges_ptr + batch * TURNS + turn) > 0, ROUNDS, 0)):
            waits = step < WAITING
            halvings = tl.maximum(step - WAITING + 1, 0)
            count = tl.maximum(S, tl.where(waits, S, (N + (1 << halvings) - 1) >> halvings))
            full = 0
            for i0 in range(0, N, B):
                full += tl.sum((load_rows(own_weight, i0 + tl.arange(0, B), N) > 0).to(tl.int32))
            if full > count:
                x, out = rows_ptr + side * N * W, rows_ptr + (1 - side) * N * W
                choose(
                    x, own_weight, value, places_ptr, places_ptr + N, full - count, waits, N, W, D, DV, B, K,
                    JUMPS, ACC,
                )  # fmt: skip
                join(x, out, own_weight, own_spread, total, value, places_ptr + N, N, W, D, DP, B, K, ACC)
                side = 1 - side
        after = at + H
        keep(
            rows_ptr + side * N * W, own_weight, own_spread, value, held_k_ptr + after * S * D,
            held_v_ptr + after * S * DV, weight_ptr + after * S, spread_ptr + after * S, N, W, S, D, DP, DV, VP, B,
            BITS,
        )  # fmt: skip


def widths(k: Tensor, v: Tensor) -> dict:
    dims = k.shape[-1], v.shape[-1]
    return {"D": dims[0], "DP": padded(dims[0]), "DV": dims[1], "VP": padded(dims[1])}


def merge(
    k: Tensor, v: Tensor, metric: Tensor, index: Tensor, comes: Tensor, merges: Tensor, held: list[Tensor],
    rounds: int, waiting: int, bits: int = 16,
) -> list[Tensor]:  # fmt: skip
    """Merge blocks of columns k, v (batch, heads, columns, dim), which lie at `index` and are there if `comes` says so.

    index, comes (batch, turns, block); merges (batch, turns). held: k, v, weight and spread of the slots (batch, heads,
    slots, …), and so of every turn: (batch, 1 + turns, heads, slots, …), at first as they were. `bits` of a number in
    keys and values.
    """
    batch, heads, columns = k.shape[:3]
    turns, block, slots, work = index.shape[1], index.shape[2], held[0].shape[2], held[2].dtype
    count = slots + block
    every = [x.new_empty(batch, turns + 1, *x.shape[1:]) for x in held]
    for each, x in zip(every, held, strict=True):
        each[:, 0] = x
    rows = torch.empty(batch, heads, 2, count, 2 * k.shape[-1] + v.shape[-1], dtype=work, device=k.device)
    numbers = torch.empty(batch, heads, 4, count, dtype=work, device=k.device)
    places = torch.empty(batch, heads, 2, count, dtype=torch.int32, device=k.device)
    merge_turns[heads, batch](
        k, v, metric, index, comes.int(), merges.int(), *every, rows, numbers, places,
        columns, heads, turns, slots, block, rounds, waiting,
        **widths(k, v), B=SIZE, K=16, JUMPS=count.bit_length(), ACC=precision(numbers)["ACC"], BITS=bits,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    return every
