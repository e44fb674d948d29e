"""Slots that merge, as Triton kernels: one program merges for one head of one text. slots_merging.py has the reference.

What pairs cost is kept, and measured again where a slot of them has changed: those rows are listed. So is the least
cost of a slot with one before it, and which that is: where that one has changed, or is gone, what was nearest to the
row is lost, and all its pairs are looked at again. A program works in memory that only it uses (kernel_slot_rows.py),
and waits for its own threads between two steps.
"""

from __future__ import annotations

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_packed_rows import as_bf16, round_rows
from .kernel_slot_rows import INFINITE, lists_of, load_row_tile, numbers_of, put_rows
from .packed_state import MOST_TOKENS
from .slots_merging import MOST_IMPORTANT, TINY

LIMIT, LEAST_DISTANCE = tl.constexpr(MOST_IMPORTANT), tl.constexpr(TINY)
HEAVIEST = tl.constexpr(MOST_TOKENS)
MOST_KEYS = tl.constexpr(2**31 - 1)


@triton.jit
def measure_rows(work, metric_ptr, changed, C: tl.constexpr):
    """Compute what merging needs of each slot that is listed as changed; no pair of it is measured yet."""
    x_ptr, v_ptr, k_ptr, _, _, list_ptr, _ = work
    _, _, key_ptr, value_ptr, importance_ptr, _, least_ptr = numbers_of(work)
    od, query_ptr = tl.arange(0, C.DP), metric_ptr + C.D * (C.D + 1)
    for begin in range(0, changed, C.BT):
        at = begin + tl.arange(0, C.BT)
        live = at < changed
        rows = tl.load(list_ptr + at, mask=live, other=0)
        x, asked = tl.zeros([C.BT, C.DP], C.ACC), tl.zeros([C.BT], C.ACC)
        for d in range(0, C.DP, C.DS):
            inner = d + tl.arange(0, C.DS)
            k = tl.load(k_ptr + rows[:, None] * C.DP + inner[None, :])
            inside = (inner < C.D)[:, None] & (od < C.D)[None, :]
            metric = tl.load(metric_ptr + od[None, :] * (C.D + 1) + inner[:, None], mask=inside, other=0.0)
            x = tl.dot(k, metric, acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
            query = tl.load(query_ptr + inner, mask=inner < C.D, other=0.0)
            asked += tl.sum(k * query[None, :], 1)
        asked = tl.minimum(tl.maximum(asked - tl.load(query_ptr + C.D), -LIMIT), LIMIT)
        v = load_row_tile(v_ptr, rows, C.VP)
        tl.store(x_ptr + rows[:, None] * C.DP + od[None, :], x, mask=live[:, None])
        tl.store(key_ptr + rows, tl.sum(x * x, 1), mask=live)
        tl.store(value_ptr + rows, tl.sum(v * v, 1), mask=live)
        tl.store(importance_ptr + rows, tl.exp(asked), mask=live)
        tl.store(least_ptr + rows, tl.full([C.BT], INFINITE, C.ACC), mask=live)
    tl.debug_barrier()


@triton.jit
def multiply_rows(pointer, rows, columns, WP: tl.constexpr, C: tl.constexpr):
    """Products of some rows of a workspace with others."""
    out = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for d in range(0, WP, C.DS):
        inner = (d + tl.arange(0, C.DS))[None, :]
        x, y = tl.load(pointer + rows[:, None] * WP + inner), tl.load(pointer + columns[:, None] * WP + inner)
        out = tl.dot(x, tl.trans(y), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def measure_pairs(work, changed, ALL: tl.constexpr, C: tl.constexpr):
    """Compute what merging costs each pair of which a slot is listed as changed, but for its place; keep the least.

    If all are listed, in the order of their rows, those before a tile of rows need not be paired with it again.
    """
    x_ptr, v_ptr, _, _, cost_ptr, list_ptr, room = work
    weight_ptr, _, key_ptr, value_ptr, importance_ptr, place_ptr, least_ptr = numbers_of(work)
    _, _, nearest_ptr, _, _ = lists_of(work)
    for begin in range(0, changed, C.BT):
        at = begin + tl.arange(0, C.BT)
        live = at < changed
        rows = tl.load(list_ptr + at, mask=live, other=0)
        key, value = tl.load(key_ptr + rows), tl.load(value_ptr + rows)
        inverse, important = 1 / tl.load(weight_ptr + rows), tl.load(importance_ptr + rows)
        place = tl.where(live, tl.load(place_ptr + rows), INFINITE)[:, None]
        best, nearest = tl.full([C.BT], INFINITE, C.ACC), tl.zeros([C.BT], tl.int32)
        for start in range(begin // C.BN * C.BN if ALL else 0, room, C.BN):
            columns = start + tl.arange(0, C.BN)
            other = tl.load(place_ptr + columns)[None, :]
            apart = key[:, None] + tl.load(key_ptr + columns)[None, :]
            apart -= 2 * multiply_rows(x_ptr, rows, columns, C.DP, C)
            values = value[:, None] + tl.load(value_ptr + columns)[None, :]
            values -= 2 * multiply_rows(v_ptr, rows, columns, C.VP, C)
            cost = apart * apart / (inverse[:, None] + (1 / tl.load(weight_ptr + columns))[None, :])
            cost = cost * cost * tl.maximum(values, LEAST_DISTANCE)
            cost *= tl.maximum(important[:, None], tl.load(importance_ptr + columns)[None, :])
            tl.store(cost_ptr + rows[:, None] * room + columns[None, :], cost, mask=live[:, None])
            least, first = nearest_of(tl.where(other < place, cost, INFINITE), columns[None, :])
            best, nearest = tl.minimum(best, least), tl.where(least < best, first, nearest)
            after = tl.where(place < other, cost, INFINITE)
            least, before = tl.min(after, 0), tl.load(least_ptr + columns)
            first = tl.max(tl.where(after == least[None, :], rows[:, None], 0), 0)
            tl.debug_barrier()  # a pair of two changed slots is written twice
            tl.store(cost_ptr + columns[None, :] * room + rows[:, None], cost, mask=live[:, None])
            tl.store(least_ptr + columns, least, mask=least < before)
            tl.store(nearest_ptr + columns, first, mask=least < before)
            tl.debug_barrier()
        before = tl.load(least_ptr + rows)
        tl.debug_barrier()
        tl.store(least_ptr + rows, best, mask=live & (best < before))
        tl.store(nearest_ptr + rows, nearest, mask=live & (best < before))
        tl.debug_barrier()


@triton.jit
def nearest_of(costs, columns):
    """The least number of each row, and which column it is in."""
    least = tl.min(costs, 1)
    return least, tl.max(tl.where(costs == least[:, None], columns, 0), 1)


@triton.jit
def look_again(work, lost, C: tl.constexpr):
    """Find the least costs of the rows that are listed as lost."""
    cost_ptr, room = work[4], work[6]
    _, _, nearest_ptr, lost_ptr, _ = lists_of(work)
    _, _, _, _, _, place_ptr, least_ptr = numbers_of(work)
    for begin in range(0, lost, C.BT):
        at = begin + tl.arange(0, C.BT)
        live = at < lost
        rows = tl.load(lost_ptr + at, mask=live, other=0)
        place = tl.load(place_ptr + rows)[:, None]
        best, nearest = tl.full([C.BT, C.BN], INFINITE, C.ACC), tl.zeros([C.BT, C.BN], tl.int32)
        for start in range(0, room, C.BN):
            columns = start + tl.arange(0, C.BN)
            cost = tl.load(cost_ptr + rows[:, None] * room + columns[None, :])
            cost = tl.where(tl.load(place_ptr + columns)[None, :] < place, cost, INFINITE)
            best, nearest = tl.minimum(best, cost), tl.where(cost < best, columns[None, :], nearest)
        least, first = nearest_of(best, nearest)
        tl.store(least_ptr + rows, least, mask=live)
        tl.store(nearest_ptr + rows, first, mask=live)
    tl.debug_barrier()


@triton.jit
def choose_gone(work, most, C: tl.constexpr):
    """Choose the `most` slots that cost least to merge with one before them, free their rows, and return those and
    their places."""
    _, _, _, _, _, place_ptr, least_ptr = numbers_of(work)
    rows, om = tl.arange(0, C.RM), tl.arange(0, C.MP)
    place = tl.load(place_ptr + rows, mask=rows < work[6], other=INFINITE)
    least = tl.load(least_ptr + rows, mask=place < INFINITE, other=INFINITE) * (place + 1)
    keys = tl.where(place < INFINITE, place, 0.0).to(tl.int32) * C.RM + rows  # in the order of places
    keys = tl.where(place < INFINITE, keys, MOST_KEYS)
    gone, left = tl.zeros([C.MP], tl.int32), tl.full([C.MP], INFINITE, C.ACC)
    for index in range(0, most):
        key = tl.min(tl.where(least == tl.min(least, 0), keys, MOST_KEYS), 0)
        gone, left = tl.where(om == index, key % C.RM, gone), tl.where(om == index, (key // C.RM).to(C.ACC), left)
        least = tl.where(keys == key, INFINITE, least)
    tl.debug_barrier()
    tl.store(place_ptr + gone, tl.full([C.MP], INFINITE, C.ACC), mask=om < most)
    tl.debug_barrier()
    return gone, left


@triton.jit
def choose_partners(work, gone, place, C: tl.constexpr):
    """Return for each slot that goes from its place the slot that stays with which merging costs least."""
    cost_ptr, room, place_ptr = work[4], work[6], numbers_of(work)[5]
    place, into = tl.where(place < INFINITE, place, 0.0), tl.zeros([C.MP], tl.int32)
    best, found = tl.full([C.MP], INFINITE, C.ACC), tl.full([C.MP], INFINITE, C.ACC)
    for start in range(0, room, C.BN):
        columns = start + tl.arange(0, C.BN)
        other = tl.load(place_ptr + columns)[None, :]
        cost = tl.load(cost_ptr + gone[:, None] * room + columns[None, :])
        cost = tl.where(other < INFINITE, cost, INFINITE) * (tl.maximum(place[:, None], other) + 1)
        least = tl.min(cost, 1)
        first = tl.min(tl.where(cost == least[:, None], other, INFINITE), 1)  # of those that cost the same
        at = tl.sum(tl.where((other == first[:, None]) & (other < INFINITE), columns[None, :], 0), 1)
        better = (least < best) | ((least == best) & (first < found))
        into, best, found = tl.where(better, at, into), tl.where(better, least, best), tl.where(better, first, found)
    return into


@triton.jit(noinline=True)  # compilers take far longer for one large function
def merge_rows(work, metric_ptr, bits, levels, count, most, changed, lost, kept, ALL: tl.constexpr, C: tl.constexpr):
    """Merge the cheapest pairs until `most` slots are left, rounded to `bits`, or to the type that `kept` points to.

    Whether ALL slots are listed as changed, in order. Return how many slots there are, and how many are listed as
    changed and as lost then.
    """
    if count > most:
        x_ptr, v_ptr, k_ptr, _, _, list_ptr, room = work
        weight_ptr, spread_ptr, key_ptr, _, _, place_ptr, _ = numbers_of(work)
        measure_rows(work, metric_ptr, changed, C)
        measure_pairs(work, changed, ALL, C)
        look_again(work, lost, C)
        gone, left = choose_gone(work, count - most, C)
        om = tl.arange(0, C.MP)
        live = om < count - most
        into = choose_partners(work, gone, left, C)
        own, weights = tl.load(weight_ptr + into), tl.load(weight_ptr + gone, mask=live, other=0.0)
        shares = tl.where((into[:, None] == into[None, :]) & live[None, :], weights[None, :], 0.0)
        total = own + tl.sum(shares, 1)
        square = tl.load(key_ptr + gone) + tl.load(spread_ptr + gone)
        spread = tl.sum(shares * square[None, :], 1) + own * (tl.load(key_ptr + into) + tl.load(spread_ptr + into))
        x = mix_rows(x_ptr, into, gone, shares, own, C.DP, C) / total[:, None]
        spread = tl.maximum(spread / total - tl.sum(x * x, 1), 0.0)
        k = mix_rows(k_ptr, into, gone, shares, own, C.DP, C) / total[:, None]
        v = mix_rows(v_ptr, into, gone, shares, own, C.VP, C) / total[:, None]
        if (bits == 16) | (not C.TURNED):
            k, v = k.to(kept.dtype.element_ty).to(C.ACC), v.to(kept.dtype.element_ty).to(C.ACC)
        codes, scales = round_rows(k, bits, levels, C.D, C.DP)
        k = codes * scales[:, None]
        codes, scales = round_rows(v, bits, levels, C.DV, C.VP)
        v = codes * scales[:, None]
        if bits < 8:
            total, spread = tl.minimum(total, HEAVIEST), as_bf16(spread.to(tl.float32)).to(C.ACC)
        place = tl.load(place_ptr + into)
        tl.debug_barrier()
        put_rows(work, into, live, k, v, total, spread, place, C)
        tl.store(list_ptr + om, into, mask=live)
        tl.debug_barrier()
        lost = close_gaps(work, gone, into, left, C)
        changed, count = count - most, most
    return count, changed, lost


@triton.jit
def close_gaps(work, gone, into, left, C: tl.constexpr):
    """Number the slots that stay, and list the rows whose least cost was with a slot that went from these places, or
    that took one in; return how many those are."""
    place_ptr, lost = numbers_of(work)[5], 0
    _, _, nearest_ptr, lost_ptr, _ = lists_of(work)
    for begin in range(0, work[6], C.BN):
        rows = begin + tl.arange(0, C.BN)
        place, nearest = tl.load(place_ptr + rows), tl.load(nearest_ptr + rows)[:, None]
        before = left[None, :] < place[:, None]
        went = left[None, :] < INFINITE
        touched = went & ((nearest == gone[None, :]) | (nearest == into[None, :]))
        merged = went & (rows[:, None] == into[None, :])
        listed = (tl.max(touched.to(tl.int32), 1) > tl.max(merged.to(tl.int32), 1)) & (place < INFINITE)
        tl.store(place_ptr + rows, place - tl.sum(before.to(C.ACC), 1), mask=place < INFINITE)
        tl.store(lost_ptr + lost + tl.cumsum(listed.to(tl.int32), 0) - 1, rows, mask=listed)
        lost += tl.sum(listed.to(tl.int32), 0)
    tl.debug_barrier()
    return lost


@triton.jit
def mix_rows(pointer, into, gone, shares, own, WP: tl.constexpr, C: tl.constexpr):
    """The weighted sums of slots that merge."""
    x = load_row_tile(pointer, into, WP) * own[:, None]
    return tl.dot(shares, load_row_tile(pointer, gone, WP), acc=x, out_dtype=C.ACC, input_precision=C.PRECISION)
