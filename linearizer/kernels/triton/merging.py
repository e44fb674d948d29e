"""Merging of slots by Triton kernels: one program merges for one head of one text, as `merge` of the definition does.

The costs of pairs are stored in the rows of the later slots, and measured again
where a slot has changed: such rows are listed. The least cost of each slot with an earlier one is searched again for
every block, since a block changes the nearest slot of most slots. A program works in its own memory
(merge_workspace.py), and its threads wait for each other between two steps. However many slots are removed at once,
each step holds a few of them in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from linearizer.kernels.triton.merge_workspace import (
    INFINITE,
    lists_of,
    load_scaled_rows,
    load_seen,
    numbers_of,
    put_rows,
    put_seen,
)
from linearizer.kernels.triton.packed_rows import as_bf16, round_rows
from linearizer.student.attention_of_student import MOST_IMPORTANT, MOST_TOKENS, TINY

LIMIT, LEAST_DISTANCE = tl.constexpr(MOST_IMPORTANT), tl.constexpr(TINY)
HEAVIEST = tl.constexpr(MOST_TOKENS)
LAST = tl.constexpr(2**63 - 1)  # a key after all others


@triton.jit
def measure_rows(work, metric_ptr, changed, C: tl.constexpr):
    """Compute what merging needs of each slot that is listed as changed, before its pairs are measured."""
    x_ptr, v_ptr, k_ptr, _, _, list_ptr, _ = work
    _, _, square_ptr, value_ptr, importance_ptr, _, listed_ptr, key_scale_ptr, value_scale_ptr, _, _ = (
        numbers_of(work, C)
    )  # fmt: skip
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
def multiply_rows(work, rows, columns, C: tl.constexpr):
    """Return the products of metric·k, and of codes of v, of rows of a workspace: (columns, rows) each. All is loaded
    before it is multiplied, since threads wait for each other where they multiply. Two rows of 16 bits have the same
    product whichever of them is the column."""
    x_ptr, v_ptr, low_ptr = work[0], work[1], work[0] + work[6] * C.DP
    WIDTH: tl.constexpr = C.DP if C.DP > C.VP else C.VP
    x, values = tl.zeros([columns.shape[0], rows.shape[0]], C.ACC), tl.zeros([columns.shape[0], rows.shape[0]], C.ACC)
    for d in tl.static_range(0, WIDTH, C.DW):
        inner = d + tl.arange(0, C.DW)[None, :]
        if d < C.DP:
            row_at, column_at = rows[:, None] * C.DP + inner, columns[:, None] * C.DP + inner
            x_rows, x_columns = tl.load(x_ptr + row_at), tl.load(x_ptr + column_at)
            if C.CODES != C.ACC:  # in two numbers, as put_seen writes them
                low_rows, low_columns = tl.load(low_ptr + row_at), tl.load(low_ptr + column_at)
        if d < C.VP:
            v_rows = tl.load(v_ptr + rows[:, None] * C.VP + inner)
            v_columns = tl.load(v_ptr + columns[:, None] * C.VP + inner)
        if d < C.DP:
            x_rows = tl.trans(x_rows)
            if C.CODES != C.ACC:
                low = tl.dot(low_columns, x_rows, out_dtype=C.ACC, input_precision=C.PRECISION)
                x += low + tl.dot(x_columns, tl.trans(low_rows), out_dtype=C.ACC, input_precision=C.PRECISION)
            x = tl.dot(x_columns, x_rows, acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
        if d < C.VP:
            v_rows = tl.trans(v_rows)
            values = tl.dot(v_columns, v_rows, acc=values, out_dtype=C.ACC, input_precision=C.PRECISION)
    return x, values


@triton.jit
def measure_pairs(work, used, changed, are_new, C: tl.constexpr):
    """Compute the cost of merging each pair with a slot that is listed as changed.

    `are_new`: all slots are listed, in the order of their rows.
    """
    cost_ptr, list_ptr = work[4], work[5]
    weight_ptr, _, square_ptr, value_ptr, importance_ptr, place_ptr, listed_ptr, _, v_scale_ptr, x_scale_ptr, _ = (
        numbers_of(work, C)
    )  # fmt: skip
    for begin in range(0, changed, C.BT):
        index = begin + tl.arange(0, C.BT)
        live = index < changed
        rows = tl.load(list_ptr + index, mask=live, other=0)
        inverse, important = 1 / tl.load(weight_ptr + rows), tl.load(importance_ptr + rows)
        square, value, place = tl.load(square_ptr + rows), tl.load(value_ptr + rows), tl.load(place_ptr + rows)
        x_scale, v_scale = 2 * tl.load(x_scale_ptr + rows), 2 * tl.load(v_scale_ptr + rows)
        for start in range(0, tl.where(are_new > 0, tl.minimum(begin + C.BT, used), used), C.BN):
            columns = start + tl.arange(0, C.BN)
            distance, values = multiply_rows(work, rows, columns, C)
            distance *= tl.load(x_scale_ptr + columns)[:, None] * x_scale[None, :]
            distance = tl.load(square_ptr + columns)[:, None] + square[None, :] - distance
            values *= tl.load(v_scale_ptr + columns)[:, None] * v_scale[None, :]
            values = tl.load(value_ptr + columns)[:, None] + value[None, :] - values
            cost = distance * distance / ((1 / tl.load(weight_ptr + columns))[:, None] + inverse[None, :])
            cost = cost * cost * tl.maximum(values, LEAST_DISTANCE)
            cost *= tl.maximum(tl.load(importance_ptr + columns)[:, None], important[None, :])
            tl.store(cost_ptr + rows[:, None] * C.RM + columns[None, :], tl.trans(cost), mask=live[:, None])
            if are_new == 0:  # later slots that are not listed
                others = tl.where(tl.load(listed_ptr + columns) == 0, tl.load(place_ptr + columns), INFINITE)
                later = (others < INFINITE)[:, None] & (others[:, None] > place[None, :]) & live[None, :]
                tl.store(cost_ptr + columns[:, None] * C.RM + rows[None, :], cost, mask=later)
    tl.debug_barrier()


@triton.jit
def find_least(work, used, C: tl.constexpr):
    """Store the least cost of each slot with an earlier one."""
    cost_ptr, place_ptr, least_ptr = work[4], numbers_of(work, C)[5], numbers_of(work, C)[10]
    for begin in range(0, used, C.RS):
        rows = begin + tl.arange(0, C.RS)
        place, least = tl.load(place_ptr + rows), tl.full([C.RS, C.BN], INFINITE, C.ACC)
        for start in range(0, used, C.BN):
            columns = start + tl.arange(0, C.BN)
            cost = tl.load(cost_ptr + rows[:, None] * C.RM + columns[None, :])
            before = tl.load(place_ptr + columns)[None, :] < place[:, None]
            least = tl.minimum(least, tl.where(before, cost, INFINITE))
        tl.store(least_ptr + rows, tl.min(least, 1))
    tl.debug_barrier()


@triton.jit
def sort_keys(cost, place, rows, C: tl.constexpr):
    """Return keys that sort by costs, which are not negative, then by places; the low digits of a key are its row."""
    bits = cost.to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
    return bits << 32 | (place.to(tl.int32) * C.RM + rows).to(tl.int64)


@triton.jit
def choose_slots(work, used, count, removed_ptr, C: tl.constexpr):
    """List the rows of the `count` slots that cost least to merge with an earlier one, and store whether slots stay."""
    place_ptr, stay_ptr, columns = numbers_of(work, C)[5], numbers_of(work, C)[10], tl.arange(0, C.RM)
    place, least = tl.load(place_ptr + columns), tl.load(stay_ptr + columns, mask=columns < used, other=0.0)
    number = tl.where(place < INFINITE, place, 0.0)
    keys = tl.where(place < INFINITE, sort_keys(least, number, columns, C), LAST)
    for index in range(0, count):
        key = tl.min(keys, 0)
        tl.store(removed_ptr + index, (key % C.RM).to(tl.int32))
        keys = tl.where(keys == key, LAST, keys)
    tl.debug_barrier()
    tl.store(stay_ptr + columns, (keys < LAST).to(C.ACC))
    tl.debug_barrier()


@triton.jit
def choose_targets(work, used, count, removed_ptr, C: tl.constexpr):
    """List for each removed slot its cheapest target among the slots that stay."""
    cost_ptr, place_ptr, stay_ptr = work[4], numbers_of(work, C)[5], numbers_of(work, C)[10]
    for begin in range(0, count, C.MP):
        index = begin + tl.arange(0, C.MP)
        removed = tl.load(removed_ptr + index, mask=index < count, other=0)
        removed_place, best = tl.load(place_ptr + removed)[None, :], tl.full([C.BN, C.MP], LAST, tl.int64)
        for start in range(0, used, C.BN):
            columns = start + tl.arange(0, C.BN)
            stays = tl.load(stay_ptr + columns) > 0
            place = tl.where(stays, tl.load(place_ptr + columns), 0.0)[:, None]
            pairs = tl.where(
                removed_place < place, columns[:, None] * C.RM + removed[None, :],
                removed[None, :] * C.RM + columns[:, None],
            )  # fmt: skip
            cost = tl.load(cost_ptr + pairs, mask=stays[:, None], other=INFINITE)
            keys = sort_keys(cost, place, columns[:, None], C)
            best = tl.minimum(best, tl.where(stays[:, None], keys, LAST))
        tl.store(work[5] + index, (tl.min(best, 0) % C.RM).to(tl.int32), mask=index < count)
    tl.debug_barrier()


@triton.jit
def number_slots(work, used, count, removed_ptr, C: tl.constexpr):
    """Number the slots that stay, and free the rows of the others; no row is listed as changed any more."""
    place_ptr, listed_ptr, stay_ptr = numbers_of(work, C)[5], numbers_of(work, C)[6], numbers_of(work, C)[10]
    for start in range(0, used, C.BN):
        columns = start + tl.arange(0, C.BN)
        place, before = tl.load(place_ptr + columns), tl.zeros([C.BN], C.ACC)
        for begin in range(0, count, C.MP):
            index = begin + tl.arange(0, C.MP)
            removed = tl.load(removed_ptr + index, mask=index < count, other=0)
            removed_place = tl.where(index < count, tl.load(place_ptr + removed), INFINITE)
            before += tl.sum((removed_place[None, :] < place[:, None]).to(C.ACC), 1)
        stays = tl.load(stay_ptr + columns) > 0
        tl.store(listed_ptr + columns, tl.where(stays, place - before, INFINITE))
    tl.debug_barrier()
    for start in range(0, used, C.BN):
        columns = start + tl.arange(0, C.BN)
        tl.store(place_ptr + columns, tl.load(listed_ptr + columns))
        tl.store(listed_ptr + columns, tl.zeros([C.BN], C.ACC))


@triton.jit
def merge_rows(work, metric_ptr, bits, levels, count, limit, changed, are_new, type_ptr, C: tl.constexpr):
    """Merge the cheapest pairs until `limit` slots remain, rounded to `bits` or to the type that `type_ptr` points to.

    `are_new`: all slots are listed as changed, in the order of their rows. Return how many slots there are, and how
    many are listed.
    """
    if count > limit:
        used, removed_ptr = tl.minimum((count + 63) // 64 * 64, work[6]), lists_of(work, C)[0] + limit
        measure_rows(work, metric_ptr, changed, C)
        measure_pairs(work, used, changed, are_new, C)
        find_least(work, used, C)
        changed, count = count - limit, limit
        choose_slots(work, used, changed, removed_ptr, C)
        choose_targets(work, used, changed, removed_ptr, C)
        number_slots(work, used, changed, removed_ptr, C)
        for begin in range(0, changed, C.MP):
            merge_part(work, bits, levels, begin, changed, removed_ptr, type_ptr, C)
        tl.debug_barrier()
    return count, changed


@triton.jit
def merge_part(work, bits, levels, begin, count, removed_ptr, type_ptr, C: tl.constexpr):
    """Merge removed slots into the targets that are listed from `begin` on, but not before."""
    _, v_ptr, k_ptr, _, _, target_ptr, _ = work
    weight_ptr, spread_ptr, square_ptr, _, _, _, _, key_scale_ptr, value_scale_ptr, _, _ = numbers_of(work, C)
    om = tl.arange(0, C.MP)
    live = begin + om < count
    target = tl.load(target_ptr + begin + om, mask=live, other=0)
    for earlier in range(0, begin, C.MP):
        known = target[:, None] == tl.load(target_ptr + earlier + om)[None, :]
        live &= tl.max(known.to(tl.int32), 1) == 0
    weight = tl.load(weight_ptr + target)
    total, spread = weight, weight * (tl.load(square_ptr + target) + tl.load(spread_ptr + target))
    x = load_seen(work, target, C) * weight[:, None]
    k = load_scaled_rows(k_ptr, key_scale_ptr, target, C.DP, C) * weight[:, None]
    v = load_scaled_rows(v_ptr, value_scale_ptr, target, C.VP, C) * weight[:, None]
    for other in range(0, count, C.MP):
        inside = other + om < count
        removed = tl.load(removed_ptr + other + om, mask=inside, other=0)
        its_target = tl.load(target_ptr + other + om, mask=inside, other=-1)
        square = tl.load(square_ptr + removed) + tl.load(spread_ptr + removed)
        shares = tl.where(target[:, None] == its_target[None, :], tl.load(weight_ptr + removed)[None, :], 0.0)
        total += tl.sum(shares, 1)
        spread += tl.sum(shares * square[None, :], 1)
        x = add_shares(x, shares, load_seen(work, removed, C), C)
        k = add_shares(k, shares, load_scaled_rows(k_ptr, key_scale_ptr, removed, C.DP, C), C)
        v = add_shares(v, shares, load_scaled_rows(v_ptr, value_scale_ptr, removed, C.VP, C), C)
    x, k, v = x / total[:, None], k / total[:, None], v / total[:, None]
    spread = tl.maximum(spread / total - tl.sum(x * x, 1), 0.0)
    if (bits == 16) | (not C.TURNED):
        k, v = k.to(type_ptr.dtype.element_ty).to(C.ACC), v.to(type_ptr.dtype.element_ty).to(C.ACC)
    if bits < 8:
        total, spread = tl.minimum(total, HEAVIEST), as_bf16(spread.to(tl.float32)).to(C.ACC)
    tl.debug_barrier()
    keys, values = round_rows(k, bits, levels, C.D, C.DP), round_rows(v, bits, levels, C.DV, C.VP)
    put_rows(work, target, live, keys, values, total, spread, C)


@triton.jit
def add_shares(x, shares, removed, C: tl.constexpr):
    """Add removed slots to those that they merge into, by their weights."""
    return tl.dot(shares, removed, acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
