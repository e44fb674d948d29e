"""What all Triton kernels share: compile-time constants, tiles of matrices, a running softmax, products of features,
and block sizes."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl

Tensor = torch.Tensor
Launch = TypeVar("Launch", bound=Callable[..., Any])
EMPTY = tl.constexpr(-1e30)
ABSENT = tl.constexpr(-2e30)
HEADROOM = tl.constexpr(60.0)
LOST = tl.constexpr(-10.0)  # a product whose log is below this, 70 below the row's bound, may have lost terms


@dataclass(frozen=True)
class Constants:
    """The compile-time constants of a kernel: its argument C. Other arguments in capitals are the sizes of one call.

    T counts tokens and H KV heads; WINDOW, SEGMENTS, COLUMNS and SINKS count what their names say. ot, oj, oc, os, om,
    od and ov are indices of rows (tokens), far columns, columns, sinks, features, and dimensions of keys and of values.
    """

    D: Any = None  # dimensions of a key
    DV: Any = None  # dimensions of a value
    DP: Any = None  # D padded to a power of two
    VP: Any = None  # DV padded
    DS: Any = None  # dimensions multiplied at a time
    G: Any = None  # query heads that share a KV head
    GP: Any = None  # G padded
    SP: Any = None  # sinks, padded
    M: Any = None  # features
    MS: Any = None  # features at a time
    MG: Any = None  # features of a program that computes gradients
    BT: Any = None  # rows (tokens) of a program
    BN: Any = None  # columns (keys) at a time
    BV: Any = None  # dimensions of a value in a program
    SEG: Any = None  # tokens of a segment
    ROWS: Any = None  # whether the log-features belong to queries
    REVERSE: Any = None  # whether segments are summed from last to first
    ACC: Any = None  # type of sums
    PRECISION: Any = None  # of products of fp32 numbers

    def __post_init__(self) -> None:
        values = tuple(getattr(self, field.name) for field in fields(self))
        object.__setattr__(self, "_hash", hash(values))  # Triton asks for it at every launch
        for field, value in zip(fields(self), values, strict=True):  # so that older compilers see constants
            object.__setattr__(self, field.name, tl.constexpr(value))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]


# (rows, columns, features at a time, warps, stages) by the chip's generation; the last row is safe on any chip.
BLOCKS = {(9, 0): (128, 64, 64, 8, 2), (8, 0): (64, 64, 64, 8, 2), None: (64, 32, 32, 8, 1)}


@triton.jit
def load_tile(pointer, rows, columns, stop, width, other=0.0):
    """Load rows of a matrix with `width` columns; numbers outside it are `other`."""
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=other)


@triton.jit
def load_rows(pointer, rows, stop):
    """Load one number of each row, and 0 outside."""
    return tl.load(pointer + rows, mask=rows < stop, other=0.0)


@triton.jit
def scores(
    q, q_ptr, k_ptr, rows, columns, T, COLUMNS, width: tl.constexpr, padded_width: tl.constexpr, C: tl.constexpr
):
    """Return q·k of rows, which q contains, with columns; wide rows are read again, DS dimensions at a time."""
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
    new_top = tl.maximum(top, tl.max(logits, 1))
    decay = tl.exp(top - new_top)
    p = tl.where(live, tl.exp(logits - new_top[:, None]), 0.0)
    acc = tl.dot(p.to(v.dtype), v, acc=acc * decay[:, None], out_dtype=acc.dtype, input_precision=C.PRECISION)
    return new_top, total * decay + tl.sum(p, 1), acc


@triton.jit
def capped(logits, left_out, cap, C: tl.constexpr):
    """Return scores as a model caps them; `left_out` is what the basis of keys leaves out of them."""
    logits += left_out
    if C.CAPPED:
        logits = cap * (1 - 2 / (tl.exp(logits * (2 / cap)) + 1))
    return logits


@triton.jit
def add_learned_sink(top, total, acc, sink):
    """Let the logit of a learned sink take weight in the running softmax of rows."""
    new_top = tl.maximum(top, sink)
    decay = tl.exp(top - new_top)
    return total * decay + tl.exp(sink - new_top), acc * decay[:, None]


@triton.jit
def row_bound(u_ptr, ceiling_ptr, rows, T, C: tl.constexpr):
    """Return max_m (u_m + ceiling_m) of each row."""
    bound = tl.full([rows.shape[0]], 2 * ABSENT, C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        u = load_tile(u_ptr, rows, om, T, C.M, EMPTY) + tl.load(ceiling_ptr + om, mask=om < C.M, other=ABSENT)[None, :]
        bound = tl.maximum(bound, tl.max(u, 1))
    return bound


@triton.jit
def exact_logits(u_ptr, w_ptr, rows, columns, T, C: tl.constexpr):
    """Return log Σ_m exp(u_im + w_jm), feature by feature: right at any magnitude, but slow."""
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
    """Return Σ_m exp(u_im + w_jm) e^(HEADROOM - bound_i)."""
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
    """Make a launch run on the device of its first tensor, which need not be the current device.

    torch.compile does not look inside, so it compiles the same code before and after a kernel's trial.
    """

    @torch.compiler.disable
    @functools.wraps(launch)
    def launch_on_device(first: Tensor, *arguments: Any, **options: Any) -> Any:
        with torch.cuda.device_of(first):  # which changes nothing for CPU tensors
            return launch(first, *arguments, **options)

    return launch_on_device


def dims_at_once(dim: int, dtype: torch.dtype) -> int:
    """Return how many dimensions a kernel may multiply at a time while it keeps rows in registers."""
    width = padded(dim)
    return width if dtype.itemsize <= 2 and width <= 128 else min(width, 64)


def precision(dtype: torch.dtype) -> dict:
    """Return the type of sums, and how to multiply fp32: nearly exactly on tensor cores, since other units need too
    many registers. AMD's matrix cores multiply fp32 exactly, and Triton offers no other way for them.
    """
    exact = dtype == torch.float64
    return {
        "ACC": tl.float64 if exact else tl.float32,
        "PRECISION": "ieee" if exact or torch.version.hip else "tf32x3",
    }


def count_parts(size: int, part: int) -> int:
    """Return ⌈size / part⌉; Triton's own function takes longer than the rest of a launch."""
    return -(-size // part)


def padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


def chip(x: Tensor) -> tuple[int, int] | None:
    """Return the generation of the NVIDIA GPU where x is; None for AMD, which uses the same numbers for its chips."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda and not torch.version.hip else None


def for_chip(table: dict, x: Tensor) -> tuple:
    """Return the row of a table for the chip where x is; None is the key of all other chips."""
    return table.get(chip(x), table[None])


def blocks(x: Tensor, *widths: int) -> tuple[dict, dict]:
    """Return block sizes and launch options for rows of these widths on the chip where x is."""
    rows, columns, features, warps, stages = for_chip(BLOCKS, x)
    if max(map(padded, widths)) > 128:  # wider tiles do not fit
        rows, columns, features, warps, stages = min(rows, 32), 32, 32, 4, 1
    if x.element_size() > 2:  # nor do fp32 tiles
        rows, columns, features, warps, stages = min(rows, 32), 32, 16, 8, 1
    return {"BT": rows, "BN": columns, "MS": features}, {"num_warps": warps, "num_stages": stages}
