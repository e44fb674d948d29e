"""Attention to sinks, a window and a far field of features, as Triton kernels; linear_attention.py says what it is.

The text is cut into segments. A row sees the sinks and its window as tokens, the keys that are far and in its own
segment as logits log Σ_m exp(u_im + w_jm), and all earlier ones as one token per feature, with the logit u_m + level_m
and the value mean_m: everything meets in one running softmax.
  sum_segments   level and mean of every segment by itself, all at once
  scan_segments  level and mean of what came before every segment: one after the other, but small
  attend         rows, all at once
Column c of the keys is behind the window of row t if c ≤ t; the row's own column is t + window.
"""

from __future__ import annotations

import torch

try:  # transformers looks for the packages that a checkpoint needs, and passes over those inside a try
    import triton
    import triton.language as tl
except ImportError:
    raise

Tensor = torch.Tensor
EMPTY = tl.constexpr(-1e30)
ABSENT = tl.constexpr(-2e30)
HEADROOM = tl.constexpr(60.0)
LOST = tl.constexpr(-10.0)  # the log of a product below which terms of it may have vanished: 70 below the row's bound

# (rows, columns, features at a time, warps, stages) by the generation of the chip; the last row is safe on any.
BLOCKS = {(9, 0): (128, 64, 64, 8, 2), (8, 0): (64, 64, 64, 8, 2), None: (64, 32, 32, 8, 1)}
SEGMENT = 128


@triton.jit
def load_tile(pointer, rows, columns, stop, width, other=0.0):
    """Rows of a matrix with `width` columns; what lies outside is `other`."""
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=other)


@triton.jit
def take_in(top, total, acc, logits, live, v, PRECISION: tl.constexpr):
    """Let the rows' running softmax see some more logits and values."""
    logits = tl.where(live, logits, EMPTY)
    new = tl.maximum(top, tl.max(logits, 1))
    kept = tl.exp(top - new)
    p = tl.where(live, tl.exp(logits - new[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc=acc * kept[:, None], out_dtype=acc.dtype, input_precision=PRECISION)
    return new, total * kept + tl.sum(p, 1), acc


@triton.jit
def row_bound(u_ptr, ceiling_ptr, rows, T, M: tl.constexpr, MS: tl.constexpr, ACC: tl.constexpr):
    """max_m (u_m + ceiling_m) of every row."""
    bound = tl.full([rows.shape[0]], 2 * ABSENT, ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        u = load_tile(u_ptr, rows, om, T, M, EMPTY) + tl.load(ceiling_ptr + om, mask=om < M, other=ABSENT)[None, :]
        bound = tl.maximum(bound, tl.max(u, 1))
    return bound


@triton.jit
def exact_logits(u_ptr, w_ptr, rows, columns, T, M: tl.constexpr, ACC: tl.constexpr):
    """log Σ_m exp(u_im + w_jm), feature by feature: right at any magnitude, and slow."""
    top = tl.full([rows.shape[0], columns.shape[0]], 4 * ABSENT, ACC)
    for m in range(0, M):
        u = tl.load(u_ptr + rows * M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * M + m, mask=columns < T, other=ABSENT)
        top = tl.maximum(top, u[:, None] + w[None, :])
    total = tl.zeros([rows.shape[0], columns.shape[0]], ACC)
    for m in range(0, M):
        u = tl.load(u_ptr + rows * M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * M + m, mask=columns < T, other=ABSENT)
        total += tl.exp(u[:, None] + w[None, :] - top)
    return top + tl.log(total)


@triton.jit
def far_product(
    u_ptr, w_ptr, ceiling_ptr, bound, rows, columns, T, M: tl.constexpr, MS: tl.constexpr, ACC: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Σ_m exp(u_im + w_jm) e^(HEADROOM - bound_i)."""
    product = tl.zeros([rows.shape[0], columns.shape[0]], ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        ceiling = tl.load(ceiling_ptr + om, mask=om < M, other=ABSENT)[None, :]
        query = tl.exp(load_tile(u_ptr, rows, om, T, M, EMPTY) + ceiling - bound[:, None])
        key = tl.exp(tl.minimum(load_tile(w_ptr, columns, om, T, M, 2 * ABSENT) - ceiling, 0.0) + HEADROOM)
        product = tl.dot(
            query.to(DOT), tl.trans(key).to(DOT), acc=product, out_dtype=ACC, input_precision=PRECISION
        )  # fmt: skip
    return product


@triton.jit
def sum_segments(
    x_ptr, v_ptr, lse_ptr, delta_ptr, level_ptr, mean_ptr, delta_mean_ptr, ceiling_ptr,
    T, G, V_TOKENS, SEGMENTS,
    DV: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr,
    ROWS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """level_m = log Σ e^x_m and mean_m = Σ e^(x_m - level_m) v over a segment and a group; grid (segment, slab, head).

    Forward, x are the keys' log-features. Backward (ROWS), x are the queries' minus the rows' log-sum-exp, v is the
    gradient of the output, and the mean of delta is taken besides.
    """
    segment, slabs_v = tl.program_id(0), tl.cdiv(DV, BV)
    om = (tl.program_id(1) // slabs_v) * MS + tl.arange(0, MS)
    iv, head = tl.program_id(1) % slabs_v, tl.program_id(2).to(tl.int64)
    ov = iv * BV + tl.arange(0, BV)
    ceiling = tl.full([MS], 2 * ABSENT, ACC)
    for step in range(0, G * (SEG // BN)):
        row = head * G + step // (SEG // BN)
        ot = segment * SEG + (step % (SEG // BN)) * BN + tl.arange(0, BN)
        x = load_tile(x_ptr + row * T * M, ot, om, T, M, 2 * ABSENT)
        if ROWS:
            x -= tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)[:, None]
        ceiling = tl.maximum(ceiling, tl.max(x, 0))
    total = tl.zeros([MS], ACC)
    delta_sum = tl.zeros([MS], ACC)
    acc = tl.zeros([MS, BV], ACC)
    for step in range(0, G * (SEG // BN)):
        row = head * G + step // (SEG // BN)
        ot = segment * SEG + (step % (SEG // BN)) * BN + tl.arange(0, BN)
        x = load_tile(x_ptr + row * T * M, ot, om, T, M, 2 * ABSENT)
        if ROWS:
            x -= tl.load(lse_ptr + row * T + ot, mask=ot < T, other=0.0)[:, None]
        weight = tl.where((ot < T)[:, None], tl.exp(x - ceiling[None, :]), 0.0)
        v = load_tile(v_ptr + row * V_TOKENS * DV, ot, ov, T, DV)
        acc = tl.dot(tl.trans(weight).to(v.dtype), v, acc=acc, out_dtype=ACC, input_precision=PRECISION)
        total += tl.sum(weight, 0)
        if ROWS:
            delta = tl.load(delta_ptr + row * T + ot, mask=ot < T, other=0.0)
            delta_sum += tl.sum(weight * delta[:, None], 0)
    total = tl.where(om < M, total, 1.0)
    out = (head * SEGMENTS + segment) * M + om
    tl.store(mean_ptr + out[:, None] * DV + ov[None, :], acc / total[:, None],
             mask=(om < M)[:, None] & (ov < DV)[None, :])  # fmt: skip
    if iv == 0:
        tl.store(level_ptr + out, ceiling + tl.log(total), mask=om < M)
        if ROWS:
            tl.store(delta_mean_ptr + out, delta_sum / total, mask=om < M)
        else:
            tl.store(ceiling_ptr + out, ceiling, mask=om < M)


@triton.jit
def scan_segments(
    level_ptr, mean_ptr, delta_ptr, first_level_ptr, first_mean_ptr, first_delta_ptr,
    before_level_ptr, before_mean_ptr, before_delta_ptr, last_level_ptr, last_mean_ptr, last_delta_ptr, SEGMENTS,
    DV: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, REVERSE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Merge segments one after the other; leave what came before each, and what there is at last."""
    om = tl.program_id(0) * MS + tl.arange(0, MS)
    iv, head = tl.program_id(1), tl.program_id(2).to(tl.int64)
    ov = iv * BV + tl.arange(0, BV)
    inside, tile = om < M, (om < M)[:, None] & (iv * BV + tl.arange(0, BV) < DV)[None, :]
    at = head * M + om
    level = tl.load(first_level_ptr + at, mask=inside, other=EMPTY).to(ACC)
    mean = tl.load(first_mean_ptr + at[:, None] * DV + ov[None, :], mask=tile, other=0.0).to(ACC)
    delta = tl.zeros([MS], ACC)
    if REVERSE:
        delta = tl.load(first_delta_ptr + at, mask=inside, other=0.0).to(ACC)
    for step in range(0, SEGMENTS):
        segment = SEGMENTS - 1 - step if REVERSE else step
        at = (head * SEGMENTS + segment) * M + om
        tl.store(before_mean_ptr + at[:, None] * DV + ov[None, :], mean.to(before_mean_ptr.dtype.element_ty), mask=tile)
        if iv == 0:
            tl.store(before_level_ptr + at, level, mask=inside)
            if REVERSE:
                tl.store(before_delta_ptr + at, delta, mask=inside)
        more = tl.load(level_ptr + at, mask=inside, other=EMPTY)
        top = tl.maximum(level, more)
        new = top + tl.log(tl.exp(level - top) + tl.exp(more - top))
        kept, added = tl.exp(level - new), tl.exp(more - new)
        own = tl.load(mean_ptr + at[:, None] * DV + ov[None, :], mask=tile, other=0.0)
        mean = mean * kept[:, None] + own * added[:, None]
        if REVERSE:
            delta = delta * kept + tl.load(delta_ptr + at, mask=inside, other=0.0) * added
        level = new
    at = head * M + om
    tl.store(last_mean_ptr + at[:, None] * DV + ov[None, :], mean, mask=tile)
    if iv == 0:
        tl.store(last_level_ptr + at, level, mask=inside)
        if REVERSE:
            tl.store(last_delta_ptr + at, delta, mask=inside)


@triton.jit
def attend(
    q_ptr, k_ptr, v_ptr, sink_k_ptr, sink_v_ptr, first_ptr, empty_ptr,
    u_ptr, w_ptr, ceiling_ptr, level_ptr, mean_ptr, out_ptr, lse_ptr,
    T, WINDOW, H, G, SEGMENTS,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr,
    M: tl.constexpr, MS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows of one query head: outputs and log-sum-exps; grid (block of rows, batch · heads · group)."""
    t0, row = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
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
        sink_k = load_tile(sink_k_ptr + head * S * D, os, od, S, D)
        sink_v = load_tile(sink_v_ptr + head * S * DV, os, ov, S, DV)
        sink_logits = tl.dot(q, tl.trans(sink_k), out_dtype=ACC, input_precision=PRECISION)
        gone = (os < S)[None, :] & (os[None, :] <= first + ot[:, None])
        top, total, acc = take_in(top, total, acc, sink_logits, gone, sink_v, PRECISION)
    if WINDOW > 0:
        for c0 in range(t0 + 1, tl.minimum(t0 + BT + WINDOW, columns), BN):
            oc = c0 + tl.arange(0, BN)
            k = load_tile(k_ptr + head * columns * D, oc, od, columns, D)
            v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
            logits = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
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


def precision(x: Tensor) -> dict:
    """How to add up, and how to multiply: fp32 products stay fp32, whatever Triton's default is."""
    return {"ACC": tl.float64 if x.dtype == torch.float64 else tl.float32, "PRECISION": "ieee"}


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def chip(x: Tensor) -> tuple[int, int] | None:
    """The generation of the GPU where x is."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


def blocks(x: Tensor, *widths: int) -> tuple[dict, dict]:
    """Block sizes, and how to launch, for rows as wide as these on the chip where x is."""
    rows, columns, features, warps, stages = BLOCKS.get(chip(x), BLOCKS[None])
    if x.element_size() > 2 or max(map(padded, widths)) > 128:  # fp32 tiles, or wide ones, do not fit otherwise
        rows, columns, features, warps, stages = min(rows, 32), 32, 32, 4, 1
    return {"BT": rows, "BN": columns, "MS": features}, {"num_warps": warps, "num_stages": stages}


class Problem:
    """The sizes of one call, checked once, and the arguments that most kernels share."""

    def __init__(self, q: Tensor, v: Tensor, sinks: int, features: int, window: int, backward: bool = False) -> None:
        self.batch, self.heads, self.group, self.tokens, self.key_dim = q.shape
        self.value_dim, self.sinks, self.features, self.window = v.shape[-1], sinks, features, window
        self.segment, self.segments = SEGMENT, triton.cdiv(self.tokens, SEGMENT)
        self.sizes, self.launch = blocks(q, self.key_dim, self.value_dim)
        if backward:  # which holds more tiles at once
            self.sizes["BT"] = min(64, self.sizes["BT"])
        self.work = precision(q)
        self.values = {"DV": self.value_dim, "VP": padded(self.value_dim)}
        self.keys = {"D": self.key_dim, "DP": padded(self.key_dim)}
        self.held = {"S": sinks, "SP": padded(sinks)}

    @property
    def pairs(self) -> int:
        return self.batch * self.heads

    def grid(self, tokens: int, size: int) -> int:
        return triton.cdiv(tokens, size)


def summarize(
    problem: Problem, x: Tensor, v: Tensor, lse: Tensor | None = None, delta: Tensor | None = None
) -> list[Tensor]:
    """Levels, means, means of delta, and ceilings of the segments of x (batch, heads, [group,] tokens, features)."""
    features, work = x.shape[-1], x.dtype
    shape, backward = (*x.shape[:2], problem.segments, features), lse is not None
    level, delta_mean, ceiling = (torch.empty(shape, dtype=work, device=x.device) for _ in range(3))
    mean = torch.empty(*shape, problem.value_dim, dtype=work, device=x.device)
    sizes, wide = problem.sizes, min(64, problem.values["VP"])
    slabs = triton.cdiv(features, sizes["MS"]) * triton.cdiv(problem.value_dim, wide)
    sum_segments[problem.segments, slabs, problem.pairs](
        x, v, lse, delta, level, mean, delta_mean, ceiling,
        problem.tokens, problem.group if backward else 1, v.shape[-2], problem.segments,
        DV=problem.value_dim, BV=wide, M=features, MS=sizes["MS"], BN=min(64, sizes["BN"]), SEG=problem.segment,
        ROWS=backward, **problem.work, **problem.launch,
    )  # fmt: skip
    return [level, mean, delta_mean, ceiling]


def accumulate(
    problem: Problem, level: Tensor, mean: Tensor, delta: Tensor, first: tuple[Tensor, ...], dtype: torch.dtype,
    backward: bool = False,
) -> list[Tensor]:  # fmt: skip
    """What came before each segment (level, mean, delta), and what there is at last."""
    features = level.shape[-1]
    before = [torch.empty_like(level), torch.empty_like(mean, dtype=dtype), torch.empty_like(delta)]
    last = [torch.empty_like(x, dtype=level.dtype) for x in first]
    wide = min(64, problem.values["VP"])
    grid = triton.cdiv(features, 32), triton.cdiv(problem.value_dim, wide), problem.pairs
    scan_segments[grid](
        level, mean, delta, *first, *before, *last, problem.segments,
        DV=problem.value_dim, BV=wide, M=features, MS=32, REVERSE=backward, ACC=problem.work["ACC"],
    )  # fmt: skip
    return before + last


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
    attend[problem.grid(problem.tokens, problem.sizes["BT"]), problem.pairs * problem.group](
        q, k, v, sink_k, sink_v, first, empty, u, w, ceiling, before_level, before_mean, out, lse,
        problem.tokens, window, problem.heads, problem.group, problem.segments,
        **problem.keys, **problem.values, **problem.held, M=features, SEG=problem.segment,
        **problem.sizes, **problem.work, **problem.launch,
    )  # fmt: skip
    return out, lse, level, mean, kept
