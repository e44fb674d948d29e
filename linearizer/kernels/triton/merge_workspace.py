"""The rows in which Triton kernels keep slots while they merge: one program has a workspace for one head of one text.

A slot stays in one row of the workspace as long as it exists; `place` has its place in the order of tokens, infinity
where the row is free. Vectors are codes and a scale. For models of 16 bits the codes are exact in 16 bits, too, and
tensor cores multiply them. merging.py merges slots.

  read_slots     copy the slots of a state into rows
  add_tokens     take tokens of a block that leaves the window into free rows
  write_slots    copy the rows into the state, in the order of their tokens
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from linearizer.kernels.triton.common import EMPTY, count_parts, padded, precision
from linearizer.kernels.triton.packed_rows import TYPES, PackedConstants, kinds_of_rows, load_codes, store_rows

Tensor = torch.Tensor
ROWS_AT_ONCE, SLOTS_AT_ONCE = 32, 16  # the latter: of a block that leaves, and that are removed
LEAST_ROOM = 512  # rows for which kernels are compiled at least: fewer take as long
INFINITE = tl.constexpr(float("inf"))
TINIEST_POWER, UNDER_HIGHEST = tl.constexpr(2.0**-100), tl.constexpr(2.0**-14)  # so that scaled numbers fit fp16
NUMBERS = tl.constexpr(11)  # of a row, in the order of numbers_of
LISTS = tl.constexpr(4)  # of rows: changed, and those of lists_of


@triton.jit
def numbers_of(work, C: tl.constexpr):
    """Return pointers to the weight, spread, |metric·k|², |v|², importance and place of rows, to whether they are
    listed, to the scales of their keys, values and metric·k, and to their least costs, or then to whether they stay."""
    number_ptr = work[3]
    return (
        number_ptr, number_ptr + C.RM, number_ptr + 2 * C.RM, number_ptr + 3 * C.RM, number_ptr + 4 * C.RM,
        number_ptr + 5 * C.RM, number_ptr + 6 * C.RM, number_ptr + 7 * C.RM, number_ptr + 8 * C.RM,
        number_ptr + 9 * C.RM, number_ptr + 10 * C.RM,
    )  # fmt: skip


@triton.jit
def lists_of(work, C: tl.constexpr):
    """Return pointers to the lists of free rows (from the number of slots on), of rows in the order of tokens, and of
    each row's last version (text_slots.py)."""
    return work[5] + C.RM, work[5] + 2 * C.RM, work[5] + 3 * C.RM


@triton.jit
def workspace_of(program, float_ptr, list_ptr, ROOM, C: tl.constexpr):
    """Return the workspace of a program: metric·k, codes of v and k, numbers, costs of pairs, lists, and the number of
    rows. Numbers, costs and lists are equally far apart for any number of rows, so one register addresses them all."""
    float_ptr += program * (ROOM * (2 * C.DP + C.VP + C.RM) + NUMBERS * C.RM)
    v_ptr = float_ptr + ROOM * C.DP
    k_ptr = v_ptr + ROOM * C.VP
    number_ptr = k_ptr + ROOM * C.DP
    CODES: tl.constexpr = tl.pointer_type(C.CODES)
    SEEN: tl.constexpr = tl.pointer_type(C.ACC if C.CODES == C.ACC else tl.float16)
    v_ptr, k_ptr, cost_ptr = v_ptr.to(CODES), k_ptr.to(CODES), number_ptr + NUMBERS * C.RM
    return float_ptr.to(SEEN), v_ptr, k_ptr, number_ptr, cost_ptr, list_ptr + program * C.RM * LISTS, ROOM


@triton.jit
def load_row_tile(pointer, rows, WP: tl.constexpr):
    """Load rows of a workspace in full width."""
    return tl.load(pointer + rows[:, None] * WP + tl.arange(0, WP)[None, :])


@triton.jit
def load_scaled_rows(pointer, scale_ptr, rows, WP: tl.constexpr, C: tl.constexpr):
    """Load rows of codes in full width, times their scales."""
    return load_row_tile(pointer, rows, WP).to(C.ACC) * tl.load(scale_ptr + rows)[:, None]


@triton.jit
def put_seen(work, rows, live, x, C: tl.constexpr):
    """Write metric·k into rows: where codes have 16 bits, as two numbers of 11 bits each, which tensor cores multiply
    as exactly as three products of TF32, in half the time."""
    index, scale = rows[:, None] * C.DP + tl.arange(0, C.DP)[None, :], tl.full([x.shape[0]], 1.0, C.ACC)
    if C.CODES == C.ACC:
        tl.store(work[0] + index, x, mask=live[:, None])
    else:
        power = tl.max(tl.abs(x), 1).to(tl.int32, bitcast=True) & 0x7F800000
        scale = tl.maximum(power.to(tl.float32, bitcast=True), TINIEST_POWER) * UNDER_HIGHEST
        x /= scale[:, None]
        high = x.to(tl.float16)
        tl.store(work[0] + index, high, mask=live[:, None])
        tl.store(work[0] + work[6] * C.DP + index, (x - high.to(C.ACC)).to(tl.float16), mask=live[:, None])
    tl.store(numbers_of(work, C)[9] + rows, scale, mask=live)


@triton.jit
def load_seen(work, rows, C: tl.constexpr):
    """Load metric·k of rows."""
    x = load_row_tile(work[0], rows, C.DP).to(C.ACC)
    if C.CODES != C.ACC:
        x += load_row_tile(work[0] + work[6] * C.DP, rows, C.DP).to(C.ACC)
    return x * tl.load(numbers_of(work, C)[9] + rows)[:, None]


@triton.jit
def put_rows(work, rows, live, keys, values, weight, spread, C: tl.constexpr):
    """Write slots into rows of a workspace; keys and values are pairs of codes and scales."""
    weight_ptr, spread_ptr, _, _, _, _, _, key_scale_ptr, value_scale_ptr, _, _ = numbers_of(work, C)
    codes, scales = keys
    tl.store(work[2] + rows[:, None] * C.DP + tl.arange(0, C.DP)[None, :], codes.to(C.CODES), mask=live[:, None])
    tl.store(key_scale_ptr + rows, scales.to(C.ACC), mask=live)
    codes, scales = values
    tl.store(work[1] + rows[:, None] * C.VP + tl.arange(0, C.VP)[None, :], codes.to(C.CODES), mask=live[:, None])
    tl.store(value_scale_ptr + rows, scales.to(C.ACC), mask=live)
    tl.store(weight_ptr + rows, weight, mask=live)
    tl.store(spread_ptr + rows, spread, mask=live)


@triton.jit
def read_slots(work, state, slots, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the slots of a state into rows, and list all as changed; return how many there are."""
    keys_ptr, values_ptr, weight_ptr, spread_ptr = state
    place_ptr, room, count = numbers_of(work, C)[5], work[6], 0
    tl.store(place_ptr + tl.arange(0, C.RM), tl.full([C.RM], INFINITE, C.ACC))
    tl.debug_barrier()
    for begin in range(0, room, C.BT):
        rows = begin + tl.arange(0, C.BT)
        weight = tl.load(weight_ptr + rows, mask=rows < slots, other=0).to(C.ACC)
        spread = tl.load(spread_ptr + rows, mask=rows < slots, other=0)
        if KIND < 8:
            spread = (spread.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        live = weight > 0
        keys = load_codes(keys_ptr, rows, live, bits, C.D, C.DP, KIND, C)
        values = load_codes(values_ptr, rows, live, bits, C.DV, C.VP, KIND, C)
        put_rows(work, rows, live, keys, values, weight, spread.to(C.ACC), C)
        tl.store(place_ptr + rows, rows.to(C.ACC), mask=live)
        tl.store(work[5] + rows, rows)
        tl.store(lists_of(work, C)[0] + rows, rows)
        count += tl.sum(live.to(tl.int32), 0)
    tl.debug_barrier()
    return count


@triton.jit
def add_tokens(work, keys, values, index, live, count, changed, C: tl.constexpr):
    """Put tokens of a block into free rows, and list these as changed; `index` counts them from the first of the block
    on. Keys and values are codes (MP, …) and scales (MP,). Return the rows (MP,)."""
    zeros, rows = tl.zeros([C.MP], C.ACC), tl.load(lists_of(work, C)[0] + count + index, mask=live, other=0)
    put_rows(work, rows, live, keys, values, zeros + 1, zeros, C)
    tl.store(numbers_of(work, C)[5] + rows, (count + index).to(C.ACC), mask=live)
    tl.store(work[5] + changed + index, rows, mask=live)
    tl.debug_barrier()
    return rows


@triton.jit
def levels_of(work, rows, live, gain, C: tl.constexpr):
    """Return the levels that are added to the logits of slots."""
    weight_ptr, spread_ptr = numbers_of(work, C)[0], numbers_of(work, C)[1]
    weight, spread = tl.load(weight_ptr + rows, mask=live, other=1.0), tl.load(spread_ptr + rows, mask=live, other=0.0)
    return tl.where(live, tl.log(weight) + gain * spread, EMPTY)


@triton.jit
def write_slots(work, state, slots, count, level_ptr, gain, bits, codes_ptr, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the rows into a state in the order of their tokens, followed by zeros, and write their levels."""
    keys_ptr, values_ptr, weight_ptr, spread_ptr = state
    weights_ptr, spreads_ptr, _, _, _, place_ptr, _, key_scale_ptr, value_scale_ptr, _, _ = numbers_of(work, C)
    order_ptr, room = lists_of(work, C)[1], work[6]
    for begin in range(0, room, C.BT):
        rows = begin + tl.arange(0, C.BT)
        place = tl.load(place_ptr + rows)
        tl.store(order_ptr + tl.where(place < INFINITE, place, 0.0).to(tl.int32), rows, mask=place < INFINITE)
    tl.debug_barrier()
    for begin in range(0, slots, C.BT):
        index = begin + tl.arange(0, C.BT)
        inside, live = index < slots, index < count
        rows = tl.load(order_ptr + index, mask=live, other=0)
        k = load_scaled_rows(work[2], key_scale_ptr, rows, C.DP, C)
        v = load_scaled_rows(work[1], value_scale_ptr, rows, C.VP, C)
        store_rows(keys_ptr, index, inside, tl.where(live[:, None], k, 0.0), bits, codes_ptr, C.D, C.DP, KIND, C)
        store_rows(values_ptr, index, inside, tl.where(live[:, None], v, 0.0), bits, codes_ptr, C.DV, C.VP, KIND, C)
        weight = tl.load(weights_ptr + rows, mask=live, other=0.0)
        spread = tl.load(spreads_ptr + rows, mask=live, other=0.0)
        if KIND < 8:
            spread = spread.to(tl.float32).to(tl.int32, bitcast=True) >> 16
        tl.store(weight_ptr + index, weight.to(weight_ptr.dtype.element_ty), mask=inside)
        tl.store(spread_ptr + index, spread.to(spread_ptr.dtype.element_ty), mask=inside)
        tl.store(level_ptr + index, levels_of(work, rows, live, gain, C), mask=inside)


def merging_launch() -> dict[str, int]:
    """Return launch options of kernels that merge: 256 threads; AMD's warps have twice as many threads."""
    return {"num_warps": 4 if torch.version.hip else 8, "num_stages": 1}


@functools.cache  # or a launch would take longer than its kernel
def merging_constants(
    dims: tuple[int, ...], room: int, work: torch.dtype, row_type: torch.dtype, least: int = 16,
    turned: bool = False, group: int = 1, ordered: bool = False,
) -> PackedConstants:  # fmt: skip
    """Return the compile-time constants of kernels that merge in `room` rows."""
    code_type, columns = row_type if row_type.itemsize == 2 else work, 64 if torch.version.hip else 128
    if max(dims) > 128:
        columns = 32  # more do not fit into registers
    return PackedConstants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=min(32, padded(min(dims))), MP=SLOTS_AT_ONCE,
        BT=ROWS_AT_ONCE, BN=columns, TURNED=turned,
        RM=padded_rows(room), RS=2 * ROWS_AT_ONCE, DW=min(64, padded(min(dims))), CODES=TYPES[code_type],
        G=group, GP=padded(group), ORDERED=ordered, **kinds_of_rows(row_type, least), **precision(work),
    )  # fmt: skip


def padded_rows(room: int) -> int:
    """Return the number of rows that kernels with room for `room` rows are compiled for."""
    return max(LEAST_ROOM, padded(room))


def make_workspace(programs: int, rows: int, dims: tuple[int, ...], like: Tensor) -> tuple[Tensor, Tensor, int]:
    """Return memory for programs that merge up to `rows` rows each, and that number rounded up."""
    room = count_parts(rows, 2 * ROWS_AT_ONCE) * 2 * ROWS_AT_ONCE
    padded_room = padded_rows(room)
    floats = room * (2 * padded(dims[0]) + padded(dims[1]) + padded_room) + NUMBERS.value * padded_room
    lists = like.new_empty(programs * padded_room * LISTS.value, dtype=torch.int32)
    return like.new_empty(programs * floats), lists, room
