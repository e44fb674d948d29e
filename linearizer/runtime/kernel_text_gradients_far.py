"""Gradients that come to log-features and far values through features; kernel_text_gradients.py says how."""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    ABSENT,
    EMPTY,
    HEADROOM,
    LOST,
    dims_at_once,
    exact_logits,
    far_product,
    load_rows,
    load_tile,
    row_bound,
    scores,
)
from .kernel_text_segments import Problem, accumulate, summarize

Tensor = torch.Tensor


@triton.jit
def feature_tile(x_ptr, rows, om, shift, T, C: tl.constexpr):
    """e^(x + shift), at most 1 or e^HEADROOM, as the stabilisers make it; 0 outside."""
    return tl.exp(load_tile(x_ptr, rows, om, T, C.M, 4 * ABSENT) + shift)


@triton.jit
def exact_sums(u_ptr, w_ptr, rows, columns, om, lse, change, BY_ROW: tl.constexpr, T, C: tl.constexpr):
    """Σ change e^(u + w - lse) over the columns of each row, or over the rows of each column, feature by feature."""
    size: tl.constexpr = rows.shape[0] if BY_ROW else columns.shape[0]
    out = tl.zeros([size, om.shape[0]], change.dtype)
    for index in range(0, om.shape[0]):
        m = tl.min(om) + index
        u = tl.load(u_ptr + rows * C.M + m, mask=rows < tl.where(m < C.M, T, 0), other=2 * ABSENT)
        w = tl.load(w_ptr + columns * C.M + m, mask=columns < tl.where(m < C.M, T, 0), other=2 * ABSENT)
        logits = tl.where(change == 0, EMPTY, u[:, None] + w[None, :] - lse[:, None])
        part = tl.sum(change * tl.exp(logits), 1 if BY_ROW else 0)
        out += tl.where((om == m)[None, :], part[:, None], 0.0)
    return out


@triton.jit
def change_tile(g, g_ptr, v_ptr, delta, rows, columns, T, C: tl.constexpr):
    """g·v - δ where a far key is behind its row, and 0 elsewhere."""
    change = scores(g, g_ptr, v_ptr, rows, columns, T, T, C.DV, C.VP, C) - delta[:, None]
    return tl.where((columns[None, :] <= rows[:, None]) & (rows < T)[:, None], change, 0.0)


@triton.jit
def row_factor(bound, lse):
    """What the stabilised features miss to be probabilities."""
    return tl.exp(tl.minimum(bound - HEADROOM - lse, -LOST))


@triton.jit
def any_lost(bound, lse, rows, T):
    """Tell whether a row has lost so much to its stabilisers that its features must be taken one by one."""
    return tl.max(tl.where((rows < T) & (bound - HEADROOM - lse > -LOST), 1, 0)) > 0


@triton.jit
def query_feature_gradients(text, segments, du_ptr, sizes, C: tl.constexpr):
    """Some features' gradients for rows; grid (batch · heads · group, slab of features, block of rows)."""
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr = text
    ceiling_ptr, level_ptr, mean_ptr = segments
    T, COLUMNS, G, SEGMENTS = sizes
    t0, row = tl.program_id(2) * C.BT, tl.program_id(0).to(tl.int64)
    head = row // G
    ot, om, ov = t0 + tl.arange(0, C.BT), tl.program_id(1) * C.MS + tl.arange(0, C.MS), tl.arange(0, C.VP)
    u_ptr += row * T * C.M
    w_ptr += head * T * C.M
    at = (head * SEGMENTS + t0 // C.SEG) * C.M
    g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
    lse = load_rows(lse_ptr + row * T, ot, T)
    delta = load_rows(delta_ptr + row * T, ot, T)
    level = tl.load(level_ptr + at + om, mask=om < C.M, other=EMPTY)
    mean = load_tile(mean_ptr + at * C.DV, om, ov, C.M, C.DV)
    p = feature_tile(u_ptr, ot, om, level[None, :] - lse[:, None], T, C)
    du = p * (tl.dot(g, tl.trans(mean), out_dtype=C.ACC, input_precision=C.PRECISION) - delta[:, None])
    bound = row_bound(u_ptr, ceiling_ptr + at, ot, T, C)
    factor = row_factor(bound, lse)
    lost = any_lost(bound, lse, ot, T)
    ceiling = tl.load(ceiling_ptr + at + om, mask=om < C.M, other=ABSENT)[None, :]
    query = feature_tile(u_ptr, ot, om, ceiling - bound[:, None], T, C)
    for j0 in range(t0 // C.SEG * C.SEG, tl.minimum(t0 + C.BT, T), C.BN):
        oj = j0 + tl.arange(0, C.BN)
        values = v_ptr + head * COLUMNS * C.DV
        change = change_tile(g, g_ptr + row * T * C.DV, values, delta, ot, oj, T, C)
        if lost:
            du += exact_sums(u_ptr, w_ptr, ot, oj, om, lse, change, True, T, C)
        else:
            key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, C).to(g.dtype)
            weight = (change * factor[:, None]).to(g.dtype)
            du += query * tl.dot(weight, key, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(du_ptr + row * T * C.M + ot[:, None] * C.M + om[None, :], du,
             mask=(ot < T)[:, None] & (om < C.M)[None, :])  # fmt: skip


@triton.jit
def key_feature_gradients(text, segments, dw_ptr, sizes, C: tl.constexpr):
    """Some features' gradients for far keys; grid (batch · heads, slab of features, block of columns)."""
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr = text
    ceiling_ptr, level_ptr, mean_ptr, delta_mean_ptr = segments
    T, COLUMNS, G, SEGMENTS = sizes
    j0, head = tl.program_id(2) * C.BN, tl.program_id(0).to(tl.int64)
    oj, om, ov = j0 + tl.arange(0, C.BN), tl.program_id(1) * C.MS + tl.arange(0, C.MS), tl.arange(0, C.VP)
    w_ptr += head * T * C.M
    at = (head * SEGMENTS + j0 // C.SEG) * C.M
    v = load_tile(v_ptr + head * COLUMNS * C.DV, oj, ov, T, C.DV)
    level = tl.load(level_ptr + at + om, mask=om < C.M, other=EMPTY)
    mean = load_tile(mean_ptr + at * C.DV, om, ov, C.M, C.DV)
    delta_mean = tl.load(delta_mean_ptr + at + om, mask=om < C.M, other=0.0)
    p = feature_tile(w_ptr, oj, om, level[None, :], T, C)
    dw = p * (tl.dot(v, tl.trans(mean), out_dtype=C.ACC, input_precision=C.PRECISION) - delta_mean[None, :])
    ceiling = tl.load(ceiling_ptr + at + om, mask=om < C.M, other=ABSENT)[None, :]
    key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, C)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // C.BT * C.BT, tl.minimum(j0 // C.SEG * C.SEG + C.SEG, T), C.BT):
            ot = t0 + tl.arange(0, C.BT)
            g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            delta = load_rows(delta_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * C.M, ceiling_ptr + at, ot, T, C)
            factor = row_factor(bound, lse)
            values = v_ptr + head * COLUMNS * C.DV
            change = change_tile(g, g_ptr + row * T * C.DV, values, delta, ot, oj, T, C)
            if any_lost(bound, lse, ot, T):
                dw += exact_sums(u_ptr + row * T * C.M, w_ptr, ot, oj, om, lse, change, False, T, C)
            else:
                query = feature_tile(u_ptr + row * T * C.M, ot, om, ceiling - bound[:, None], T, C).to(v.dtype)
                weight = tl.trans(change * factor[:, None]).to(v.dtype)
                dw += key * tl.dot(weight, query, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(dw_ptr + head * T * C.M + oj[:, None] * C.M + om[None, :], dw,
             mask=(oj < T)[:, None] & (om < C.M)[None, :])  # fmt: skip


@triton.jit
def far_value_gradients(text, segments, dv_ptr, sizes, C: tl.constexpr):
    """Gradients of far values; grid (batch · heads, block of columns)."""
    u_ptr, w_ptr, g_ptr, lse_ptr = text
    ceiling_ptr, level_ptr, mean_ptr = segments
    T, G, SEGMENTS = sizes
    j0, head = tl.program_id(1) * C.BN, tl.program_id(0).to(tl.int64)
    oj, ov = j0 + tl.arange(0, C.BN), tl.arange(0, C.VP)
    w_ptr += head * T * C.M
    at = (head * SEGMENTS + j0 // C.SEG) * C.M
    dv = tl.zeros([C.BN, C.VP], C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        level = tl.load(level_ptr + at + om, mask=om < C.M, other=EMPTY)
        mean = load_tile(mean_ptr + at * C.DV, om, ov, C.M, C.DV)
        p = feature_tile(w_ptr, oj, om, level[None, :], T, C)
        dv = tl.dot(p.to(mean.dtype), mean, acc=dv, out_dtype=C.ACC, input_precision=C.PRECISION)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // C.BT * C.BT, tl.minimum(j0 // C.SEG * C.SEG + C.SEG, T), C.BT):
            ot = t0 + tl.arange(0, C.BT)
            g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * C.M, ceiling_ptr + at, ot, T, C)
            factor = row_factor(bound, lse)
            product = far_product(u_ptr + row * T * C.M, w_ptr, ceiling_ptr + at, bound, ot, oj, T, g.dtype, C)
            live = (oj[None, :] <= ot[:, None]) & (ot < T)[:, None]
            p = tl.where(live, product * factor[:, None], 0.0)
            if any_lost(bound, lse, ot, T):
                logits = exact_logits(u_ptr + row * T * C.M, w_ptr, ot, oj, T, C)
                p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(dv_ptr + head * T * C.DV + oj[:, None] * C.DV + ov[None, :], dv,
             mask=(oj < T)[:, None] & (ov < C.DV)[None, :])  # fmt: skip


def compute_far_gradients(
    problem: Problem, u: Tensor, w: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, kept: list[Tensor],
    last: tuple[Tensor, Tensor, Tensor],
):  # fmt: skip
    """Gradients that come through features: of u, w and values, and of the state, as (level, mean, mean of δ)."""
    ceiling, level, mean = kept
    own_level, own_mean, own_delta, _ = summarize(problem, u, g, lse, delta)
    later_level, later_mean, later_delta, *first = accumulate(
        problem, own_level, own_mean, own_delta, last, g.dtype, backward=True
    )
    du, dw = torch.empty_like(u), torch.empty_like(w)
    dv = torch.empty(*w.shape[:-1], problem.value_dim, dtype=w.dtype, device=w.device)
    shared, text = problem.constants(DS=dims_at_once(v)), (u, w, v, g, lse, delta)
    sizes = problem.tokens, v.shape[-2], problem.group, problem.segments
    by_row, by_key = (problem.grid(problem.tokens, problem.sizes[name]) for name in ("BT", "BN"))
    slabs = problem.grid(problem.features, problem.sizes["MS"])
    query_feature_gradients[problem.pairs * problem.group, slabs, by_row](
        text, (ceiling, level, mean), du, sizes, shared, **problem.launch
    )
    key_feature_gradients[problem.pairs, slabs, by_key](
        text, (ceiling, later_level, later_mean, later_delta), dw, sizes, shared, **problem.launch
    )
    far_value_gradients[problem.pairs, by_key](
        (u, w, g, lse), (ceiling, later_level, later_mean), dv, (problem.tokens, problem.group, problem.segments),
        shared, **problem.launch,
    )  # fmt: skip
    return du, dw, dv, first
