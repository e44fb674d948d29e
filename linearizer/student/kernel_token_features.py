"""One token for heads with windows and features: log-features, state and output in one launch, the state in place.

Nothing is read back from the device, so that a token can be captured in a CUDA graph. One program does all of a KV
head, because the old state must have been read before the new one is written. feature_maps.py is the reference
of the features, features_torch.py of the attention.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .feature_maps import HALVES as HALVES_FORM
from .feature_maps import NEAREST as NEAREST_FORM
from .feature_maps import NONE as NO_FORM
from .kernel_common import (
    ABSENT,
    COUNT,
    EMPTY,
    FAR,
    HEAD,
    HEADS,
    OWN,
    REST,
    TYPES,
    WINDOW,
    WINDOW_K,
    Constants,
    address,
    attend_near,
    dims_at_once,
    load_new,
    load_part,
    load_tile,
    load_vector,
    new_exponent,
    on_device_of_first,
    padded,
    point_at_pair,
    precision,
    store_token,
    update_softmax,
)
from .kernel_token_table import TokenTable
from .state import ExactState, FeatureState

Tensor = torch.Tensor
NONE, NEAREST, HALVES = tl.constexpr(NO_FORM), tl.constexpr(NEAREST_FORM), tl.constexpr(HALVES_FORM)
LEVEL, MEAN, QUERY, QUERY_BIAS, KEY, KEY_BIAS, QUERY_NORM, KEY_NORM = (tl.constexpr(REST.value + n) for n in range(8))


@triton.jit
def query_features(q, q_stride, weight, om, og, M, C: tl.constexpr):
    """Products of the query heads, (heads, features), and |q|²/2 of each head."""
    out, square = tl.zeros([og.shape[0], om.shape[0]], C.ACC), tl.zeros([og.shape[0]], C.ACC)
    for d in tl.static_range(0, C.DP, C.DS):
        od = d + tl.arange(0, C.DS)
        rows = load_part(q, og, od, C.G, q_stride, C.D).to(C.ACC) * C.SCALE
        tile_size = load_tile(weight, om, od, M, C.D).to(C.ACC)
        out = tl.dot(rows, tl.trans(tile_size), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
        square += tl.sum(rows * rows, 1) / 2
    return out, square


@triton.jit
def key_features(k, weight, bias, om, M, C: tl.constexpr):
    """Products of the leaving key with their biases, and |k|²/2 as often."""
    out, square = tl.load(bias + om, mask=om < M, other=0.0).to(C.ACC), tl.zeros([om.shape[0]], C.ACC)
    for d in tl.static_range(0, C.DP, C.DS):
        od = d + tl.arange(0, C.DS)
        key = tl.load(k + od, mask=od < C.D, other=0.0).to(C.ACC)
        out += tl.sum(load_tile(weight, om, od, M, C.D).to(C.ACC) * key[None, :], 1)
        square += tl.sum(key * key, 0) / 2
    return out, square


@triton.jit
def extend_logsumexp(top, total, x, live, AXIS: tl.constexpr):
    """Let running log-sum-exps see some more numbers."""
    new = tl.maximum(top, tl.max(tl.where(live, x, 2 * ABSENT), AXIS))
    shifted = tl.exp(x - (new[:, None] if AXIS == 1 else new))
    return new, total * tl.exp(top - new) + tl.sum(tl.where(live, shifted, 0.0), AXIS)


@triton.jit
def key_shares(k, weight, bias, M, HALF, C: tl.constexpr):
    """What a key's log-features lack to be logs of shares, in the first half and beyond; and which is the largest."""
    top, beyond_top = tl.full([], EMPTY, C.ACC), tl.full([], EMPTY, C.ACC)
    total, beyond, nearest = tl.full([], 0.0, C.ACC), tl.full([], 0.0, C.ACC), tl.full([], 0, tl.int32)
    for m in range(0, M, C.MS):
        om = m + tl.arange(0, C.MS)
        w, _ = key_features(k, weight, bias, om, M, C)
        w = tl.where(om < M, w, ABSENT)
        nearest = tl.where(tl.max(w, 0) > top, m + tl.argmax(w, 0), nearest)
        top, total = extend_logsumexp(top, total, w, om < HALF, 0)
        beyond_top, beyond = extend_logsumexp(beyond_top, beyond, w, (om >= HALF) & (om < M), 0)
    least = 1e-37  # of a row without features, and of all features in one half
    return top + tl.log(tl.maximum(total, least)), beyond_top + tl.log(tl.maximum(beyond, least)), nearest


@triton.jit
def query_shares(q, q_stride, weight, og, M, HALF, C: tl.constexpr):
    """What log-features of the query heads lack to be logs of shares, in the first half and in the second."""
    top, beyond_top = tl.full([og.shape[0]], EMPTY, C.ACC), tl.full([og.shape[0]], EMPTY, C.ACC)
    total, beyond = tl.zeros([og.shape[0]], C.ACC), tl.zeros([og.shape[0]], C.ACC)
    for m in range(0, M, C.MS):
        om = m + tl.arange(0, C.MS)
        u, _ = query_features(q, q_stride, weight, om, og, M, C)
        top, total = extend_logsumexp(top, total, u, (om < HALF)[None, :] & (og >= 0)[:, None], 1)
        beyond_top, beyond = extend_logsumexp(
            beyond_top, beyond, u, ((om >= HALF) & (om < M))[None, :] & (og >= 0)[:, None], 1
        )
    least = 1e-37
    return top + tl.log(tl.maximum(total, least)), beyond_top + tl.log(tl.maximum(beyond, least))


@triton.jit
def token_features_kernel(table, token, layout, scratch_ptr, out_ptr, C: tl.constexpr):
    """Grid (rows of the table, batch). KEPT and MADE are the types of keys that are kept, and of folded features."""
    table_ptr, ticket_ptr, COLUMNS = table
    q_ptr, k_ptr, v_ptr, u_ptr, w_ptr = token
    KV, q_batch, q_head, q_stride, k_batch, k_head, v_batch, v_head = layout
    row_ptr, batch = table_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    head, own, heads = tl.load(row_ptr + HEAD), tl.load(row_ptr + OWN), tl.load(row_ptr + HEADS)
    WIDTH, M, at = tl.load(row_ptr + WINDOW).to(tl.int32), tl.load(row_ptr + FAR).to(tl.int32), batch * heads + own
    place = tl.load(address(row_ptr, COUNT, tl.int64) + batch).to(tl.int32)
    og, ov = tl.arange(0, C.GP), tl.arange(0, C.VP)
    q = q_ptr + batch * q_batch + head * q_head
    k, v = k_ptr + batch * k_batch + head * k_head, v_ptr + batch * v_batch + head * v_head
    k_exponent, v_exponent = new_exponent(k, C.D, C.DP, C), new_exponent(v, C.DV, C.VP, C)
    new_v = load_new(v, ov, v_exponent, C.DV, C)
    merged = tl.maximum(place - WIDTH + 1, 0)
    top, total, acc = attend_near(row_ptr, at, q, q_stride, (k, k_exponent, v, new_v), place, merged, WIDTH, og, C)
    slot = place % tl.maximum(WIDTH, 1)
    old_k, old_v = point_at_pair(row_ptr, WINDOW_K, at * WIDTH + slot, C)
    old_v = tl.where(WIDTH > 0, load_vector(old_v, 0, ov, WIDTH > 0, C.DV, C).to(C.ACC), new_v)
    if C.BITS == 8:  # as numbers, in memory: products read it some dimensions at a time
        leaving, od = scratch_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * C.D, tl.arange(0, C.DP)
        old = load_vector(old_k, 0, od, WIDTH > 0, C.D, C).to(C.ACC)
        old = tl.where(WIDTH > 0, old, load_new(k, od, k_exponent, C.D, C))
        tl.store(leaving + od, old.to(leaving.dtype.element_ty), mask=od < C.D)
        tl.debug_barrier()
    else:
        leaving = tl.where(WIDTH > 0, old_k, k)
    level_ptr, mean_ptr = address(row_ptr, LEVEL, C.ACC) + at * M, address(row_ptr, MEAN, C.ACC) + at * M * C.DV
    HALF = M // 2 if C.SHARES == HALVES else M
    if C.SHARES >= 0:
        query, query_bias = (
            address(row_ptr, QUERY, C.MADE) + own * M * C.D,
            address(row_ptr, QUERY_BIAS, C.MADE) + own * M,
        )
        key, key_bias = address(row_ptr, KEY, C.MADE) + own * M * C.D, address(row_ptr, KEY_BIAS, C.MADE) + own * M
        query_norm, key_norm = address(row_ptr, QUERY_NORM, C.MADE) + own, address(row_ptr, KEY_NORM, C.MADE) + own
    if C.SHARES > 0:
        first, beyond, nearest = key_shares(leaving, key, key_bias, M, HALF, C)
    if C.SHARES == HALVES:
        q_first, q_beyond = query_shares(q, q_stride, query, og, M, HALF, C)
    for m in range(0, M, C.MS):
        om = m + tl.arange(0, C.MS)
        inside = om < M
        if C.SHARES >= 0:
            u, q_square = query_features(q, q_stride, query, om, og, M, C)
            w, k_square = key_features(leaving, key, key_bias, om, M, C)
            if C.SHARES == NONE:
                u -= (q_square * tl.load(query_norm).to(C.ACC))[:, None]
                w -= k_square * tl.load(key_norm).to(C.ACC)
            elif C.SHARES == NEAREST:
                w = tl.where(om == nearest, 0.0, ABSENT)
            else:
                w -= tl.where(om < HALF, first, beyond)
            if C.SHARES == HALVES:
                u -= tl.where((om < HALF)[None, :], q_first[:, None], q_beyond[:, None])
            u += tl.load(query_bias + om, mask=inside, other=0.0).to(C.ACC)[None, :]
        else:
            w = tl.load(w_ptr + at * M + om, mask=inside, other=ABSENT).to(C.ACC)
            u = load_tile(u_ptr + at * C.G * M, og, om, C.G, M).to(C.ACC)
        w = tl.where(inside & (place - WIDTH >= C.S), w, ABSENT)
        level = tl.load(level_ptr + om, mask=inside, other=EMPTY)
        mean = load_tile(mean_ptr, om, ov, M, C.DV)
        tl.debug_barrier()  # a warp must not overwrite what another has yet to read
        higher = tl.maximum(level, w)
        new = higher + tl.log(tl.exp(level - higher) + tl.exp(w - higher))
        mean = mean * tl.exp(level - new)[:, None] + tl.exp(w - new)[:, None] * old_v[None, :]
        tl.store(level_ptr + om, new, mask=inside)
        tl.store(mean_ptr + om[:, None] * C.DV + ov[None, :], mean, mask=inside[:, None] & (ov < C.DV)[None, :])
        live = inside[None, :] & (og >= 0)[:, None]
        top, total, acc = update_softmax(top, total, acc, u + new[None, :], live, mean, C)
    tl.store(out_ptr + ((batch * KV + head) * C.G + og[:, None]) * C.DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(og < C.G)[:, None] & (ov < C.DV)[None, :])  # fmt: skip
    store_token(row_ptr, at, k, k_exponent, v, v_exponent, place, WIDTH, ticket_ptr, C)


def token_layout(q: Tensor, k: Tensor, v: Tensor, state: ExactState) -> tuple[tuple, dict]:
    """Say how the heads of a layer lie, q (batch, heads, group, 1, dim), k, v (batch, heads, 1, dim), and their sizes.

    `state` is any of the states.
    """
    layout = q.shape[1], *q.stride()[:3], *k.stride()[:2], *v.stride()[:2]
    group, dim, value_dim = q.shape[2], q.shape[-1], v.shape[-1]
    sizes = {"G": group, "GP": padded(group), "D": dim, "DP": padded(dim), "DS": dims_at_once(q), "DV": value_dim}
    small, sinks = state.window_k.dtype == torch.int8, state.sink_k.shape[-2]
    kept = {"BITS": 8 if small else 16, "KEPT": TYPES[state.window_k.dtype], "SINK": TYPES[state.sink_k.dtype]}
    kept |= {"S": sinks, "SP": padded(sinks)}
    return layout, {
        **sizes,
        "VP": padded(value_dim),
        "BN": 16 if small else tile_size(q, v),
        **kept,
    }  # bytes lie unaligned


def tile_size(q: Tensor, v: Tensor) -> int:
    """How many keys or features a program takes at a time."""
    return 32 if dims_at_once(q) == padded(q.shape[-1]) and padded(v.shape[-1]) <= 128 else 16


@on_device_of_first
def run_token_features(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, table: TokenTable, state: FeatureState, shares: int,
    scale: float = 1.0, u: Tensor | None = None, w: Tensor | None = None, made: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Attend with one token to what some heads of a layer hold, and bring all of it up to date in place.

    `state` is any of the states. Where features are not folded, `shares` is -1, and u and w are given.
    """
    layout, sizes = token_layout(q, k, v, state)
    small = sizes["BITS"] == 8
    sizes |= {"DS": min(sizes["DS"], 32), "MS": 16 if small else tile_size(q, v)}  # with more at once registers spill
    scratch = q.new_empty(q.shape[0], table.rows.shape[0], q.shape[-1]) if small else None
    token_features_kernel[table.rows.shape[0], q.shape[0]](
        (table.rows, table.tickets, table.rows.shape[1]),
        (q, k, v, u, w),
        layout,
        scratch,
        out,
        Constants(**sizes, SHARES=shares, MADE=TYPES[made], SCALE=scale, **precision(state.level)),
        num_warps=8,
        num_stages=1,
    )
