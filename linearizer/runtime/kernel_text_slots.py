"""Attention of a text to slots as Triton kernels, without gradients. The reference is in slots_torch.py.

One program merges the blocks of one text and head, one after the other. Then the rows of all periods attend at once,
each to its window, the sinks, and the slots of its period.
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
    load_rows,
    load_tile,
    on_device_of_first,
    padded,
    precision,
    scores,
    update_softmax,
)
from .kernel_slots_merging import SIZE, fill_rows, merge_rows, store_slots

Tensor = torch.Tensor


@triton.jit
def merge_periods_kernel(text, blocks, slots, scratch, sizes, C: tl.constexpr):
    """Merge a block per period; grid (heads, batch). slots: (batch, PERIODS + 1, heads, SLOTS, …)."""
    k_ptr, v_ptr, metric_ptr = text
    index_ptr, present_ptr = blocks
    held_k_ptr, held_v_ptr, weight_ptr, spread_ptr = slots
    rows_ptr, numbers_ptr, places_ptr = scratch
    COLUMNS, H, PERIODS, SLOTS, BLOCK = sizes
    head, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    pair, N, W = batch * H + head, SLOTS + BLOCK, 2 * C.D + C.DV
    rows_ptr += pair * 2 * N * W
    numbers_ptr += pair * 4 * N
    places_ptr += pair * 2 * N
    own_weight, own_spread, value = numbers_ptr, numbers_ptr + N, numbers_ptr + 2 * N
    for period in range(0, PERIODS):
        at = ((batch * (PERIODS + 1) + period) * H + head) * SLOTS
        block = (batch * PERIODS + period) * BLOCK
        fill_rows(
            (rows_ptr, own_weight, own_spread),
            (held_k_ptr + at * C.D, held_v_ptr + at * C.DV, weight_ptr + at, spread_ptr + at),
            (k_ptr + pair * COLUMNS * C.D, v_ptr + pair * COLUMNS * C.DV, metric_ptr + head * C.D * C.D),
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
    k: Tensor, v: Tensor, metric: Tensor, index: Tensor, present: Tensor, held: list[Tensor],
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
    numbers = torch.empty(batch, heads, 4, count, dtype=work, device=k.device)
    places = torch.empty(batch, heads, 2, count, dtype=torch.int32, device=k.device)
    merge_periods_kernel[heads, batch](
        (k, v, metric),
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
