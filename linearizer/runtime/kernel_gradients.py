"""Gradients of the attention kernels. With p = e^(logit - lse) and δ_i = g_i·y_i, where g is the gradient of the
output y, every logit's gradient is p (g_i·v_j - δ_i).

Backward is the same attention with the roles exchanged: to a key, all rows of later segments are one token per
feature, whose level is log Σ_i e^(u_im - lse_i) and whose value is the mean of g (and of δ).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

try:  # as in kernels.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernels import (
    ABSENT,
    EMPTY,
    HEADROOM,
    LOST,
    Problem,
    accumulate,
    exact_logits,
    far_product,
    load_tile,
    row_bound,
    run,
    summarize,
)

Tensor = torch.Tensor


@triton.jit
def near_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr, dk_ptr, dv_ptr, T, WINDOW, H, G,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the window's keys and values; grid (block of columns, batch · heads)."""
    head, columns = tl.program_id(1).to(tl.int64), T + WINDOW
    oc, od, ov = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, VP)
    empty = tl.load(empty_ptr + head // H)
    k = load_tile(k_ptr + head * columns * D, oc, od, columns, D)
    v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
    dk = tl.zeros([BN, DP], ACC)
    dv = tl.zeros([BN, VP], ACC)
    start = tl.maximum(tl.program_id(0) * BN - WINDOW, 0)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(start, tl.minimum(tl.program_id(0) * BN + BN, T), BT):
            ot = t0 + tl.arange(0, BT)
            q = load_tile(q_ptr + row * T * D, ot, od, T, D)
            g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
            lse = tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)
            delta = tl.load(delta_ptr + row * T + ot, mask=ot < T, other=0.0)
            logits = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
            live = (oc[None, :] > ot[:, None]) & (oc[None, :] <= ot[:, None] + WINDOW) & (ot < T)[:, None]
            live = live & (oc >= empty)[None, :] & (oc < columns)[None, :]
            p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
            change = p * (tl.dot(g, tl.trans(v), out_dtype=ACC, input_precision=PRECISION) - delta[:, None])
            dk = tl.dot(tl.trans(change).to(q.dtype), q, acc=dk, out_dtype=ACC, input_precision=PRECISION)
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dk_ptr + head * columns * D + oc[:, None] * D + od[None, :], dk,
             mask=(oc < columns)[:, None] & (od < D)[None, :])  # fmt: skip
    tl.store(dv_ptr + head * columns * DV + oc[:, None] * DV + ov[None, :], dv,
             mask=(oc < columns)[:, None] & (ov < DV)[None, :])  # fmt: skip


@triton.jit
def query_gradients(
    k_ptr, v_ptr, q_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr, dq_ptr, T, WINDOW, H, G,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the window gives to the gradients of queries; grid (block of rows, batch · heads · group)."""
    t0, row = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    head, columns = row // G, T + WINDOW
    ot, od, ov = t0 + tl.arange(0, BT), tl.arange(0, DP), tl.arange(0, VP)
    empty = tl.load(empty_ptr + head // H)
    q = load_tile(q_ptr + row * T * D, ot, od, T, D)
    g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
    lse = tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)
    delta = tl.load(delta_ptr + row * T + ot, mask=ot < T, other=0.0)
    dq = tl.zeros([BT, DP], ACC)
    for c0 in range(t0 + 1, tl.minimum(t0 + BT + WINDOW, columns), BN):
        oc = c0 + tl.arange(0, BN)
        k = load_tile(k_ptr + head * columns * D, oc, od, columns, D)
        v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
        logits = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
        live = (oc[None, :] > ot[:, None]) & (oc[None, :] <= ot[:, None] + WINDOW) & (ot < T)[:, None]
        live = live & (oc >= empty)[None, :] & (oc < columns)[None, :]
        p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
        change = p * (tl.dot(g, tl.trans(v), out_dtype=ACC, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(change.to(k.dtype), k, acc=dq, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dq_ptr + row * T * D + ot[:, None] * D + od[None, :], dq,
             mask=(ot < T)[:, None] & (od < D)[None, :])  # fmt: skip


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
def change_tile(g, v, delta, rows, columns, T, PRECISION: tl.constexpr):
    """g·v - δ where a far key is behind its row, and 0 elsewhere."""
    change = tl.dot(g, tl.trans(v), out_dtype=delta.dtype, input_precision=PRECISION) - delta[:, None]
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
    DV: tl.constexpr, VP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some features' gradients for rows; grid (block of rows, slab of features, batch · heads · group)."""
    t0, row = tl.program_id(0) * BT, tl.program_id(2).to(tl.int64)
    head = row // G
    ot, om, ov = t0 + tl.arange(0, BT), tl.program_id(1) * MS + tl.arange(0, MS), tl.arange(0, VP)
    u_ptr += row * T * M
    w_ptr += head * T * M
    at = (head * SEGMENTS + t0 // SEG) * M
    g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
    lse = tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)
    delta = tl.load(delta_ptr + row * T + ot, mask=ot < T, other=0.0)
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
        v = load_tile(v_ptr + head * COLUMNS * DV, oj, ov, T, DV)
        change = change_tile(g, v, delta, ot, oj, T, PRECISION)
        if lost:
            du += exact_sums(u_ptr, w_ptr, ot, oj, om, lse, change, True, T, M)
        else:
            key = feature_tile(w_ptr, oj, om, HEADROOM - ceiling, T, M).to(v.dtype)
            weight = (change * factor[:, None]).to(v.dtype)
            du += query * tl.dot(weight, key, out_dtype=ACC, input_precision=PRECISION)
    tl.store(du_ptr + row * T * M + ot[:, None] * M + om[None, :], du,
             mask=(ot < T)[:, None] & (om < M)[None, :])  # fmt: skip


@triton.jit
def key_feature_gradients(
    u_ptr, w_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, ceiling_ptr, level_ptr, mean_ptr, delta_mean_ptr, dw_ptr,
    T, COLUMNS, G, SEGMENTS,
    DV: tl.constexpr, VP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Some features' gradients for far keys; grid (block of columns, slab of features, batch · heads)."""
    j0, head = tl.program_id(0) * BN, tl.program_id(2).to(tl.int64)
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
            lse = tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)
            delta = tl.load(delta_ptr + row * T + ot, mask=ot < T, other=0.0)
            bound = row_bound(u_ptr + row * T * M, ceiling_ptr + at, ot, T, M, MS, ACC)
            factor = row_factor(bound, lse)
            change = change_tile(g, v, delta, ot, oj, T, PRECISION)
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
    DV: tl.constexpr, VP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of far values; grid (block of columns, batch · heads)."""
    j0, head = tl.program_id(0) * BN, tl.program_id(1).to(tl.int64)
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
            lse = tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)
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


def near(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, empty: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that come through the window: of queries, of keys, of values."""
    dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (q, k, v))
    sizes = {name: problem.sizes[name] for name in ("BT", "BN")}
    shared = {**problem.keys, **problem.values, **sizes, **problem.work, **problem.launch}
    tail = problem.tokens, problem.window, problem.heads, problem.group
    grid = problem.grid(k.shape[-2], sizes["BN"]), problem.pairs
    near_gradients[grid](q, k, v, g, lse, delta, empty, dk, dv, *tail, **shared)
    grid = problem.grid(problem.tokens, sizes["BT"]), problem.pairs * problem.group
    query_gradients[grid](k, v, q, g, lse, delta, empty, dq, *tail, **shared)
    return dq, dk, dv


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
    shared = {**problem.values, "M": problem.features, "SEG": problem.segment, **problem.sizes}
    shared |= {**problem.work, **problem.launch}
    tail = problem.tokens, v.shape[-2], problem.group, problem.segments
    by_row, by_key = (problem.grid(problem.tokens, problem.sizes[name]) for name in ("BT", "BN"))
    slabs = problem.grid(problem.features, problem.sizes["MS"])
    query_feature_gradients[by_row, slabs, problem.pairs * problem.group](
        u, w, v, g, lse, delta, ceiling, level, mean, du, *tail, **shared
    )
    key_feature_gradients[by_key, slabs, problem.pairs](
        u, w, v, g, lse, delta, ceiling, later_level, later_mean, later_delta, dw, *tail, **shared
    )
    far_value_gradients[by_key, problem.pairs](
        u, w, g, lse, ceiling, later_level, later_mean, dv, problem.tokens, problem.group, problem.segments, **shared
    )
    return du, dw, dv, first


def sinks(
    q: Tensor, g: Tensor, sink_k: Tensor, sink_v: Tensor, first: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that come through the sinks, which are few: of queries, of the sinks' keys and values."""
    work = lse.dtype
    q, g, k, v = (x.to(work) for x in (q, g, sink_k[:, :, None], sink_v[:, :, None]))
    place = first[:, None] + torch.arange(q.shape[-2], device=q.device)
    gone = torch.arange(sink_k.shape[-2], device=q.device) <= place[..., None]
    p = (q @ k.mT - lse[..., None]).masked_fill(~gone[:, None, None], EMPTY.value).exp()
    change = p * (g @ v.mT - delta[..., None])
    return change @ k, (change.mT @ q).sum(2), (p.mT @ g).sum(2)


class Attention(torch.autograd.Function):
    """kernels.run, with gradients of all that is real."""

    @staticmethod
    def forward(ctx: Any, window: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, level, mean, kept = run(*inputs, window)  # type: ignore[arg-type, call-arg]
        ctx.save_for_backward(*inputs, out, lse, level, mean, *kept)
        ctx.window = window
        return out, level, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dlevel: Tensor, dmean: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, start, empty, u, w, level0, mean0, out, lse, level, mean, *kept = ctx.saved_tensors
        g = g.to(out.dtype).contiguous()
        delta = (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        problem = Problem(q, v, sink_k.shape[-2], 0 if u is None else u.shape[-1], ctx.window, True)
        dq, dk, dv = near(problem, q, k, v, g, lse, delta, empty)
        to_q, dsink_k, dsink_v = sinks(q, g, sink_k, sink_v, start, lse, delta)
        du = dw = dlevel0 = dmean0 = None
        if u is not None:
            last = (-level, dmean.contiguous(), (dmean * mean).sum(-1) - dlevel)
            du, dw, far_v, (level1, mean1, delta1) = far(problem, u, w, v, g, lse, delta, kept, last)
            dv[:, :, : far_v.shape[-2]] += far_v
            weight = (level0 + level1).exp()
            dlevel0 = weight * ((mean1 * mean0).sum(-1) - delta1)
            dmean0 = weight[..., None] * mean1
        dq, dk, dv = (dx.to(x.dtype) for dx, x in ((dq + to_q, q), (dk, k), (dv, v)))
        return None, dq, dk, dv, dsink_k.to(k.dtype), dsink_v.to(v.dtype), None, None, du, dw, dlevel0, dmean0
