"""Gradients of the attention kernels. With p = e^(logit - lse) and δ_i = g_i·y_i, where g is the gradient of the
output y, every logit's gradient is p (g_i·v_j - δ_i).

Backward is the same attention with the roles exchanged: to a key, all rows of later segments are one token per
feature, whose level is log Σ_i e^(u_im - lse_i) and whose value is the mean of g (and of δ).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, load_rows, load_tile
from .kernel_text_features import run_text_features
from .kernel_text_gradients_far import compute_far_gradients
from .kernel_text_segments import Problem

Tensor = torch.Tensor


@triton.jit
def window_tile(of_rows, of_columns, rows, columns, empty, T, WINDOW, C: tl.constexpr):
    """Probabilities p, and p (g·v - δ): 0 where a column is not in a row's window."""
    q, g, lse, delta = of_rows
    k, v = of_columns
    logits = tl.dot(q, tl.trans(k), out_dtype=C.ACC, input_precision=C.PRECISION)
    live = (columns[None, :] > rows[:, None]) & (columns[None, :] <= rows[:, None] + WINDOW) & (rows < T)[:, None]
    live = live & (columns >= empty)[None, :] & (columns < T + WINDOW)[None, :]
    p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
    return p, p * (tl.dot(g, tl.trans(v), out_dtype=C.ACC, input_precision=C.PRECISION) - delta[:, None])


@triton.jit
def window_key_gradients(text, results, sizes, C: tl.constexpr):
    """Gradients of the window's keys and values; grid (batch · heads, block of columns)."""
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
    """What the window gives to the gradients of queries; grid (batch · heads · group, block of rows)."""
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
    """Gradients that come through the window: of queries, of keys, of values."""
    dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (q, k, v))
    text, shared = (q, k, v, g, lse, delta, empty), problem.constants()
    sizes = problem.tokens, problem.window, problem.heads, problem.group
    grid = problem.pairs, problem.grid(k.shape[-2], problem.sizes["BN"])
    window_key_gradients[grid](text, (dk, dv), sizes, shared, **problem.launch)
    grid = problem.pairs * problem.group, problem.grid(problem.tokens, problem.sizes["BT"])
    window_query_gradients[grid](text, dq, sizes, shared, **problem.launch)
    return dq, dk, dv


def compute_sink_gradients(
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


class FeatureAttention(torch.autograd.Function):
    """run_text_features with gradients of queries, keys, values, log-features and the state."""

    @staticmethod
    def forward(ctx: Any, window: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, level, mean, kept = run_text_features(*inputs, window)  # type: ignore[arg-type, call-arg]
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
        dq, dk, dv = compute_window_gradients(problem, q, k, v, g, lse, delta, empty)
        to_q, dsink_k, dsink_v = compute_sink_gradients(q, g, sink_k, sink_v, start, lse, delta)
        du = dw = dlevel0 = dmean0 = None
        if u is not None:
            last = (-level, dmean.contiguous(), (dmean * mean).sum(-1) - dlevel)
            du, dw, far_v, (level1, mean1, delta1) = compute_far_gradients(problem, u, w, v, g, lse, delta, kept, last)
            dv[:, :, : far_v.shape[-2]] += far_v
            weight = (level0 + level1).exp()
            dlevel0 = weight * ((mean1 * mean0).sum(-1) - delta1)
            dmean0 = weight[..., None] * mean1
        dq, dk, dv = (dx.to(x.dtype) for dx, x in ((dq + to_q, q), (dk, k), (dv, v)))
        return None, dq, dk, dv, dsink_k.to(k.dtype), dsink_v.to(v.dtype), None, None, du, dw, dlevel0, dmean0
