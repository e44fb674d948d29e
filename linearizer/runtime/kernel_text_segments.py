"""Segments of a text, summed up: what a feature keeps of the keys in each, and of all before it.

  sum_segments   level and mean of every segment by itself, all at once
  scan_segments  level and mean of what came before every segment: one after the other, but small
Backward the same is done of queries, from the last segment to the first.
"""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import ABSENT, EMPTY, blocks, load_rows, load_tile, padded, precision

Tensor = torch.Tensor
SEGMENT = 128


@triton.jit
def segment_tile(x_ptr, lse_ptr, row, ot, om, T, M: tl.constexpr, ROWS: tl.constexpr):
    """Some log-features of some tokens; those of queries (ROWS) minus their row's log-sum-exp."""
    x = load_tile(x_ptr + row * T * M, ot, om, T, M, 2 * ABSENT)
    if ROWS:
        x -= load_rows(lse_ptr + row * T, ot, T)[:, None]
    return x


@triton.jit
def sum_segments(
    x_ptr, v_ptr, lse_ptr, delta_ptr, level_ptr, mean_ptr, delta_mean_ptr, ceiling_ptr,
    T, G, V_TOKENS, SEGMENTS,
    DV: tl.constexpr, BV: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, SEG: tl.constexpr,
    ROWS: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """level_m = log Σ e^x_m and mean_m = Σ e^(x_m - level_m) v over a segment and a group; grid (head, slab, segment).

    Forward, x are the keys' log-features. Backward (ROWS), x are the queries' minus the rows' log-sum-exp, v is the
    gradient of the output, and the mean of delta is taken besides.
    """
    segment, slabs_v = tl.program_id(2), tl.cdiv(DV, BV)
    om = (tl.program_id(1) // slabs_v) * MS + tl.arange(0, MS)
    iv, head = tl.program_id(1) % slabs_v, tl.program_id(0).to(tl.int64)
    ov = iv * BV + tl.arange(0, BV)
    ceiling = tl.full([MS], 2 * ABSENT, ACC)
    for step in range(0, G * (SEG // BN)):
        row = head * G + step // (SEG // BN)
        ot = segment * SEG + (step % (SEG // BN)) * BN + tl.arange(0, BN)
        x = segment_tile(x_ptr, lse_ptr, row, ot, om, T, M, ROWS)
        ceiling = tl.maximum(ceiling, tl.max(x, 0))
    total = tl.zeros([MS], ACC)
    delta_sum = tl.zeros([MS], ACC)
    acc = tl.zeros([MS, BV], ACC)
    for step in range(0, G * (SEG // BN)):
        row = head * G + step // (SEG // BN)
        ot = segment * SEG + (step % (SEG // BN)) * BN + tl.arange(0, BN)
        x = segment_tile(x_ptr, lse_ptr, row, ot, om, T, M, ROWS)
        weight = tl.where((ot < T)[:, None], tl.exp(x - ceiling[None, :]), 0.0)
        v = load_tile(v_ptr + row * V_TOKENS * DV, ot, ov, T, DV)
        acc = tl.dot(tl.trans(weight).to(v.dtype), v, acc=acc, out_dtype=ACC, input_precision=PRECISION)
        total += tl.sum(weight, 0)
        if ROWS:
            delta = load_rows(delta_ptr + row * T, ot, T)
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
    om = tl.program_id(1) * MS + tl.arange(0, MS)
    iv, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
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
    sum_segments[problem.pairs, slabs, problem.segments](
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
    grid = problem.pairs, triton.cdiv(features, 32), triton.cdiv(problem.value_dim, wide)
    scan_segments[grid](
        level, mean, delta, *first, *before, *last, problem.segments,
        DV=problem.value_dim, BV=wide, M=features, MS=32, REVERSE=backward, ACC=problem.work["ACC"],
    )  # fmt: skip
    return before + last
