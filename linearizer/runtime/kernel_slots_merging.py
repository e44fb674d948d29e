"""One round of merging slots, as parts of a Triton kernel; merging.py says what it computes.

All threads of a program work at it, so what they hand each other goes through memory, between barriers.
"""

from __future__ import annotations

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import keep_some, load_kept, load_part, load_rows, load_tile

INFINITE = tl.constexpr(float("inf"))
SIZE = 32  # rows at a time; sums of products go over 16 numbers at a time, or they would fill the registers


@triton.jit
def squared_distances(x_ptr, i, j, N, W, D, K: tl.constexpr, ACC: tl.constexpr):
    """|x_i - x_j|² of rows of D among W numbers, the same both ways."""
    square = tl.zeros([i.shape[0], j.shape[0]], ACC)
    one = tl.zeros([i.shape[0], j.shape[0]], ACC)
    back = tl.zeros([j.shape[0], i.shape[0]], ACC)
    for d0 in range(0, D, K):
        od = d0 + tl.arange(0, K)
        own, other = load_part(x_ptr, i, od, N, W, D), load_part(x_ptr, j, od, N, W, D)
        square += tl.sum(own * own, 1)[:, None] + tl.sum(other * other, 1)[None, :]
        one = tl.dot(own, tl.trans(other), acc=one, out_dtype=ACC, input_precision="ieee")
        back = tl.dot(other, tl.trans(own), acc=back, out_dtype=ACC, input_precision="ieee")
    return tl.maximum(square - 2 * tl.minimum(one, tl.trans(back)), 0.0)


@triton.jit
def costs(
    x_ptr, weight_ptr, i, j, N, W, D: tl.constexpr, DV: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr
):  # fmt: skip
    """What merging pairs costs; infinite where a slot is empty or would be its own partner."""
    own, other = load_rows(weight_ptr, i, N), load_rows(weight_ptr, j, N)
    apart = squared_distances(x_ptr, i, j, N, W, D, K, ACC)
    values = squared_distances(x_ptr + D, i, j, N, W, DV, K, ACC)
    one, another = 1 / tl.maximum(own, 1.0), 1 / tl.maximum(other, 1.0)
    cost = apart * apart * tl.sqrt(values) / (one[:, None] + another[None, :])
    never = (own == 0)[:, None] | (other == 0)[None, :] | (i[:, None] == j[None, :])
    return tl.where(never, INFINITE, cost)


@triton.jit
def ranks(value_ptr, i, N, B: tl.constexpr):
    """How many values come before those at i; of equal ones, the first."""
    own = tl.load(value_ptr + i, mask=i < N, other=INFINITE)
    rank = tl.zeros([B], tl.int32)
    for j0 in range(0, N, B):
        j = j0 + tl.arange(0, B)
        other = tl.load(value_ptr + j, mask=j < N, other=INFINITE)
        first = (other[None, :] == own[:, None]) & (j[None, :] < i[:, None])
        rank += tl.sum(((other[None, :] < own[:, None]) | first).to(tl.int32), 1)
    return rank


@triton.jit
def gathered(value_ptr, target_ptr, i, N, B: tl.constexpr, ACC: tl.constexpr):
    """The sum of the values whose target is i."""
    out = tl.zeros([B], ACC)
    for j0 in range(0, N, B):
        j = j0 + tl.arange(0, B)
        target = tl.load(target_ptr + j, mask=j < N, other=-1)
        out += tl.sum(tl.where(target[None, :] == i[:, None], load_rows(value_ptr, j, N)[None, :], 0.0), 1)
    return out


@triton.jit
def choose(
    x_ptr, weight_ptr, value_ptr, partner_ptr, target_ptr, surplus, waits, N, W, D: tl.constexpr, DV: tl.constexpr,
    B: tl.constexpr, K: tl.constexpr, JUMPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Say into which slot each goes: the `surplus` cheapest into their partners, the others into themselves."""
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        best, partner = tl.full([B], INFINITE, ACC), tl.zeros([B], tl.int32)
        for j0 in range(0, N, B):
            cost = costs(x_ptr, weight_ptr, i, j0 + tl.arange(0, B), N, W, D, DV, K, ACC)
            least = tl.min(cost, 1)
            partner = tl.where(least < best, tl.argmin(cost, 1).to(tl.int32) + j0, partner)
            best = tl.minimum(least, best)
        tl.store(value_ptr + i, best, mask=i < N)
        tl.store(partner_ptr + i, partner, mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        partner = tl.load(partner_ptr + i, mask=i < N, other=0)
        stays = (tl.load(partner_ptr + partner) == i) & (i < partner)
        value = tl.where(stays, INFINITE, tl.load(value_ptr + i, mask=i < N, other=INFINITE))
        tl.store(value_ptr + i, value, mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        value = tl.load(value_ptr + i, mask=i < N, other=INFINITE)
        goes = (ranks(value_ptr, i, N, B) < surplus) & (value < INFINITE)
        tl.store(target_ptr + i, tl.where(goes, tl.load(partner_ptr + i, mask=i < N, other=0), i), mask=i < N)
    tl.debug_barrier()
    if waits:  # what has a partner that goes stays for now, so that no chain is longer than one
        for i0 in range(0, N, B):
            i = i0 + tl.arange(0, B)
            target = tl.load(target_ptr + i, mask=i < N, other=0)
            partner = tl.where(tl.load(target_ptr + target) == target, target, i)
            tl.store(partner_ptr + i, partner, mask=i < N)
        tl.debug_barrier()
        for i0 in range(0, N, B):
            i = i0 + tl.arange(0, B)
            tl.store(target_ptr + i, tl.load(partner_ptr + i, mask=i < N, other=0), mask=i < N)
        tl.debug_barrier()
    else:
        for _ in range(0, JUMPS):
            for i0 in range(0, N, B):
                i = i0 + tl.arange(0, B)
                target = tl.load(target_ptr + tl.load(target_ptr + i, mask=i < N, other=0))
                tl.store(target_ptr + i, target, mask=i < N)
            tl.debug_barrier()


@triton.jit
def join(
    x_ptr, out_ptr, weight_ptr, spread_ptr, total_ptr, value_ptr, target_ptr, N, W, D: tl.constexpr, DP: tl.constexpr,
    B: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge every slot into its target."""
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        tl.store(total_ptr + i, gathered(weight_ptr, target_ptr, i, N, B, ACC), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        for w0 in range(0, W, B):
            ow = w0 + tl.arange(0, B)
            acc = tl.zeros([B, B], ACC)
            for j0 in range(0, N, K):
                j = j0 + tl.arange(0, K)
                target = tl.load(target_ptr + j, mask=j < N, other=0)
                share = load_rows(weight_ptr, j, N) / tl.maximum(tl.load(total_ptr + target), 1.0)
                share = tl.where((target[None, :] == i[:, None]) & (j < N)[None, :], share[None, :], 0.0)
                acc = tl.dot(share, load_tile(x_ptr, j, ow, N, W), acc=acc, out_dtype=ACC, input_precision="ieee")
            tl.store(out_ptr + i[:, None] * W + ow[None, :], acc, mask=(i < N)[:, None] & (ow < W)[None, :])
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i, od = i0 + tl.arange(0, B), tl.arange(0, DP)
        target = tl.load(target_ptr + i, mask=i < N, other=0)
        moved = load_part(x_ptr, i, od, N, W, D) - load_part(out_ptr, target, od, N, W, D)
        share = load_rows(weight_ptr, i, N) / tl.maximum(tl.load(total_ptr + target), 1.0)
        tl.store(value_ptr + i, share * (load_rows(spread_ptr, i, N) + tl.sum(moved * moved, 1)), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        tl.store(spread_ptr + i, gathered(value_ptr, target_ptr, i, N, B, ACC), mask=i < N)
        tl.store(weight_ptr + i, load_rows(total_ptr, i, N), mask=i < N)
    tl.debug_barrier()


@triton.jit
def fill(
    x_ptr, weight_ptr, spread_ptr, k_ptr, v_ptr, metric_ptr, held_k_ptr, held_v_ptr, held_weight_ptr,
    held_spread_ptr, index_ptr, comes_ptr, N, W, S, ROOT: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, K: tl.constexpr, ACC: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    """Lay the slots that are held and a block of tokens into rows; BYTES is 8 where both are kept as bytes."""
    for i0 in range(0, N, B):
        i, od, ov = i0 + tl.arange(0, B), tl.arange(0, DP), tl.arange(0, VP)
        new = (i >= S) & (i < N)
        column = tl.load(index_ptr + i - S, mask=new, other=0)
        k = load_kept(held_k_ptr, i, od, S, D, BYTES).to(ACC)
        k += load_kept(k_ptr, column, od, tl.where(new, column + 1, 0), D, BYTES).to(ACC)
        v = load_kept(held_v_ptr, i, ov, S, DV, BYTES).to(ACC)
        v += load_kept(v_ptr, column, ov, tl.where(new, column + 1, 0), DV, BYTES).to(ACC)
        row = x_ptr + i[:, None] * W
        tl.store(row + D + ov[None, :], v, mask=(i < N)[:, None] & (ov < DV)[None, :])
        tl.store(row + D + DV + od[None, :], k, mask=(i < N)[:, None] & (od < D)[None, :])
        weight = load_rows(held_weight_ptr, i, S) + tl.load(comes_ptr + i - S, mask=new, other=0).to(ACC)
        tl.store(weight_ptr + i, weight, mask=i < N)
        tl.store(spread_ptr + i, load_rows(held_spread_ptr, i, S), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        for d0 in range(0, D, B):
            o = d0 + tl.arange(0, B)
            seen = tl.zeros([B, B], ACC)
            for e0 in range(0, D, K):
                oe = e0 + tl.arange(0, K)
                k = load_part(x_ptr + D + DV, i, oe, N, W, D)
                metric = load_tile(metric_ptr, o, oe, D, D).to(ACC) * ROOT
                seen = tl.dot(k, tl.trans(metric), acc=seen, out_dtype=ACC, input_precision="ieee")
            tl.store(x_ptr + i[:, None] * W + o[None, :], seen, mask=(i < N)[:, None] & (o < D)[None, :])
    tl.debug_barrier()


@triton.jit
def keep(
    x_ptr, weight_ptr, spread_ptr, value_ptr, held_k_ptr, held_v_ptr, held_weight_ptr, held_spread_ptr, N, W, S,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, B: tl.constexpr, BITS: tl.constexpr,
    BYTES: tl.constexpr, TYPE: tl.constexpr,
):  # fmt: skip
    """Leave the first S slots that hold something, in order, as numbers of a type, of so many bits, or as bytes."""
    for i0 in range(0, N, B):
        i = i0 + tl.arange(0, B)
        weight = load_rows(weight_ptr, i, N)
        tl.store(value_ptr + i, tl.where(weight == 0, 1.0, 0.0).to(weight.dtype), mask=i < N)
    tl.debug_barrier()
    for i0 in range(0, N, B):
        i, od, ov = i0 + tl.arange(0, B), tl.arange(0, DP), tl.arange(0, VP)
        weight, to = load_rows(weight_ptr, i, N), ranks(value_ptr, i, N, B)
        here, full = (i < N) & (to < S), (weight > 0)[:, None]
        k = tl.where(full, load_part(x_ptr + D + DV, i, od, N, W, D), 0.0)
        v = tl.where(full, load_part(x_ptr + D, i, ov, N, W, DV), 0.0)
        keep_some(held_k_ptr, to, od, k.to(TYPE).to(k.dtype), here, D, BITS, BYTES)
        keep_some(held_v_ptr, to, ov, v.to(TYPE).to(v.dtype), here, DV, BITS, BYTES)
        tl.store(held_weight_ptr + to, weight, mask=here)
        tl.store(held_spread_ptr + to, tl.where(weight > 0, load_rows(spread_ptr, i, N), 0.0), mask=here)
    tl.debug_barrier()


@triton.jit
def merge_rows(
    rows_ptr, numbers_ptr, places_ptr, MOST, N, W, S, ROUNDS, WAITING, D: tl.constexpr, DP: tl.constexpr,
    DV: tl.constexpr, B: tl.constexpr, K: tl.constexpr, JUMPS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge N rows, which lie in memory for MOST, until S are left; say which of the two copies has them."""
    weight, spread, value, total = numbers_ptr, numbers_ptr + MOST, numbers_ptr + 2 * MOST, numbers_ptr + 3 * MOST
    side = 0
    for step in range(0, ROUNDS):
        waits = step < WAITING
        halvings = tl.maximum(step - WAITING + 1, 0)
        count = tl.maximum(S, tl.where(waits, S, (N + (1 << halvings) - 1) >> halvings))
        full = 0
        for i0 in range(0, N, B):
            full += tl.sum((load_rows(weight, i0 + tl.arange(0, B), N) > 0).to(tl.int32))
        if full > count:
            x, out = rows_ptr + side * MOST * W, rows_ptr + (1 - side) * MOST * W
            choose(
                x, weight, value, places_ptr, places_ptr + MOST, full - count, waits, N, W, D, DV, B, K, JUMPS, ACC
            )  # fmt: skip
            join(x, out, weight, spread, total, value, places_ptr + MOST, N, W, D, DP, B, K, ACC)
            side = 1 - side
    return side
