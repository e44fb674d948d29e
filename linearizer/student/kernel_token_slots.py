"""One token for heads with slots in one launch: merge a block where it leaves the window, then attend; all in place.

Whether a block leaves is decided on the device, by the number of tokens read. No gradients. slots_torch.py is the
reference.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    BLOCK,
    COUNT,
    FAR,
    HEAD,
    HEADS,
    OWN,
    REST,
    TYPES,
    WINDOW,
    WINDOW_K,
    Constants,
    address,
    attend_near,
    load_new,
    load_rows,
    load_vectors,
    new_exponent,
    on_device_of_first,
    point_at_pair,
    precision,
    scores_with_new,
    store_token,
    update_softmax,
)
from .kernel_text_slots import SIZE, fill_rows, merge_rows, store_slots
from .kernel_token_table import TokenTable
from .kernel_token_windows import token_layout
from .state import SlotState

Tensor = torch.Tensor
SLOT_K, WEIGHT, SPREAD, METRIC, GAIN, MEAN_QUERY = (tl.constexpr(REST.value + n) for n in (0, 2, 3, 4, 5, 6))


@triton.jit
def token_slots_kernel(table, token, layout, scratch, out_ptr, C: tl.constexpr):
    """Grid (rows of the table, batch). The scratch memory has ROOM for so many rows that merge."""
    table_ptr, ticket_ptr, COLUMNS = table
    q_ptr, k_ptr, v_ptr = token
    numbers_ptr, places_ptr, ROOM = scratch
    KV, q_batch, q_head, q_stride, k_batch, k_head, v_batch, v_head = layout
    row_ptr, batch = table_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    head, own, heads = tl.load(row_ptr + HEAD), tl.load(row_ptr + OWN), tl.load(row_ptr + HEADS)
    WIDTH, SLOTS = tl.load(row_ptr + WINDOW).to(tl.int32), tl.load(row_ptr + FAR).to(tl.int32)
    block, at = tl.load(row_ptr + BLOCK).to(tl.int32), batch * heads + own
    place = tl.load(address(row_ptr, COUNT, tl.int64) + batch).to(tl.int32)
    og, ov = tl.arange(0, C.GP), tl.arange(0, C.VP)
    slot_k, slot_v = point_at_pair(row_ptr, SLOT_K, at * SLOTS, C)
    weight_ptr, spread_ptr = address(row_ptr, WEIGHT, C.ACC) + at * SLOTS, address(row_ptr, SPREAD, C.ACC) + at * SLOTS
    W, own_numbers = 2 * C.D + C.DV, batch * tl.num_programs(0) + tl.program_id(0)
    rows, places = numbers_ptr + own_numbers * (2 * W + 5) * ROOM, places_ptr + own_numbers * 2 * ROOM
    merged = tl.maximum(place - WIDTH + block, 0) // block * block  # tokens before this place are not in the window
    if (merged > 0) & (merged - block == place - WIDTH):
        N = SLOTS + block
        numbers = rows + 2 * W * ROOM
        for i0 in range(0, block, C.B):
            i = i0 + tl.arange(0, C.B)
            tl.store(places + i, (merged - block + i) % WIDTH, mask=i < block)
            tl.store(places + ROOM + i, (merged - block + i >= C.S).to(tl.int32), mask=i < block)
        tl.debug_barrier()
        window_k, window_v = point_at_pair(row_ptr, WINDOW_K, at * WIDTH, C)
        slots = slot_k, slot_v, weight_ptr, spread_ptr
        metric = address(row_ptr, METRIC, C.MADE) + own * C.D * C.D
        mean_query = address(row_ptr, MEAN_QUERY, C.MADE) + own * (C.D + 1)
        fill_rows(
            (rows, numbers, numbers + ROOM, numbers + 4 * ROOM), slots, (window_k, window_v, metric, mean_query),
            (places, places + ROOM), N, W, SLOTS, C.ROOT, C.BITS == 8, C,
        )  # fmt: skip
        side = merge_rows(rows, numbers, places, ROOM, N, W, SLOTS, C)
        store_slots(
            (rows + side * ROOM * W, numbers, numbers + ROOM, numbers + 2 * ROOM), slots, N, W, SLOTS, C.BITS == 8,
            k_ptr.dtype.element_ty, C,
        )  # fmt: skip
    q = q_ptr + batch * q_batch + head * q_head
    k, v = k_ptr + batch * k_batch + head * k_head, v_ptr + batch * v_batch + head * v_head
    k_exponent, v_exponent = new_exponent(k, C.D, C.DP, C), new_exponent(v, C.DV, C.VP, C)
    new_v = load_new(v, ov, v_exponent, C.DV, C)
    top, total, acc = attend_near(row_ptr, at, q, q_stride, (k, k_exponent, v, new_v), place, merged, WIDTH, og, C)
    gain = tl.load(address(row_ptr, GAIN, C.MADE) + own).to(C.ACC)
    for n0 in range(0, SLOTS, C.BN):
        on = n0 + tl.arange(0, C.BN)
        weight = load_rows(weight_ptr, on, SLOTS)
        level = tl.log(tl.maximum(weight, 1.0)) + gain * load_rows(spread_ptr, on, SLOTS)
        logits = scores_with_new(q, q_stride, slot_k, k, k_exponent, on, -1, og, SLOTS, C)
        values = load_vectors(slot_v, on, ov, SLOTS, C.DV, C.BITS == 8).to(C.ACC)
        live = (weight > 0)[None, :] & (og >= 0)[:, None]
        top, total, acc = update_softmax(top, total, acc, logits + level[None, :], live, values, C)
    tl.store(out_ptr + ((batch * KV + head) * C.G + og[:, None]) * C.DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(og < C.G)[:, None] & (ov < C.DV)[None, :])  # fmt: skip
    store_token(row_ptr, at, k, k_exponent, v, v_exponent, place, WIDTH, ticket_ptr, C)


@on_device_of_first
def run_token_slots(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, table: TokenTable, state: SlotState, room: int, made: torch.dtype,
    root: float, scale: float = 1.0,
) -> None:  # fmt: skip
    """Attend with one token to what some heads of a layer hold, and bring all of it up to date in place.

    `state` is any of the states, slots and a block's tokens are at most `room`.
    """
    layout, sizes = token_layout(q, k, v, state)
    heads, width = table.rows.shape[0], 2 * k.shape[-1] + v.shape[-1]
    numbers = torch.empty(q.shape[0], heads, (2 * width + 5) * room, dtype=state.weight.dtype, device=q.device)
    places = torch.empty(q.shape[0], heads, 2 * room, dtype=torch.int32, device=q.device)
    merging = {"B": SIZE, "K": 16}
    token_slots_kernel[heads, q.shape[0]](
        (table.rows, table.tickets, table.rows.shape[1]),
        (q, k, v),
        layout,
        (numbers, places, room),
        out,
        Constants(**sizes, **merging, MADE=TYPES[made], SCALE=scale, ROOT=root, **precision(state.weight)),
        num_warps=8,
        num_stages=1,
    )
