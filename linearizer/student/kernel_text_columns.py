"""The columns of a text, as Triton kernels: tokens of a head's ring, and behind them the new ones, as it holds them.

  lay_columns    turn and round new keys and values, lay them behind those of the ring, and keep sinks
  remember_rows  write the last columns into the ring, and the levels of what the next token sees

A column is a vector of codes and a scale. Codes of 8 bits and fewer are exact in bf16, so columns are of the model's
type.
"""

from __future__ import annotations

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY
from .kernel_leaving import load_tile_at
from .kernel_packed_rows import (
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
    for_kind,
    load_codes,
    round_rows,
    store_codes,
)


@triton.jit
def places_of(ends, text, TOKENS, C: tl.constexpr):
    """The place of the first new token of a text, and that behind its last."""
    count_ptr, new_ptr, _ = ends
    first = tl.load(count_ptr + text).to(tl.int32)
    if C.ORDERED:
        return first, first + tl.load(new_ptr + text).to(tl.int32)
    else:
        return first, first + TOKENS


@triton.jit
def tokens_at(ends, text, place, live, end, TOKENS, C: tl.constexpr):
    """Where the new tokens at some places stand in what is given."""
    at = place - end + TOKENS
    if C.ORDERED:
        return tl.load(ends[2] + text * TOKENS + at, mask=live, other=0)
    else:
        return at.to(tl.int64)


@triton.jit
def take_rows(
    x_ptr, rows, stride, live, turns, root, WIDTH: tl.constexpr, WP: tl.constexpr, KIND: tl.constexpr, C: tl.constexpr
):
    """Some rows of keys or values, turned where heads of such a kind turn them."""
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
    """Lay rounded new keys, or values, and those of the ring, as columns; keep those that are sinks."""
    ring_ptr, sink_ptr, code_ptr, scale_ptr = pointers
    first, end, window = places
    fresh, od = (place >= first) & (place < end), tl.arange(0, WP)
    held = (place >= 0) & (place >= first - window) & (place < first)
    sink = fresh & (place < SINKS)
    if KIND < 16:  # which keeps its sinks in bf16
        x = tl.where(sink[:, None], as_bf16(x.to(tl.float32)).to(C.ACC), x)
    SINK: tl.constexpr = C.KEPT if KIND == 16 else tl.bfloat16
    to_ptr = sink_ptr.to(tl.pointer_type(SINK)) + place[:, None] * WIDTH + od[None, :]
    kept = x if KIND == 16 else x.to(tl.float32)  # fp64 does not become bf16 everywhere
    tl.store(to_ptr, kept.to(SINK), mask=sink[:, None] & (od < WIDTH)[None, :])
    codes, scales = round_rows(x, KIND, 1 << bits, WIDTH, WP)
    ring = tl.where(held, place, 0) % window
    others, other_scales = load_codes(ring_ptr, ring, held, bits, WIDTH, WP, KIND, C)
    inside = (fresh | held)[:, None] & (od < WIDTH)[None, :]
    to_ptr = code_ptr + column.to(tl.int64)[:, None] * WIDTH + od[None, :]
    tl.store(to_ptr, tl.where(fresh[:, None], codes, others).to(to_ptr.dtype.element_ty), mask=inside)
    tl.store(scale_ptr + column, tl.where(fresh, scales, other_scales), mask=fresh | held)


@triton.jit
def lay_tile(new, head, turns, columns, at, places, SINKS, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Lay some columns of a head whose rows are of such a kind."""
    k_ptr, v_ptr, k_token, v_token = new
    start_ptr, at_ptr = head
    step_ptr, middle_ptr, value_middle_ptr, ones_ptr, matrix_ptr, value_matrix_ptr, _, root = turns
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr = columns
    column, place, token = at
    number, live = tl.load(at_ptr + HEAD), (place >= places[0]) & (place < places[1])
    keys = step_ptr + number * C.D, middle_ptr + number * C.D, matrix_ptr
    k = take_rows(k_ptr, token, k_token, live, keys, root, C.D, C.DP, KIND, C)
    ring_ptr = start_ptr + tl.multiple_of(tl.load(at_ptr + KEYS), ALIGNED)
    pointers = ring_ptr, start_ptr + tl.load(at_ptr + SINK_K), code_k_ptr, scale_k_ptr
    lay_vectors(k, column, place, places, pointers, SINKS, bits, C.D, C.DP, KIND, C)
    values = ones_ptr, value_middle_ptr + number * C.DV, value_matrix_ptr
    v = take_rows(v_ptr, token, v_token, live, values, 1.0, C.DV, C.VP, KIND, C)
    ring_ptr = start_ptr + tl.multiple_of(tl.load(at_ptr + VALUES), ALIGNED)
    pointers = ring_ptr, start_ptr + tl.load(at_ptr + SINK_V), code_v_ptr, scale_v_ptr
    lay_vectors(v, column, place, places, pointers, SINKS, bits, C.DV, C.VP, KIND, C)


@triton.jit
def head_of(kept):
    """The head and the text of a program, where its fields lie, and its text's bytes, and its bits."""
    pool_ptr, table_ptr, H, BYTES, _ = kept
    own = tl.program_id(0).to(tl.int64)
    at_ptr, start_ptr = table_ptr + own % H * FIELDS, pool_ptr + own // H * BYTES
    return own, own // H, at_ptr, start_ptr, tl.load(at_ptr + BITS_KEPT).to(tl.int32)


@triton.jit
def columns_of(columns, own, COLUMNS, C: tl.constexpr):
    """The columns of a head."""
    at = own * COLUMNS
    return columns[0] + at * C.D, columns[1] + at * C.DV, columns[2] + at, columns[3] + at


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS"])
def lay_columns(given, kept, turns, columns, ends, TOKENS, COLUMNS, C: tl.constexpr):
    """Lay the columns of a text; grid (text and head, part of the columns, of which the last are new)."""
    k_ptr, v_ptr, k_text, k_head, k_token, v_text, v_head, v_token = given
    own, text, at_ptr, start_ptr, bits = head_of(kept)
    number, window = tl.load(at_ptr + HEAD), tl.load(at_ptr + WINDOW).to(tl.int32)
    first, end = places_of(ends, text, TOKENS, C)
    some: tl.constexpr = C.BN // 2
    column = tl.program_id(1) * some + tl.arange(0, some)
    place = column + end - COLUMNS
    if (tl.program_id(1) + 1) * some + end - COLUMNS > tl.maximum(first - window, 0):
        at = column, place, tokens_at(ends, text, place, (place >= first) & (place < end), end, TOKENS, C)
        new = k_ptr + text * k_text + number * k_head, v_ptr + text * v_text + number * v_head, k_token, v_token
        head, mine, places = (start_ptr, at_ptr), columns_of(columns, own, COLUMNS, C), (first, end, window)
        for_kind(lay_tile, (new, head, turns, mine, at, places, kept[4]), bits, C)


@triton.jit
def load_columns(pointers, column, live, WIDTH: tl.constexpr, WP: tl.constexpr, C: tl.constexpr):
    """The codes of columns, and their scales: (columns, WP), (columns,)."""
    code_ptr, scale_ptr = pointers
    od = tl.arange(0, WP)
    inside = live[:, None] & (od < WIDTH)[None, :]
    codes = tl.load(code_ptr + column.to(tl.int64)[:, None] * WIDTH + od[None, :], mask=inside, other=0.0)
    return codes, tl.load(scale_ptr + column, mask=live, other=0.0)


@triton.jit
def remember_kind(head, columns, rows, codes_ptr, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Write columns into rows of a ring of such a kind, and zeros where there are none before the first token."""
    start_ptr, at_ptr = head
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr = columns
    row, column, held, changes = rows
    least: tl.constexpr = LEAST if KIND == 8 else 0.0  # the scale of zeros
    codes, scales = load_columns((code_k_ptr, scale_k_ptr), column, held, C.D, C.DP, C)
    ring_ptr, scales = start_ptr + tl.multiple_of(tl.load(at_ptr + KEYS), ALIGNED), tl.maximum(scales, least)
    store_codes(ring_ptr, row, changes, codes.to(C.ACC), scales, bits, codes_ptr, C.D, C.DP, KIND, C)
    codes, scales = load_columns((code_v_ptr, scale_v_ptr), column, held, C.DV, C.VP, C)
    ring_ptr, scales = start_ptr + tl.multiple_of(tl.load(at_ptr + VALUES), ALIGNED), tl.maximum(scales, least)
    store_codes(ring_ptr, row, changes, codes.to(C.ACC), scales, bits, codes_ptr, C.DV, C.VP, KIND, C)


@triton.jit
def remember_rows(kept, columns, ends, codes_ptr, TOKENS, COLUMNS, part, C: tl.constexpr):
    """Write the last columns of a head into a part of its ring, and levels: of rows, and with the first part of sinks;
    those of slots are written where they merge."""
    own, text, at_ptr, start_ptr, bits = head_of(kept)
    window, block = tl.load(at_ptr + WINDOW).to(tl.int32), tl.load(at_ptr + BLOCK).to(tl.int32)
    first, end = places_of(ends, text, TOKENS, C)
    row = part * C.BT + tl.arange(0, C.BT)
    place = end - 1 - (end - 1 + window - row) % window
    inside, new = row < window, place >= first
    head, mine = (start_ptr, at_ptr), columns_of(columns, own, COLUMNS, C)
    rows = row, place - end + COLUMNS, inside & new, inside & (new | (place < 0))
    codes_ptr += (own * tl.num_programs(1) + part) * C.BT * (C.DP + C.VP)
    for_kind(remember_kind, (head, mine, rows, codes_ptr), bits, C)
    merged = tl.where((block > 0) & (end > window), ((end - 1 - window) // tl.maximum(block, 1) + 1) * block, 0)
    level_ptr = (start_ptr + tl.load(at_ptr + LEVEL)).to(tl.pointer_type(C.SUMS))
    seen = (place >= 0) & (place >= tl.maximum(merged, kept[4]))
    tl.store(level_ptr + kept[4] + row, tl.where(seen, 0.0, EMPTY), mask=inside)
    if part == 0:
        for sink in range(0, kept[4]):
            tl.store(level_ptr + sink, tl.where(sink < end, 0.0, EMPTY))
