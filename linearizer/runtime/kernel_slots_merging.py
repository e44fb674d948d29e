"""Merging slots, as parts of Triton kernels: for a text and for a token. slots_merging.py is the reference.

All threads of a program work at it, so what they hand each other goes through memory, between barriers.
"""

from __future__ import annotations

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import load_part, load_rows, load_tile, load_vectors, store_vectors
from .slots_merging import TINY

INFINITE = tl.constexpr(float("inf"))
LEAST = tl.constexpr(TINY)
SIZE = 32  # rows at a time; sums of products go over 16 numbers at a time, or they would fill the registers


@triton.jit
def squared_distances(x_ptr, i, j, N, W, D, least: tl.constexpr, C: tl.constexpr):
    """|x_i - x_j|² of rows of D among W numbers, and no less than `least`."""
    square = tl.zeros([i.shape[0], j.shape[0]], C.ACC)
    product = tl.zeros([i.shape[0], j.shape[0]], C.ACC)
    for d0 in range(0, D, C.K):
        od = d0 + tl.arange(0, C.K)
        own, other = load_part(x_ptr, i, od, N, W, D), load_part(x_ptr, j, od, N, W, D)
        square += tl.sum(own * own, 1)[:, None] + tl.sum(other * other, 1)[None, :]
        product = tl.dot(own, tl.trans(other), acc=product, out_dtype=C.ACC, input_precision="ieee")
    return tl.maximum(square - 2 * product, least)


@triton.jit
def pair_costs(x_ptr, weight_ptr, i, j, N, W, C: tl.constexpr):
    """Compute what merging pairs costs (slots_merging.py); infinite for empty slots and a slot with itself."""
    own, other = load_rows(weight_ptr, i, N), load_rows(weight_ptr, j, N)
    apart = squared_distances(x_ptr, i, j, N, W, C.D, 0.0, C)
    values = squared_distances(x_ptr + C.D, i, j, N, W, C.DV, LEAST, C)
    light = 1 / tl.maximum(own, 1.0)[:, None] + 1 / tl.maximum(other, 1.0)[None, :]
    cost = apart * apart * (apart * apart) * values / light / light
    never = (own == 0)[:, None] | (other == 0)[None, :] | (i[:, None] == j[None, :])
    return tl.where(never, INFINITE, cost)


@triton.jit
def rank_values(value_ptr, i, N, C: tl.constexpr):
    """Count the values that sort before those at i; of equal ones, the first comes first."""
    own = tl.load(value_ptr + i, mask=i < N, other=INFINITE)
    rank = tl.zeros([C.B], tl.int32)
    for j0 in range(0, N, C.B):
        j = j0 + tl.arange(0, C.B)
        other = tl.load(value_ptr + j, mask=j < N, other=INFINITE)
        first = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] < own[:, None]) | first).to(tl.int32), 1)
    return rank


@triton.jit
def sum_by_target(value_ptr, target_ptr, i, N, C: tl.constexpr):
    """Sum the values whose target is i."""
    out = tl.zeros([C.B], C.ACC)
    for j0 in range(0, N, C.B):
        j = j0 + tl.arange(0, C.B)
        target = tl.load(target_ptr + j, mask=j < N, other=-1)
        out += tl.sum(tl.where(target[None, :] == i[:, None], load_rows(value_ptr, j, N)[None, :], 0.0), 1)
    return out


@triton.jit
def choose_targets(x_ptr, weight_ptr, value_ptr, gone_ptr, target_ptr, surplus, N, W, C: tl.constexpr):
    """Choose the slot that each goes into: the `surplus` cheapest into one that stays, the others into themselves."""
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        best = tl.full([C.B], INFINITE, C.ACC)
        for j0 in range(0, i0 + 1, C.B):
            j = j0 + tl.arange(0, C.B)
            cost = tl.where(i[:, None] > j[None, :], pair_costs(x_ptr, weight_ptr, i, j, N, W, C), INFINITE)
            best = tl.minimum(tl.min(cost, 1), best)
        tl.store(value_ptr + i, best, mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        tl.store(gone_ptr + i, (rank_values(value_ptr, i, N, C) < surplus).to(tl.int32), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        best, partner = tl.full([C.B], INFINITE, C.ACC), tl.zeros([C.B], tl.int32)
        for j0 in range(0, N, C.B):
            j = j0 + tl.arange(0, C.B)
            stays = tl.load(gone_ptr + j, mask=j < N, other=1) == 0
            cost = tl.where(stays[None, :], pair_costs(x_ptr, weight_ptr, i, j, N, W, C), INFINITE)
            least = tl.min(cost, 1)
            partner = tl.where(least < best, tl.argmin(cost, 1).to(tl.int32) + j0, partner)
            best = tl.minimum(least, best)
        goes = tl.load(gone_ptr + i, mask=i < N, other=0) > 0
        tl.store(target_ptr + i, tl.where(goes, partner, i), mask=i < N)
    tl.debug_barrier()


@triton.jit
def join_slots(x_ptr, out_ptr, weight_ptr, spread_ptr, total_ptr, value_ptr, target_ptr, N, W, C: tl.constexpr):
    """Merge every slot into its target."""
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        tl.store(total_ptr + i, sum_by_target(weight_ptr, target_ptr, i, N, C), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        for w0 in range(0, W, C.B):
            ow = w0 + tl.arange(0, C.B)
            acc = tl.zeros([C.B, C.B], C.ACC)
            for j0 in range(0, N, C.K):
                j = j0 + tl.arange(0, C.K)
                target = tl.load(target_ptr + j, mask=j < N, other=0)
                share = tl.where((target[None, :] == i[:, None]), load_rows(weight_ptr, j, N)[None, :], 0.0)
                acc = tl.dot(share, load_tile(x_ptr, j, ow, N, W), acc=acc, out_dtype=C.ACC, input_precision="ieee")
            # sums of few bits are exact and shares are not, by which a mean that lies half way would be rounded
            acc = acc / tl.maximum(load_rows(total_ptr, i, N), 1.0)[:, None]
            tl.store(out_ptr + i[:, None] * W + ow[None, :], acc, mask=(i < N)[:, None] & (ow < W)[None, :])
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i, od = i0 + tl.arange(0, C.B), tl.arange(0, C.DP)
        target = tl.load(target_ptr + i, mask=i < N, other=0)
        moved = load_part(x_ptr, i, od, N, W, C.D) - load_part(out_ptr, target, od, N, W, C.D)
        share = load_rows(weight_ptr, i, N) / tl.maximum(tl.load(total_ptr + target), 1.0)
        tl.store(value_ptr + i, share * (load_rows(spread_ptr, i, N) + tl.sum(moved * moved, 1)), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        tl.store(spread_ptr + i, sum_by_target(value_ptr, target_ptr, i, N, C), mask=i < N)
        tl.store(weight_ptr + i, load_rows(total_ptr, i, N), mask=i < N)
    tl.debug_barrier()


@triton.jit
def fill_rows(rows, slots, text, block, N, W, SLOTS, ROOT: tl.constexpr, packed: tl.constexpr, C: tl.constexpr):
    """Fill rows with the slots and a block of tokens; packed where both are kept as bytes."""
    x_ptr, weight_ptr, spread_ptr = rows
    held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr = slots
    k_ptr, v_ptr, metric_ptr = text
    index_ptr, present_ptr = block
    for i0 in range(0, N, C.B):
        i, od, ov = i0 + tl.arange(0, C.B), tl.arange(0, C.DP), tl.arange(0, C.VP)
        new = (i >= SLOTS) & (i < N)
        column = tl.load(index_ptr + i - SLOTS, mask=new, other=0)
        k = load_vectors(held_k_ptr, i, od, SLOTS, C.D, packed).to(C.ACC)
        k += load_vectors(k_ptr, column, od, tl.where(new, column + 1, 0), C.D, packed).to(C.ACC)
        v = load_vectors(held_v_ptr, i, ov, SLOTS, C.DV, packed).to(C.ACC)
        v += load_vectors(v_ptr, column, ov, tl.where(new, column + 1, 0), C.DV, packed).to(C.ACC)
        row = x_ptr + i[:, None] * W
        tl.store(row + C.D + ov[None, :], v, mask=(i < N)[:, None] & (ov < C.DV)[None, :])
        tl.store(row + C.D + C.DV + od[None, :], k, mask=(i < N)[:, None] & (od < C.D)[None, :])
        weight = load_rows(held_weight_ptr, i, SLOTS) + tl.load(present_ptr + i - SLOTS, mask=new, other=0).to(C.ACC)
        tl.store(weight_ptr + i, weight, mask=i < N)
        tl.store(spread_ptr + i, load_rows(held_spread_ptr, i, SLOTS), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        for d0 in range(0, C.D, C.B):
            o = d0 + tl.arange(0, C.B)
            seen = tl.zeros([C.B, C.B], C.ACC)
            for e0 in range(0, C.D, C.K):
                oe = e0 + tl.arange(0, C.K)
                k = load_part(x_ptr + C.D + C.DV, i, oe, N, W, C.D)
                metric = load_tile(metric_ptr, o, oe, C.D, C.D).to(C.ACC) * ROOT
                seen = tl.dot(k, tl.trans(metric), acc=seen, out_dtype=C.ACC, input_precision="ieee")
            tl.store(x_ptr + i[:, None] * W + o[None, :], seen, mask=(i < N)[:, None] & (o < C.D)[None, :])
    tl.debug_barrier()


@triton.jit
def store_slots(rows, slots, N, W, SLOTS, packed: tl.constexpr, TYPE: tl.constexpr, C: tl.constexpr):
    """Store the first SLOTS slots that are not empty, in order, rounded to a type and BITS, as numbers or as bytes."""
    x_ptr, weight_ptr, spread_ptr, value_ptr = rows
    held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr = slots
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        weight = load_rows(weight_ptr, i, N)
        tl.store(value_ptr + i, tl.where(weight == 0, 1.0, 0.0).to(weight.dtype), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, C.B):
        i, od, ov = i0 + tl.arange(0, C.B), tl.arange(0, C.DP), tl.arange(0, C.VP)
        weight, to = load_rows(weight_ptr, i, N), rank_values(value_ptr, i, N, C)
        here, full = (i < N) & (to < SLOTS), (weight > 0)[:, None]
        k = tl.where(full, load_part(x_ptr + C.D + C.DV, i, od, N, W, C.D), 0.0)
        v = tl.where(full, load_part(x_ptr + C.D, i, ov, N, W, C.DV), 0.0)
        store_vectors(held_k_ptr, to, od, k.to(TYPE).to(k.dtype), here, C.D, packed, C)
        store_vectors(held_v_ptr, to, ov, v.to(TYPE).to(v.dtype), here, C.DV, packed, C)
        tl.store(held_weight_ptr + to, weight, mask=here)
        tl.store(held_spread_ptr + to, tl.where(weight > 0, load_rows(spread_ptr, i, N), 0.0), mask=here)
    tl.debug_barrier()


@triton.jit
def merge_rows(rows_ptr, numbers_ptr, places_ptr, MOST, N, W, SLOTS, C: tl.constexpr):
    """Merge N rows, which lie in memory for MOST, until SLOTS are left; return which of the two copies has them."""
    weight, spread, value, total = numbers_ptr, numbers_ptr + MOST, numbers_ptr + 2 * MOST, numbers_ptr + 3 * MOST
    full = 0
    for i0 in range(0, N, C.B):
        full += tl.sum((load_rows(weight, i0 + tl.arange(0, C.B), N) > 0).to(tl.int32))
    side = 0
    if full > SLOTS:
        x, out, target = rows_ptr, rows_ptr + MOST * W, places_ptr + MOST
        choose_targets(x, weight, value, places_ptr, target, full - SLOTS, N, W, C)
        join_slots(x, out, weight, spread, total, value, target, N, W, C)
        side = 1
    return side
