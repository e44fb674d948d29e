"""Attention of a text to sinks, a window and features, as Triton kernels. The reference is in features.py.

The text is cut into segments. A row sees the sinks and its window as tokens, the keys that are far and in its own
segment as logits log Σ_m exp(u_im + w_jm), and all earlier ones as one token per feature, with the logit u_m + level_m
and the value mean_m (kernel_text_segments.py): everything meets in one running softmax, for all rows at once.
Column c of the keys is behind the window of row t if c ≤ t; the row's own column is t + window.
"""

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
    load_tile,
    on_device_of_first,
    row_bound,
    scores,
    update_softmax,
)
from .kernel_text_segments import Problem, accumulate, summarize

Tensor = torch.Tensor


@triton.jit
def text_features_kernel(text, features, results, sizes, C: tl.constexpr):
    """Compute outputs and log-sum-exps of one query head; grid (batch · heads · group, block of rows)."""
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr, first_ptr, empty_ptr = text
    u_ptr, w_ptr, ceiling_ptr, level_ptr, mean_ptr = features
    out_ptr, lse_ptr = results
    T, WINDOW, H, G, SEGMENTS = sizes
    t0, row = tl.program_id(1) * C.BT, tl.program_id(0).to(tl.int64)
    head, batch = row // G, row // G // H
    columns = T + WINDOW
    ot, od, ov = t0 + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.arange(0, C.VP)
    q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
    first, empty = tl.load(first_ptr + batch), tl.load(empty_ptr + batch)
    top = tl.full([C.BT], EMPTY, C.ACC)
    total = tl.zeros([C.BT], C.ACC)
    acc = tl.zeros([C.BT, C.VP], C.ACC)
    if C.S > 0:
        os = tl.arange(0, C.SP)
        sink_v = load_tile(sink_v_ptr + head * C.S * C.DV, os, ov, C.S, C.DV)
        sinks = sink_k_ptr + head * C.S * C.D
        sink_logits = scores(q, q_ptr + row * T * C.D, sinks, ot, os, T, C.S, C.D, C.DP, C)
        gone = (os < C.S)[None, :] & (os[None, :] <= first + ot[:, None])
        top, total, acc = update_softmax(top, total, acc, sink_logits, gone, sink_v, C)
    if WINDOW > 0:
        for c0 in range(t0 + 1, tl.minimum(t0 + C.BT + WINDOW, columns), C.BN):
            oc = c0 + tl.arange(0, C.BN)
            v = load_tile(v_ptr + head * columns * C.DV, oc, ov, columns, C.DV)
            keys = k_ptr + head * columns * C.D
            logits = scores(q, q_ptr + row * T * C.D, keys, ot, oc, T, columns, C.D, C.DP, C)
            live = (oc[None, :] > ot[:, None]) & (oc[None, :] <= ot[:, None] + WINDOW)
            live = live & (oc >= empty)[None, :] & (oc < columns)[None, :]
            top, total, acc = update_softmax(top, total, acc, logits, live, v, C)
    if C.M > 0:
        u_ptr += row * T * C.M
        w_ptr += head * T * C.M
        at = (head * SEGMENTS + t0 // C.SEG) * C.M
        for m in range(0, C.M, C.MS):
            om = m + tl.arange(0, C.MS)
            level = tl.load(level_ptr + at + om, mask=om < C.M, other=EMPTY)
            logits = load_tile(u_ptr, ot, om, T, C.M, EMPTY) + level[None, :]
            mean = load_tile(mean_ptr + at * C.DV, om, ov, C.M, C.DV)
            live = (om < C.M)[None, :] & (ot < T)[:, None]
            top, total, acc = update_softmax(top, total, acc, logits, live, mean, C)
        bound = row_bound(u_ptr, ceiling_ptr + at, ot, T, C)
        for j0 in range(t0 // C.SEG * C.SEG, tl.minimum(t0 + C.BT, T), C.BN):
            oj = j0 + tl.arange(0, C.BN)
            v = load_tile(v_ptr + head * columns * C.DV, oj, ov, T, C.DV)
            product = far_product(u_ptr, w_ptr, ceiling_ptr + at, bound, ot, oj, T, v_ptr.dtype.element_ty, C)
            live = (oj[None, :] <= ot[:, None]) & (ot < T)[:, None]
            logits = tl.log(tl.maximum(product, 1e-37)) + (bound - HEADROOM)[:, None]
            reached = tl.maximum(top, tl.max(tl.where(live, logits, 2 * ABSENT), 1))
            if tl.max(tl.where((ot >= j0) & (ot < T) & (reached < bound - HEADROOM + LOST), 1, 0)) > 0:
                logits = exact_logits(u_ptr, w_ptr, ot, oj, T, C)
            top, total, acc = update_softmax(top, total, acc, logits, live, v, C)
    total = tl.where(total > 0, total, 1.0)  # a row of padding may see nothing
    tl.store(out_ptr + row * T * C.DV + ot[:, None] * C.DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(ot < T)[:, None] & (ov < C.DV)[None, :])  # fmt: skip
    tl.store(lse_ptr + row * T + ot, top + tl.log(total), mask=ot < T)


@on_device_of_first
def run_text_features(
    q: Tensor, k: Tensor, v: Tensor, sink_k: Tensor, sink_v: Tensor, first: Tensor, empty: Tensor, u: Tensor | None,
    w: Tensor | None, level: Tensor, mean: Tensor, window: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]:  # fmt: skip
    """Return outputs, log-sum-exps, the last level and mean, and what the gradients need besides."""
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
    text_features_kernel[problem.pairs * problem.group, problem.grid(problem.tokens, problem.sizes["BT"])](
        (q, k, v, sink_k, sink_v, first, empty),
        (u, w, ceiling, before_level, before_mean),
        (out, lse),
        (problem.tokens, window, problem.heads, problem.group, problem.segments),
        problem.constants(DS=dims_at_once(q)),
        **problem.launch,
    )
    return out, lse, level, mean, kept
