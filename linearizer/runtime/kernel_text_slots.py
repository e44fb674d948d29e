"""Attention to slots as a Triton kernel; slots.py says what it computes. Forward only.

The rows of a turn attend to their window, the sinks and the slots of that turn, all turns at once.
"""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, at_once, load_rows, load_tile, padded, precision, scores, take_in, where_it_lies
from .kernel_text_merging import widths

Tensor = torch.Tensor


@triton.jit
def look_turns(
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr, slot_k_ptr, slot_v_ptr, weight_ptr, spread_ptr, gain_ptr, place_ptr,
    merged_ptr, first_ptr, empty_ptr, out_ptr, C, H, G, TURNS, ROWS, WINDOW, SLOTS,
    D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (batch · heads, turns, blocks of a group's rows)."""
    turn, pair = tl.program_id(1), tl.program_id(0).to(tl.int64)
    batch, head = pair // H, pair % H
    row, od, ov = tl.program_id(2) * BT + tl.arange(0, BT), tl.arange(0, DP), tl.arange(0, VP)
    line = ((pair * G + row // ROWS) * TURNS + turn) * ROWS + row % ROWS
    inside = row < G * ROWS
    line, lines = tl.where(inside, line, -1), tl.num_programs(0) * G * TURNS * ROWS
    q = load_tile(q_ptr, line, od, lines, D)
    place = tl.load(place_ptr + (batch * TURNS + turn) * ROWS + row % ROWS, mask=inside, other=0)
    merged = tl.load(merged_ptr + batch * TURNS + turn)
    first, empty = tl.load(first_ptr + batch), tl.load(empty_ptr + batch)
    top, total, acc = tl.full([BT], EMPTY, ACC), tl.zeros([BT], ACC), tl.zeros([BT, VP], ACC)
    if S > 0:
        os = tl.arange(0, SP)
        sink_v = load_tile(sink_v_ptr + pair * S * DV, os, ov, S, DV)
        sinks = sink_k_ptr + pair * S * D
        sink_logits = scores(q, q_ptr, sinks, line, os, lines, S, D, DP, DS, ACC, PRECISION)
        gone = ((os < S) & (os < merged))[None, :] & inside[:, None]
        top, total, acc = take_in(top, total, acc, sink_logits, gone, sink_v, PRECISION)
    for n0 in range(0, WINDOW, BN):
        near = merged + n0 + tl.arange(0, BN)
        column = near - first
        v = load_tile(v_ptr + pair * C * DV, column, ov, C, DV)
        logits = scores(q, q_ptr, k_ptr + pair * C * D, line, column, lines, C, D, DP, DS, ACC, PRECISION)
        live = ((column >= empty) & (column < C) & (n0 + tl.arange(0, BN) < WINDOW))[None, :]
        live = live & (near[None, :] <= place[:, None])
        top, total, acc = take_in(top, total, acc, logits, live, v, PRECISION)
    gain, at = tl.load(gain_ptr + head).to(ACC), ((batch * (TURNS + 1) + turn + 1) * H + head) * SLOTS
    for n0 in range(0, SLOTS, BN):
        on = n0 + tl.arange(0, BN)
        v = load_tile(slot_v_ptr + at * DV, on, ov, SLOTS, DV)
        weight = load_rows(weight_ptr + at, on, SLOTS)
        level = tl.log(tl.maximum(weight, 1.0)) + gain * load_rows(spread_ptr + at, on, SLOTS)
        logits = scores(q, q_ptr, slot_k_ptr + at * D, line, on, lines, SLOTS, D, DP, DS, ACC, PRECISION)
        logits += level[None, :]
        top, total, acc = take_in(top, total, acc, logits, (weight > 0)[None, :] & inside[:, None], v, PRECISION)
    out = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out_ptr + line[:, None] * DV + ov[None, :], out.to(out_ptr.dtype.element_ty),
             mask=inside[:, None] & (ov < DV)[None, :])  # fmt: skip


@where_it_lies
def look(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, slots: list[Tensor], gain: Tensor, place: Tensor,
    merged: Tensor, first: Tensor, empty: Tensor, window: int,
) -> Tensor:  # fmt: skip
    """Attend with rows q (batch, heads, group, turns · rows, dim) at places (batch, turns, rows).

    slots: what `merge` gave; merged (batch, turns).
    """
    batch, heads, group = q.shape[:3]
    turns, rows = place.shape[1:]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    size = 16 if group * rows <= 16 else 32
    look_turns[batch * heads, turns, triton.cdiv(group * rows, size)](
        q, k, v, sink_k, sink_v, *slots, gain, place, merged, first, empty, out,
        k.shape[2], heads, group, turns, rows, window, slots[0].shape[3],
        **widths(k, v), DS=at_once(q), S=sink_k.shape[2], SP=padded(sink_k.shape[2]), BT=size, BN=32,
        **precision(slots[2]), num_warps=4, num_stages=1,
    )  # fmt: skip
    return out
