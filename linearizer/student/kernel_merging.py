"""Slots that merge, as Triton kernels: one program merges for one head of one text. slots_merging.py has the reference.

What pairs cost is kept, but for their places, and measured again where a slot of them has changed: those rows are
listed. The least cost of each slot with one before it is looked up anew for every block, from all that is kept: a block
changes what is nearest to most slots. A program works in memory that only it uses (kernel_slot_rows.py), and waits for
its own threads between two steps.
"""

from __future__ import annotations

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_packed_rows import as_bf16, round_rows
from .kernel_slot_rows import INFINITE, lists_of, load_scaled_rows, load_seen, numbers_of, put_rows, put_seen
from .packed_state import MOST_TOKENS
from .slots_merging import MOST_IMPORTANT, TINY

LIMIT, LEAST_DISTANCE = tl.constexpr(MOST_IMPORTANT), tl.constexpr(TINY)
HEAVIEST = tl.constexpr(MOST_TOKENS)
LAST = tl.constexpr(2**63 - 1)  # a key behind all others
AT_ONCE = tl.constexpr(4)  # tiles of costs that are on their way at once


@triton.jit
def measure_rows(work, metric_ptr, changed, C: tl.constexpr):
    """Compute what merging needs of each slot that is listed as changed; no pair of it is measured yet."""
    x_ptr, v_ptr, k_ptr, _, _, list_ptr, _ = work
    _, _, square_ptr, value_ptr, importance_ptr, _, listed_ptr, key_scale_ptr, value_scale_ptr, _ = numbers_of(work, C)
    SOME: tl.constexpr = C.DP if C.DP <= 64 else 2**20 // (C.DP * C.DP)  # more would not fit into registers
    od, query_ptr = tl.arange(0, C.DP), metric_ptr + C.D * (C.D + 1)
    for begin in range(0, changed, C.BT):
        at = begin + tl.arange(0, C.BT)
        live = at < changed
        rows = tl.load(list_ptr + at, mask=live, other=0)
        scale = tl.load(key_scale_ptr + rows)
        x, asked = tl.zeros([C.BT, C.DP], C.ACC), tl.zeros([C.BT], C.ACC)
        for d in tl.static_range(0, C.DP, SOME):
            inner = d + tl.arange(0, SOME)
            k = tl.load(k_ptr + rows[:, None] * C.DP + inner[None, :]).to(C.ACC) * scale[:, None]
            inside = (inner < C.D)[:, None] & (od < C.D)[None, :]
            metric = tl.load(metric_ptr + od[None, :] * (C.D + 1) + inner[:, None], mask=inside, other=0.0)
            x = tl.dot(k, metric, acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
            query = tl.load(query_ptr + inner, mask=inner < C.D, other=0.0)
            asked += tl.sum(k * query[None, :], 1)
        asked = tl.minimum(tl.maximum(asked - tl.load(query_ptr + C.D), -LIMIT), LIMIT)
        v = load_scaled_rows(v_ptr, value_scale_ptr, rows, C.VP, C)
        tl.store(square_ptr + rows, tl.sum(x * x, 1), mask=live)
        put_seen(work, rows, live, x, C)
        tl.store(value_ptr + rows, tl.sum(v * v, 1), mask=live)
        tl.store(importance_ptr + rows, tl.exp(asked), mask=live)
        tl.store(listed_ptr + rows, tl.full([C.BT], 1.0, C.ACC), mask=live)
    tl.debug_barrier()


@triton.jit
def multiply_rows(pointer, low, rows, columns, WP: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr):
    """Products of some rows of a workspace, that are in so many PARTS, with others: (columns, rows)."""
    out = tl.zeros([columns.shape[0], rows.shape[0]], C.ACC)
    for d in tl.static_range(0, WP, C.DW):
        inner = (d + tl.arange(0, C.DW))[None, :]
        x_ptr, y_ptr = pointer + rows[:, None] * WP + inner, pointer + columns[:, None] * WP + inner
        x, y = tl.trans(tl.load(x_ptr)), tl.load(y_ptr)
        if PARTS == 2:
            other = tl.trans(tl.load(x_ptr + low))
            out = tl.dot(tl.load(y_ptr + low), x, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
            out = tl.dot(y, other, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
        out = tl.dot(y, x, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def measure_pairs(work, used, changed, ALL: tl.constexpr, C: tl.constexpr):
    """Compute what merging costs each pair of which a slot is listed as changed, but for its place.

    A pair of two listed slots is measured for each of them, unless ALL are listed, in the order of their rows: then
    those before a tile of rows need not be paired with it again.
    """
    x_ptr, v_ptr, _, _, cost_ptr, list_ptr, room = work
    weight_ptr, _, square_ptr, value_ptr, importance_ptr, _, listed_ptr, _, v_scale_ptr, x_scale_ptr = (
        numbers_of(work, C)
    )  # fmt: skip
    PARTS: tl.constexpr = 1 if C.CODES == C.ACC else 2
    for begin in range(0, changed, C.BT):
        at, first = begin + tl.arange(0, C.BT), begin if ALL else 0
        live = at < changed
        rows = tl.load(list_ptr + at, mask=live, other=0)
        inverse, important = 1 / tl.load(weight_ptr + rows), tl.load(importance_ptr + rows)
        square, value = tl.load(square_ptr + rows), tl.load(value_ptr + rows)
        x_scale, v_scale = 2 * tl.load(x_scale_ptr + rows), 2 * tl.load(v_scale_ptr + rows)
        for start in range(first // C.BN * C.BN, used, C.BN):
            columns = start + tl.arange(0, C.BN)
            inside, across = columns < used, columns >= begin + C.BT
            if not ALL:
                across = tl.load(listed_ptr + columns, mask=inside, other=1.0) == 0
            apart = multiply_rows(x_ptr, room * C.DP, rows, columns, C.DP, PARTS, C)
            apart *= tl.load(x_scale_ptr + columns)[:, None] * x_scale[None, :]
            apart = tl.load(square_ptr + columns)[:, None] + square[None, :] - apart
            values = multiply_rows(v_ptr, 0, rows, columns, C.VP, 1, C)
            values *= tl.load(v_scale_ptr + columns)[:, None] * v_scale[None, :]
            values = tl.load(value_ptr + columns)[:, None] + value[None, :] - values
            cost = apart * apart / ((1 / tl.load(weight_ptr + columns))[:, None] + inverse[None, :])
            cost = cost * cost * tl.maximum(values, LEAST_DISTANCE)
            cost *= tl.maximum(tl.load(importance_ptr + columns)[:, None], important[None, :])
            across = (across & inside)[:, None] & live[None, :]
            tl.store(cost_ptr + columns[:, None] * C.RM + rows[None, :], cost, mask=across)
            inside = live[:, None] & (inside & (columns >= first))[None, :]
            tl.store(cost_ptr + rows[:, None] * C.RM + columns[None, :], tl.trans(cost), mask=inside)
    tl.debug_barrier()


@triton.jit
def ordered(cost, place, rows, C: tl.constexpr):
    """Keys in the order of costs, which are not negative, and where they are alike, of places; a key's end is a row."""
    bits = cost.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return bits << 32 | (place.to(tl.int32) * C.RM + rows).to(tl.int64)


@triton.jit
def choose_pairs(work, used, most, C: tl.constexpr):
    """Choose the `most` slots that cost least to merge with one before them, and for each the slot that stays with
    which merging costs least; free the rows of those that go, and number those that stay. Return the rows of both."""
    cost_ptr, place_ptr, listed_ptr = work[4], numbers_of(work, C)[5], numbers_of(work, C)[6]
    columns, om = tl.arange(0, C.RM), tl.arange(0, C.MP)
    place = tl.load(place_ptr + columns)
    best = tl.full([C.RS, C.RM], INFINITE, C.ACC)
    for start in range(0, used, AT_ONCE * C.RS):
        for part in tl.static_range(AT_ONCE):
            rows = start + part * C.RS + tl.arange(0, C.RS)
            before = tl.load(place_ptr + rows)[:, None] < place[None, :]
            cost = tl.load(cost_ptr + rows[:, None] * C.RM + columns[None, :], mask=(columns < used)[None, :])
            best = tl.minimum(best, tl.where(before, cost, INFINITE))
    number = tl.where(place < INFINITE, place, 0.0)
    keys = tl.where(place < INFINITE, ordered(tl.min(best, 0) * (number + 1), number, columns, C), LAST)
    chosen = tl.zeros([C.MP], tl.int64)
    for index in range(0, most):
        key = tl.min(keys, 0)
        chosen, keys = tl.where(om == index, key, chosen), tl.where(keys == key, LAST, keys)
    stays, gone = keys < LAST, (chosen % C.RM).to(tl.int32)
    left = ((chosen & 0x7FFFFFFF) // C.RM).to(C.ACC)
    cost = tl.load(cost_ptr + gone[:, None] * C.RM + columns[None, :], mask=stays[None, :], other=INFINITE)
    pairs = ordered(cost * (tl.maximum(left[:, None], number[None, :]) + 1), number[None, :], columns[None, :], C)
    into = (tl.min(tl.where(stays[None, :], pairs, LAST), 1) % C.RM).to(tl.int32)
    before = tl.sum(((left[None, :] < place[:, None]) & (om < most)[None, :]).to(C.ACC), 1)
    tl.debug_barrier()
    tl.store(place_ptr + columns, tl.where(stays, place - before, INFINITE))
    tl.store(listed_ptr + columns, tl.zeros([C.RM], C.ACC))
    return gone, into


@triton.jit
def merge_rows(work, metric_ptr, bits, levels, count, most, changed, kept, ALL: tl.constexpr, C: tl.constexpr):
    """Merge the cheapest pairs until `most` slots are left, rounded to `bits`, or to the type that `kept` points to.

    Whether ALL slots are listed as changed, in order. Return how many slots there are, and how many are listed then.
    """
    if count > most:
        _, v_ptr, k_ptr, _, _, list_ptr, room = work
        weight_ptr, spread_ptr, square_ptr, _, _, _, _, key_scale_ptr, value_scale_ptr, _ = numbers_of(work, C)
        used = tl.minimum((most + C.MP + 63) // 64 * 64, room)
        measure_rows(work, metric_ptr, changed, C)
        measure_pairs(work, used, changed, ALL, C)
        changed, count, om = count - most, most, tl.arange(0, C.MP)
        gone, into = choose_pairs(work, used, changed, C)
        live = om < changed
        own, weights = tl.load(weight_ptr + into), tl.load(weight_ptr + gone, mask=live, other=0.0)
        shares = tl.where((into[:, None] == into[None, :]) & live[None, :], weights[None, :], 0.0)
        total = own + tl.sum(shares, 1)
        square = tl.load(square_ptr + gone) + tl.load(spread_ptr + gone)
        spread = tl.sum(shares * square[None, :], 1) + own * (tl.load(square_ptr + into) + tl.load(spread_ptr + into))
        x = mix_rows(load_seen(work, into, C), load_seen(work, gone, C), shares, own, total, C)
        spread = tl.maximum(spread / total - tl.sum(x * x, 1), 0.0)
        k, other = (
            load_scaled_rows(k_ptr, key_scale_ptr, into, C.DP, C), load_scaled_rows(k_ptr, key_scale_ptr, gone, C.DP, C)
        )  # fmt: skip
        k = mix_rows(k, other, shares, own, total, C)
        v, other = (
            load_scaled_rows(v_ptr, value_scale_ptr, into, C.VP, C),
            load_scaled_rows(v_ptr, value_scale_ptr, gone, C.VP, C),
        )
        v = mix_rows(v, other, shares, own, total, C)
        if (bits == 16) | (not C.TURNED):
            k, v = k.to(kept.dtype.element_ty).to(C.ACC), v.to(kept.dtype.element_ty).to(C.ACC)
        if bits < 8:
            total, spread = tl.minimum(total, HEAVIEST), as_bf16(spread.to(tl.float32)).to(C.ACC)
        tl.debug_barrier()
        keys, values = round_rows(k, bits, levels, C.D, C.DP), round_rows(v, bits, levels, C.DV, C.VP)
        put_rows(work, into, live, keys, values, total, spread, C)
        tl.store(list_ptr + om, into, mask=live)
        tl.store(lists_of(work, C)[0] + count + om, gone, mask=live)
        tl.debug_barrier()
    return count, changed


@triton.jit
def mix_rows(x, other, shares, own, total, C: tl.constexpr):
    """The weighted means of slots that merge."""
    x = tl.dot(shares, other, acc=x * own[:, None], out_dtype=C.ACC, input_precision=C.PRECISION)
    return x / total[:, None]
