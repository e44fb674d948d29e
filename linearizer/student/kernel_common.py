"""Parts of all Triton kernels: their letters, tiles of matrices, a running softmax, products of features, sizes of
blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

try:  # transformers looks for the packages that a checkpoint needs, and passes over those inside a try
    import triton
    import triton.language as tl
except ImportError:
    raise

Tensor = torch.Tensor
Launch = TypeVar("Launch", bound=Callable[..., Any])
EMPTY = tl.constexpr(-1e30)
ABSENT = tl.constexpr(-2e30)
HEADROOM = tl.constexpr(60.0)
LOST = tl.constexpr(-10.0)  # the log of a product below which terms of it may have vanished: 70 below the row's bound


@dataclass(frozen=True)
class Constants:
    """What a kernel is compiled for: the argument C of every kernel. Other letters are of single calls, and pointers.

    T tokens, H KV heads; WINDOW, SEGMENTS, COLUMNS and SINKS count what they say. ot, oj, oc, os, om, od, ov: indices
    of rows (tokens), far columns, columns, sinks, features, dimensions of keys, and of values.
    """

    D: Any = None  # dimensions of a key
    DV: Any = None  # dimensions of a value
    DP: Any = None  # D padded to a power of two
    VP: Any = None  # DV padded
    DS: Any = None  # dimensions that are multiplied at once
    G: Any = None  # query heads that share a KV head
    GP: Any = None  # G padded
    SP: Any = None  # sinks, padded
    M: Any = None  # features
    MS: Any = None  # features at a time
    MG: Any = None  # features of a program that makes gradients
    BT: Any = None  # rows (tokens) of a program
    BN: Any = None  # columns (keys) at a time
    BV: Any = None  # dimensions of a value in a program
    SEG: Any = None  # tokens of a segment
    ROWS: Any = None  # whether log-features are those of queries
    REVERSE: Any = None  # whether segments are summed from the last one on
    ACC: Any = None  # type of sums
    PRECISION: Any = None  # of products of fp32 numbers

    def __post_init__(self) -> None:
        values = tuple(getattr(self, field.name) for field in fields(self))
        object.__setattr__(self, "_hash", hash(values))  # Triton asks for it at every launch
        for field, value in zip(fields(self), values, strict=True):  # so that older compilers see constants, too
            object.__setattr__(self, field.name, tl.constexpr(value))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


# (rows, columns, features at a time, warps, stages) by the generation of the chip; the last row is safe on any.
BLOCKS = {(9, 0): (128, 64, 64, 8, 2), (8, 0): (64, 64, 64, 8, 2), None: (64, 32, 32, 8, 1)}


@triton.jit
def load_tile(pointer, rows, columns, stop, width, other=0.0):
    """Rows of a matrix with `width` columns; what lies outside is `other`."""
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=other)


@triton.jit
def load_rows(pointer, rows, stop):
    """One number of every row, and 0 outside."""
    return tl.load(pointer + rows, mask=rows < stop, other=0.0)


@triton.jit
def scores(
    q, q_ptr, k_ptr, rows, columns, T, COLUMNS, width: tl.constexpr, padded_width: tl.constexpr, C: tl.constexpr
):
    """q·k of rows, held in q, with columns; if it is too wide, DS dimensions at a time, and q is read again."""
    if C.DS == padded_width:
        k = load_tile(k_ptr, columns, tl.arange(0, padded_width), COLUMNS, width)
        return tl.dot(q, tl.trans(k), out_dtype=C.ACC, input_precision=C.PRECISION)
    out = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for d in tl.static_range(0, padded_width, C.DS):
        od = d + tl.arange(0, C.DS)
        k = load_tile(k_ptr, columns, od, COLUMNS, width)
        out = tl.dot(
            load_tile(q_ptr, rows, od, T, width), tl.trans(k), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION
        )
    return out


@triton.jit
def update_softmax(top, total, acc, logits, live, v, C: tl.constexpr):
    """Add logits and values to the running softmax of rows."""
    logits = tl.where(live, logits, EMPTY)
    new = tl.maximum(top, tl.max(logits, 1))
    kept = tl.exp(top - new)
    p = tl.where(live, tl.exp(logits - new[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc=acc * kept[:, None], out_dtype=acc.dtype, input_precision=C.PRECISION)
    return new, total * kept + tl.sum(p, 1), acc


@triton.jit
def row_bound(u_ptr, ceiling_ptr, rows, T, C: tl.constexpr):
    """max_m (u_m + ceiling_m) of every row."""
    bound = tl.full([rows.shape[0]], 2 * ABSENT, C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        u = load_tile(u_ptr, rows, om, T, C.M, EMPTY) + tl.load(ceiling_ptr + om, mask=om < C.M, other=ABSENT)[None, :]
        bound = tl.maximum(bound, tl.max(u, 1))
    return bound


@triton.jit
def exact_logits(u_ptr, w_ptr, rows, columns, T, C: tl.constexpr):
    """log Σ_m exp(u_im + w_jm), feature by feature: right at any magnitude, and slow."""
    top = tl.full([rows.shape[0], columns.shape[0]], 4 * ABSENT, C.ACC)
    for m in range(0, C.M):
        u = tl.load(u_ptr + rows * C.M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * C.M + m, mask=columns < T, other=ABSENT)
        top = tl.maximum(top, u[:, None] + w[None, :])
    total = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for m in range(0, C.M):
        u = tl.load(u_ptr + rows * C.M + m, mask=rows < T, other=0.0)
        w = tl.load(w_ptr + columns * C.M + m, mask=columns < T, other=ABSENT)
        total += tl.exp(u[:, None] + w[None, :] - top)
    return top + tl.log(total)


@triton.jit
def far_product(u_ptr, w_ptr, ceiling_ptr, bound, rows, columns, T, DOT: tl.constexpr, C: tl.constexpr):
    """Σ_m exp(u_im + w_jm) e^(HEADROOM - bound_i)."""
    product = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        ceiling = tl.load(ceiling_ptr + om, mask=om < C.M, other=ABSENT)[None, :]
        query = tl.exp(load_tile(u_ptr, rows, om, T, C.M, EMPTY) + ceiling - bound[:, None])
        key = tl.exp(tl.minimum(load_tile(w_ptr, columns, om, T, C.M, 2 * ABSENT) - ceiling, 0.0) + HEADROOM)
        product = tl.dot(
            query.to(DOT), tl.trans(key).to(DOT), acc=product, out_dtype=C.ACC, input_precision=C.PRECISION
        )
    return product


def on_device_of_first(launch: Launch) -> Launch:
    """Launch on the device of the first tensor, which need not be the current one.

    torch.compile does not look inside, so it compiles the same before and after the trial of a kernel.
    """

    @torch.compiler.disable
    @functools.wraps(launch)
    def there(first: Tensor, *rest: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):  # nothing for tensors of a CPU
            return launch(first, *rest, **named)

    return there


def dims_at_once(dim: int, dtype: torch.dtype) -> int:
    """How many dimensions of rows a kernel that holds them may multiply at once."""
    width = padded(dim)
    return width if dtype.itemsize <= 2 and width <= 128 else min(width, 64)


def precision(dtype: torch.dtype) -> dict:
    """How to add up, and how to multiply fp32: on tensor cores, nearly exactly; without them it fills the registers.

    AMD's multiply fp32 exactly, and Triton has no other way for them.
    """
    exact = dtype == torch.float64
    return {
        "ACC": tl.float64 if exact else tl.float32,
        "PRECISION": "ieee" if exact or torch.version.hip else "tf32x3",
    }


def count_parts(size: int, part: int) -> int:
    """Count the parts of a size that cover another: Triton's own function takes the host longer than all else."""
    return -(-size // part)


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def chip(x: Tensor) -> tuple[int, int] | None:
    """The generation of the NVIDIA GPU where x is; AMD counts its own by the same numbers."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda and not torch.version.hip else None


def for_chip(table: dict, x: Tensor) -> tuple:
    """The row of a table for the chip where x is; its last row is for any."""
    return table.get(chip(x), table[None])


def blocks(x: Tensor, *widths: int) -> tuple[dict, dict]:
    """Block sizes, and how to launch, for rows as wide as these on the chip where x is."""
    rows, columns, features, warps, stages = for_chip(BLOCKS, x)
    if max(map(padded, widths)) > 128:  # wide tiles do not fit otherwise
        rows, columns, features, warps, stages = min(rows, 32), 32, 32, 4, 1
    if x.element_size() > 2:  # nor do tiles in fp32
        rows, columns, features, warps, stages = min(rows, 32), 32, 16, 8, 1
    return {"BT": rows, "BN": columns, "MS": features}, {"num_warps": warps, "num_stages": stages}
