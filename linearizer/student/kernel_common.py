"""Parts of all Triton kernels: their letters, tiles of matrices, a running softmax, products of features, sizes of
blocks; and of those for one token: their table, keys and values that may be bytes, the window and the sinks.

A program for one token serves a KV head and reads its row of the table (kernel_token_table.py). BITS is 8 where keys
and values are kept as bytes (rounding.py), but for sinks; the new token is rounded as it is read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

try:  # transformers looks for the packages that a checkpoint needs, and passes over those inside a try
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_token_table import COLUMNS

Tensor = torch.Tensor
Launch = TypeVar("Launch", bound=Callable[..., Any])
EMPTY = tl.constexpr(-1e30)
ABSENT = tl.constexpr(-2e30)
HEADROOM = tl.constexpr(60.0)
LOST = tl.constexpr(-10.0)  # the log of a product below which terms of it may have vanished: 70 below the row's bound
HEAD, OWN, HEADS, TICKET, WINDOW, FAR, BLOCK = (tl.constexpr(n) for n in range(len(COLUMNS)))
COUNT, SINK_K, WINDOW_K, REST = (tl.constexpr(len(COLUMNS) + n) for n in (0, 1, 3, 5))  # values follow keys
TYPES = {
    torch.int8: tl.int8,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
}


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for: the argument C of every kernel. Other letters are of single calls, and pointers.

    T tokens, H KV heads, N rows that merge, W = 2 D + DV numbers of each; PERIODS, SLOTS, WINDOW, SEGMENTS, COLUMNS and
    BLOCK count what they say. ot, oj, oc, os, om, od, ov: indices of rows (tokens), far columns, columns, sinks,
    features, dimensions of keys, and of values.
    """

    D: Any = None  # dimensions of a key
    DV: Any = None  # dimensions of a value
    DP: Any = None  # D padded to a power of two
    VP: Any = None  # DV padded
    DS: Any = None  # dimensions that are multiplied at once
    G: Any = None  # query heads that share a KV head
    GP: Any = None  # G padded
    S: Any = None  # sinks
    SP: Any = None  # S padded
    M: Any = None  # features
    MS: Any = None  # features at a time
    MG: Any = None  # features of a program that makes gradients
    BT: Any = None  # rows (tokens) of a program
    BN: Any = None  # columns (keys) at a time
    BV: Any = None  # dimensions of a value in a program
    SEG: Any = None  # tokens of a segment
    B: Any = None  # slots at a time
    K: Any = None  # numbers that products of slots sum at a time
    ROWS: Any = None  # whether log-features are those of queries
    REVERSE: Any = None  # whether segments are summed from the last one on
    SQUARED: Any = None  # whether a loss is the squared error
    SCALE: Any = None  # of the scores
    ROOT: Any = None  # what keys are multiplied by before their distances are measured
    BITS: Any = None  # of a number in keys and values that are kept
    KEPT: Any = None  # type of keys and values that are kept
    SINK: Any = None  # type of sinks
    MADE: Any = None  # type of metrics
    ACC: Any = None  # type of sums
    PRECISION: Any = None  # of products of fp32 numbers

    def __post_init__(self) -> None:
        for field in fields(self):  # so that older compilers take them for constants, too
            object.__setattr__(self, field.name, tl.constexpr(getattr(self, field.name)))


# (rows, columns, features at a time, warps, stages) by the generation of the chip; the last row is safe on any.
BLOCKS = {(9, 0): (128, 64, 64, 8, 2), (8, 0): (64, 64, 64, 8, 2), None: (64, 32, 32, 8, 1)}


@triton.jit
def load_tile(pointer, rows, columns, stop, width, other=0.0):
    """Rows of a matrix with `width` columns; what lies outside is `other`."""
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=other)


@triton.jit
def load_part(pointer, rows, columns, stop, stride, width):
    """The first `width` columns of rows that lie `stride` apart; what lies outside is 0."""
    inside = (rows < stop)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(pointer, rows, stop):
    """One number of every row, and 0 outside."""
    return tl.load(pointer + rows, mask=rows < stop, other=0.0)


@triton.jit
def power(exponent):
    """2 to whole numbers, exactly."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents(x, AXIS: tl.constexpr):
    """The exponents of vectors: the least with which 127 times a power of two is not below the largest number."""
    bits = tl.max(tl.abs(x), AXIS).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 133 + tl.where((bits & 0x7FFFFF) > 0x7E0000, 1, 0)  # the latter: above 127/128 of it
    return tl.minimum(tl.maximum(exponent, -24), 121)


@triton.jit
def codes(x, inverse):
    """Whole numbers: adding and taking away a number whose last digit is 1 rounds to them."""
    large = 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0
    return (x * inverse + large) - large


@triton.jit
def load_vectors(pointer, rows, columns, stop, width: tl.constexpr, packed: tl.constexpr):
    """Some columns of keys or values that are kept."""
    if packed:
        whole = load_part(pointer, rows, columns, stop, width + 1, width)
        exponent = tl.load(pointer + rows * (width + 1) + width, mask=rows < stop, other=0)
        return whole.to(tl.float32) * power(exponent)[:, None]
    else:
        return load_tile(pointer, rows, columns, stop, width)


@triton.jit
def store_vectors(pointer, rows, o, x, live, width: tl.constexpr, packed: tl.constexpr, C: tl.constexpr):
    """Keep keys or values that are `live`, rounded to so many bits, as numbers or as bytes."""
    inside = live[:, None] & (o < width)[None, :]
    if C.BITS == 8:
        exponent = exponents(x, 1)
        x = codes(x, power(-exponent)[:, None])
        if packed:
            tl.store(pointer + rows * (width + 1) + width, exponent.to(tl.int8), mask=live)
        else:
            x *= power(exponent)[:, None]
    stride: tl.constexpr = width + 1 if packed else width
    tl.store(pointer + rows[:, None] * stride + o[None, :], x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def scores(
    q, q_ptr, k_ptr, rows, columns, T, COLUMNS, width: tl.constexpr, padded_width: tl.constexpr, C: tl.constexpr
):
    """q·k of rows, held in q, with columns; if it is too wide, DS dimensions at a time, and q read anew."""
    if C.DS == padded_width:
        k = load_tile(k_ptr, columns, tl.arange(0, padded_width), COLUMNS, width)
        return tl.dot(q, tl.trans(k), out_dtype=C.ACC, input_precision=C.PRECISION)
    out = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for d in tl.static_range(0, padded_width, C.DS):
        od = d + tl.arange(0, C.DS)
        k = load_tile(k_ptr, columns, od, COLUMNS, width)
        out = tl.dot(
            load_tile(q_ptr, rows, od, T, width), tl.trans(k), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION
        )
    return out


@triton.jit
def update_softmax(top, total, acc, logits, live, v, C: tl.constexpr):
    """Add logits and values to the running softmax of rows."""
    logits = tl.where(live, logits, EMPTY)
    new = tl.maximum(top, tl.max(logits, 1))
    kept = tl.exp(top - new)
    p = tl.where(live, tl.exp(logits - new[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc=acc * kept[:, None], out_dtype=acc.dtype, input_precision=C.PRECISION)
    return new, total * kept + tl.sum(p, 1), acc


@triton.jit
def row_bound(u_ptr, ceiling_ptr, rows, T, C: tl.constexpr):
    """max_m (u_m + ceiling_m) of every row."""
    bound = tl.full([rows.shape[0]], 2 * ABSENT, C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        u = load_tile(u_ptr, rows, om, T, C.M, EMPTY) + tl.load(ceiling_ptr + om, mask=om < C.M, other=ABSENT)[None, :]
        bound = tl.maximum(bound, tl.max(u, 1))
    return bound


@triton.jit
def exact_logits(u_ptr, w_ptr, rows, columns, T, C: tl.constexpr):
    """log Σ_m exp(u_im + w_jm), feature by feature: right at any magnitude, and slow."""
    top = tl.full([rows.shape[0], columns.shape[0]], 4 * ABSENT, C.ACC)
    for m in range(0, C.M):
        u = tl.load(u_ptr + rows * C.M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * C.M + m, mask=columns < T, other=ABSENT)
        top = tl.maximum(top, u[:, None] + w[None, :])
    total = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for m in range(0, C.M):
        u = tl.load(u_ptr + rows * C.M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * C.M + m, mask=columns < T, other=ABSENT)
        total += tl.exp(u[:, None] + w[None, :] - top)
    return top + tl.log(total)


@triton.jit
def far_product(u_ptr, w_ptr, ceiling_ptr, bound, rows, columns, T, DOT: tl.constexpr, C: tl.constexpr):
    """Σ_m exp(u_im + w_jm) e^(HEADROOM - bound_i)."""
    product = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        ceiling = tl.load(ceiling_ptr + om, mask=om < C.M, other=ABSENT)[None, :]
        query = tl.exp(load_tile(u_ptr, rows, om, T, C.M, EMPTY) + ceiling - bound[:, None])
        key = tl.exp(tl.minimum(load_tile(w_ptr, columns, om, T, C.M, 2 * ABSENT) - ceiling, 0.0) + HEADROOM)
        product = tl.dot(
            query.to(DOT), tl.trans(key).to(DOT), acc=product, out_dtype=C.ACC, input_precision=C.PRECISION
        )
    return product


def on_device_of_first(launch: Launch) -> Launch:
    """Launch on the device of the first tensor, which need not be the current one.

    torch.compile does not look inside, so it compiles the same before and after the trial of a kernel.
    """

    @torch.compiler.disable
    @functools.wraps(launch)
    def there(first: Tensor, *rest: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):  # nothing for tensors of a CPU
            return launch(first, *rest, **named)

    return there


def dims_at_once(x: Tensor) -> int:
    """How many dimensions of rows of x a kernel that holds them may multiply at once."""
    width = padded(x.shape[-1])
    return width if x.element_size() <= 2 and width <= 128 else min(width, 64)


def precision(x: Tensor) -> dict:
    """How to add up, and how to multiply fp32: on tensor cores, nearly exactly; without them it fills the registers."""
    exact = x.dtype == torch.float64
    return {"ACC": tl.float64 if exact else tl.float32, "PRECISION": "ieee" if exact else "tf32x3"}


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def chip(x: Tensor) -> tuple[int, int] | None:
    """The generation of the GPU where x is."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


def for_chip(table: dict, x: Tensor) -> tuple:
    """The row of a table for the chip where x is; its last row is for any."""
    return table.get(chip(x), table[None])


def blocks(x: Tensor, *widths: int) -> tuple[dict, dict]:
    """Block sizes, and how to launch, for rows as wide as these on the chip where x is."""
    rows, columns, features, warps, stages = for_chip(BLOCKS, x)
    if max(map(padded, widths)) > 128:  # wide tiles do not fit otherwise
        rows, columns, features, warps, stages = min(rows, 32), 32, 32, 4, 1
    if x.element_size() > 2:  # nor do tiles in fp32
        rows, columns, features, warps, stages = min(rows, 32), 32, 16, 8, 1
    return {"BT": rows, "BN": columns, "MS": features}, {"num_warps": warps, "num_stages": stages}


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
def point_at_sinks(row_ptr, at, C: tl.constexpr):
    """The keys and the values of the sinks of a text and head."""
    keys, values = address(row_ptr, SINK_K, C.SINK), address(row_ptr, SINK_K + 1, C.SINK)
    return keys + at * C.S * C.D, values + at * C.S * C.DV


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
def as_sink(x, C: tl.constexpr):
    """Numbers in the type of sinks."""
    if C.BITS == 8:  # bf16, which the interpreter makes of fp32 alone
        return x.to(tl.float32).to(C.SINK)
    else:
        return x.to(C.SINK)


@triton.jit
def of_sink(x, C: tl.constexpr):
    """Numbers of sinks, to compute with."""
    return x.to(tl.float32).to(C.ACC) if C.BITS == 8 else x.to(C.ACC)


@triton.jit
def load_new_sink(pointer, o, width: tl.constexpr, C: tl.constexpr):
    """Some numbers of the new key or value, as a sink is kept."""
    return of_sink(as_sink(tl.load(pointer + o, mask=o < width, other=0.0), C), C)


@triton.jit
def replace_row(tile, index, slot, new):
    """A tile (index, dim) with the row `slot` replaced."""
    return tl.where((index == slot)[:, None], new[None, :], tile)


@triton.jit
def scores_with_new(
    q, q_stride, kept, new, exponent, index, slot, og, STOP, C: tl.constexpr, are_sinks: tl.constexpr = False
):
    """q·k for rows `index` of the keys that are kept, STOP of them, with the new one in the place of the row `slot`."""
    out = tl.zeros([og.shape[0], index.shape[0]], C.ACC)
    for d in tl.static_range(0, C.DP, C.DS):
        od = d + tl.arange(0, C.DS)
        rows = load_part(q, og, od, C.G, q_stride, C.D)
        if are_sinks:
            tile, own = of_sink(load_tile(kept, index, od, STOP, C.D), C), load_new_sink(new, od, C.D, C)
        else:
            tile, own = load_vectors(kept, index, od, STOP, C.D, C.BITS == 8), load_new(new, od, exponent, C.D, C)
        tile = replace_row(tile.to(rows.dtype), index, slot, own.to(rows.dtype))
        out = tl.dot(rows, tl.trans(tile), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out * C.SCALE


@triton.jit
def attend_near(row_ptr, at, q, q_stride, token, place, merged, WIDTH, og, C: tl.constexpr):
    """Let query heads see the sinks, and the window from the place `merged` on, the new token among them.

    Sinks are seen where they are kept, not in the window. `at` is the number of the text and head in tensors of the
    state, WIDTH the window. Gives a running softmax.
    """
    k, k_exponent, v, new_v = token
    ov = tl.arange(0, C.VP)
    top = tl.full([og.shape[0]], EMPTY, C.ACC)
    total = tl.zeros([og.shape[0]], C.ACC)
    acc = tl.zeros([og.shape[0], C.VP], C.ACC)
    ring, slot = tl.maximum(WIDTH, 1), place % tl.maximum(WIDTH, 1)
    window_k, window_v = point_at_pair(row_ptr, WINDOW_K, at * WIDTH, C)
    for s0 in range(0, tl.minimum(place + 1, WIDTH), C.BN):
        os = s0 + tl.arange(0, C.BN)
        logits = scores_with_new(q, q_stride, window_k, k, k_exponent, os, slot, og, WIDTH, C)
        values = replace_row(load_vectors(window_v, os, ov, WIDTH, C.DV, C.BITS == 8).to(C.ACC), os, slot, new_v)
        live = ((place - os + ring) % ring <= place - tl.maximum(merged, C.S)) & (os < WIDTH)
        top, total, acc = update_softmax(top, total, acc, logits, live[None, :] & (og >= 0)[:, None], values, C)
    if C.S > 0:
        os = tl.arange(0, C.SP)
        sink_k, sink_v = point_at_sinks(row_ptr, at, C)
        logits = scores_with_new(q, q_stride, sink_k, k, k_exponent, os, place, og, C.S, C, True)
        values = of_sink(load_tile(sink_v, os, ov, C.S, C.DV), C)
        values = replace_row(values, os, place, load_new_sink(v, ov, C.DV, C))
        live = (os < C.S) & (os <= place)
        top, total, acc = update_softmax(top, total, acc, logits, live[None, :] & (og >= 0)[:, None], values, C)
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
        sink_k, sink_v = point_at_sinks(row_ptr, at, C)
        tl.store(sink_k + place * C.D + od, as_sink(new_k, C), mask=od < tl.where(place < C.S, C.D, 0))
        tl.store(sink_v + place * C.DV + ov, as_sink(new_v, C), mask=ov < tl.where(place < C.S, C.DV, 0))
    last = tl.load(row_ptr + HEADS) - 1
    count, ticket = address(row_ptr, COUNT, tl.int64), tl.load(row_ptr + TICKET) * tl.num_programs(1)
    before = tl.atomic_add(ticket_ptr + ticket + tl.program_id(1), 1)
    tl.store(count + tl.program_id(1), place + 1, mask=before == last)
    tl.store(ticket_ptr + ticket + tl.program_id(1), 0, mask=before == last)
