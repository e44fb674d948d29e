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

from .kernel_common import load_part, load_rows, load_tile, padded, precision, where_it_lies
from .kernel_slots_rounds import choose, join, ranks
from .kernel_token_common import keep_some, load_kept

Tensor = torch.Tensor
SIZE = 32  # rows at a time; sums of products go over 16 numbers at a time, or they would fill the registers


@triton.jit
def fill(
    x_ptr, weight_ptr, spread_ptr, k_ptr, v_ptr, metric_ptr, held_k_ptr, held_v_ptr, held_weight_ptr,
    held_spread_ptr, index_ptr, comes_ptr, N, W, S, ROOT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Lay the slots that are held and a block of tokens into rows; BYTES is 8 where both are kept as bytes."""
    for i0 in range(0, N, B):
        i, od, ov = i0 + tl.arange(0, B), tl.arange(0, DP), tl.arange(0, VP)
        new = (i >= S) & (i < N)
        column = tl.load(index_ptr + i - S, mask=new, other=0)
        k = load_kept(held_k_ptr, i, od, S, D, BYTES).to(ACC)
        k += load_kept(k_ptr, column, od, tl.where(new, column + 1, 0), D, BYTES).to(ACC)
        v = load_kept(held_v_ptr, i, ov, S, DV, BYTES).to(ACC)
        v += load_kept(v_ptr, column, ov, tl.where(new, column + 1, 0), DV, BYTES).to(ACC)
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
                metric = load_tile(metric_ptr, o, oe, D, D).to(ACC) * ROOT
                seen = tl.dot(k, tl.trans(metric), acc=seen, out_dtype=ACC, input_precision="ieee")
            tl.store(x_ptr + i[:, None] * W + o[None, :], seen, mask=(i < N)[:, None] & (o < D)[None, :])
    tl.debug_barrier()


@triton.jit
def keep(
    x_ptr, weight_ptr, spread_ptr, value_ptr, held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr, N, W, S,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
    BYTES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Leave the first S slots that hold something, in order, as numbers of a type, of so many bits, or as bytes."""
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
        keep_some(held_k_ptr, to, od, k.to(TYPE).to(k.dtype), here, D, BITS, BYTES)
        keep_some(held_v_ptr, to, ov, v.to(TYPE).to(v.dtype), here, DV, BITS, BYTES)
        tl.store(held_weight_ptr + to, weight, mask=here)
        tl.store(held_spread_ptr + to, tl.where(weight > 0, load_rows(spread_ptr, i, N), 0.0), mask=here)
    tl.debug_barrier()


@triton.jit
def merge_rows(
    rows_ptr, numbers_ptr, places_ptr, MOST, N, W, S, ROUNDS, WAITING, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, B: tl.constexpr, K: tl.constexpr, JUMPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge N rows, which lie in memory for MOST, until S are left; say which of the two copies has them."""
    weight, spread, value, total = numbers_ptr, numbers_ptr + MOST, numbers_ptr + 2 * MOST, numbers_ptr + 3 * MOST
    side = 0
    for step in range(0, ROUNDS):
        waits = step < WAITING
        halvings = tl.maximum(step - WAITING + 1, 0)
        count = tl.maximum(S, tl.where(waits, S, (N + (1 << halvings) - 1) >> halvings))
        full = 0
        for i0 in range(0, N, B):
            full += tl.sum((load_rows(weight, i0 + tl.arange(0, B), N) > 0).to(tl.int32))
        if full > count:
            x, out = rows_ptr + side * MOST * W, rows_ptr + (1 - side) * MOST * W
            choose(
                x, weight, value, places_ptr, places_ptr + MOST, full - count, waits, N, W, D, DV, B, K, JUMPS, ACC
            )  # fmt: skip
            join(x, out, weight, spread, total, value, places_ptr + MOST, N, W, D, DP, B, K, ACC)
            side = 1 - side
    return side


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
    own_weight, own_spread, value = numbers_ptr, numbers_ptr + N, numbers_ptr + 2 * N
    for turn in range(0, TURNS):
        at = (batch * (TURNS + 1) + turn) * H + head
        block = (batch * TURNS + turn) * BLOCK
        fill(
            rows_ptr, own_weight, own_spread, k_ptr + pair * C * D, v_ptr + pair * C * DV, metric_ptr + head * D * D,
            held_k_ptr + at * S * D, held_v_ptr + at * S * DV, weight_ptr + at * S, spread_ptr + at * S,
            index_ptr + block, comes_ptr + block, N, W, S, 1.0, D, DP, DV, VP, B, K, ACC, 16,
        )  # fmt: skip
        some = tl.where(tl.load(merges_ptr + batch * TURNS + turn) > 0, ROUNDS, 0)
        side = merge_rows(
            rows_ptr, numbers_ptr, places_ptr, N, N, W, S, some, WAITING, D, DP, DV, B, K, JUMPS, ACC
        )  # fmt: skip
        after = at + H
        keep(
            rows_ptr + side * N * W, own_weight, own_spread, value, held_k_ptr + after * S * D,
            held_v_ptr + after * S * DV, weight_ptr + after * S, spread_ptr + after * S, N, W, S, D, DP, DV, VP, B,
            BITS, 16, held_k_ptr.dtype.element_ty,
        )  # fmt: skip


def widths(k: Tensor, v: Tensor) -> dict:
    dims = k.shape[-1], v.shape[-1]
    return {"D": dims[0], "DP": padded(dims[0]), "DV": dims[1], "VP": padded(dims[1])}


@where_it_lies
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
