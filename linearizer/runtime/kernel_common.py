"""What all kernels are made of: tiles of matrices, a running softmax, products of features, and sizes of blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
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

# (rows, columns, features at a time, warps, stages) by the generation of the chip; the last row is safe on any.
BLOCKS = {(9, 0): (128, 64, 64, 8, 2), (8, 0): (64, 64, 64, 8, 2), None: (64, 32, 32, 8, 1)}


@triton.jit
def load_tile(pointer, rows, columns, stop, width, other=0.0):
    """Rows of a matrix with `width` columns; what lies outside is `other`."""
    inside = ((rows >= 0) & (rows < stop))[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * width + columns[None, :], mask=inside, other=other)


@triton.jit
def load_part(pointer, rows, columns, stop, stride, width):
    """The first `width` columns of rows that lie `stride` apart; what lies outside is 0."""
    inside = (rows < stop)[:, None] & (columns < width)[None, :]
    return tl.load(pointer + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def load_rows(pointer, rows, stop):
    """One number of every row, and 0 outside."""
    return tl.load(pointer + rows, mask=rows < stop, other=0.0)


@triton.jit
def power(exponent):
    """2 to whole numbers, exactly."""
    return ((exponent.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def exponents(x, AXIS: tl.constexpr):
    """The exponents of vectors: the least with which 127 times a power of two is not below the largest number."""
    bits = tl.max(tl.abs(x), AXIS).to(tl.float32).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) - 133 + tl.where((bits & 0x7FFFFF) > 0x7E0000, 1, 0)  # the latter: above 127/128 of it
    return tl.minimum(tl.maximum(exponent, -24), 121)


@triton.jit
def codes(x, inverse):
    """Whole numbers: adding and taking away a number whose last digit is 1 rounds to them."""
    large = 6755399441055744.0 if x.dtype == tl.float64 else 12582912.0
    return (x * inverse + large) - large


@triton.jit
def load_kept(pointer, rows, columns, stop, width: tl.constexpr, BITS: tl.constexpr):
    """Some columns of keys or values that are kept."""
    if BITS == 8:
        whole = load_part(pointer, rows, columns, stop, width + 1, width)
        exponent = tl.load(pointer + rows * (width + 1) + width, mask=rows < stop, other=0)
        return whole.to(tl.float32) * power(exponent)[:, None]
    else:
        return load_tile(pointer, rows, columns, stop, width)


@triton.jit
def keep_some(pointer, rows, o, x, live, width: tl.constexpr, BITS: tl.constexpr, BYTES: tl.constexpr):
    """Keep keys or values that are `live`, rounded to so many bits, as numbers or as bytes."""
    inside = live[:, None] & (o < width)[None, :]
    if BITS == 8:
        exponent = exponents(x, 1)
        x = codes(x, power(-exponent)[:, None])
        if BYTES == 8:
            tl.store(pointer + rows * (width + 1) + width, exponent.to(tl.int8), mask=live)
        else:
            x *= power(exponent)[:, None]
    stride: tl.constexpr = width + 1 if BYTES == 8 else width
    tl.store(pointer + rows[:, None] * stride + o[None, :], x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def scores(
    q, q_ptr, k_ptr, rows, columns, T, C, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """q·k of rows, held in q, with columns; if DS < DP some dimensions at a time, and q read anew: it is too wide."""
    if DS == DP:
        k = load_tile(k_ptr, columns, tl.arange(0, DP), C, D)
        return tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
    out = tl.zeros([rows.shape[0], columns.shape[0]], ACC)
    for d in tl.static_range(0, DP, DS):
        od = d + tl.arange(0, DS)
        k = load_tile(k_ptr, columns, od, C, D)
        out = tl.dot(
            load_tile(q_ptr, rows, od, T, D), tl.trans(k), acc=out, out_dtype=ACC, input_precision=PRECISION
        )  # fmt: skip
    return out


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


def where_it_lies(launch: Launch) -> Launch:
    """Let a function launch on the device of its first tensor, which need not be the current one.

    A compiler of the model sees nothing of it, and so compiles around kernels alike before and after their trial.
    """

    @torch.compiler.disable
    @functools.wraps(launch)
    def there(first: Tensor, *rest: Any, **named: Any) -> Any:
        with torch.cuda.device_of(first):  # nothing for tensors of a CPU
            return launch(first, *rest, **named)

    return there


def at_once(x: Tensor) -> int:
    """How many dimensions of rows of x a kernel that holds them may multiply at once."""
    width = padded(x.shape[-1])
    return width if x.element_size() <= 2 and width <= 128 else min(width, 64)


def precision(x: Tensor) -> dict:
    """How to add up, and how to multiply fp32: on tensor cores, nearly exactly; without them it fills the registers."""
    exact = x.dtype == torch.float64
    return {"ACC": tl.float64 if exact else tl.float32, "PRECISION": "ieee" if exact else "tf32x3"}


def padded(size: int) -> int:
    return max(16, triton.next_power_of_2(size))


def chip(x: Tensor) -> tuple[int, int] | None:
    """The generation of the GPU where x is."""
    return torch.cuda.get_device_capability(x.device) if x.is_cuda else None


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
