"""Parts of the kernels for one token: their table, keys and values that may be bytes, the window and the sinks.

Each program serves a KV head and reads its row of the table (kernel_token_table.py). BITS is 8 where keys and values
are kept as bytes (few_bits.py); the new token is rounded as it is read.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, codes, exponents, load_part, load_vectors, power, update_softmax
from .kernel_token_table import COLUMNS

HEAD, OWN, HEADS, TICKET, WINDOW, FAR, BLOCK = (tl.constexpr(n) for n in range(len(COLUMNS)))
COUNT, SINK_K, WINDOW_K, REST = (tl.constexpr(len(COLUMNS) + n) for n in (0, 1, 3, 5))  # values follow keys
TYPES = {
    torch.int8: tl.int8,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@triton.jit
def address(row_ptr, column: tl.constexpr, TYPE: tl.constexpr):
    """Read an address from a row of the table."""
    return tl.multiple_of(tl.load(row_ptr + column).to(tl.pointer_type(TYPE)), 16)


@triton.jit
def point_at_pair(row_ptr, column: tl.constexpr, at, C: tl.constexpr):
    """Keys that are kept, from the vector `at` on, and their values, which the next column has."""
    BYTES: tl.constexpr = 1 if C.BITS == 8 else 0
    keys, values = address(row_ptr, column, C.KEPT), address(row_ptr, column + 1, C.KEPT)
    return keys + at * (C.D + BYTES), values + at * (C.DV + BYTES)


@triton.jit
def load_vector(pointer, row, o, live, width: tl.constexpr, C: tl.constexpr):
    """One key or value that is kept, if it is `live`."""
    if C.BITS == 8:
        whole = tl.load(pointer + row * (width + 1) + o, mask=o < tl.where(live, width, 0), other=0)
        return whole.to(tl.float32) * power(tl.load(pointer + row * (width + 1) + width, mask=live, other=0))
    else:
        return tl.load(pointer + row * width + o, mask=o < tl.where(live, width, 0), other=0.0)


@triton.jit
def store_vector(pointer, row, o, x, exponent, live, width: tl.constexpr, C: tl.constexpr):
    """Keep one key or value, if it is `live`."""
    if C.BITS == 8:
        tl.store(
            pointer + row * (width + 1) + o, codes(x, power(-exponent)).to(tl.int8), mask=o < tl.where(live, width, 0)
        )
        tl.store(pointer + row * (width + 1) + width, exponent.to(tl.int8), mask=live)
    else:
        tl.store(pointer + row * width + o, x.to(pointer.dtype.element_ty), mask=o < tl.where(live, width, 0))


@triton.jit
def new_exponent(pointer, width: tl.constexpr, PADDED: tl.constexpr, C: tl.constexpr):
    """The exponent of the new key or value; 0 where nothing is rounded."""
    if C.BITS == 8:
        o = tl.arange(0, PADDED)
        return exponents(tl.load(pointer + o, mask=o < width, other=0.0), 0)
    else:
        return 0


@triton.jit
def load_new(pointer, o, exponent, width: tl.constexpr, C: tl.constexpr):
    """Some numbers of the new key or value, rounded as they will be kept."""
    x = tl.load(pointer + o, mask=o < width, other=0.0).to(C.ACC)
    if C.BITS == 8:
        return codes(x, power(-exponent)) * power(exponent)
    else:
        return x


@triton.jit
def replace_row(tile, index, slot, new):
    """A tile (index, dim) with the row `slot` replaced."""
    return tl.where((index == slot)[:, None], new[None, :], tile)


@triton.jit
def scores(q, q_stride, kept, new, exponent, index, slot, og, STOP, C: tl.constexpr):
    """q·k for rows `index` of the keys that are kept, STOP of them, with the new one in the place of the row `slot`."""
    out = tl.zeros([og.shape[0], index.shape[0]], C.ACC)
    for d in tl.static_range(0, C.DP, C.DS):
        od = d + tl.arange(0, C.DS)
        rows = load_part(q, og, od, C.G, q_stride, C.D)
        tile = load_vectors(kept, index, od, STOP, C.D, C.BITS == 8).to(rows.dtype)
        tile = replace_row(tile, index, slot, load_new(new, od, exponent, C.D, C).to(rows.dtype))
        out = tl.dot(rows, tl.trans(tile), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out * C.SCALE


@triton.jit
def attend_near(row_ptr, at, q, q_stride, k, k_exponent, new_v, place, merged, WIDTH, og, C: tl.constexpr):
    """Let query heads see the window from the place `merged` on, and the sinks before it, the new token among them.

    `at` is the number of the text and head in tensors of the state, WIDTH the window. Gives a running softmax.
    """
    ov = tl.arange(0, C.VP)
    top = tl.full([og.shape[0]], EMPTY, C.ACC)
    total = tl.zeros([og.shape[0]], C.ACC)
    acc = tl.zeros([og.shape[0], C.VP], C.ACC)
    ring, slot = tl.maximum(WIDTH, 1), place % tl.maximum(WIDTH, 1)
    window_k, window_v = point_at_pair(row_ptr, WINDOW_K, at * WIDTH, C)
    for s0 in range(0, tl.minimum(place + 1, WIDTH), C.BN):
        os = s0 + tl.arange(0, C.BN)
        logits = scores(q, q_stride, window_k, k, k_exponent, os, slot, og, WIDTH, C)
        v = replace_row(load_vectors(window_v, os, ov, WIDTH, C.DV, C.BITS == 8).to(C.ACC), os, slot, new_v)
        live = ((place - os + ring) % ring <= place - merged) & (os < WIDTH)
        top, total, acc = update_softmax(top, total, acc, logits, live[None, :] & (og >= 0)[:, None], v, C)
    if C.S > 0:
        os = tl.arange(0, C.SP)
        sink_k, sink_v = point_at_pair(row_ptr, SINK_K, at * C.S, C)
        logits = scores(q, q_stride, sink_k, k, k_exponent, os, place, og, C.S, C)
        v = replace_row(load_vectors(sink_v, os, ov, C.S, C.DV, C.BITS == 8).to(C.ACC), os, place, new_v)
        gone = (os < C.S) & (os < merged)
        top, total, acc = update_softmax(top, total, acc, logits, gone[None, :] & (og >= 0)[:, None], v, C)
    return top, total, acc


@triton.jit
def store_token(row_ptr, at, k, k_exponent, v, v_exponent, place, WIDTH, ticket_ptr, C: tl.constexpr):
    """Put the new token into the ring and among the sinks; the last head of a group to do so counts it."""
    od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
    new_k, new_v = (
        tl.load(k + od, mask=od < C.D, other=0.0).to(C.ACC),
        tl.load(v + ov, mask=ov < C.DV, other=0.0).to(C.ACC),
    )
    tl.debug_barrier()  # a warp must not overwrite what another has yet to read
    slot = place % tl.maximum(WIDTH, 1)
    window_k, window_v = point_at_pair(row_ptr, WINDOW_K, at * WIDTH, C)
    store_vector(window_k, slot, od, new_k, k_exponent, WIDTH > 0, C.D, C)
    store_vector(window_v, slot, ov, new_v, v_exponent, WIDTH > 0, C.DV, C)
    if C.S > 0:
        sink_k, sink_v = point_at_pair(row_ptr, SINK_K, at * C.S, C)
        store_vector(sink_k, place, od, new_k, k_exponent, place < C.S, C.D, C)
        store_vector(sink_v, place, ov, new_v, v_exponent, place < C.S, C.DV, C)
    last = tl.load(row_ptr + HEADS) - 1
    count, ticket = address(row_ptr, COUNT, tl.int64), tl.load(row_ptr + TICKET) * tl.num_programs(1)
    before = tl.atomic_add(ticket_ptr + ticket + tl.program_id(1), 1)
    tl.store(count + tl.program_id(1), place + 1, mask=before == last)
    tl.store(ticket_ptr + ticket + tl.program_id(1), 0, mask=before == last)
