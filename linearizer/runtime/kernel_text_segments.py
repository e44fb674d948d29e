"""Segments of a text, summed up: what a feature keeps of the keys in each, and of all before it.

  sum_segments   level and mean of every segment by itself, all at once
  scan_segments  level and mean of what came before every segment: one after the other, but small
Backward the same is done of queries, from the last segment to the first.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import ABSENT, EMPTY, Constants, blocks, load_rows, load_tile, padded, precision

Tensor = torch.Tensor
SEGMENT = 128


@triton.jit
def segment_tile(x_ptr, lse_ptr, row, ot, om, T, C: tl.constexpr):
    """Some log-features of some tokens; those of queries (ROWS) minus their row's log-sum-exp."""
    x = load_tile(x_ptr + row * T * C.M, ot, om, T, C.M, 2 * ABSENT)
    if C.ROWS:
        x -= load_rows(lse_ptr + row * T, ot, T)[:, None]
    return x


@triton.jit
def sum_segments(rows, sums, sizes, C: tl.constexpr):
    """level_m = log Σ e^x_m and mean_m = Σ e^(x_m - level_m) v over a segment and a group; grid (head, slab, segment).

    Forward, x are the keys' log-features. Backward (ROWS), x are the queries' minus the rows' log-sum-exp, v is the
    gradient of the output, and the mean of delta is taken besides.
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
def scan_segments(own, first, before, last, SEGMENTS, C: tl.constexpr):
    """Merge segments one after the other; leave what came before each, and what there is at last.

    All are (level, mean, delta).
    """
    level_ptr, mean_ptr, delta_ptr = own
    first_level_ptr, first_mean_ptr, first_delta_ptr = first
    before_level_ptr, before_mean_ptr, before_delta_ptr = before
    last_level_ptr, last_mean_ptr, last_delta_ptr = last
    om = tl.program_id(1) * C.MS + tl.arange(0, C.MS)
    iv, head = tl.program_id(2), tl.program_id(0).to(tl.int64)
    ov = iv * C.BV + tl.arange(0, C.BV)
    inside, tile = om < C.M, (om < C.M)[:, None] & (iv * C.BV + tl.arange(0, C.BV) < C.DV)[None, :]
    at = head * C.M + om
    level = tl.load(first_level_ptr + at, mask=inside, other=EMPTY).to(C.ACC)
    mean = tl.load(first_mean_ptr + at[:, None] * C.DV + ov[None, :], mask=tile, other=0.0).to(C.ACC)
    delta = tl.zeros([C.MS], C.ACC)
    if C.REVERSE:
        delta = tl.load(first_delta_ptr + at, mask=inside, other=0.0).to(C.ACC)
    for step in range(0, SEGMENTS):
        segment = SEGMENTS - 1 - step if C.REVERSE else step
        at = (head * SEGMENTS + segment) * C.M + om
        tl.store(
            before_mean_ptr + at[:, None] * C.DV + ov[None, :], mean.to(before_mean_ptr.dtype.element_ty), mask=tile
        )
        if iv == 0:
            tl.store(before_level_ptr + at, level, mask=inside)
            if C.REVERSE:
                tl.store(before_delta_ptr + at, delta, mask=inside)
        more = tl.load(level_ptr + at, mask=inside, other=EMPTY)
        top = tl.maximum(level, more)
        new = top + tl.log(tl.exp(level - top) + tl.exp(more - top))
        kept, added = tl.exp(level - new), tl.exp(more - new)
        own_mean = tl.load(mean_ptr + at[:, None] * C.DV + ov[None, :], mask=tile, other=0.0)
        mean = mean * kept[:, None] + own_mean * added[:, None]
        if C.REVERSE:
            delta = delta * kept + tl.load(delta_ptr + at, mask=inside, other=0.0) * added
        level = new
    at = head * C.M + om
    tl.store(last_mean_ptr + at[:, None] * C.DV + ov[None, :], mean, mask=tile)
    if iv == 0:
        tl.store(last_level_ptr + at, level, mask=inside)
        if C.REVERSE:
            tl.store(last_delta_ptr + at, delta, mask=inside)


class Problem:
    """The sizes of one call, checked once, and the arguments that most kernels share."""

    def __init__(self, q: Tensor, v: Tensor, sinks: int, features: int, window: int, backward: bool = False) -> None:
        self.batch, self.heads, self.group, self.tokens, self.key_dim = q.shape
        self.value_dim, self.sinks, self.features, self.window = v.shape[-1], sinks, features, window
        self.segments = triton.cdiv(self.tokens, SEGMENT)
        self.sizes, self.launch = blocks(q, self.key_dim, self.value_dim)
        if backward:  # which holds more tiles at once
            self.sizes["BT"] = min(64, self.sizes["BT"])
        self.letters = {
            **{"D": self.key_dim, "DP": padded(self.key_dim), "DV": self.value_dim, "VP": padded(self.value_dim)},
            **{"S": sinks, "SP": padded(sinks), "M": features, "SEG": SEGMENT, **self.sizes, **precision(q)},
        }

    def constants(self, **more: object) -> Constants:
        """What kernels are compiled for, and what one of them needs besides."""
        return Constants(**{**self.letters, **more})

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
    sizes, wide = problem.sizes, min(64, padded(problem.value_dim))
    slabs = triton.cdiv(features, sizes["MS"]) * triton.cdiv(problem.value_dim, wide)
    sum_segments[problem.pairs, slabs, problem.segments](
        (x, v, lse, delta),
        (level, mean, delta_mean, ceiling),
        (problem.tokens, problem.group if backward else 1, v.shape[-2], problem.segments),
        problem.constants(BV=wide, BN=min(64, sizes["BN"]), ROWS=backward),
        **problem.launch,
    )
    return [level, mean, delta_mean, ceiling]


def accumulate(
    problem: Problem, level: Tensor, mean: Tensor, delta: Tensor, first: tuple[Tensor, ...], dtype: torch.dtype,
    backward: bool = False,
) -> list[Tensor]:  # fmt: skip
    """What came before each segment (level, mean, delta), and what there is at last."""
    features = level.shape[-1]
    before = [torch.empty_like(level), torch.empty_like(mean, dtype=dtype), torch.empty_like(delta)]
    last = [torch.empty_like(x, dtype=level.dtype) for x in first]
    wide = min(64, padded(problem.value_dim))
    grid = problem.pairs, triton.cdiv(features, 32), triton.cdiv(problem.value_dim, wide)
    scan_segments[grid](
        (level, mean, delta), first, tuple(before), tuple(last), problem.segments,
        problem.constants(BV=wide, MS=32, REVERSE=backward),
    )  # fmt: skip
    return before + last
