"""The Triton kernel that runs before attention with a token: a block that leaves a window merges into the slots of its
head, and other programs turn the token for heads that keep turned vectors.

merging.py merges; this module finds a head's rows and slots in the pool (state_pool.py) by the pool's table.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linearizer.kernels.triton.common import EMPTY
from linearizer.kernels.triton.merge_workspace import add_tokens, read_slots, workspace_of, write_slots
from linearizer.kernels.triton.merging import merge_rows
from linearizer.kernels.triton.packed_rows import (
    ALIGNED,
    BITS_KEPT,
    BLOCK,
    FIELDS,
    HEAD,
    KEYS,
    LEVEL,
    MERGER,
    SLOTS,
    SPREAD,
    TWO_BYTES,
    VALUES,
    WEIGHT,
    WINDOW,
    call_for_kind,
    count_for_kind,
    load_codes,
)


@triton.jit
def slots_of(field_ptr, start_ptr, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Return pointers to the keys and the values of a head, and to those of its slots with their counts, which take two
    bytes each where bits are few."""
    keys_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + KEYS), ALIGNED)
    values_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + VALUES), ALIGNED)
    weight_ptr, spread_ptr = start_ptr + tl.load(field_ptr + WEIGHT), start_ptr + tl.load(field_ptr + SPREAD)
    window = tl.load(field_ptr + WINDOW)
    if KIND == 16:
        ROWS: tl.constexpr = tl.pointer_type(C.KEPT)
        slot_k_ptr, slot_v_ptr = keys_ptr.to(ROWS) + window * C.D, values_ptr.to(ROWS) + window * C.DV
    elif KIND == 8:
        slot_k_ptr, slot_v_ptr = keys_ptr + window * (C.D + 1), values_ptr + window * (C.DV + 1)
    else:
        slot_k_ptr = keys_ptr + window * (bits * C.D // 8 + 2)
        slot_v_ptr = values_ptr + window * (bits * C.DV // 8 + 2)
    if KIND < 8:
        return keys_ptr, values_ptr, (slot_k_ptr, slot_v_ptr, weight_ptr.to(TWO_BYTES), spread_ptr.to(TWO_BYTES))
    else:
        COUNTS: tl.constexpr = tl.pointer_type(C.SUMS)
        return keys_ptr, values_ptr, (slot_k_ptr, slot_v_ptr, weight_ptr.to(COUNTS), spread_ptr.to(COUNTS))


@triton.jit(noinline=True)  # compilers take far longer for one large function
def read_leaving(
    work, field_ptr, start_ptr, slots, first, missing, window, block, bits, KIND: tl.constexpr, C: tl.constexpr
):
    """Copy slots and a leaving block into rows, and list all as changed; return how many there are."""
    keys_ptr, values_ptr, state = slots_of(field_ptr, start_ptr, bits, KIND, C)
    count = read_slots(work, state, slots, bits, KIND, C)
    for begin in range(0, block, C.MP):
        om = begin + tl.arange(0, C.MP)
        tokens, live = (first + om) % window, (om >= missing) & (om < block)
        keys = load_codes(keys_ptr, tokens, live, bits, C.D, C.DP, KIND, C)
        values = load_codes(values_ptr, tokens, live, bits, C.DV, C.VP, KIND, C)
        add_tokens(work, keys, values, om - missing, live, count, count, C)
    return count + block - missing


@triton.jit(noinline=True)
def write_merged(
    work, field_ptr, start_ptr, slots, count, level_ptr, gain, codes_ptr, bits, KIND: tl.constexpr, C: tl.constexpr
):
    """Copy merged rows into the slots of a state."""
    _, _, state = slots_of(field_ptr, start_ptr, bits, KIND, C)
    write_slots(work, state, slots, count, level_ptr, gain, bits, codes_ptr, KIND, C)


@triton.jit
def load_tile_at(pointer, rows, stride, stop, columns, width):
    """Load rows of a matrix that are `stride` apart; numbers outside are 0."""
    inside = (rows < stop)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def turned_of(turned_ptr, program, C: tl.constexpr):
    """Return pointers to the queries, the key and the value of a token as a head turned them."""
    turned_ptr += program * ((C.GP + 1) * C.DP + C.VP)
    return turned_ptr, turned_ptr + C.GP * C.DP, turned_ptr + (C.GP + 1) * C.DP


@triton.jit
def turn_vector(x_ptr, factor_ptr, middle_ptr, root, matrix_ptr, columns, WIDTH: tl.constexpr, WP: tl.constexpr):
    """Return columns of (x · root - middle) / factor, rotated, and of the rotation: (columns,), (WP, columns)."""
    od = tl.arange(0, WP)
    matrix = load_tile_at(matrix_ptr, od, WIDTH, WIDTH, columns, WIDTH)
    x = tl.load(x_ptr + od, mask=od < WIDTH, other=0.0).to(matrix.dtype) * root
    x -= tl.load(middle_ptr + od, mask=od < WIDTH, other=0.0).to(matrix.dtype)
    x /= tl.load(factor_ptr + od, mask=od < WIDTH, other=1.0).to(matrix.dtype)
    return tl.sum(x[:, None] * matrix, 0), matrix


@triton.jit
def turn_token(inputs, turns, turned_ptr, program, text, head, columns, factors, C: tl.constexpr):
    """Turn the given columns of the queries, the key and the value of a head."""
    q_ptr, k_ptr, v_ptr, q_text, q_head, q_group, k_text, k_head, v_text, v_head = inputs
    steps_ptr, middle_ptr, value_middle_ptr, ones_ptr, key_matrix_ptr, value_matrix_ptr = turns
    scale, root = factors
    query_ptr, key_ptr, value_ptr = turned_of(turned_ptr, program, C)
    og, od = tl.arange(0, C.GP), tl.arange(0, C.DP)
    steps_ptr, middle_ptr = steps_ptr + head * C.D, middle_ptr + head * C.D
    k_ptr, v_ptr = k_ptr + text * k_text + head * k_head, v_ptr + text * v_text + head * v_head
    k, matrix = turn_vector(k_ptr, steps_ptr, middle_ptr, root, key_matrix_ptr, columns, C.D, C.DP)
    q = load_tile_at(q_ptr + text * q_text + head * q_head, og, q_group, C.G, od, C.D).to(C.ACC) * scale
    q *= tl.load(steps_ptr + od, mask=od < C.D, other=0.0).to(C.ACC)[None, :] / root
    q = tl.dot(q, matrix.to(C.ACC), out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(
        query_ptr + og[:, None] * C.DP + columns[None, :], q, mask=(og < C.GP)[:, None] & (columns < C.DP)[None, :]
    )
    tl.store(key_ptr + columns, k, mask=columns < C.DP)
    value_middle_ptr += head * C.DV
    v, _ = turn_vector(v_ptr, ones_ptr, value_middle_ptr, 1.0, value_matrix_ptr, columns, C.DV, C.VP)
    tl.store(value_ptr + columns, v, mask=columns < C.VP)


@triton.jit(do_not_specialize=["H", "SINKS"])
def prepare_token(
    inputs, pool, merging, turns, turned_ptr, workspace, codes_ptr, H, BYTES, SINKS, factors, C: tl.constexpr
):
    """Merge the block that leaves the window before the next token, if any, in the first program of a head, and turn
    the token in the others; grid (text and head, 1 + parts of the dimensions)."""
    table_ptr = pool[2]
    if tl.program_id(1) == 0:
        merge_leaving(pool, merging, workspace, codes_ptr, H, BYTES, SINKS, C)
    elif C.TURNED:
        program = tl.program_id(0).to(tl.int64)
        field_ptr = table_ptr + program % H * FIELDS
        if tl.load(field_ptr + BITS_KEPT) < 16:
            columns = (tl.program_id(1) - 1) * C.DS + tl.arange(0, C.DS)
            turn_token(inputs, turns, turned_ptr, program, program // H, tl.load(field_ptr + HEAD), columns, factors, C)


@triton.jit
def merge_leaving(pool, merging, workspace, codes_ptr, H, BYTES, SINKS, C: tl.constexpr):
    """Merge the block that leaves the window of a head before the next token, if any."""
    pool_ptr, count_ptr, table_ptr, row_ptr = pool
    metric_ptr, gain_ptr = merging
    float_ptr, list_ptr, ROOM = workspace
    program = tl.program_id(0).to(tl.int64)
    field_ptr, start_ptr = table_ptr + program % H * FIELDS, pool_ptr + tl.load(row_ptr + program // H) * BYTES
    tokens, window = tl.load(count_ptr + program // H).to(tl.int32), tl.load(field_ptr + WINDOW).to(tl.int32)
    slots, block = tl.load(field_ptr + SLOTS).to(tl.int32), tl.load(field_ptr + BLOCK).to(tl.int32)
    if (block > 0) & (tokens >= window) & ((tokens - window) % tl.maximum(block, 1) == 0):
        bits, merger = tl.load(field_ptr + BITS_KEPT).to(tl.int32), tl.load(field_ptr + MERGER)
        level_ptr = (start_ptr + tl.load(field_ptr + LEVEL)).to(tl.pointer_type(C.SUMS)) + SINKS
        metric_ptr, gain = metric_ptr + merger * (C.D + 1) * (C.D + 1), tl.load(gain_ptr + merger)
        work, first = workspace_of(program, float_ptr, list_ptr, ROOM, C), tokens - window
        missing = tl.minimum(tl.maximum(SINKS - first, 0), block)
        arguments = work, field_ptr, start_ptr, slots, first, missing, window, block
        count = count_for_kind(read_leaving, arguments, bits, C)
        type_ptr, levels = pool_ptr.to(tl.pointer_type(C.KEPT)), 1 << bits
        count, _ = merge_rows(work, metric_ptr, bits, levels, count, slots, count, 1, type_ptr, C)
        codes_ptr += program * C.BT * (C.DP + C.VP)
        arguments = work, field_ptr, start_ptr, slots, count, level_ptr + window, gain, codes_ptr
        call_for_kind(write_merged, arguments, bits, C)
        for begin in range(0, block, C.MP):
            om = begin + tl.arange(0, C.MP)
            tl.store(level_ptr + (first + om) % window, EMPTY, mask=om < block)
