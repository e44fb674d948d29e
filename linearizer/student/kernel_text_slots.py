"""Slots that merge, and attention of a text to them, as Triton kernels without gradients.

slots_merging.py is the reference of merging, which a token's kernel does, too: all threads of a program work at it, so
what they hand each other goes through memory, between barriers. slots_torch.py is that of a text: one program merges
the blocks of one text and head, one after the other. Then the rows of all periods attend at once, each to its window,
the sinks, and the slots of its period.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    EMPTY,
    Constants,
    dims_at_once,
    load_part,
    load_rows,
    load_tile,
    load_vectors,
    on_device_of_first,
    padded,
    precision,
    scores,
    store_vectors,
    update_softmax,
)
from .slots_merging import MOST_IMPORTANT, TINY

Tensor = torch.Tensor
INFINITE = tl.constexpr(float("inf"))
LEAST, MOST = tl.constexpr(TINY), tl.constexpr(MOST_IMPORTANT)
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
def pair_costs(x_ptr, weight_ptr, place_ptr, importance_ptr, i, j, N, W, C: tl.constexpr):
    """Compute what merging pairs costs (slots_merging.py); infinite for empty slots and a slot with itself."""
    own, other = load_rows(weight_ptr, i, N), load_rows(weight_ptr, j, N)
    apart = squared_distances(x_ptr, i, j, N, W, C.D, 0.0, C)
    values = squared_distances(x_ptr + C.D, i, j, N, W, C.DV, LEAST, C)
    light = 1 / tl.maximum(own, 1.0)[:, None] + 1 / tl.maximum(other, 1.0)[None, :]
    cost = apart * apart * (apart * apart) * values / light / light
    newer = tl.maximum(load_rows(place_ptr, i, N)[:, None], load_rows(place_ptr, j, N)[None, :])
    important = tl.maximum(load_rows(importance_ptr, i, N)[:, None], load_rows(importance_ptr, j, N)[None, :])
    cost = cost * important * newer  # slots_merging.RECENCY
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
def number_slots(weight_ptr, place_ptr, N, C: tl.constexpr):
    """Number the slots that are not empty, from 1 on."""
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        place = tl.zeros([C.B], C.ACC)
        for j0 in range(0, i0 + 1, C.B):
            j = j0 + tl.arange(0, C.B)
            counts = (load_rows(weight_ptr, j, N) > 0)[None, :] & (j[None, :] <= i[:, None])
            place += tl.sum(tl.where(counts, 1.0, 0.0).to(C.ACC), 1)
        tl.store(place_ptr + i, place, mask=i < N)
    tl.debug_barrier()


@triton.jit
def choose_targets(x_ptr, numbers, gone_ptr, target_ptr, surplus, N, W, C: tl.constexpr):
    """Choose the slot that each goes into: the `surplus` cheapest into one that stays, the others into themselves."""
    weight_ptr, value_ptr, place_ptr, importance_ptr = numbers
    for i0 in range(0, N, C.B):
        i = i0 + tl.arange(0, C.B)
        best = tl.full([C.B], INFINITE, C.ACC)
        for j0 in range(0, i0 + 1, C.B):
            j = j0 + tl.arange(0, C.B)
            cost = pair_costs(x_ptr, weight_ptr, place_ptr, importance_ptr, i, j, N, W, C)
            cost = tl.where(i[:, None] > j[None, :], cost, INFINITE)
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
            cost = pair_costs(x_ptr, weight_ptr, place_ptr, importance_ptr, i, j, N, W, C)
            cost = tl.where(stays[None, :], cost, INFINITE)
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
    x_ptr, weight_ptr, spread_ptr, importance_ptr = rows
    held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr = slots
    k_ptr, v_ptr, metric_ptr, query_ptr = text
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
        query = ROOT * tl.load(query_ptr + od, mask=od < C.D, other=0).to(C.ACC)
        asked = tl.sum(k * query[None, :], 1) - tl.load(query_ptr + C.D).to(C.ACC)
        tl.store(importance_ptr + i, tl.exp(tl.minimum(tl.maximum(asked, -MOST), MOST)), mask=i < N)
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
    importance = numbers_ptr + 4 * MOST
    full = 0
    for i0 in range(0, N, C.B):
        full += tl.sum((load_rows(weight, i0 + tl.arange(0, C.B), N) > 0).to(tl.int32))
    side = 0
    if full > SLOTS:
        x, out, target = rows_ptr, rows_ptr + MOST * W, places_ptr + MOST
        number_slots(weight, total, N, C)
        choose_targets(x, (weight, value, total, importance), places_ptr, target, full - SLOTS, N, W, C)
        join_slots(x, out, weight, spread, total, value, target, N, W, C)
        side = 1
    return side


@triton.jit
def merge_periods_kernel(text, blocks, slots, scratch, sizes, C: tl.constexpr):
    """Merge a block per period; grid (heads, batch). slots: (batch, PERIODS + 1, heads, SLOTS, …)."""
    k_ptr, v_ptr, metric_ptr, query_ptr = text
    index_ptr, present_ptr = blocks
    held_k_ptr, held_v_ptr, weight_ptr, spread_ptr = slots
    rows_ptr, numbers_ptr, places_ptr = scratch
    COLUMNS, H, PERIODS, SLOTS, BLOCK = sizes
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, N, W = batch * H + head, SLOTS + BLOCK, 2 * C.D + C.DV
    rows_ptr += pair * 2 * N * W
    numbers_ptr += pair * 5 * N
    places_ptr += pair * 2 * N
    own_weight, own_spread, value = numbers_ptr, numbers_ptr + N, numbers_ptr + 2 * N
    for period in range(0, PERIODS):
        at = ((batch * (PERIODS + 1) + period) * H + head) * SLOTS
        block = (batch * PERIODS + period) * BLOCK
        fill_rows(
            (rows_ptr, own_weight, own_spread, numbers_ptr + 4 * N),
            (held_k_ptr + at * C.D, held_v_ptr + at * C.DV, weight_ptr + at, spread_ptr + at),
            (k_ptr + pair * COLUMNS * C.D, v_ptr + pair * COLUMNS * C.DV, metric_ptr + head * C.D * C.D,
             query_ptr + head * (C.D + 1)),
            (index_ptr + block, present_ptr + block), N, W, SLOTS, 1.0, False, C,
        )  # fmt: skip
        side = merge_rows(rows_ptr, numbers_ptr, places_ptr, N, N, W, SLOTS, C)
        after = at + H * SLOTS
        store_slots(
            (rows_ptr + side * N * W, own_weight, own_spread, value),
            (held_k_ptr + after * C.D, held_v_ptr + after * C.DV, weight_ptr + after, spread_ptr + after),
            N, W, SLOTS, False, held_k_ptr.dtype.element_ty, C,
        )  # fmt: skip


def widths(k: Tensor, v: Tensor) -> dict:
    dims = k.shape[-1], v.shape[-1]
    return {"D": dims[0], "DP": padded(dims[0]), "DV": dims[1], "VP": padded(dims[1])}


@on_device_of_first
def run_slot_merging(
    k: Tensor, v: Tensor, metric: Tensor, mean_query: Tensor, index: Tensor, present: Tensor, held: list[Tensor],
    bits: int = 16,
) -> list[Tensor]:  # fmt: skip
    """Merge blocks of columns k, v (batch, heads, columns, dim), as slots_torch.merge_blocks does.

    index, present (batch, periods, block): columns of the blocks, and which are merged.
    held: k, v, weight and spread of the slots (batch, heads, slots, …). The result are those of every period:
    (batch, 1 + periods, heads, slots, …), at first as they were. `bits` of a number in keys and values.
    """
    batch, heads, columns = k.shape[:3]
    periods, block, slots, work = index.shape[1], index.shape[2], held[0].shape[2], held[2].dtype
    count = slots + block
    every = [x.new_empty(batch, periods + 1, *x.shape[1:]) for x in held]
    for each, x in zip(every, held, strict=True):
        each[:, 0] = x
    rows = torch.empty(batch, heads, 2, count, 2 * k.shape[-1] + v.shape[-1], dtype=work, device=k.device)
    numbers = torch.empty(batch, heads, 5, count, dtype=work, device=k.device)
    places = torch.empty(batch, heads, 2, count, dtype=torch.int32, device=k.device)
    merge_periods_kernel[heads, batch](
        (k, v, metric, mean_query),
        (index, present.int()),
        tuple(every),
        (rows, numbers, places),
        (columns, heads, periods, slots, block),
        Constants(**widths(k, v), B=SIZE, K=16, BITS=bits, **precision(numbers)),
        num_warps=4,
        num_stages=1,
    )
    return every


@triton.jit
def text_slots_kernel(text, slots, places, out_ptr, sizes, C: tl.constexpr):
    """Attend with the rows of a period; grid (batch · heads, periods, blocks of a group's rows)."""
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr = text
    slot_k_ptr, slot_v_ptr, weight_ptr, spread_ptr, gain_ptr = slots
    place_ptr, merged_ptr, first_ptr, empty_ptr = places
    COLUMNS, H, G, PERIODS, ROWS, WINDOW, SLOTS = sizes
    period, pair = tl.program_id(1), tl.program_id(0).to(tl.int64)
    batch, head = pair // H, pair % H
    row, od, ov = tl.program_id(2) * C.BT + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.arange(0, C.VP)
    line = ((pair * G + row // ROWS) * PERIODS + period) * ROWS + row % ROWS
    inside = row < G * ROWS
    line, lines = tl.where(inside, line, -1), tl.num_programs(0) * G * PERIODS * ROWS
    q = load_tile(q_ptr, line, od, lines, C.D)
    place = tl.load(place_ptr + (batch * PERIODS + period) * ROWS + row % ROWS, mask=inside, other=0)
    merged = tl.load(merged_ptr + batch * PERIODS + period)
    first, empty = tl.load(first_ptr + batch), tl.load(empty_ptr + batch)
    top, total, acc = tl.full([C.BT], EMPTY, C.ACC), tl.zeros([C.BT], C.ACC), tl.zeros([C.BT, C.VP], C.ACC)
    if C.S > 0:
        os = tl.arange(0, C.SP)
        sink_v = load_tile(sink_v_ptr + pair * C.S * C.DV, os, ov, C.S, C.DV)
        sinks = sink_k_ptr + pair * C.S * C.D
        sink_logits = scores(q, q_ptr, sinks, line, os, lines, C.S, C.D, C.DP, C)
        gone = ((os < C.S) & (os < merged))[None, :] & inside[:, None]
        top, total, acc = update_softmax(top, total, acc, sink_logits, gone, sink_v, C)
    for n0 in range(0, WINDOW, C.BN):
        near = merged + n0 + tl.arange(0, C.BN)
        column = near - first
        v = load_tile(v_ptr + pair * COLUMNS * C.DV, column, ov, COLUMNS, C.DV)
        logits = scores(q, q_ptr, k_ptr + pair * COLUMNS * C.D, line, column, lines, COLUMNS, C.D, C.DP, C)
        live = ((column >= empty) & (column < COLUMNS) & (n0 + tl.arange(0, C.BN) < WINDOW))[None, :]
        live = live & (near[None, :] <= place[:, None])
        top, total, acc = update_softmax(top, total, acc, logits, live, v, C)
    gain, at = tl.load(gain_ptr + head).to(C.ACC), ((batch * (PERIODS + 1) + period + 1) * H + head) * SLOTS
    for n0 in range(0, SLOTS, C.BN):
        on = n0 + tl.arange(0, C.BN)
        v = load_tile(slot_v_ptr + at * C.DV, on, ov, SLOTS, C.DV)
        weight = load_rows(weight_ptr + at, on, SLOTS)
        level = tl.log(tl.maximum(weight, 1.0)) + gain * load_rows(spread_ptr + at, on, SLOTS)
        logits = scores(q, q_ptr, slot_k_ptr + at * C.D, line, on, lines, SLOTS, C.D, C.DP, C)
        logits += level[None, :]
        top, total, acc = update_softmax(top, total, acc, logits, (weight > 0)[None, :] & inside[:, None], v, C)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + line[:, None] * C.DV + ov[None, :], out.to(out_ptr.dtype.element_ty),
             mask=inside[:, None] & (ov < C.DV)[None, :])  # fmt: skip


@on_device_of_first
def run_text_slots(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, slots: list[Tensor], gain: Tensor, place: Tensor,
    merged: Tensor, first: Tensor, empty: Tensor, window: int,
) -> Tensor:  # fmt: skip
    """Attend with rows q (batch, heads, group, periods · rows, dim) at places (batch, periods, rows).

    slots: what `merge` gave; merged (batch, periods).
    """
    batch, heads, group = q.shape[:3]
    (periods, rows), sinks = place.shape[1:], sink_k.shape[2]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    size = 16 if group * rows <= 16 else 32
    text_slots_kernel[batch * heads, periods, triton.cdiv(group * rows, size)](
        (q, k, v, sink_k, sink_v),
        (*slots, gain),
        (place, merged, first, empty),
        out,
        (k.shape[2], heads, group, periods, rows, window, slots[0].shape[3]),
        Constants(**widths(k, v), DS=dims_at_once(q), S=sinks, SP=padded(sinks), BT=size, BN=32, **precision(slots[2])),
        num_warps=4,
        num_stages=1,
    )
    return out
