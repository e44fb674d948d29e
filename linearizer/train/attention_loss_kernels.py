"""The losses of attention_loss.py as Triton kernels: no tensor of the size tokens × tokens leaves a tile.

  stabilise   features e^(u + ceiling - bound) and e^(w - ceiling + HEADROOM), once
  statistics  of the teacher's rows log-sum-exp, entropy and largest score, of the student's log-sum-exp
  by_row      KL divergence (or squared error), and the gradient of u
  by_column   the gradient of w, a group's rows summed in one program, in order
With p = e^(S - shift) and P = query · key, so that A = P e^(bound - HEADROOM), the weight of a far pair is
  softmax  (p̂ - p) / P = factor - p / P   with shift the teacher's log-sum-exp and factor = e^(bound - HEADROOM - lse)
  l2       -2 (p - P factor) factor       with shift the largest score and factor = e^(bound - HEADROOM - shift)
which is subtracted before it is rounded, and ∂/∂u = query ∘ (weight · key), ∂/∂w = key ∘ (weightᵀ · query).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from linearizer.runtime.kernel_common import (
    EMPTY,
    HEADROOM,
    LOST,
    at_once,
    for_chip,
    load_rows,
    load_tile,
    padded,
    precision,
    scores,
    where_it_lies,
)

Tensor = torch.Tensor

# (rows, columns, features at a time, features of a gradient, warps, stages); the last row is safe on any chip.
BLOCKS = {(9, 0): (128, 64, 128, 128, 8, 1), (8, 0): (64, 32, 64, 64, 4, 1), None: (64, 32, 64, 64, 4, 1)}


@triton.jit
def stabilise(
    x_ptr, ceiling_ptr, out_ptr, bound_ptr, T, G, START,
    M: tl.constexpr, MS: tl.constexpr, BT: tl.constexpr, ROWS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """Compute the features of queries (ROWS), with their bounds, or of keys from START on, the others being 0."""
    row = tl.program_id(1).to(tl.int64)
    ot, base = tl.program_id(0) * BT + tl.arange(0, BT), row * T * M
    bound = tl.full([BT], 4 * EMPTY, ACC)
    if ROWS:
        for m in range(0, M, MS):
            om = m + tl.arange(0, MS)
            ceiling = tl.load(ceiling_ptr + row // G * M + om, mask=om < M, other=2 * EMPTY)
            x = load_tile(x_ptr + base, ot, om, T, M, 2 * EMPTY) + ceiling[None, :]
            bound = tl.maximum(bound, tl.max(x, 1))
        tl.store(bound_ptr + row * T + ot, bound - HEADROOM, mask=ot < T)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        ceiling = tl.load(ceiling_ptr + row // G * M + om, mask=om < M, other=0.0)[None, :]
        x = load_tile(x_ptr + base, ot, om, T, M, 4 * EMPTY)
        if ROWS:
            feature = tl.exp(x + ceiling - bound[:, None])
        else:
            feature = tl.where((ot >= START)[:, None], tl.exp(tl.minimum(x - ceiling, 0.0) + HEADROOM), 0.0)
        tl.store(out_ptr + base + ot[:, None] * M + om[None, :], feature.to(out_ptr.dtype.element_ty),
                 mask=(ot < T)[:, None] & (om < M)[None, :])  # fmt: skip


@triton.jit
def products(
    query_ptr, key_ptr, rows, columns, T, M: tl.constexpr, MS: tl.constexpr, ACC: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P = query · key."""
    out = tl.zeros([rows.shape[0], columns.shape[0]], ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        query, key = load_tile(query_ptr, rows, om, T, M), load_tile(key_ptr, columns, om, T, M)
        out = tl.dot(query, tl.trans(key), acc=out, out_dtype=ACC, input_precision=PRECISION)
    return out


@triton.jit
def statistics(
    q_ptr, k_ptr, query_ptr, key_ptr, sums_ptr, bound_ptr, lse_ptr, entropy_ptr, largest_ptr, student_ptr,
    T, G, WINDOW, SINKS, scale, TILES,
    D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BT: tl.constexpr,
    BN: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute them for one query head; sums (…, TILES, M) holds the sum of all keys before a tile of BN columns."""
    t0, row = tl.program_id(0) * BT, tl.program_id(1).to(tl.int64)
    head = row // G
    ot, od = t0 + tl.arange(0, BT), tl.arange(0, DP)
    q = load_tile(q_ptr + row * T * D, ot, od, T, D)
    top = tl.full([BT], EMPTY, ACC)
    near_top = tl.full([BT], EMPTY, ACC)
    total = tl.zeros([BT], ACC)
    moment = tl.zeros([BT], ACC)
    near = tl.zeros([BT], ACC)
    for j0 in range(0, tl.minimum(t0 + BT, T), BN):
        oj = j0 + tl.arange(0, BN)
        q_rows, keys = q_ptr + row * T * D, k_ptr + head * T * D
        s = scores(q, q_rows, keys, ot, oj, T, T, D, DP, DS, ACC, PRECISION) * scale
        live = oj[None, :] <= ot[:, None]
        s = tl.where(live, s, EMPTY)
        new = tl.maximum(top, tl.max(s, 1))
        kept, p = tl.exp(top - new), tl.where(live, tl.exp(s - new[:, None]), 0.0)
        total, moment, top = total * kept + tl.sum(p, 1), moment * kept + tl.sum(p * s, 1), new
        is_near = live & ((oj[None, :] < SINKS) | (ot[:, None] - oj[None, :] < WINDOW))
        s = tl.where(is_near, s, EMPTY)
        new = tl.maximum(near_top, tl.max(s, 1))
        p = tl.where(is_near, tl.exp(s - new[:, None]), 0.0)
        near, near_top = near * tl.exp(near_top - new) + tl.sum(p, 1), new
    far = tl.zeros([BT], ACC)
    whole = tl.maximum(t0 - WINDOW + 1, 0) // BN  # tiles that are far from all rows of the block
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        before = tl.load(sums_ptr + (head * TILES + whole) * M + om, mask=om < M, other=0.0)
        query = load_tile(query_ptr + row * T * M, ot, om, T, M).to(ACC)
        far += tl.sum(query * before[None, :], 1)
    for j0 in range(whole * BN, tl.minimum(t0 + BT, T) - WINDOW, BN):
        oj = j0 + tl.arange(0, BN)
        product = products(query_ptr + row * T * M, key_ptr + head * T * M, ot, oj, T, M, MS, ACC, PRECISION)
        far += tl.sum(tl.where(oj[None, :] <= ot[:, None] - WINDOW, product, 0.0), 1)
    bound = load_rows(bound_ptr + row * T, ot, T)
    far_lse = tl.where(far > 0, tl.log(tl.where(far > 0, far, 1.0)) + bound, EMPTY)
    near_lse = tl.where(near > 0, tl.log(tl.where(near > 0, near, 1.0)) + near_top, EMPTY)
    both = tl.maximum(far_lse, near_lse)
    student = both + tl.log(tl.exp(far_lse - both) + tl.exp(near_lse - both))
    lse = top + tl.log(total)
    inside = ot < T
    tl.store(lse_ptr + row * T + ot, lse, mask=inside)
    tl.store(entropy_ptr + row * T + ot, lse - moment / total, mask=inside)
    tl.store(largest_ptr + row * T + ot, top, mask=inside)
    tl.store(student_ptr + row * T + ot, student, mask=inside)


@triton.jit
def weigh(s, product, shift, factor, far, SQUARED: tl.constexpr):
    """Compute p and the weights of the far pairs of a tile."""
    p = tl.where(far, tl.exp(tl.minimum(s - shift, 0.0)), 0.0)
    if SQUARED:
        weight = -2.0 * (p - product * factor) * factor
    else:
        weight = factor - p / tl.maximum(product, tl.exp(3.0 * LOST))
    return p, tl.where(far, weight, 0.0)


@triton.jit
def by_row(
    q_ptr, k_ptr, query_ptr, key_ptr, shift_ptr, factor_ptr, bound_ptr, loss_ptr, lost_ptr, du_ptr,
    T, G, WINDOW, SINKS, scale,
    D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, MG: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SQUARED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the loss of far pairs, the teacher's mass on lost pairs, and some features' gradient of u."""
    t0, row = tl.program_id(0) * BT, tl.program_id(2).to(tl.int64)
    head = row // G
    ot, od, om = t0 + tl.arange(0, BT), tl.arange(0, DP), tl.program_id(1) * MG + tl.arange(0, MG)
    query_ptr += row * T * M
    key_ptr += head * T * M
    q = load_tile(q_ptr + row * T * D, ot, od, T, D)
    shift = load_rows(shift_ptr + row * T, ot, T)
    factor = load_rows(factor_ptr + row * T, ot, T)
    bound = load_rows(bound_ptr + row * T, ot, T)
    acc = tl.zeros([BT, MG], ACC)
    loss = tl.zeros([BT], ACC)
    lost = tl.zeros([BT], ACC)
    for j0 in range(SINKS // BN * BN, tl.minimum(t0 + BT, T) - WINDOW, BN):
        oj = j0 + tl.arange(0, BN)
        q_rows, keys = q_ptr + row * T * D, k_ptr + head * T * D
        s = scores(q, q_rows, keys, ot, oj, T, T, D, DP, DS, ACC, PRECISION) * scale
        product = products(query_ptr, key_ptr, ot, oj, T, M, MS, ACC, PRECISION)
        far = (oj[None, :] <= ot[:, None] - WINDOW) & (oj >= SINKS)[None, :] & (ot < T)[:, None]
        p, weight = weigh(s, product, shift[:, None], factor[:, None], far, SQUARED)
        if SQUARED:
            error = tl.where(far, p - product * factor[:, None], 0.0)
            loss += tl.sum(error * error, 1)
        else:
            log_a = tl.log(tl.maximum(product, tl.exp(3.0 * LOST))) + bound[:, None]
            loss += tl.sum(p * (s - log_a), 1)
            lost += tl.sum(tl.where(product < tl.exp(1.0 * LOST), p, 0.0), 1)
        key = load_tile(key_ptr, oj, om, T, M)
        acc = tl.dot(weight.to(key.dtype), key, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    query = load_tile(query_ptr, ot, om, T, M)
    tl.store(du_ptr + row * T * M + ot[:, None] * M + om[None, :], acc * query.to(ACC),
             mask=(ot < T)[:, None] & (om < M)[None, :])  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(loss_ptr + row * T + ot, loss, mask=ot < T)
        tl.store(lost_ptr + row * T + ot, lost, mask=ot < T)


@triton.jit
def by_column(
    q_ptr, k_ptr, query_ptr, key_ptr, shift_ptr, factor_ptr, dw_ptr, T, G, WINDOW, SINKS, scale,
    D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, MG: tl.constexpr,
    BT: tl.constexpr, BN: tl.constexpr, SQUARED: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute some features' gradient of w; here BT are columns and BN rows, so that sums are as large as by row."""
    j0, head = tl.program_id(0) * BT, tl.program_id(2).to(tl.int64)
    oj, od, om = j0 + tl.arange(0, BT), tl.arange(0, DP), tl.program_id(1) * MG + tl.arange(0, MG)
    k = load_tile(k_ptr + head * T * D, oj, od, T, D)
    acc = tl.zeros([BT, MG], ACC)
    for member in range(0, G):
        row = head * G + member
        for t0 in range((j0 + WINDOW) // BN * BN, T, BN):
            ot = t0 + tl.arange(0, BN)
            shift = load_rows(shift_ptr + row * T, ot, T)
            factor = load_rows(factor_ptr + row * T, ot, T)
            rows, keys = q_ptr + row * T * D, k_ptr + head * T * D
            s = scores(k, keys, rows, oj, ot, T, T, D, DP, DS, ACC, PRECISION) * scale
            product = products(key_ptr + head * T * M, query_ptr + row * T * M, oj, ot, T, M, MS, ACC, PRECISION)
            far = (oj[:, None] <= ot[None, :] - WINDOW) & (oj >= SINKS)[:, None] & (ot < T)[None, :]
            _, weight = weigh(s, product, shift[None, :], factor[None, :], far, SQUARED)
            query = load_tile(query_ptr + row * T * M, ot, om, T, M)
            acc = tl.dot(weight.to(query.dtype), query, acc=acc, out_dtype=ACC, input_precision=PRECISION)
    key = load_tile(key_ptr + head * T * M, oj, om, T, M)
    tl.store(dw_ptr + head * T * M + oj[:, None] * M + om[None, :], acc * key.to(ACC),
             mask=(oj < T)[:, None] & (om < M)[None, :])  # fmt: skip


def block_sizes(x: Tensor, features: int, width: int) -> tuple[dict, dict]:
    """Choose block sizes, warps and stages for the chip of x."""
    rows, columns, slab, gradient, warps, stages = for_chip(BLOCKS, x)
    if x.element_size() > 2 or width > 128:  # fp32 tiles, or wide ones, do not fit otherwise
        rows, columns, slab, gradient, warps = 32, 32, 32, 32, 8 if x.element_size() > 2 else 4
    slab, gradient = min(slab, padded(features)), min(gradient, padded(features))
    return {"BT": rows, "BN": columns, "MS": slab, "MG": gradient}, {"num_warps": warps, "num_stages": stages}


@where_it_lies
def losses(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool, scale: float = 1.0,
    top: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute loss, entropy and lost mass of rows (batch, heads, group, tokens), and gradients of the summed loss."""
    batch, heads, group, tokens, features = u.shape
    u, w, q, k = (x.contiguous() for x in (u, w, q, k))
    sizes, launch = block_sizes(q, features, padded(q.shape[-1]))
    work, pairs, kept = precision(q), batch * heads, u.dtype
    far = w[:, :, sinks : max(sinks, tokens - window)]
    ceiling = far.amax(2).contiguous() if far.shape[2] else w.new_zeros(batch, heads, features)
    query, key = torch.empty_like(u, dtype=q.dtype), torch.empty_like(w, dtype=q.dtype)
    bound, lse, entropy, largest, student, loss, lost = (
        torch.empty(u.shape[:-1], dtype=kept, device=u.device) for _ in range(7)
    )
    shape = {"M": features, "MS": sizes["MS"], "ACC": work["ACC"], **launch}
    blocks = triton.cdiv(tokens, sizes["BT"])
    stabilise[blocks, pairs * group](u, ceiling, query, bound, tokens, group, 0, BT=sizes["BT"], ROWS=True, **shape)
    stabilise[blocks, pairs](w, ceiling, key, bound, tokens, 1, sinks, BT=sizes["BT"], ROWS=False, **shape)
    sums = sums_before(key, sizes["BN"], kept)
    dims = {"D": q.shape[-1], "DP": padded(q.shape[-1]), "DS": at_once(q), "M": features, **sizes, **work, **launch}
    plain = {name: value for name, value in dims.items() if name != "MG"}
    statistics[blocks, pairs * group](
        q, k, query, key, sums, bound, lse, entropy, largest, student,
        tokens, group, window, sinks, scale, sums.shape[2], **plain,
    )  # fmt: skip
    top = (largest.amax((0, 2, 3)) if top is None else top.to(kept))[:, None, None]
    shift = top.expand_as(lse).contiguous() if squared else lse
    factor = (bound - (shift if squared else student)).clamp_max_(80.0).exp_()
    du, dw = torch.empty_like(u), torch.empty_like(w)
    slabs = triton.cdiv(features, sizes["MG"])
    common = {**dims, "SQUARED": squared}
    by_row[blocks, slabs, pairs * group](
        q, k, query, key, shift, factor, bound, loss, lost, du, tokens, group, window, sinks, scale, **common
    )
    by_column[blocks, slabs, pairs](q, k, query, key, shift, factor, dw, tokens, group, window, sinks, scale, **common)
    if squared:
        return loss, torch.zeros_like(loss), torch.zeros_like(loss), du, dw
    lost = lost + ((student < bound + LOST.value) & (bound > EMPTY.value)).to(kept)
    return entropy + student - lse + loss, entropy, lost, du, dw


def sums_before(key: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Sum all keys before each tile of `size` columns: (batch, heads, tiles, features)."""
    tokens = key.shape[2]
    key = torch.nn.functional.pad(key, (0, 0, 0, -tokens % size))
    sums = key.unflatten(2, (-1, size)).sum(3, dtype=dtype)
    return (sums.cumsum(2) - sums).contiguous()
