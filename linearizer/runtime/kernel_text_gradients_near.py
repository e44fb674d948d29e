"""Gradients that come to queries, keys and values through the window; kernel_gradients.py says how."""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, load_rows, load_tile
from .kernel_text_segments import Problem

Tensor = torch.Tensor


@triton.jit
def window_tile(
    q, k, v, g, lse, delta, rows, columns, empty, T, WINDOW, ACC: tl.constexpr, PRECISION: tl.constexpr
):  # fmt: skip
    """Probabilities p, and p (g·v - δ): 0 where a column is not in a row's window."""
    logits = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
    live = (columns[None, :] > rows[:, None]) & (columns[None, :] <= rows[:, None] + WINDOW) & (rows < T)[:, None]
    live = live & (columns >= empty)[None, :] & (columns < T + WINDOW)[None, :]
    p = tl.exp(tl.where(live, logits - lse[:, None], EMPTY))
    return p, p * (tl.dot(g, tl.trans(v), out_dtype=ACC, input_precision=PRECISION) - delta[:, None])


@triton.jit
def near_gradients(
    q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr, dk_ptr, dv_ptr, T, WINDOW, H, G,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of the window's keys and values; grid (batch · heads, block of columns)."""
    head, j0, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BN, T + WINDOW
    oc, od, ov = j0 + tl.arange(0, BN), tl.arange(0, DP), tl.arange(0, VP)
    empty = tl.load(empty_ptr + head // H)
    k = load_tile(k_ptr + head * columns * D, oc, od, columns, D)
    v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
    dk = tl.zeros([BN, DP], ACC)
    dv = tl.zeros([BN, VP], ACC)
    start = tl.maximum(j0 - WINDOW, 0)
    for member in range(0, G):
        row = head * G + member
        for t0 in range(start, tl.minimum(j0 + BN, T), BT):
            ot = t0 + tl.arange(0, BT)
            q = load_tile(q_ptr + row * T * D, ot, od, T, D)
            g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
            lse = load_rows(lse_ptr + row * T, ot, T)
            delta = load_rows(delta_ptr + row * T, ot, T)
            p, change = window_tile(q, k, v, g, lse, delta, ot, oc, empty, T, WINDOW, ACC, PRECISION)
            dk = tl.dot(tl.trans(change).to(q.dtype), q, acc=dk, out_dtype=ACC, input_precision=PRECISION)
            dv = tl.dot(tl.trans(p).to(g.dtype), g, acc=dv, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dk_ptr + head * columns * D + oc[:, None] * D + od[None, :], dk,
             mask=(oc < columns)[:, None] & (od < D)[None, :])  # fmt: skip
    tl.store(dv_ptr + head * columns * DV + oc[:, None] * DV + ov[None, :], dv,
             mask=(oc < columns)[:, None] & (ov < DV)[None, :])  # fmt: skip


@triton.jit
def query_gradients(
    k_ptr, v_ptr, q_ptr, g_ptr, lse_ptr, delta_ptr, empty_ptr, dq_ptr, T, WINDOW, H, G,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What the window gives to the gradients of queries; grid (batch · heads · group, block of rows)."""
    t0, row = tl.program_id(1) * BT, tl.program_id(0).to(tl.int64)
    head, columns = row // G, T + WINDOW
    ot, od, ov = t0 + tl.arange(0, BT), tl.arange(0, DP), tl.arange(0, VP)
    empty = tl.load(empty_ptr + head // H)
    q = load_tile(q_ptr + row * T * D, ot, od, T, D)
    g = load_tile(g_ptr + row * T * DV, ot, ov, T, DV)
    lse = load_rows(lse_ptr + row * T, ot, T)
    delta = load_rows(delta_ptr + row * T, ot, T)
    dq = tl.zeros([BT, DP], ACC)
    for c0 in range(t0 + 1, tl.minimum(t0 + BT + WINDOW, columns), BN):
        oc = c0 + tl.arange(0, BN)
        k = load_tile(k_ptr + head * columns * D, oc, od, columns, D)
        v = load_tile(v_ptr + head * columns * DV, oc, ov, columns, DV)
        _, change = window_tile(q, k, v, g, lse, delta, ot, oc, empty, T, WINDOW, ACC, PRECISION)
        dq = tl.dot(change.to(k.dtype), k, acc=dq, out_dtype=ACC, input_precision=PRECISION)
    tl.store(dq_ptr + row * T * D + ot[:, None] * D + od[None, :], dq,
             mask=(ot < T)[:, None] & (od < D)[None, :])  # fmt: skip


def near(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, g: Tensor, lse: Tensor, delta: Tensor, empty: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that come through the window: of queries, of keys, of values."""
    dq, dk, dv = (torch.empty_like(x, dtype=lse.dtype) for x in (q, k, v))
    sizes = {name: problem.sizes[name] for name in ("BT", "BN")}
    shared = {**problem.keys, **problem.values, **sizes, **problem.work, **problem.launch}
    tail = problem.tokens, problem.window, problem.heads, problem.group
    grid = problem.pairs, problem.grid(k.shape[-2], sizes["BN"])
    near_gradients[grid](q, k, v, g, lse, delta, empty, dk, dv, *tail, **shared)
    grid = problem.pairs * problem.group, problem.grid(problem.tokens, sizes["BT"])
    query_gradients[grid](k, v, q, g, lse, delta, empty, dq, *tail, **shared)
    return dq, dk, dv
