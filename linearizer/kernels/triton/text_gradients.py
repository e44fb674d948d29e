"""Gradients of the attention kernels. With p = e^(logit - lse) and δ_i = g_i·y_i, where g is the gradient of the
output y, each logit's gradient is p (g_i·v_j - δ_i).

The backward pass is the same attention with the roles exchanged: to a key, all rows of later segments are one token per
feature, with the level log Σ_i e^(u_im - lse_i) and the mean of g (and of δ) as its value.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

from linearizer.kernels.triton.common import (
    ABSENT,
    EMPTY,
    HEADROOM,
    LOST,
    count_parts,
    dims_at_once,
    exact_logits,
    far_product,
    load_rows,
    load_tile,
    row_bound,
    scores,
)
from linearizer.kernels.triton.text_features import Problem, accumulate, run_text_features, summarize

Tensor = torch.Tensor


@triton.jit
def feature_tile(x_ptr, rows, om, shift, T, C: tl.constexpr):
    """Return e^(x + shift), which the stabilisers limit to 1 or e^HEADROOM; 0 outside."""
    return tl.exp(load_tile(x_ptr, rows, om, T, C.M, 4 * ABSENT) + shift)


@triton.jit
def exact_sums(u_ptr, w_ptr, rows, columns, om, lse, change, BY_ROW: tl.constexpr, T, C: tl.constexpr):
    """Sum change e^(u + w - lse) over the columns of each row, or over the rows of each column, feature by feature."""
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
    """Return g·v - δ where a far key is behind its row, and 0 elsewhere."""
    change = scores(g, g_ptr, v_ptr, rows, columns, T, T, C.DV, C.VP, C) - delta[:, None]
    return tl.where((columns[None, :] <= rows[:, None]) & (rows < T)[:, None], change, 0.0)


@triton.jit
def row_factor(bound, lse):
    """Return the factor that turns products of stabilised features into probabilities."""
    return tl.exp(tl.minimum(bound - HEADROOM - lse, -LOST))


@triton.jit
def any_lost(bound, lse, rows, T):
    """Return whether a row lost so much to its stabilisers that its features must be computed one by one."""
    return tl.max(tl.where((rows < T) & (bound - HEADROOM - lse > -LOST), 1, 0)) > 0


@triton.jit
def query_feature_gradients(text, segments, du_ptr, sizes, C: tl.constexpr):
    """Compute gradients of the rows' features; grid (batch · heads · group, slab of features, block of rows)."""
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr = text
    ceiling_ptr, level_ptr, mean_ptr = segments
    T, COLUMNS, G, SEGMENTS = sizes
    t0, row = tl.program_id(2) * C.BT, tl.program_id(0).to(tl.int64)
    head = row // G
    ot, om, ov = t0 + tl.arange(0, C.BT), tl.program_id(1) * C.MS + tl.arange(0, C.MS), tl.arange(0, C.VP)
    u_ptr += row * T * C.M
    w_ptr += head * T * C.M
    offset = (head * SEGMENTS + t0 // C.SEG) * C.M
    g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
    lse = load_rows(lse_ptr + row * T, ot, T)
    delta = load_rows(delta_ptr + row * T, ot, T)
    level = tl.load(level_ptr + offset + om, mask=om < C.M, other=EMPTY)
    mean = load_tile(mean_ptr + offset * C.DV, om, ov, C.M, C.DV)
    p = feature_tile(u_ptr, ot, om, level[None, :] - lse[:, None], T, C)
    du = p * (tl.dot(g, tl.trans(mean), out_dtype=C.ACC, input_precision=C.PRECISION) - delta[:, None])
    bound = row_bound(u_ptr, ceiling_ptr + offset, ot, T, C)
    factor = row_factor(bound, lse)
    lost = any_lost(bound, lse, ot, T)
    ceiling = tl.load(ceiling_ptr + offset + om, mask=om < C.M, other=ABSENT)[None, :]
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
    """Compute gradients of the far keys' features; grid (batch · heads, slab of features, block of columns)."""
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr = text
    ceiling_ptr, level_ptr, mean_ptr, delta_mean_ptr = segments
    T, COLUMNS, G, SEGMENTS = sizes
    j0, head = tl.program_id(2) * C.BN, tl.program_id(0).to(tl.int64)
    oj, om, ov = j0 + tl.arange(0, C.BN), tl.program_id(1) * C.MS + tl.arange(0, C.MS), tl.arange(0, C.VP)
    w_ptr += head * T * C.M
    offset = (head * SEGMENTS + j0 // C.SEG) * C.M
    v = load_tile(v_ptr + head * COLUMNS * C.DV, oj, ov, T, C.DV)
    level = tl.load(level_ptr + offset + om, mask=om < C.M, other=EMPTY)
    mean = load_tile(mean_ptr + offset * C.DV, om, ov, C.M, C.DV)
    delta_mean = tl.load(delta_mean_ptr + offset + om, mask=om < C.M, other=0.0)
    p = feature_tile(w_ptr, oj, om, level[None, :], T, C)
    dw = p * (tl.dot(v, tl.trans(mean), out_dtype=C.ACC, input_precision=C.PRECISION) - delta_mean[None, :])
    ceiling = tl.load(ceiling_ptr + offset + om, mask=om < C.M, other=ABSENT)[None, :]
    key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, C)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // C.BT * C.BT, tl.minimum(j0 // C.SEG * C.SEG + C.SEG, T), C.BT):
            ot = t0 + tl.arange(0, C.BT)
            g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            delta = load_rows(delta_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * C.M, ceiling_ptr + offset, ot, T, C)
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
    """Compute gradients of far values; grid (batch · heads, block of columns)."""
    u_ptr, w_ptr, g_ptr, lse_ptr = text
    ceiling_ptr, level_ptr, mean_ptr = segments
    T, G, SEGMENTS = sizes
    j0, head = tl.program_id(1) * C.BN, tl.program_id(0).to(tl.int64)
    oj, ov = j0 + tl.arange(0, C.BN), tl.arange(0, C.VP)
    w_ptr += head * T * C.M
    offset = (head * SEGMENTS + j0 // C.SEG) * C.M
    dv = tl.zeros([C.BN, C.VP], C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        level = tl.load(level_ptr + offset + om, mask=om < C.M, other=EMPTY)
        mean = load_tile(mean_ptr + offset * C.DV, om, ov, C.M, C.DV)
        p = feature_tile(w_ptr, oj, om, level[None, :], T, C)
        dv = tl.dot(p.to(mean.dtype), mean, acc=dv, out_dtype=C.ACC, input_precision=C.PRECISION)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(j0 // C.BT * C.BT, tl.minimum(j0 // C.SEG * C.SEG + C.SEG, T), C.BT):
            ot = t0 + tl.arange(0, C.BT)
            g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            bound = row_bound(u_ptr + row * T * C.M, ceiling_ptr + offset, ot, T, C)
            factor = row_factor(bound, lse)
            product = far_product(u_ptr + row * T * C.M, w_ptr, ceiling_ptr + offset, bound, ot, oj, T, g.dtype, C)
            live = (oj[None, :] <= ot[:, None]) & (ot < T)[:, None]
            p = tl.where(live, product * factor[:, None], 0.0)
            if any_lost(bound, lse, ot, T):
                logits = exact_logits(u_ptr + row * T * C.M, w_ptr, ot, oj, T, C)
                p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(dv_ptr + head * T * C.DV + oj[:, None] * C.DV + ov[None, :], dv,
             mask=(oj < T)[:, None] & (ov < C.DV)[None, :])  # fmt: skip


def compute_far_gradients(
    problem: Problem, u: Tensor, w: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, saved: list[Tensor],
    last: tuple[Tensor, Tensor, Tensor],
):  # fmt: skip
    """Return gradients through features: of u, w and values, and of the state, as (level, mean, mean of δ)."""
    ceiling, level, mean = saved
    segment_level, segment_mean, segment_delta, _ = summarize(problem, u, g, lse, delta)
    later_level, later_mean, later_delta, *first = accumulate(
        problem, segment_level, segment_mean, segment_delta, last, g.dtype, backward=True
    )
    du, dw = torch.empty_like(u), torch.empty_like(w)
    dv = torch.empty(*w.shape[:-1], problem.value_dim, dtype=w.dtype, device=w.device)
    shared, text = problem.constants(DS=dims_at_once(v.shape[-1], v.dtype)), (u, w, v, g, lse, delta)
    sizes = problem.tokens, v.shape[-2], problem.group, problem.segments
    by_row, by_key = (count_parts(problem.tokens, problem.sizes[name]) for name in ("BT", "BN"))
    slabs = count_parts(problem.features, problem.sizes["MS"])
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


@triton.jit
def window_tile(of_rows, of_columns, rows, columns, empty, T, WINDOW, C: tl.constexpr):
    """Return probabilities p, and p (g·v - δ); both are 0 where a column is not in a row's window."""
    q, g, lse, delta = of_rows
    k, v = of_columns
    logits = tl.dot(q, tl.trans(k), out_dtype=C.ACC, input_precision=C.PRECISION)
    live = (columns[None, :] > rows[:, None]) & (columns[None, :] <= rows[:, None] + WINDOW) & (rows < T)[:, None]
    live = live & (columns >= empty)[None, :] & (columns < T + WINDOW)[None, :]
    p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
    return p, p * (tl.dot(g, tl.trans(v), out_dtype=C.ACC, input_precision=C.PRECISION) - delta[:, None])


@triton.jit
def window_key_gradients(text, results, sizes, C: tl.constexpr):
    """Compute gradients of the window's keys and values; grid (batch · heads, block of columns)."""
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr = text
    dk_ptr, dv_ptr = results
    T, WINDOW, H, G = sizes
    head, j0, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * C.BN, T + WINDOW
    oc, od, ov = j0 + tl.arange(0, C.BN), tl.arange(0, C.DP), tl.arange(0, C.VP)
    empty = tl.load(empty_ptr + head // H)
    k = load_tile(k_ptr + head * columns * C.D, oc, od, columns, C.D)
    v = load_tile(v_ptr + head * columns * C.DV, oc, ov, columns, C.DV)
    dk = tl.zeros([C.BN, C.DP], C.ACC)
    dv = tl.zeros([C.BN, C.VP], C.ACC)
    start = tl.maximum(j0 - WINDOW, 0)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(start, tl.minimum(j0 + C.BN, T), C.BT):
            ot = t0 + tl.arange(0, C.BT)
            q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
            g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            delta = load_rows(delta_ptr + row * T, ot, T)
            p, change = window_tile((q, g, lse, delta), (k, v), ot, oc, empty, T, WINDOW, C)
            dk = tl.dot(tl.trans(change).to(q.dtype), q, acc=dk, out_dtype=C.ACC, input_precision=C.PRECISION)
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(dk_ptr + head * columns * C.D + oc[:, None] * C.D + od[None, :], dk,
             mask=(oc < columns)[:, None] & (od < C.D)[None, :])  # fmt: skip
    tl.store(dv_ptr + head * columns * C.DV + oc[:, None] * C.DV + ov[None, :], dv,
             mask=(oc < columns)[:, None] & (ov < C.DV)[None, :])  # fmt: skip


@triton.jit
def window_query_gradients(text, dq_ptr, sizes, C: tl.constexpr):
    """Compute gradients of queries through the window; grid (batch · heads · group, block of rows)."""
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr = text
    T, WINDOW, H, G = sizes
    t0, row = tl.program_id(1) * C.BT, tl.program_id(0).to(tl.int64)
    head, columns = row // G, T + WINDOW
    ot, od, ov = t0 + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.arange(0, C.VP)
    empty = tl.load(empty_ptr + head // H)
    q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
    g = load_tile(g_ptr + row * T * C.DV, ot, ov, T, C.DV)
    lse = load_rows(lse_ptr + row * T, ot, T)
    delta = load_rows(delta_ptr + row * T, ot, T)
    dq = tl.zeros([C.BT, C.DP], C.ACC)
    for c0 in range(t0 + 1, tl.minimum(t0 + C.BT + WINDOW, columns), C.BN):
        oc = c0 + tl.arange(0, C.BN)
        k = load_tile(k_ptr + head * columns * C.D, oc, od, columns, C.D)
        v = load_tile(v_ptr + head * columns * C.DV, oc, ov, columns, C.DV)
        _, change = window_tile((q, g, lse, delta), (k, v), ot, oc, empty, T, WINDOW, C)
        dq = tl.dot(change.to(k.dtype), k, acc=dq, out_dtype=C.ACC, input_precision=C.PRECISION)
    tl.store(dq_ptr + row * T * C.D + ot[:, None] * C.D + od[None, :], dq,
             mask=(ot < T)[:, None] & (od < C.D)[None, :])  # fmt: skip


def compute_window_gradients(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, empty: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients through the window: of queries, keys and values."""
    dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (q, k, v))
    text, shared = (q, k, v, g, lse, delta, empty), problem.constants()
    sizes = problem.tokens, problem.window, problem.heads, problem.group
    grid = problem.pairs, count_parts(k.shape[-2], problem.sizes["BN"])
    window_key_gradients[grid](text, (dk, dv), sizes, shared, **problem.launch)
    grid = problem.pairs * problem.group, count_parts(problem.tokens, problem.sizes["BT"])
    window_query_gradients[grid](text, dq, sizes, shared, **problem.launch)
    return dq, dk, dv


def compute_sink_gradients(
    q: Tensor, g: Tensor, sink_k: Tensor, sink_v: Tensor, first: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients through the sinks, which are few: of queries, and of the sinks' keys and values."""
    work = lse.dtype
    q, g, k, v = (x.to(work) for x in (q, g, sink_k[:, :, None], sink_v[:, :, None]))
    place = first[:, None] + torch.arange(q.shape[-2], device=q.device)
    seen = torch.arange(sink_k.shape[-2], device=q.device) <= place[..., None]
    p = (q @ k.mT - lse[..., None]).masked_fill(~seen[:, None, None], EMPTY.value).exp()
    change = p * (g @ v.mT - delta[..., None])
    return change @ k, (change.mT @ q).sum(2), (p.mT @ g).sum(2)


class FeatureAttention(torch.autograd.Function):
    """run_text_features with gradients of queries, keys, values, log-features and the state."""

    @staticmethod
    def forward(ctx: Any, window: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, level, mean, saved = run_text_features(*inputs, window)  # type: ignore[arg-type, call-arg]
        ctx.save_for_backward(*inputs, out, lse, level, mean, *saved)
        ctx.window = window
        return out, level, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dlevel: Tensor, dmean: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, start, empty, u, w, level0, mean0, out, lse, level, mean, *saved = ctx.saved_tensors
        g = g.to(out.dtype).contiguous()
        delta = (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        problem = Problem(q, v, sink_k.shape[-2], 0 if u is None else u.shape[-1], ctx.window, True)
        dq, dk, dv = compute_window_gradients(problem, q, k, v, g, lse, delta, empty)
        sink_dq, dsink_k, dsink_v = compute_sink_gradients(q, g, sink_k, sink_v, start, lse, delta)
        du = dw = dlevel0 = dmean0 = None
        if u is not None:
            last = (-level, dmean.contiguous(), (dmean * mean).sum(-1) - dlevel)
            du, dw, far_dv, (level1, mean1, delta1) = compute_far_gradients(
                problem, u, w, v, g, lse, delta, saved, last
            )
            dv[:, :, : far_dv.shape[-2]] += far_dv
            weight = (level0 + level1).exp()
            dlevel0 = weight * ((mean1 * mean0).sum(-1) - delta1)
            dmean0 = weight[..., None] * mean1
        dq, dk, dv = (dx.to(x.dtype) for dx, x in ((dq + sink_dq, q), (dk, k), (dv, v)))
        return None, dq, dk, dv, dsink_k.to(k.dtype), dsink_v.to(v.dtype), None, None, du, dw, dlevel0, dmean0
