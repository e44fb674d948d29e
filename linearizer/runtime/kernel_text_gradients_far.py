"""Gradients that come to log-features and far values through features; kernel_gradients.py says how."""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    ABSENT,
    EMPTY,
    HEADROOM,
    LOST,
    at_once,
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
def feature_tile(x_ptr, rows, om, shift, T, M: tl.constexpr):
    """e^(x + shift), at most 1 or e^HEADROOM, as the stabilisers make it; 0 outside."""
    return tl.exp(load_tile(x_ptr, rows, om, T, M, 4 * ABSENT) + shift)


@triton.jit
def exact_sums(u_ptr, w_ptr, rows, columns, om, lse, change, BY_ROW: tl.constexpr, T, M: tl.constexpr):
    """Σ change e^(u + w - lse) over the columns of each row, or over the rows of each column, feature by feature."""
    size: tl.constexpr = rows.shape[0] if BY_ROW else columns.shape[0]
    out = tl.zeros([size, om.shape[0]], change.dtype)
    for index in range(0, om.shape[0]):
        m = tl.min(om) + index
        u = tl.load(u_ptr + rows * M + m, mask=rows < tl.where(m < M, T, 0), other=2 * ABSENT)
        w = tl.load(w_ptr + columns * M + m, mask=columns < tl.where(m < M, T, 0), other=2 * ABSENT)
        logits = tl.where(change == 0, EMPTY, u[:, None] + w[None, :] - lse[:, None])
        part = tl.sum(change * tl.exp(logits), 1 if BY_ROW else 0)
        out += tl.where((om == m)[None, :], part[:, None], 0.0)
    return out


@triton.jit
def change_tile(
    g, g_ptr, v_ptr, delta, rows, columns, T, DV: tl.constexpr, VP: tl.constexpr, DS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """g·v - δ where a far key is behind its row, and 0 elsewhere."""
    change = scores(g, g_ptr, v_ptr, rows, columns, T, T, DV, VP, DS, delta.dtype, PRECISION) - delta[:, None]
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
def query_feature_gradients(
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, ceiling_ptr, level_ptr, mean_ptr, du_ptr,
    T, COLUMNS, G, SEGMENTS,
    DV: tl.constexpr, VP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some features' gradients for rows; grid (batch · heads · group, slab of features, block of rows)."""
    t0, row = tl.program_id(2) * BT, tl.program_id(0).to(tl.int64)
    head = row // G
    ot, om, ov = t0 + tl.arange(0, BT), tl.program_id(1) * MS + tl.arange(0, MS), tl.arange(0, VP)
    u_ptr += row * T * M
    w_ptr += head * T * M
    at = (head * SEGMENTS + t0 // SEG) * M
    g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
    lse = load_rows(lse_ptr + row * T, ot, T)
    delta = load_rows(delta_ptr + row * T, ot, T)
    level = tl.load(level_ptr + at + om, mask=om < M, other=EMPTY)
    mean = load_tile(mean_ptr + at * DV, om, ov, M, DV)
    p = feature_tile(u_ptr, ot, om, level[None, :] - lse[:, None], T, M)
    du = p * (tl.dot(g, tl.trans(mean), out_dtype=ACC, input_precision=PRECISION) - delta[:, None])
    bound = row_bound(u_ptr, ceiling_ptr + at, ot, T, M, MS, ACC)
    factor = row_factor(bound, lse)
    lost = any_lost(bound, lse, ot, T)
    ceiling = tl.load(ceiling_ptr + at + om, mask=om < M, other=ABSENT)[None, :]
    query = feature_tile(u_ptr, ot, om, ceiling - bound[:, None], T, M)
    for j0 in range(t0 // SEG * SEG, tl.minimum(t0 + BT, T), BN):
        oj = j0 + tl.arange(0, BN)
        values = v_ptr + head * COLUMNS * DV
        change = change_tile(g, g_ptr + row * T * DV, values, delta, ot, oj, T, DV, VP, DS, PRECISION)
        if lost:
            du += exact_sums(u_ptr, w_ptr, ot, oj, om, lse, change, True, T, M)
        else:
            key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, M).to(g.dtype)
            weight = (change * factor[:, None]).to(g.dtype)
            du += query * tl.dot(weight, key, out_dtype=ACC, input_precision=PRECISION)
    tl.store(du_ptr + row * T * M + ot[:, None] * M + om[None, :], du,
             mask=(ot < T)[:, None] & (om < M)[None, :])  # fmt: skip


@triton.jit
def key_feature_gradients(
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, ceiling_ptr, level_ptr, mean_ptr, delta_mean_ptr, dw_ptr,
    T, COLUMNS, G, SEGMENTS,
    DV: tl.constexpr, VP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some features' gradients for far keys; grid (batch · heads, slab of features, block of columns)."""
    j0, head = tl.program_id(2) * BN, tl.program_id(0).to(tl.int64)
    oj, om, ov = j0 + tl.arange(0, BN), tl.program_id(1) * MS + tl.arange(0, MS), tl.arange(0, VP)
    w_ptr += head * T * M
    at = (head * SEGMENTS + j0 // SEG) * M
    v = load_tile(v_ptr + head * COLUMNS * DV, oj, ov, T, DV)
    level = tl.load(level_ptr + at + om, mask=om < M, other=EMPTY)
    mean = load_tile(mean_ptr + at * DV, om, ov, M, DV)
    delta_mean = tl.load(delta_mean_ptr + at + om, mask=om < M, other=0.0)
    p = feature_tile(w_ptr, oj, om, level[None, :], T, M)
    dw = p * (tl.dot(v, tl.trans(mean), out_dtype=ACC, input_precision=PRECISION) - delta_mean[None, :])
    ceiling = tl.load(ceiling_ptr + at + om, mask=om < M, other=ABSENT)[None, :]
    key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, M)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // BT * BT, tl.minimum(j0 // SEG * SEG + SEG, T), BT):
            ot = t0 + tl.arange(0, BT)
            g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            delta = load_rows(delta_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * M, ceiling_ptr + at, ot, T, M, MS, ACC)
            factor = row_factor(bound, lse)
            values = v_ptr + head * COLUMNS * DV
            change = change_tile(g, g_ptr + row * T * DV, values, delta, ot, oj, T, DV, VP, DS, PRECISION)
            if any_lost(bound, lse, ot, T):
                dw += exact_sums(u_ptr + row * T * M, w_ptr, ot, oj, om, lse, change, False, T, M)
            else:
                query = feature_tile(u_ptr + row * T * M, ot, om, ceiling - bound[:, None], T, M).to(v.dtype)
                weight = tl.trans(change * factor[:, None]).to(v.dtype)
                dw += key * tl.dot(weight, query, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dw_ptr + head * T * M + oj[:, None] * M + om[None, :], dw,
             mask=(oj < T)[:, None] & (om < M)[None, :])  # fmt: skip


@triton.jit
def far_value_gradients(
    u_ptr, w_ptr, g_ptr, lse_ptr, ceiling_ptr, level_ptr, mean_ptr, dv_ptr, T, G, SEGMENTS,
    DV: tl.constexpr, VP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of far values; grid (batch · heads, block of columns)."""
    j0, head = tl.program_id(1) * BN, tl.program_id(0).to(tl.int64)
    oj, ov = j0 + tl.arange(0, BN), tl.arange(0, VP)
    w_ptr += head * T * M
    at = (head * SEGMENTS + j0 // SEG) * M
    dv = tl.zeros([BN, VP], ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        level = tl.load(level_ptr + at + om, mask=om < M, other=EMPTY)
        mean = load_tile(mean_ptr + at * DV, om, ov, M, DV)
        p = feature_tile(w_ptr, oj, om, level[None, :], T, M)
        dv = tl.dot(p.to(mean.dtype), mean, acc=dv, out_dtype=ACC, input_precision=PRECISION)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // BT * BT, tl.minimum(j0 // SEG * SEG + SEG, T), BT):
            ot = t0 + tl.arange(0, BT)
            g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * M, ceiling_ptr + at, ot, T, M, MS, ACC)
            factor = row_factor(bound, lse)
            product = far_product(
                u_ptr + row * T * M, w_ptr, ceiling_ptr + at, bound, ot, oj, T, M, MS, ACC, g.dtype, PRECISION
            )  # fmt: skip
            live = (oj[None, :] <= ot[:, None]) & (ot < T)[:, None]
            p = tl.where(live, product * factor[:, None], 0.0)
            if any_lost(bound, lse, ot, T):
                logits = exact_logits(u_ptr + row * T * M, w_ptr, ot, oj, T, M, ACC)
                p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dv_ptr + head * T * DV + oj[:, None] * DV + ov[None, :], dv,
             mask=(oj < T)[:, None] & (ov < DV)[None, :])  # fmt: skip


def far(
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
    shared = {**problem.values, "DS": at_once(v), "M": problem.features, "SEG": problem.segment, **problem.sizes}
    shared |= {**problem.work, **problem.launch}
    tail = problem.tokens, v.shape[-2], problem.group, problem.segments
    by_row, by_key = (problem.grid(problem.tokens, problem.sizes[name]) for name in ("BT", "BN"))
    slabs = problem.grid(problem.features, problem.sizes["MS"])
    query_feature_gradients[problem.pairs * problem.group, slabs, by_row](
        u, w, v, g, lse, delta, ceiling, level, mean, du, *tail, **shared
    )
    key_feature_gradients[problem.pairs, slabs, by_key](
        u, w, v, g, lse, delta, ceiling, later_level, later_mean, later_delta, dw, *tail, **shared
    )
    far_value_gradients[problem.pairs, by_key](
        u, w, g, lse, ceiling, later_level, later_mean, dv, problem.tokens, problem.group, problem.segments, **shared
    )
    return du, dw, dv, first
