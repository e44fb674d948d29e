"""Merging of slots by Triton kernels: one program merges for one head of one text. slots_merging.py has the reference.

The costs of pairs, without the factor of their places, are stored, and measured again where a slot has changed: such
rows are listed. The least cost of each slot with an earlier one is searched again for every block, since a block
changes the nearest slot of most slots. A program works in its own memory (kernel_slot_rows.py), and its threads wait
for each other between two steps.
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
LAST = tl.constexpr(2**63 - 1)  # a key after all others
AT_ONCE = tl.constexpr(4)  # tiles of costs that are loaded at once


@triton.jit
def measure_rows(work, metric_ptr, changed, C: tl.constexpr):
    """Compute what merging needs of each slot that is listed as changed, before its pairs are measured."""
    x_ptr, v_ptr, k_ptr, _, _, list_ptr, _ = work
    _, _, square_ptr, value_ptr, importance_ptr, _, listed_ptr, key_scale_ptr, value_scale_ptr, _ = numbers_of(work, C)
    STEP: tl.constexpr = C.DP if C.DP <= 64 else 2**20 // (C.DP * C.DP)  # more do not fit into registers
    od, query_ptr = tl.arange(0, C.DP), metric_ptr + C.D * (C.D + 1)
    for begin in range(0, changed, C.BT):
        index = begin + tl.arange(0, C.BT)
        live = index < changed
        rows = tl.load(list_ptr + index, mask=live, other=0)
        scale = tl.load(key_scale_ptr + rows)
        x, importance = tl.zeros([C.BT, C.DP], C.ACC), tl.zeros([C.BT], C.ACC)
        for d in tl.static_range(0, C.DP, STEP):
            inner = d + tl.arange(0, STEP)
            k = tl.load(k_ptr + rows[:, None] * C.DP + inner[None, :]).to(C.ACC) * scale[:, None]
            inside = (inner < C.D)[:, None] & (od < C.D)[None, :]
            metric = tl.load(metric_ptr + od[None, :] * (C.D + 1) + inner[:, None], mask=inside, other=0.0)
            x = tl.dot(k, metric, acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
            query = tl.load(query_ptr + inner, mask=inner < C.D, other=0.0)
            importance += tl.sum(k * query[None, :], 1)
        importance = tl.minimum(tl.maximum(importance - tl.load(query_ptr + C.D), -LIMIT), LIMIT)
        v = load_scaled_rows(v_ptr, value_scale_ptr, rows, C.VP, C)
        tl.store(square_ptr + rows, tl.sum(x * x, 1), mask=live)
        put_seen(work, rows, live, x, C)
        tl.store(value_ptr + rows, tl.sum(v * v, 1), mask=live)
        tl.store(importance_ptr + rows, tl.exp(importance), mask=live)
        tl.store(listed_ptr + rows, tl.full([C.BT], 1.0, C.ACC), mask=live)
    tl.debug_barrier()


@triton.jit
def multiply_rows(pointer, low, rows, columns, WP: tl.constexpr, PARTS: tl.constexpr, C: tl.constexpr):
    """Return products of rows of a workspace, stored in PARTS numbers, with columns: (columns, rows)."""
    out = tl.zeros([columns.shape[0], rows.shape[0]], C.ACC)
    for d in tl.static_range(0, WP, C.DW):
        inner = (d + tl.arange(0, C.DW))[None, :]
        x_ptr, y_ptr = pointer + rows[:, None] * WP + inner, pointer + columns[:, None] * WP + inner
        x, y = tl.trans(tl.load(x_ptr)), tl.load(y_ptr)
        if PARTS == 2:
            x_low = tl.trans(tl.load(x_ptr + low))
            out = tl.dot(tl.load(y_ptr + low), x, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
            out = tl.dot(y, x_low, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
        out = tl.dot(y, x, acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def measure_pairs(work, used, changed, ALL: tl.constexpr, C: tl.constexpr):
    """Compute the cost of merging each pair with a slot that is listed as changed, without the factor of its place.

    A pair of two listed slots is measured for each of them. Where ALL slots are listed, in the order of their rows, a
    tile of rows is not paired again with the rows before it.
    """
    x_ptr, v_ptr, _, _, cost_ptr, list_ptr, room = work
    weight_ptr, _, square_ptr, value_ptr, importance_ptr, _, listed_ptr, _, v_scale_ptr, x_scale_ptr = (
        numbers_of(work, C)
    )  # fmt: skip
    PARTS: tl.constexpr = 1 if C.CODES == C.ACC else 2
    for begin in range(0, changed, C.BT):
        index, first = begin + tl.arange(0, C.BT), begin if ALL else 0
        live = index < changed
        rows = tl.load(list_ptr + index, mask=live, other=0)
        inverse, important = 1 / tl.load(weight_ptr + rows), tl.load(importance_ptr + rows)
        square, value = tl.load(square_ptr + rows), tl.load(value_ptr + rows)
        x_scale, v_scale = 2 * tl.load(x_scale_ptr + rows), 2 * tl.load(v_scale_ptr + rows)
        for start in range(first // C.BN * C.BN, used, C.BN):
            columns = start + tl.arange(0, C.BN)
            inside, mirrored = columns < used, columns >= begin + C.BT
            if not ALL:
                mirrored = tl.load(listed_ptr + columns, mask=inside, other=1.0) == 0
            distance = multiply_rows(x_ptr, room * C.DP, rows, columns, C.DP, PARTS, C)
            distance *= tl.load(x_scale_ptr + columns)[:, None] * x_scale[None, :]
            distance = tl.load(square_ptr + columns)[:, None] + square[None, :] - distance
            values = multiply_rows(v_ptr, 0, rows, columns, C.VP, 1, C)
            values *= tl.load(v_scale_ptr + columns)[:, None] * v_scale[None, :]
            values = tl.load(value_ptr + columns)[:, None] + value[None, :] - values
            cost = distance * distance / ((1 / tl.load(weight_ptr + columns))[:, None] + inverse[None, :])
            cost = cost * cost * tl.maximum(values, LEAST_DISTANCE)
            cost *= tl.maximum(tl.load(importance_ptr + columns)[:, None], important[None, :])
            mirrored = (mirrored & inside)[:, None] & live[None, :]
            tl.store(cost_ptr + columns[:, None] * C.RM + rows[None, :], cost, mask=mirrored)
            inside = live[:, None] & (inside & (columns >= first))[None, :]
            tl.store(cost_ptr + rows[:, None] * C.RM + columns[None, :], tl.trans(cost), mask=inside)
    tl.debug_barrier()


@triton.jit
def sort_keys(cost, place, rows, C: tl.constexpr):
    """Return keys that sort by costs, which are not negative, then by places; the low digits of a key are its row."""
    bits = cost.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return bits << 32 | (place.to(tl.int32) * C.RM + rows).to(tl.int64)


@triton.jit
def choose_pairs(work, used, count, C: tl.constexpr):
    """Choose the `count` slots that cost least to merge with an earlier one, and for each its cheapest target among the
    slots that stay; free the rows of the former, and number the latter. Return the rows of slots and targets."""
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
    keys = tl.where(place < INFINITE, sort_keys(tl.min(best, 0) * (number + 1), number, columns, C), LAST)
    chosen = tl.zeros([C.MP], tl.int64)
    for index in range(0, count):
        key = tl.min(keys, 0)
        chosen, keys = tl.where(om == index, key, chosen), tl.where(keys == key, LAST, keys)
    remaining, removed = keys < LAST, (chosen % C.RM).to(tl.int32)
    removed_place = ((chosen & 0x7FFFFFFF) // C.RM).to(C.ACC)
    cost = tl.load(cost_ptr + removed[:, None] * C.RM + columns[None, :], mask=remaining[None, :], other=INFINITE)
    cost *= tl.maximum(removed_place[:, None], number[None, :]) + 1
    pairs = sort_keys(cost, number[None, :], columns[None, :], C)
    target = (tl.min(tl.where(remaining[None, :], pairs, LAST), 1) % C.RM).to(tl.int32)
    before = tl.sum(((removed_place[None, :] < place[:, None]) & (om < count)[None, :]).to(C.ACC), 1)
    tl.debug_barrier()
    tl.store(place_ptr + columns, tl.where(remaining, place - before, INFINITE))
    tl.store(listed_ptr + columns, tl.zeros([C.RM], C.ACC))
    return removed, target


@triton.jit
def merge_rows(work, metric_ptr, bits, levels, count, limit, changed, type_ptr, ALL: tl.constexpr, C: tl.constexpr):
    """Merge the cheapest pairs until `limit` slots remain, rounded to `bits` or to the type that `type_ptr` points to.

    ALL: all slots are listed as changed, in order. Return how many slots there are, and how many are listed.
    """
    if count > limit:
        _, v_ptr, k_ptr, _, _, list_ptr, room = work
        weight_ptr, spread_ptr, square_ptr, _, _, _, _, key_scale_ptr, value_scale_ptr, _ = numbers_of(work, C)
        used = tl.minimum((limit + C.MP + 63) // 64 * 64, room)
        measure_rows(work, metric_ptr, changed, C)
        measure_pairs(work, used, changed, ALL, C)
        changed, count, om = count - limit, limit, tl.arange(0, C.MP)
        removed, target = choose_pairs(work, used, changed, C)
        live = om < changed
        weight, weights = tl.load(weight_ptr + target), tl.load(weight_ptr + removed, mask=live, other=0.0)
        shares = tl.where((target[:, None] == target[None, :]) & live[None, :], weights[None, :], 0.0)
        total = weight + tl.sum(shares, 1)
        square = tl.load(square_ptr + removed) + tl.load(spread_ptr + removed)
        spread = tl.sum(shares * square[None, :], 1)
        spread += weight * (tl.load(square_ptr + target) + tl.load(spread_ptr + target))
        x = mix_rows(load_seen(work, target, C), load_seen(work, removed, C), shares, weight, total, C)
        spread = tl.maximum(spread / total - tl.sum(x * x, 1), 0.0)
        k = load_scaled_rows(k_ptr, key_scale_ptr, target, C.DP, C)
        k = mix_rows(k, load_scaled_rows(k_ptr, key_scale_ptr, removed, C.DP, C), shares, weight, total, C)
        v = load_scaled_rows(v_ptr, value_scale_ptr, target, C.VP, C)
        v = mix_rows(v, load_scaled_rows(v_ptr, value_scale_ptr, removed, C.VP, C), shares, weight, total, C)
        if (bits == 16) | (not C.TURNED):
            k, v = k.to(type_ptr.dtype.element_ty).to(C.ACC), v.to(type_ptr.dtype.element_ty).to(C.ACC)
        if bits < 8:
            total, spread = tl.minimum(total, HEAVIEST), as_bf16(spread.to(tl.float32)).to(C.ACC)
        tl.debug_barrier()
        keys, values = round_rows(k, bits, levels, C.D, C.DP), round_rows(v, bits, levels, C.DV, C.VP)
        put_rows(work, target, live, keys, values, total, spread, C)
        tl.store(list_ptr + om, target, mask=live)
        tl.store(lists_of(work, C)[0] + count + om, removed, mask=live)
        tl.debug_barrier()
    return count, changed


@triton.jit
def mix_rows(x, removed, shares, weight, total, C: tl.constexpr):
    """Return the weighted means of slots that merge."""
    x = tl.dot(shares, removed, acc=x * weight[:, None], out_dtype=C.ACC, input_precision=C.PRECISION)
    return x / total[:, None]
