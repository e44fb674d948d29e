"""Triton kernels for attention of a text to sinks, a window and features. The reference is features_torch.py.

The text is cut into segments. A row sees the sinks and its window as tokens, the far keys in its own segment as logits
log Σ_m exp(u_im + w_jm), and all earlier keys as one token per feature, with the logit u_m + level_m and the value
mean_m. One running softmax adds all of these, for all rows at once.
Column c of the keys is behind the window of row t if c ≤ t; the row's own column is t + window.

  sum_segments          level and mean of each segment, all at once
  scan_segments         level and mean of all tokens before each segment: one after the other, but small
  text_features_kernel  the outputs of rows
The backward pass runs the first two on queries, from the last segment to the first.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from linearizer.kernels.triton.common import (
    ABSENT,
    EMPTY,
    HEADROOM,
    LOST,
    Constants,
    blocks,
    count_parts,
    dims_at_once,
    exact_logits,
    far_product,
    load_rows,
    load_tile,
    on_device_of_first,
    padded,
    precision,
    row_bound,
    scores,
    update_softmax,
)

Tensor = torch.Tensor
SEGMENT = 128


@triton.jit
def segment_tile(x_ptr, lse_ptr, row, ot, om, T, C: tl.constexpr):
    """Load a tile of log-features; those of queries (ROWS) minus their rows' log-sum-exp."""
    x = load_tile(x_ptr + row * T * C.M, ot, om, T, C.M, 2 * ABSENT)
    if C.ROWS:
        x -= load_rows(lse_ptr + row * T, ot, T)[:, None]
    return x


@triton.jit
def sum_segments(rows, sums, sizes, C: tl.constexpr):
    """Compute level_m = log Σ e^x_m and mean_m = Σ e^(x_m - level_m) v over a segment and a group; grid (head, slab,
    segment). Forward, x are the keys' log-features. Backward (ROWS), x are the queries' log-features minus the rows'
    log-sum-exp, v is the gradient of the output, and the mean of delta is also computed.
    """
    x_ptr, v_ptr, lse_ptr, delta_ptr = rows
    level_ptr, mean_ptr, delta_mean_ptr, ceiling_ptr = sums
    T, G, V_TOKENS, SEGMENTS = sizes
    segment, slabs_v = tl.program_id(2), tl.cdiv(C.DV, C.BV)
    om = (tl.program_id(1) // slabs_v) * C.MS + tl.arange(0, C.MS)
    iv, head = tl.program_id(1) % slabs_v, tl.program_id(0).to(tl.int64)
    ov = iv * C.BV + tl.arange(0, C.BV)
    ceiling = tl.full([C.MS], 2 * ABSENT, C.ACC)
    for step in range(0, G * (C.SEG // C.BN)):
        member = step // (C.SEG // C.BN)
        row = head * G + member
        ot = segment * C.SEG + step * C.BN - member * C.SEG + tl.arange(0, C.BN)
        x = segment_tile(x_ptr, lse_ptr, row, ot, om, T, C)
        ceiling = tl.maximum(ceiling, tl.max(x, 0))
    total = tl.zeros([C.MS], C.ACC)
    delta_sum = tl.zeros([C.MS], C.ACC)
    acc = tl.zeros([C.MS, C.BV], C.ACC)
    for step in range(0, G * (C.SEG // C.BN)):
        member = step // (C.SEG // C.BN)
        row = head * G + member
        ot = segment * C.SEG + step * C.BN - member * C.SEG + tl.arange(0, C.BN)
        x = segment_tile(x_ptr, lse_ptr, row, ot, om, T, C)
        weight = tl.where((ot < T)[:, None], tl.exp(x - ceiling[None, :]), 0.0)
        v = load_tile(v_ptr + row * V_TOKENS * C.DV, ot, ov, T, C.DV)
        acc = tl.dot(tl.trans(weight).to(v.dtype), v, acc=acc, out_dtype=C.ACC, input_precision=C.PRECISION)
        total += tl.sum(weight, 0)
        if C.ROWS:
            delta = load_rows(delta_ptr + row * T, ot, T)
            delta_sum += tl.sum(weight * delta[:, None], 0)
    total = tl.where(om < C.M, total, 1.0)
    out = (head * SEGMENTS + segment) * C.M + om
    tl.store(mean_ptr + out[:, None] * C.DV + ov[None, :], acc / total[:, None],
             mask=(om < C.M)[:, None] & (ov < C.DV)[None, :])  # fmt: skip
    if iv == 0:
        tl.store(level_ptr + out, ceiling + tl.log(total), mask=om < C.M)
        if C.ROWS:
            tl.store(delta_mean_ptr + out, delta_sum / total, mask=om < C.M)
        else:
            tl.store(ceiling_ptr + out, ceiling, mask=om < C.M)


@triton.jit
def scan_segments(segments, first, before, last, SEGMENTS, C: tl.constexpr):
    """Merge segments one after the other; write the state before each, and the last. All are (level, mean, delta)."""
    level_ptr, mean_ptr, delta_ptr = segments
    first_level_ptr, first_mean_ptr, first_delta_ptr = first
    before_level_ptr, before_mean_ptr, before_delta_ptr = before
    last_level_ptr, last_mean_ptr, last_delta_ptr = last
    om = tl.program_id(1) * C.MS + tl.arange(0, C.MS)
    iv, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    ov = iv * C.BV + tl.arange(0, C.BV)
    inside, tile = om < C.M, (om < C.M)[:, None] & (iv * C.BV + tl.arange(0, C.BV) < C.DV)[None, :]
    offset = head * C.M + om
    level = tl.load(first_level_ptr + offset, mask=inside, other=EMPTY).to(C.ACC)
    mean = tl.load(first_mean_ptr + offset[:, None] * C.DV + ov[None, :], mask=tile, other=0.0).to(C.ACC)
    delta = tl.zeros([C.MS], C.ACC)
    if C.REVERSE:
        delta = tl.load(first_delta_ptr + offset, mask=inside, other=0.0).to(C.ACC)
    for step in range(0, SEGMENTS):
        segment = SEGMENTS - 1 - step if C.REVERSE else step
        offset = (head * SEGMENTS + segment) * C.M + om
        tl.store(
            before_mean_ptr + offset[:, None] * C.DV + ov[None, :], mean.to(before_mean_ptr.dtype.element_ty), mask=tile
        )
        if iv == 0:
            tl.store(before_level_ptr + offset, level, mask=inside)
            if C.REVERSE:
                tl.store(before_delta_ptr + offset, delta, mask=inside)
        segment_level = tl.load(level_ptr + offset, mask=inside, other=EMPTY)
        top = tl.maximum(level, segment_level)
        merged_level = top + tl.log(tl.exp(level - top) + tl.exp(segment_level - top))
        decay, added = tl.exp(level - merged_level), tl.exp(segment_level - merged_level)
        segment_mean = tl.load(mean_ptr + offset[:, None] * C.DV + ov[None, :], mask=tile, other=0.0)
        mean = mean * decay[:, None] + segment_mean * added[:, None]
        if C.REVERSE:
            delta = delta * decay + tl.load(delta_ptr + offset, mask=inside, other=0.0) * added
        level = merged_level
    offset = head * C.M + om
    tl.store(last_mean_ptr + offset[:, None] * C.DV + ov[None, :], mean, mask=tile)
    if iv == 0:
        tl.store(last_level_ptr + offset, level, mask=inside)
        if C.REVERSE:
            tl.store(last_delta_ptr + offset, delta, mask=inside)


class Problem:
    """The sizes of one call, and the arguments that most kernels share."""

    def __init__(self, q: Tensor, v: Tensor, sinks: int, features: int, window: int, backward: bool = False) -> None:
        self.batch, self.heads, self.group, self.tokens, self.key_dim = q.shape
        self.value_dim, self.sinks, self.features, self.window = v.shape[-1], sinks, features, window
        self.segments = count_parts(self.tokens, SEGMENT)
        self.sizes, self.launch = blocks(q, self.key_dim, self.value_dim)
        if backward:  # kernels keep more tiles at once
            self.sizes["BT"] = min(64, self.sizes["BT"])
        self.shared = {
            **{"D": self.key_dim, "DP": padded(self.key_dim), "DV": self.value_dim, "VP": padded(self.value_dim)},
            **{"SP": padded(sinks), "M": features, "SEG": SEGMENT, **self.sizes, **precision(q.dtype)},
        }

    def constants(self, **extra: object) -> Constants:
        """Return the compile-time constants of all kernels with the extra ones of one kernel."""
        return Constants(**{**self.shared, **extra})

    @property
    def pairs(self) -> int:
        return self.batch * self.heads


def summarize(
    problem: Problem, x: Tensor, v: Tensor, lse: Tensor | None = None, delta: Tensor | None = None
) -> list[Tensor]:
    """Return level, mean, mean of delta, and ceiling of the segments of x (batch, heads, [group,] tokens, features)."""
    features, work = x.shape[-1], x.dtype
    shape, backward = (*x.shape[:2], problem.segments, features), lse is not None
    level, delta_mean, ceiling = (torch.empty(shape, dtype=work, device=x.device) for _ in range(3))
    mean = torch.empty(*shape, problem.value_dim, dtype=work, device=x.device)
    sizes, width = problem.sizes, min(64, padded(problem.value_dim))
    slabs = count_parts(features, sizes["MS"]) * count_parts(problem.value_dim, width)
    sum_segments[problem.pairs, slabs, problem.segments](
        (x, v, lse, delta),
        (level, mean, delta_mean, ceiling),
        (problem.tokens, problem.group if backward else 1, v.shape[-2], problem.segments),
        problem.constants(BV=width, BN=min(64, sizes["BN"]), ROWS=backward),
        **problem.launch,
    )
    return [level, mean, delta_mean, ceiling]


def accumulate(
    problem: Problem, level: Tensor, mean: Tensor, delta: Tensor, first: tuple[Tensor, ...], dtype: torch.dtype,
    backward: bool = False,
) -> list[Tensor]:  # fmt: skip
    """Return the state before each segment (level, mean, delta), and the last."""
    features = level.shape[-1]
    before = [torch.empty_like(level), torch.empty_like(mean, dtype=dtype), torch.empty_like(delta)]
    last = [torch.empty_like(x, dtype=level.dtype) for x in first]
    width = min(64, padded(problem.value_dim))
    grid = problem.pairs, count_parts(features, 32), count_parts(problem.value_dim, width)
    scan_segments[grid](
        (level, mean, delta), first, tuple(before), tuple(last), problem.segments,
        problem.constants(BV=width, MS=32, REVERSE=backward),
    )  # fmt: skip
    return before + last


@triton.jit(do_not_specialize=["WINDOW", "H", "G", "SEGMENTS", "SINKS"])
def text_features_kernel(text, features, results, T, WINDOW, H, G, SEGMENTS, SINKS, C: tl.constexpr):
    """Compute outputs and log-sum-exps of one query head; grid (batch · heads · group, block of rows).

    No number that changes from head to head is compiled in. Only texts of a multiple of 16 tokens, with aligned rows,
    have a form of their own.
    """
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr, first_ptr, empty_ptr = text
    u_ptr, w_ptr, ceiling_ptr, level_ptr, mean_ptr = features
    out_ptr, lse_ptr = results
    t0, row = tl.program_id(1) * C.BT, tl.program_id(0).to(tl.int64)
    head, batch = row // G, row // G // H
    columns = T + WINDOW
    ot, od, ov = t0 + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.arange(0, C.VP)
    q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
    first, empty = tl.load(first_ptr + batch), tl.load(empty_ptr + batch)
    top = tl.full([C.BT], EMPTY, C.ACC)
    total = tl.zeros([C.BT], C.ACC)
    acc = tl.zeros([C.BT, C.VP], C.ACC)
    if SINKS > 0:
        os = tl.arange(0, C.SP)
        sink_v = load_tile(sink_v_ptr + head * SINKS * C.DV, os, ov, SINKS, C.DV)
        sinks = sink_k_ptr + head * SINKS * C.D
        sink_logits = scores(q, q_ptr + row * T * C.D, sinks, ot, os, T, SINKS, C.D, C.DP, C)
        seen = (os < SINKS)[None, :] & (os[None, :] <= first + ot[:, None])
        top, total, acc = update_softmax(top, total, acc, sink_logits, seen, sink_v, C)
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
        offset = (head * SEGMENTS + t0 // C.SEG) * C.M
        for m in range(0, C.M, C.MS):
            om = m + tl.arange(0, C.MS)
            level = tl.load(level_ptr + offset + om, mask=om < C.M, other=EMPTY)
            logits = load_tile(u_ptr, ot, om, T, C.M, EMPTY) + level[None, :]
            mean = load_tile(mean_ptr + offset * C.DV, om, ov, C.M, C.DV)
            live = (om < C.M)[None, :] & (ot < T)[:, None]
            top, total, acc = update_softmax(top, total, acc, logits, live, mean, C)
        bound = row_bound(u_ptr, ceiling_ptr + offset, ot, T, C)
        for j0 in range(t0 // C.SEG * C.SEG, tl.minimum(t0 + C.BT, T), C.BN):
            oj = j0 + tl.arange(0, C.BN)
            v = load_tile(v_ptr + head * columns * C.DV, oj, ov, T, C.DV)
            product = far_product(u_ptr, w_ptr, ceiling_ptr + offset, bound, ot, oj, T, v_ptr.dtype.element_ty, C)
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
    """Return outputs, log-sum-exps, the last level and mean, and the tensors that gradients need."""
    features = 0 if u is None else u.shape[-1]
    problem = Problem(q, v, sink_k.shape[-2], features, window)
    saved: list[Tensor] = []
    ceiling = before_level = before_mean = None
    if u is not None and w is not None:
        segment_level, segment_mean, delta, ceiling = summarize(problem, w, v)
        before_level, before_mean, _, level, mean, _ = accumulate(
            problem, segment_level, segment_mean, delta, (level, mean, torch.empty_like(level)), v.dtype
        )
        saved = [ceiling, before_level, before_mean]
    out = torch.empty(*q.shape[:-1], problem.value_dim, dtype=v.dtype, device=v.device)
    lse = torch.empty(q.shape[:-1], dtype=level.dtype, device=v.device)
    text_features_kernel[problem.pairs * problem.group, count_parts(problem.tokens, problem.sizes["BT"])](
        (q, k, v, sink_k, sink_v, first, empty),
        (u, w, ceiling, before_level, before_mean),
        (out, lse),
        problem.tokens,
        window,
        problem.heads,
        problem.group,
        problem.segments,
        problem.sinks,
        problem.constants(DS=dims_at_once(q.shape[-1], q.dtype)),
        **problem.launch,
    )
    return out, lse, level, mean, saved
