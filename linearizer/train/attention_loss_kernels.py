"""The losses of attention_loss.py as Triton kernels: no tensor of the size tokens × tokens leaves a tile.

  stabilise   features e^(u + ceiling - bound) and e^(w - ceiling + HEADROOM), once
  statistics  of the teacher's rows log-sum-exp and entropy, of the student's log-sum-exp
  by_row      KL divergence, and the gradient of u
  by_column   the gradient of w, a group's rows summed in one program, in order
With p = e^(S - shift), shift the teacher's log-sum-exp, and P = query · key, so that A = P e^(bound - HEADROOM), the
weight of a far pair is (p̂ - p) / P = factor - p / P with factor = e^(bound - HEADROOM - the student's log-sum-exp),
which is subtracted before it is rounded, and ∂/∂u = query ∘ (weight · key), ∂/∂w = key ∘ (weightᵀ · query).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from linearizer.kernels.triton.common import (
    EMPTY,
    HEADROOM,
    LOST,
    Constants,
    dims_at_once,
    for_chip,
    load_rows,
    load_tile,
    on_device_of_first,
    padded,
    precision,
    scores,
)

Tensor = torch.Tensor

# (rows, columns, features at a time, features of a gradient, warps, stages); the last row is safe on any chip.
BLOCKS = {(9, 0): (128, 64, 128, 128, 8, 1), (8, 0): (64, 32, 64, 64, 4, 1), None: (64, 32, 64, 64, 4, 1)}


@triton.jit
def stabilise(x_ptr, ceiling_ptr, out_ptr, bound_ptr, T, G, START, C: tl.constexpr):
    """Compute the features of queries (ROWS), with their bounds, or of keys from START on, the others being 0."""
    row = tl.program_id(1).to(tl.int64)
    ot, base = tl.program_id(0) * C.BT + tl.arange(0, C.BT), row * T * C.M
    bound = tl.full([C.BT], 4 * EMPTY, C.ACC)
    if C.ROWS:
        for m in range(0, C.M, C.MS):
            om = m + tl.arange(0, C.MS)
            ceiling = tl.load(ceiling_ptr + row // G * C.M + om, mask=om < C.M, other=2 * EMPTY)
            x = load_tile(x_ptr + base, ot, om, T, C.M, 2 * EMPTY) + ceiling[None, :]
            bound = tl.maximum(bound, tl.max(x, 1))
        tl.store(bound_ptr + row * T + ot, bound - HEADROOM, mask=ot < T)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        ceiling = tl.load(ceiling_ptr + row // G * C.M + om, mask=om < C.M, other=0.0)[None, :]
        x = load_tile(x_ptr + base, ot, om, T, C.M, 4 * EMPTY)
        if C.ROWS:
            feature = tl.exp(x + ceiling - bound[:, None])
        else:
            feature = tl.where((ot >= START)[:, None], tl.exp(tl.minimum(x - ceiling, 0.0) + HEADROOM), 0.0)
        tl.store(out_ptr + base + ot[:, None] * C.M + om[None, :], feature.to(out_ptr.dtype.element_ty),
                 mask=(ot < T)[:, None] & (om < C.M)[None, :])  # fmt: skip


@triton.jit
def products(query_ptr, key_ptr, rows, columns, T, C: tl.constexpr):
    """Compute P = query · key."""
    out = tl.zeros([rows.shape[0], columns.shape[0]], C.ACC)
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        query, key = load_tile(query_ptr, rows, om, T, C.M), load_tile(key_ptr, columns, om, T, C.M)
        out = tl.dot(query, tl.trans(key), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def statistics(text, features, results, sizes, scale, C: tl.constexpr):
    """Compute them for one query head; sums (…, TILES, M) holds the sum of all keys before a tile of BN columns."""
    q_ptr, k_ptr = text
    query_ptr, key_ptr, sums_ptr, bound_ptr = features
    lse_ptr, entropy_ptr, student_ptr = results
    T, G, WINDOW, SINKS, TILES = sizes
    t0, row = tl.program_id(0) * C.BT, tl.program_id(1).to(tl.int64)
    head = row // G
    ot, od = t0 + tl.arange(0, C.BT), tl.arange(0, C.DP)
    q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
    top = tl.full([C.BT], EMPTY, C.ACC)
    near_top = tl.full([C.BT], EMPTY, C.ACC)
    total = tl.zeros([C.BT], C.ACC)
    moment = tl.zeros([C.BT], C.ACC)
    near = tl.zeros([C.BT], C.ACC)
    for j0 in range(0, tl.minimum(t0 + C.BT, T), C.BN):
        oj = j0 + tl.arange(0, C.BN)
        q_rows, keys = q_ptr + row * T * C.D, k_ptr + head * T * C.D
        s = scores(q, q_rows, keys, ot, oj, T, T, C.D, C.DP, C) * scale
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
    far = tl.zeros([C.BT], C.ACC)
    whole = tl.maximum(t0 - WINDOW + 1, 0) // C.BN  # tiles that are far from all rows of the block
    for m in range(0, C.M, C.MS):
        om = m + tl.arange(0, C.MS)
        before = tl.load(sums_ptr + (head * TILES + whole) * C.M + om, mask=om < C.M, other=0.0)
        query = load_tile(query_ptr + row * T * C.M, ot, om, T, C.M).to(C.ACC)
        far += tl.sum(query * before[None, :], 1)
    for j0 in range(whole * C.BN, tl.minimum(t0 + C.BT, T) - WINDOW, C.BN):
        oj = j0 + tl.arange(0, C.BN)
        product = products(query_ptr + row * T * C.M, key_ptr + head * T * C.M, ot, oj, T, C)
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
    tl.store(student_ptr + row * T + ot, student, mask=inside)


@triton.jit
def weigh(s, product, shift, factor, far, C: tl.constexpr):
    """Compute p and the weights of the far pairs of a tile."""
    p = tl.where(far, tl.exp(tl.minimum(s - shift, 0.0)), 0.0)
    weight = factor - p / tl.maximum(product, tl.exp(3.0 * LOST))
    return p, tl.where(far, weight, 0.0)


@triton.jit
def by_row(text, features, row_numbers, results, sizes, scale, C: tl.constexpr):
    """Compute the loss of far pairs, the teacher's mass on lost pairs, and some features' gradient of u."""
    q_ptr, k_ptr = text
    query_ptr, key_ptr = features
    shift_ptr, factor_ptr, bound_ptr = row_numbers
    loss_ptr, lost_ptr, du_ptr = results
    T, G, WINDOW, SINKS = sizes
    t0, row = tl.program_id(0) * C.BT, tl.program_id(2).to(tl.int64)
    head = row // G
    ot, od, om = t0 + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.program_id(1) * C.MG + tl.arange(0, C.MG)
    query_ptr += row * T * C.M
    key_ptr += head * T * C.M
    q = load_tile(q_ptr + row * T * C.D, ot, od, T, C.D)
    shift = load_rows(shift_ptr + row * T, ot, T)
    factor = load_rows(factor_ptr + row * T, ot, T)
    bound = load_rows(bound_ptr + row * T, ot, T)
    acc = tl.zeros([C.BT, C.MG], C.ACC)
    loss = tl.zeros([C.BT], C.ACC)
    lost = tl.zeros([C.BT], C.ACC)
    for j0 in range(SINKS // C.BN * C.BN, tl.minimum(t0 + C.BT, T) - WINDOW, C.BN):
        oj = j0 + tl.arange(0, C.BN)
        q_rows, keys = q_ptr + row * T * C.D, k_ptr + head * T * C.D
        s = scores(q, q_rows, keys, ot, oj, T, T, C.D, C.DP, C) * scale
        product = products(query_ptr, key_ptr, ot, oj, T, C)
        far = (oj[None, :] <= ot[:, None] - WINDOW) & (oj >= SINKS)[None, :] & (ot < T)[:, None]
        p, weight = weigh(s, product, shift[:, None], factor[:, None], far, C)
        log_a = tl.log(tl.maximum(product, tl.exp(3.0 * LOST))) + bound[:, None]
        loss += tl.sum(p * (s - log_a), 1)
        lost += tl.sum(tl.where(product < tl.exp(1.0 * LOST), p, 0.0), 1)
        key = load_tile(key_ptr, oj, om, T, C.M)
        acc = tl.dot(weight.to(key.dtype), key, acc=acc, out_dtype=C.ACC, input_precision=C.PRECISION)
    query = load_tile(query_ptr, ot, om, T, C.M)
    tl.store(du_ptr + row * T * C.M + ot[:, None] * C.M + om[None, :], acc * query.to(C.ACC),
             mask=(ot < T)[:, None] & (om < C.M)[None, :])  # fmt: skip
    if tl.program_id(1) == 0:
        tl.store(loss_ptr + row * T + ot, loss, mask=ot < T)
        tl.store(lost_ptr + row * T + ot, lost, mask=ot < T)


@triton.jit
def by_column(text, features, row_numbers, dw_ptr, sizes, scale, C: tl.constexpr):
    """Compute some features' gradient of w; here BT are columns and BN rows, so that sums are as large as by row."""
    q_ptr, k_ptr = text
    query_ptr, key_ptr = features
    shift_ptr, factor_ptr = row_numbers
    T, G, WINDOW, SINKS = sizes
    j0, head = tl.program_id(0) * C.BT, tl.program_id(2).to(tl.int64)
    oj, od, om = j0 + tl.arange(0, C.BT), tl.arange(0, C.DP), tl.program_id(1) * C.MG + tl.arange(0, C.MG)
    k = load_tile(k_ptr + head * T * C.D, oj, od, T, C.D)
    acc = tl.zeros([C.BT, C.MG], C.ACC)
    for member in range(0, G):
        row = head * G + member
        for t0 in range((j0 + WINDOW) // C.BN * C.BN, T, C.BN):
            ot = t0 + tl.arange(0, C.BN)
            shift = load_rows(shift_ptr + row * T, ot, T)
            factor = load_rows(factor_ptr + row * T, ot, T)
            rows, keys = q_ptr + row * T * C.D, k_ptr + head * T * C.D
            s = scores(k, keys, rows, oj, ot, T, T, C.D, C.DP, C) * scale
            product = products(key_ptr + head * T * C.M, query_ptr + row * T * C.M, oj, ot, T, C)
            far = (oj[:, None] <= ot[None, :] - WINDOW) & (oj >= SINKS)[:, None] & (ot < T)[None, :]
            _, weight = weigh(s, product, shift[None, :], factor[None, :], far, C)
            query = load_tile(query_ptr + row * T * C.M, ot, om, T, C.M)
            acc = tl.dot(weight.to(query.dtype), query, acc=acc, out_dtype=C.ACC, input_precision=C.PRECISION)
    key = load_tile(key_ptr + head * T * C.M, oj, om, T, C.M)
    tl.store(dw_ptr + head * T * C.M + oj[:, None] * C.M + om[None, :], acc * key.to(C.ACC),
             mask=(oj < T)[:, None] & (om < C.M)[None, :])  # fmt: skip


def block_sizes(x: Tensor, features: int, width: int) -> tuple[dict, dict]:
    """Choose block sizes, warps and stages for the chip of x."""
    rows, columns, slab, gradient, warps, stages = for_chip(BLOCKS, x)
    if x.element_size() > 2 or width > 128:  # fp32 tiles, or wide ones, do not fit otherwise
        rows, columns, slab, gradient, warps = 32, 32, 32, 32, 8 if x.element_size() > 2 else 4
    slab, gradient = min(slab, padded(features)), min(gradient, padded(features))
    return {"BT": rows, "BN": columns, "MS": slab, "MG": gradient}, {"num_warps": warps, "num_stages": stages}


@on_device_of_first
def losses(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, scale: float = 1.0
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute loss, entropy and lost mass of rows (batch, heads, group, tokens), and gradients of the summed loss."""
    batch, heads, group, tokens, features = u.shape
    u, w, q, k = (x.contiguous() for x in (u, w, q, k))
    sizes, launch = block_sizes(q, features, padded(q.shape[-1]))
    pairs, dtype = batch * heads, u.dtype
    far = w[:, :, sinks : max(sinks, tokens - window)]
    ceiling = far.amax(2).contiguous() if far.shape[2] else w.new_zeros(batch, heads, features)
    query, key = torch.empty_like(u, dtype=q.dtype), torch.empty_like(w, dtype=q.dtype)
    bound, lse, entropy, student, loss, lost = (
        torch.empty(u.shape[:-1], dtype=dtype, device=u.device) for _ in range(6)
    )
    letters = {
        "D": q.shape[-1],
        "DP": padded(q.shape[-1]),
        "DS": dims_at_once(q.shape[-1], q.dtype),
        "M": features,
        **sizes,
        **precision(q.dtype),
    }
    constants = Constants(**letters)
    blocks = triton.cdiv(tokens, sizes["BT"])
    of_queries, of_keys = (Constants(**letters, ROWS=rows) for rows in (True, False))
    stabilise[blocks, pairs * group](u, ceiling, query, bound, tokens, group, 0, of_queries, **launch)
    stabilise[blocks, pairs](w, ceiling, key, bound, tokens, 1, sinks, of_keys, **launch)
    sums = sums_before(key, sizes["BN"], dtype)
    statistics[blocks, pairs * group](
        (q, k),
        (query, key, sums, bound),
        (lse, entropy, student),
        (tokens, group, window, sinks, sums.shape[2]),
        scale,
        constants,
        **launch,
    )
    factor = (bound - student).clamp_max_(80.0).exp_()
    du, dw = torch.empty_like(u), torch.empty_like(w)
    slabs, lengths = triton.cdiv(features, sizes["MG"]), (tokens, group, window, sinks)
    by_row[blocks, slabs, pairs * group](
        (q, k), (query, key), (lse, factor, bound), (loss, lost, du), lengths, scale, constants, **launch
    )
    by_column[blocks, slabs, pairs]((q, k), (query, key), (lse, factor), dw, lengths, scale, constants, **launch)
    lost = lost + ((student < bound + LOST.value) & (bound > EMPTY.value)).to(dtype)
    return entropy + student - lse + loss, entropy, lost, du, dw


def sums_before(key: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """Sum all keys before each tile of `size` columns: (batch, heads, tiles, features)."""
    tokens = key.shape[2]
    key = torch.nn.functional.pad(key, (0, 0, 0, -tokens % size))
    sums = key.unflatten(2, (-1, size)).sum(3, dtype=dtype)
    return (sums.cumsum(2) - sums).contiguous()
