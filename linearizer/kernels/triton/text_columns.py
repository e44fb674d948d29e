"""Triton kernels for the columns of a text: the tokens in a head's ring, then the new tokens as the head stores them.

  lay_columns    turn and round new keys and values, put them after those of the ring, and store sinks
  remember_rows  write the last columns into the ring, and the levels of the rows that the next token sees

A column is a vector of codes and a scale. Codes of 8 or fewer bits are exact in bf16, so columns have the model's type.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linearizer.kernels.triton.common import EMPTY
from linearizer.kernels.triton.packed_rows import (
    ALIGNED,
    BITS_KEPT,
    BLOCK,
    FIELDS,
    HEAD,
    KEYS,
    LEAST,
    LEVEL,
    SINK_K,
    SINK_V,
    VALUES,
    WINDOW,
    as_bf16,
    call_for_kind,
    load_codes,
    round_rows,
    store_codes,
)
from linearizer.kernels.triton.prepare_token import load_tile_at


@triton.jit
def places_of(ends, text, TOKENS, C: tl.constexpr):
    """Return the place of the first new token of a text, and the place after its last."""
    count_ptr, new_ptr, _ = ends
    first = tl.load(count_ptr + text).to(tl.int32)
    if C.ORDERED:
        return first, first + tl.load(new_ptr + text).to(tl.int32)
    else:
        return first, first + TOKENS


@triton.jit
def tokens_at(ends, text, place, live, end, TOKENS, C: tl.constexpr):
    """Return the indices in the input of the new tokens at the given places."""
    index = place - end + TOKENS
    if C.ORDERED:
        return tl.load(ends[2] + text * TOKENS + index, mask=live, other=0)
    else:
        return index.to(tl.int64)


@triton.jit
def take_rows(
    x_ptr, rows, stride, live, turns, root, WIDTH: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr
):
    """Load rows of keys or values, turned where heads of this kind turn them."""
    step_ptr, middle_ptr, matrix_ptr = turns
    od = tl.arange(0, WP)
    if C.TURNED and KIND < 16:
        out = tl.zeros([rows.shape[0], WP], C.ACC)
        for d in range(0, WP, C.DS):
            inner = d + tl.arange(0, C.DS)
            inside = live[:, None] & (inner < WIDTH)[None, :]
            x = tl.load(x_ptr + rows[:, None] * stride + inner[None, :], mask=inside, other=0.0).to(C.ACC) * root
            x -= tl.load(middle_ptr + inner, mask=inner < WIDTH, other=0.0).to(C.ACC)[None, :]
            x /= tl.load(step_ptr + inner, mask=inner < WIDTH, other=1.0).to(C.ACC)[None, :]
            matrix = load_tile_at(matrix_ptr, inner, WIDTH, WIDTH, od, WIDTH).to(C.ACC)
            out = tl.dot(x, matrix, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
        return out
    else:
        inside = live[:, None] & (od < WIDTH)[None, :]
        return tl.load(x_ptr + rows[:, None] * stride + od[None, :], mask=inside, other=0.0).to(C.ACC)


@triton.jit
def lay_vectors(
    x, column, place, places, pointers, SINKS, bits, WIDTH: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr,
    C: tl.constexpr,
):  # fmt: skip
    """Write rounded new keys, or values, and those of the ring as columns; store the sinks among them."""
    ring_ptr, sink_ptr, code_ptr, scale_ptr = pointers
    first, end, window = places
    is_new, od = (place >= first) & (place < end), tl.arange(0, WP)
    in_ring = (place >= 0) & (place >= first - window) & (place < first)
    is_sink = is_new & (place < SINKS)
    if KIND < 16:  # such heads store sinks in bf16
        x = tl.where(is_sink[:, None], as_bf16(x.to(tl.float32)).to(C.ACC), x)
    SINK: tl.constexpr = C.KEPT if KIND == 16 else tl.bfloat16
    target_ptr = sink_ptr.to(tl.pointer_type(SINK)) + place[:, None] * WIDTH + od[None, :]
    sink_rows = x if KIND == 16 else x.to(tl.float32)  # fp64 does not become bf16 everywhere
    tl.store(target_ptr, sink_rows.to(SINK), mask=is_sink[:, None] & (od < WIDTH)[None, :])
    codes, scales = round_rows(x, KIND, 1 << bits, WIDTH, WP)
    ring_rows = tl.where(in_ring, place, 0) % window
    ring_codes, ring_scales = load_codes(ring_ptr, ring_rows, in_ring, bits, WIDTH, WP, KIND, C)
    inside = (is_new | in_ring)[:, None] & (od < WIDTH)[None, :]
    target_ptr = code_ptr + column.to(tl.int64)[:, None] * WIDTH + od[None, :]
    tl.store(target_ptr, tl.where(is_new[:, None], codes, ring_codes).to(target_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + column, tl.where(is_new, scales, ring_scales), mask=is_new | in_ring)


@triton.jit
def lay_tile(inputs, head, turns, columns, tokens, places, SINKS, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Write a tile of columns of a head with rows of the given kind."""
    k_ptr, v_ptr, k_token, v_token = inputs
    start_ptr, field_ptr = head
    step_ptr, middle_ptr, value_middle_ptr, ones_ptr, matrix_ptr, value_matrix_ptr, _, root = turns
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr = columns
    column, place, token = tokens
    index, live = tl.load(field_ptr + HEAD), (place >= places[0]) & (place < places[1])
    keys = step_ptr + index * C.D, middle_ptr + index * C.D, matrix_ptr
    k = take_rows(k_ptr, token, k_token, live, keys, root, C.D, C.DP, KIND, C)
    ring_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + KEYS), ALIGNED)
    pointers = ring_ptr, start_ptr + tl.load(field_ptr + SINK_K), code_k_ptr, scale_k_ptr
    lay_vectors(k, column, place, places, pointers, SINKS, bits, C.D, C.DP, KIND, C)
    values = ones_ptr, value_middle_ptr + index * C.DV, value_matrix_ptr
    v = take_rows(v_ptr, token, v_token, live, values, 1.0, C.DV, C.VP, KIND, C)
    ring_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + VALUES), ALIGNED)
    pointers = ring_ptr, start_ptr + tl.load(field_ptr + SINK_V), code_v_ptr, scale_v_ptr
    lay_vectors(v, column, place, places, pointers, SINKS, bits, C.DV, C.VP, KIND, C)


@triton.jit
def head_of(pool):
    """Return the program's index, its text, pointers to its head's fields and its text's bytes, and its bits."""
    pool_ptr, table_ptr, H, BYTES, _, row_ptr = pool
    program = tl.program_id(0).to(tl.int64)
    text, field_ptr = program // H, table_ptr + program % H * FIELDS
    start_ptr = pool_ptr + tl.load(row_ptr + text) * BYTES
    return program, text, field_ptr, start_ptr, tl.load(field_ptr + BITS_KEPT).to(tl.int32)


@triton.jit
def columns_of(columns, program, COLUMNS, C: tl.constexpr):
    """Return pointers to the columns of a head."""
    first = program * COLUMNS
    return columns[0] + first * C.D, columns[1] + first * C.DV, columns[2] + first, columns[3] + first


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS"])
def lay_columns(inputs, pool, turns, columns, ends, TOKENS, COLUMNS, C: tl.constexpr):
    """Write the columns of a text; grid (text and head, part of the columns, of which the last are new)."""
    k_ptr, v_ptr, k_text, k_head, k_token, v_text, v_head, v_token = inputs
    program, text, field_ptr, start_ptr, bits = head_of(pool)
    index, window = tl.load(field_ptr + HEAD), tl.load(field_ptr + WINDOW).to(tl.int32)
    first, end = places_of(ends, text, TOKENS, C)
    size: tl.constexpr = C.BN // 2
    column = tl.program_id(1) * size + tl.arange(0, size)
    place = column + end - COLUMNS
    if (tl.program_id(1) + 1) * size + end - COLUMNS > tl.maximum(first - window, 0):
        tokens = column, place, tokens_at(ends, text, place, (place >= first) & (place < end), end, TOKENS, C)
        head_inputs = k_ptr + text * k_text + index * k_head, v_ptr + text * v_text + index * v_head, k_token, v_token
        head, head_columns = (start_ptr, field_ptr), columns_of(columns, program, COLUMNS, C)
        places = first, end, window
        call_for_kind(lay_tile, (head_inputs, head, turns, head_columns, tokens, places, pool[4]), bits, C)


@triton.jit
def load_columns(pointers, column, live, WIDTH: tl.constexpr, WP: tl.constexpr, C: tl.constexpr):
    """Load the codes of columns, (columns, WP), and their scales, (columns,)."""
    code_ptr, scale_ptr = pointers
    od = tl.arange(0, WP)
    inside = live[:, None] & (od < WIDTH)[None, :]
    codes = tl.load(code_ptr + column.to(tl.int64)[:, None] * WIDTH + od[None, :], mask=inside, other=0.0)
    return codes, tl.load(scale_ptr + column, mask=live, other=0.0)


@triton.jit
def remember_kind(head, columns, rows, codes_ptr, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Write columns into rows of a ring of the given kind, and zeros into rows before the first token."""
    start_ptr, field_ptr = head
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr = columns
    row, column, is_new, is_written = rows
    least: tl.constexpr = LEAST if KIND == 8 else 0.0  # the scale of zeros
    codes, scales = load_columns((code_k_ptr, scale_k_ptr), column, is_new, C.D, C.DP, C)
    ring_ptr, scales = start_ptr + tl.multiple_of(tl.load(field_ptr + KEYS), ALIGNED), tl.maximum(scales, least)
    store_codes(ring_ptr, row, is_written, codes.to(C.ACC), scales, bits, codes_ptr, C.D, C.DP, KIND, C)
    codes, scales = load_columns((code_v_ptr, scale_v_ptr), column, is_new, C.DV, C.VP, C)
    ring_ptr, scales = start_ptr + tl.multiple_of(tl.load(field_ptr + VALUES), ALIGNED), tl.maximum(scales, least)
    store_codes(ring_ptr, row, is_written, codes.to(C.ACC), scales, bits, codes_ptr, C.DV, C.VP, KIND, C)


@triton.jit
def remember_rows(pool, columns, ends, codes_ptr, TOKENS, COLUMNS, part, C: tl.constexpr):
    """Write the last columns of a head into a part of its ring, and the levels of these rows; the first part also
    writes the levels of sinks. The levels of slots are written where slots merge."""
    program, text, field_ptr, start_ptr, bits = head_of(pool)
    window, block = tl.load(field_ptr + WINDOW).to(tl.int32), tl.load(field_ptr + BLOCK).to(tl.int32)
    first, end = places_of(ends, text, TOKENS, C)
    row = part * C.BT + tl.arange(0, C.BT)
    place = end - 1 - (end - 1 + window - row) % window
    inside, is_new = row < window, place >= first
    head, head_columns = (start_ptr, field_ptr), columns_of(columns, program, COLUMNS, C)
    rows = row, place - end + COLUMNS, inside & is_new, inside & (is_new | (place < 0))
    codes_ptr += (program * tl.num_programs(1) + part) * C.BT * (C.DP + C.VP)
    call_for_kind(remember_kind, (head, head_columns, rows, codes_ptr), bits, C)
    merged = tl.where((block > 0) & (end > window), ((end - 1 - window) // tl.maximum(block, 1) + 1) * block, 0)
    level_ptr = (start_ptr + tl.load(field_ptr + LEVEL)).to(tl.pointer_type(C.SUMS))
    seen = (place >= 0) & (place >= tl.maximum(merged, pool[4]))
    tl.store(level_ptr + pool[4] + row, tl.where(seen, 0.0, EMPTY), mask=inside)
    if part == 0:
        for sink in range(0, pool[4]):
            tl.store(level_ptr + sink, tl.where(sink < end, 0.0, EMPTY))
