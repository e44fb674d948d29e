"""Attention to sinks, a window and a far field of features, as Triton kernels; linear_attention.py says what it is.

The text is cut into segments. A row sees the sinks and its window as tokens, the keys that are far and in its own
segment as logits log Σ_m exp(u_im + w_jm), and all earlier ones as one token per feature, with the logit u_m + level_m
and the value mean_m (kernel_segments.py): everything meets in one running softmax, for all rows at once.
Column c of the keys is behind the window of row t if c ≤ t; the row's own column is t + window.
"""

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
    load_tile,
    row_bound,
    scores,
    take_in,
    where_it_lies,
)
from .kernel_text_segments import Problem, accumulate, summarize

Tensor = torch.Tensor


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr, first_ptr, empty_ptr,
    u_ptr, w_ptr, ceiling_ptr, level_ptr, mean_ptr, out_ptr, lse_ptr,
    T, WINDOW, H, G, SEGMENTS,
    D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    SP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one query head: outputs and log-sum-exps; grid (batch · heads · group, block of rows)."""
    t0, row = tl.program_id(1) * BT, tl.program_id(0).to(tl.int64)
    head, batch = row // G, row // G // H
    columns = T + WINDOW
    ot, od, ov = t0 + tl.arange(0, BT), tl.arange(0, DP), tl.arange(0, VP)
    q = load_tile(q_ptr + row * T * D, ot, od, T, D)
    first, empty = tl.load(first_ptr + batch), tl.load(empty_ptr + batch)
    top = tl.full([BT], EMPTY, ACC)
    total = tl.zeros([BT], ACC)
    acc = tl.zeros([BT, VP], ACC)
    if S > 0:
        os = tl.arange(0, SP)
        sink_v = load_tile(sink_v_ptr + head * S * DV, os, ov, S, DV)
        sinks = sink_k_ptr + head * S * D
        sink_logits = scores(q, q_ptr + row * T * D, sinks, ot, os, T, S, D, DP, DS, ACC, PRECISION)
        gone = (os < S)[None, :] & (os[None, :] <= first + ot[:, None])
        top, total, acc = take_in(top, total, acc, sink_logits, gone, sink_v, PRECISION)
    if WINDOW > 0:
        for c0 in range(t0 + 1, tl.minimum(t0 + BT + WINDOW, columns), BN):
            oc = c0 + tl.arange(0, BN)
            v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
            keys = k_ptr + head * columns * D
            logits = scores(q, q_ptr + row * T * D, keys, ot, oc, T, columns, D, DP, DS, ACC, PRECISION)
            live = (oc[None, :] > ot[:, None]) & (oc[None, :] <= ot[:, None] + WINDOW)
            live = live & (oc >= empty)[None, :] & (oc < columns)[None, :]
            top, total, acc = take_in(top, total, acc, logits, live, v, PRECISION)
    if M > 0:
        u_ptr += row * T * M
        w_ptr += head * T * M
        at = (head * SEGMENTS + t0 // SEG) * M
        for m in range(0, M, MS):
            om = m + tl.arange(0, MS)
            level = tl.load(level_ptr + at + om, mask=om < M, other=EMPTY)
            logits = load_tile(u_ptr, ot, om, T, M, EMPTY) + level[None, :]
            mean = load_tile(mean_ptr + at * DV, om, ov, M, DV)
            live = (om < M)[None, :] & (ot < T)[:, None]
            top, total, acc = take_in(top, total, acc, logits, live, mean, PRECISION)
        bound = row_bound(u_ptr, ceiling_ptr + at, ot, T, M, MS, ACC)
        for j0 in range(t0 // SEG * SEG, tl.minimum(t0 + BT, T), BN):
            oj = j0 + tl.arange(0, BN)
            v = load_tile(v_ptr + head * columns * DV, oj, ov, T, DV)
            product = far_product(
                u_ptr, w_ptr, ceiling_ptr + at, bound, ot, oj, T, M, MS, ACC, v_ptr.dtype.element_ty, PRECISION
            )  # fmt: skip
            live = (oj[None, :] <= ot[:, None]) & (ot < T)[:, None]
            logits = tl.log(tl.maximum(product, 1e-37)) + (bound - HEADROOM)[:, None]
            reached = tl.maximum(top, tl.max(tl.where(live, logits, 2 * ABSENT), 1))
            if tl.max(tl.where((ot >= j0) & (ot < T) & (reached < bound - HEADROOM + LOST), 1, 0)) > 0:
                logits = exact_logits(u_ptr, w_ptr, ot, oj, T, M, ACC)
            top, total, acc = take_in(top, total, acc, logits, live, v, PRECISION)
    total = tl.where(total > 0, total, 1.0)  # a row of padding may see nothing
    tl.store(out_ptr + row * T * DV + ot[:, None] * DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(ot < T)[:, None] & (ov < DV)[None, :])  # fmt: skip
    tl.store(lse_ptr + row * T + ot, top + tl.log(total), mask=ot < T)


@where_it_lies
def run(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, first: Tensor, empty: Tensor,
    u: Tensor | None, w: Tensor | None, level: Tensor, mean: Tensor, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Attend: outputs, log-sum-exps, the last level and mean, and what the gradients need besides."""
    features = 0 if u is None else u.shape[-1]
    problem = Problem(q, v, sink_k.shape[-2], features, window)
    kept: list[Tensor] = []
    ceiling = before_level = before_mean = None
    if u is not None and w is not None:
        own_level, own_mean, delta, ceiling = summarize(problem, w, v)
        before_level, before_mean, _, level, mean, _ = accumulate(
            problem, own_level, own_mean, delta, (level, mean, torch.empty_like(level)), v.dtype
        )
        kept = [ceiling, before_level, before_mean]
    out = torch.empty(*q.shape[:-1], problem.value_dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(q.shape[:-1], dtype=level.dtype, device=v.device)
    attend[problem.pairs * problem.group, problem.grid(problem.tokens, problem.sizes["BT"])](
        q, k, v, sink_k, sink_v, first, empty, u, w, ceiling, before_level, before_mean, out, lse,
        problem.tokens, window, problem.heads, problem.group, problem.segments,
        **problem.keys, DS=at_once(q), **problem.values, **problem.held, M=features, SEG=problem.segment,
        **problem.sizes, **problem.work, **problem.launch,
    )  # fmt: skip
    return out, lse, level, mean, kept
