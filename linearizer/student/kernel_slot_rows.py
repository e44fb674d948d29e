"""Rows that slots lie in while they merge, as Triton kernels: one program has a workspace for one head of one text.

A slot lies in a row of the workspace, and stays there while it lives; `place` has its place in the order of tokens,
infinity where the row is free. kernel_merging.py merges them.

  read_slots     copy the slots of a state into rows
  add_block      take the tokens of a block that leaves the window into free rows
  write_slots    copy the rows into the state, in the order of their tokens
"""

from __future__ import annotations

import functools

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, count_parts, padded, precision
from .kernel_packed_rows import PackedConstants, kinds_of_rows, load_codes, store_rows

Tensor = torch.Tensor
ROWS_AT_ONCE = 32
LEAST_ROOM = 512  # of rows, for which kernels are compiled: fewer take as long
INFINITE = tl.constexpr(float("inf"))
NUMBERS = tl.constexpr(7)  # of a row, in the order of numbers_of
LISTS = tl.constexpr(7)  # of rows: changed (twice as long as a list), and those of lists_of


@triton.jit
def numbers_of(work):
    """Where the weight, spread, |metric·k|², |v|², importance, place and least cost of rows lie (that but for its
    place)."""
    number_ptr, room = work[3], work[6]
    return (
        number_ptr, number_ptr + room, number_ptr + 2 * room, number_ptr + 3 * room, number_ptr + 4 * room,
        number_ptr + 5 * room, number_ptr + 6 * room,
    )  # fmt: skip


@triton.jit
def lists_of(work):
    """Where the lists of free rows lie, of rows in order, of the slot with which a row's least cost is, of lost rows,
    and of the last version of a row (kernel_text_slots.py)."""
    list_ptr, room = work[5], work[6]
    return list_ptr + 2 * room, list_ptr + 3 * room, list_ptr + 4 * room, list_ptr + 5 * room, list_ptr + 6 * room


@triton.jit
def workspace_of(own, float_ptr, list_ptr, ROOM, C: tl.constexpr):
    """The part of a program: metric·k, v and k of rows, their numbers, costs of pairs, lists, and how many rows."""
    float_ptr += own * ROOM * (2 * C.DP + C.VP + NUMBERS + ROOM)
    v_ptr = float_ptr + ROOM * C.DP
    k_ptr = v_ptr + ROOM * C.VP
    number_ptr = k_ptr + ROOM * C.DP
    return float_ptr, v_ptr, k_ptr, number_ptr, number_ptr + NUMBERS * ROOM, list_ptr + own * ROOM * LISTS, ROOM


@triton.jit
def load_row_tile(pointer, rows, WP: tl.constexpr):
    """Whole rows of a workspace."""
    return tl.load(pointer + rows[:, None] * WP + tl.arange(0, WP)[None, :])


@triton.jit
def put_rows(work, rows, live, k, v, weight, spread, place, C: tl.constexpr):
    """Write slots into rows of a workspace."""
    weight_ptr, spread_ptr, _, _, _, place_ptr, _ = numbers_of(work)
    od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
    tl.store(work[2] + rows[:, None] * C.DP + od[None, :], k, mask=live[:, None])
    tl.store(work[1] + rows[:, None] * C.VP + ov[None, :], v, mask=live[:, None])
    tl.store(weight_ptr + rows, weight, mask=live)
    tl.store(spread_ptr + rows, spread, mask=live)
    tl.store(place_ptr + rows, place, mask=live)


@triton.jit
def read_slots(work, state, slots, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the slots of a state into rows; return how many there are, all of them listed as changed."""
    keys_ptr, values_ptr, weight_ptr, spread_ptr = state
    weights_ptr, room, count = work[3], work[6], 0
    for begin in range(0, room, C.BT):
        rows = begin + tl.arange(0, C.BT)
        weight = tl.load(weight_ptr + rows, mask=rows < slots, other=0).to(C.ACC)
        spread = tl.load(spread_ptr + rows, mask=rows < slots, other=0)
        if KIND < 8:
            spread = (spread.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        live = weight > 0
        codes, scales = load_codes(keys_ptr, rows, live, bits, C.D, C.DP, KIND, C)
        k = codes * scales[:, None]
        codes, scales = load_codes(values_ptr, rows, live, bits, C.DV, C.VP, KIND, C)
        place = tl.where(live, rows.to(C.ACC), INFINITE)
        put_rows(work, rows, rows >= 0, k, codes * scales[:, None], weight + (~live), spread.to(C.ACC), place, C)
        for number in tl.static_range(2, 5):  # of free rows, too, so that nothing is computed of what lay here before
            tl.store(weights_ptr + number * room + rows, tl.zeros([C.BT], C.ACC))
        tl.store(work[0] + rows[:, None] * C.DP + tl.arange(0, C.DP)[None, :], tl.zeros([C.BT, C.DP], C.ACC))
        tl.store(work[5] + rows, rows, mask=live)
        count += tl.sum(live.to(tl.int32), 0)
    tl.debug_barrier()
    return count, count


@triton.jit
def add_block(work, keys, values, missing, block, count, changed, C: tl.constexpr):
    """Take tokens of a block, as codes and scales, into free rows, all but the first `missing`, which are sinks; list
    them as changed. Return how many slots there are, and how many are listed."""
    place_ptr, list_ptr, room = numbers_of(work)[5], work[5], work[6]
    free_ptr, found = lists_of(work)[0], 0
    for begin in range(0, room, C.BT):
        rows = begin + tl.arange(0, C.BT)
        free = (tl.load(place_ptr + rows) == INFINITE).to(tl.int32)
        tl.store(free_ptr + found + tl.cumsum(free, 0) - 1, rows, mask=free > 0)
        found += tl.sum(free, 0)
    tl.debug_barrier()
    om = tl.arange(0, C.MP)
    live, index = (om >= missing) & (om < block), om - missing
    rows = tl.load(free_ptr + index, mask=live, other=0)
    k, v = keys[0].to(C.ACC) * keys[1][:, None], values[0].to(C.ACC) * values[1][:, None]
    none = tl.zeros([C.MP], C.ACC)
    put_rows(work, rows, live, k, v, none + 1, none, (count + index).to(C.ACC), C)
    tl.store(list_ptr + changed + index, rows, mask=live)
    tl.debug_barrier()
    new = tl.maximum(block - missing, 0)
    return count + new, changed + new


@triton.jit
def levels_of(work, rows, live, gain, C: tl.constexpr):
    """What is added to the logits of slots."""
    weight_ptr, spread_ptr, _, _, _, _, _ = numbers_of(work)
    weight, spread = tl.load(weight_ptr + rows, mask=live, other=1.0), tl.load(spread_ptr + rows, mask=live, other=0.0)
    return tl.where(live, tl.log(weight) + gain * spread, EMPTY)


@triton.jit
def write_slots(work, state, slots, count, level_ptr, gain, bits, codes_ptr, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the rows into a state, in the order of their tokens, and zeros behind them; write their levels, too."""
    keys_ptr, values_ptr, weight_ptr, spread_ptr = state
    weights_ptr, spreads_ptr, _, _, _, place_ptr, _ = numbers_of(work)
    order_ptr, room = lists_of(work)[1], work[6]
    for begin in range(0, room, C.BT):
        rows = begin + tl.arange(0, C.BT)
        place = tl.load(place_ptr + rows)
        tl.store(order_ptr + tl.where(place < INFINITE, place, 0.0).to(tl.int32), rows, mask=place < INFINITE)
    tl.debug_barrier()
    for begin in range(0, slots, C.BT):
        at = begin + tl.arange(0, C.BT)
        inside, live = at < slots, at < count
        rows = tl.load(order_ptr + at, mask=live, other=0)
        k, v = load_row_tile(work[2], rows, C.DP), load_row_tile(work[1], rows, C.VP)
        store_rows(keys_ptr, at, inside, tl.where(live[:, None], k, 0.0), bits, codes_ptr, C.D, C.DP, KIND, C)
        store_rows(values_ptr, at, inside, tl.where(live[:, None], v, 0.0), bits, codes_ptr, C.DV, C.VP, KIND, C)
        weight = tl.load(weights_ptr + rows, mask=live, other=0.0)
        spread = tl.load(spreads_ptr + rows, mask=live, other=0.0)
        if KIND < 8:
            spread = spread.to(tl.float32).to(tl.int32, bitcast=True) >> 16
        tl.store(weight_ptr + at, weight.to(weight_ptr.dtype.element_ty), mask=inside)
        tl.store(spread_ptr + at, spread.to(spread_ptr.dtype.element_ty), mask=inside)
        tl.store(level_ptr + at, levels_of(work, rows, live, gain, C), mask=inside)


def merging_launch() -> dict[str, int]:
    """Return how to launch kernels that merge: with 256 threads, of which a warp of AMD's has twice as many."""
    return {"num_warps": 4 if torch.version.hip else 8, "num_stages": 1}


@functools.cache  # or the host would take longer to launch a kernel than it runs
def merging_constants(
    dims: tuple[int, ...], most: int, room: int, work: torch.dtype, kept: torch.dtype, least: int = 16,
    turned: bool = False, group: int = 1, ordered: bool = False,
) -> PackedConstants:  # fmt: skip
    """Return what kernels that merge are compiled for: keys and values of these sizes, blocks of at most so many, and
    so many rows."""
    some = padded(max(dims))
    return PackedConstants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=min(32, padded(min(dims))), MP=padded(most),
        BT=ROWS_AT_ONCE, BN=ROWS_AT_ONCE * (2 if some <= 128 else 1), TURNED=turned,
        RM=max(LEAST_ROOM, padded(room)),
        G=group, GP=padded(group), ORDERED=ordered, **kinds_of_rows(kept, least), **precision(work),
    )  # fmt: skip


def make_workspace(programs: int, rows: int, dims: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return memory for programs that merge so many rows each, and the number of rows, filled up."""
    room = count_parts(rows, 2 * ROWS_AT_ONCE) * 2 * ROWS_AT_ONCE
    numbers = 2 * padded(dims[0]) + padded(dims[1]) + NUMBERS.value + room
    return (
        like.new_empty(programs * room * numbers),
        like.new_empty(programs * room * LISTS.value, dtype=torch.int32),
        room,
    )
