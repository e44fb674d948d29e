"""One token: features (where they can be folded, folded.py), state and output in one launch, the state in place.

Nothing is read back from the device, so that a step can be captured in a CUDA graph. One program does all of a KV
head, because the old state must have been read before the new one is written.
"""

from __future__ import annotations

import torch

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from . import folded as forms
from .folded import Folded
from .kernel_tiles import ABSENT, EMPTY, load_tile, padded, precision, take_in

Tensor = torch.Tensor
NONE, NEAREST, HALVES = tl.constexpr(forms.NONE), tl.constexpr(forms.NEAREST), tl.constexpr(forms.HALVES)

FEATURES, COLUMNS = 32, 32  # at a time


@triton.jit
def replaced(tile, index, slot, new):
    """A tile (index, dim) with the row `slot` replaced."""
    return tl.where((index == slot)[:, None], new[None, :], tile)


@triton.jit
def key_features(weight_ptr, bias_ptr, om, od, k, D: tl.constexpr, M: tl.constexpr):
    """Some products of a key."""
    bias = tl.load(bias_ptr + om, mask=om < M, other=0.0).to(k.dtype)
    return tl.sum(load_tile(weight_ptr, om, od, M, D).to(k.dtype) * k[None, :], 1) + bias


@triton.jit
def query_features(weight_ptr, om, od, q, D: tl.constexpr, M: tl.constexpr, PRECISION: tl.constexpr):
    """Some products of the query heads of a group."""
    weight = load_tile(weight_ptr, om, od, M, D).to(q.dtype)
    return tl.dot(q, tl.trans(weight), out_dtype=q.dtype, input_precision=PRECISION)


@triton.jit
def more(top, total, x, live, AXIS: tl.constexpr):
    """Let running log-sum-exps see some more numbers."""
    new = tl.maximum(top, tl.max(tl.where(live, x, 2 * ABSENT), AXIS))
    shifted = tl.exp(x - (new[:, None] if AXIS == 1 else new))
    return new, total * tl.exp(top - new) + tl.sum(tl.where(live, shifted, 0.0), AXIS)


@triton.jit
def key_shares(
    weight_ptr, bias_ptr, k, od, D: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """What a key's log-features lack to be logs of shares, in the first half and beyond; and the largest of them."""
    top, beyond_top = tl.full([], EMPTY, k.dtype), tl.full([], EMPTY, k.dtype)
    total, beyond, nearest = tl.full([], 0.0, k.dtype), tl.full([], 0.0, k.dtype), tl.full([], 0, tl.int32)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        w = tl.where(om < M, key_features(weight_ptr, bias_ptr, om, od, k, D, M), ABSENT)
        nearest = tl.where(tl.max(w, 0) > top, m + tl.argmax(w, 0), nearest)
        top, total = more(top, total, w, om < HALF, 0)
        if HALF < M:
            beyond_top, beyond = more(beyond_top, beyond, w, (om >= HALF) & (om < M), 0)
    return top + tl.log(total), beyond_top + tl.log(tl.maximum(beyond, 1e-37)), nearest


@triton.jit
def query_shares(
    q_ptr, weight_ptr, og, od, G: tl.constexpr, D: tl.constexpr, M: tl.constexpr, MS: tl.constexpr,
    HALF: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same of the query heads of a group."""
    top, beyond_top = tl.full([og.shape[0]], EMPTY, ACC), tl.full([og.shape[0]], EMPTY, ACC)
    total, beyond = tl.zeros([og.shape[0]], ACC), tl.zeros([og.shape[0]], ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        q = load_tile(q_ptr, og, od, G, D).to(ACC)
        u = query_features(weight_ptr, om, od, q, D, M, PRECISION)
        top, total = more(top, total, u, (om < HALF)[None, :] & (og >= 0)[:, None], 1)
        beyond_top, beyond = more(beyond_top, beyond, u, ((om >= HALF) & (om < M))[None, :] & (og >= 0)[:, None], 1)
    return top + tl.log(total), beyond_top + tl.log(beyond)


@triton.jit
def step_heads(
    q_ptr, k_ptr, v_ptr, u_ptr, w_ptr, query_ptr, query_bias_ptr, key_ptr, key_bias_ptr, query_norm_ptr, key_norm_ptr,
    count_ptr, sink_k_ptr, sink_v_ptr, window_k_ptr, window_v_ptr, level_ptr, mean_ptr, out_ptr, WINDOW, H,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, SHARES: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, batch)."""
    head = (tl.program_id(1) * H + tl.program_id(0)).to(tl.int64)
    place = tl.load(count_ptr + tl.program_id(1))
    og, od, ov = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, VP)
    q = load_tile(q_ptr + head * G * D, og, od, G, D).to(ACC)
    new_k = tl.load(k_ptr + head * D + od, mask=od < D, other=0.0).to(ACC)
    new_v = tl.load(v_ptr + head * DV + ov, mask=ov < DV, other=0.0).to(ACC)
    slot = place % tl.maximum(WINDOW, 1)
    top = tl.full([GP], EMPTY, ACC)
    total = tl.zeros([GP], ACC)
    acc = tl.zeros([GP, VP], ACC)
    for s0 in range(0, tl.minimum(place + 1, WINDOW), BN):
        os = s0 + tl.arange(0, BN)
        k = replaced(load_tile(window_k_ptr + head * WINDOW * D, os, od, WINDOW, D).to(ACC), os, slot, new_k)
        v = replaced(load_tile(window_v_ptr + head * WINDOW * DV, os, ov, WINDOW, DV).to(ACC), os, slot, new_v)
        logits = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision=PRECISION)
        live = ((os <= place) & (os < WINDOW))[None, :] & (og >= 0)[:, None]
        top, total, acc = take_in(top, total, acc, logits, live, v, PRECISION)
    if S > 0:
        os = tl.arange(0, SP)
        sink_k = replaced(load_tile(sink_k_ptr + head * S * D, os, od, S, D).to(ACC), os, place, new_k)
        sink_v = replaced(load_tile(sink_v_ptr + head * S * DV, os, ov, S, DV).to(ACC), os, place, new_v)
        sink_logits = tl.dot(q, tl.trans(sink_k), out_dtype=ACC, input_precision=PRECISION)
        gone = ((os < S) & (os <= place - WINDOW))[None, :] & (og >= 0)[:, None]
        top, total, acc = take_in(top, total, acc, sink_logits, gone, sink_v, PRECISION)
    old_k, old_v, own = new_k, new_v, head * WINDOW + slot
    if WINDOW > 0:
        old_k = tl.load(window_k_ptr + own * D + od, mask=od < D, other=0.0).to(ACC)
        old_v = tl.load(window_v_ptr + own * DV + ov, mask=ov < DV, other=0.0).to(ACC)
    tl.debug_barrier()  # a warp must not overwrite what another has yet to read
    if WINDOW > 0:
        tl.store(window_k_ptr + own * D + od, new_k.to(window_k_ptr.dtype.element_ty), mask=od < D)
        tl.store(window_v_ptr + own * DV + ov, new_v.to(window_v_ptr.dtype.element_ty), mask=ov < DV)
    if S > 0:
        sink = head * S + place
        tl.store(sink_k_ptr + sink * D + od, new_k.to(sink_k_ptr.dtype.element_ty), mask=od < tl.where(place < S, D, 0))
        tl.store(
            sink_v_ptr + sink * DV + ov, new_v.to(sink_v_ptr.dtype.element_ty), mask=ov < tl.where(place < S, DV, 0)
        )
    HALF: tl.constexpr = M // 2 if SHARES == HALVES else M
    if SHARES >= 0:
        query_ptr += tl.program_id(0) * M * D
        query_bias_ptr += tl.program_id(0) * M
        key_ptr += tl.program_id(0) * M * D
        key_bias_ptr += tl.program_id(0) * M
    if SHARES > 0:
        first, beyond, nearest = key_shares(key_ptr, key_bias_ptr, old_k, od, D, M, MS, HALF)
    if SHARES == HALVES:
        q_first, q_beyond = query_shares(
            q_ptr + head * G * D, query_ptr, og, od, G, D, M, MS, HALF, ACC, PRECISION
        )  # fmt: skip
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        inside, at = om < M, head * M + om
        if SHARES >= 0:
            q = load_tile(q_ptr + head * G * D, og, od, G, D).to(ACC)  # again: it would fill the registers meanwhile
            u = query_features(query_ptr, om, od, q, D, M, PRECISION)
            w = key_features(key_ptr, key_bias_ptr, om, od, old_k, D, M)
            if SHARES == NONE:
                u -= (tl.sum(q * q, 1) * tl.load(query_norm_ptr + tl.program_id(0)).to(ACC) / 2)[:, None]
                w -= tl.sum(old_k * old_k, 0) * tl.load(key_norm_ptr + tl.program_id(0)).to(ACC) / 2
            elif SHARES == NEAREST:
                w = tl.where(om == nearest, 0.0, ABSENT)
            else:
                w -= tl.where(om < HALF, first, beyond)
            if SHARES == HALVES:
                u -= tl.where((om < HALF)[None, :], q_first[:, None], q_beyond[:, None])
            u += tl.load(query_bias_ptr + om, mask=inside, other=0.0).to(ACC)[None, :]
        else:
            w = tl.load(w_ptr + at, mask=inside, other=ABSENT).to(ACC)
            u = load_tile(u_ptr + head * G * M, og, om, G, M).to(ACC)
        w = tl.where(inside & (place - WINDOW >= S), w, ABSENT)
        level = tl.load(level_ptr + at, mask=inside, other=EMPTY)
        mean = load_tile(mean_ptr + head * M * DV, om, ov, M, DV)
        tl.debug_barrier()
        higher = tl.maximum(level, w)
        new = higher + tl.log(tl.exp(level - higher) + tl.exp(w - higher))
        mean = mean * tl.exp(level - new)[:, None] + tl.exp(w - new)[:, None] * old_v[None, :]
        tl.store(level_ptr + at, new, mask=inside)
        tl.store(mean_ptr + at[:, None] * DV + ov[None, :], mean, mask=inside[:, None] & (ov < DV)[None, :])
        live = inside[None, :] & (og >= 0)[:, None]
        top, total, acc = take_in(top, total, acc, u + new[None, :], live, mean, PRECISION)
    tl.store(out_ptr + (head * G + og[:, None]) * DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(og < G)[:, None] & (ov < DV)[None, :])  # fmt: skip


def run_step(
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, w: Tensor | None, folded: Folded | None,
    count: Tensor, sink_k: Tensor, sink_v: Tensor, window_k: Tensor, window_v: Tensor, level: Tensor, mean: Tensor,
) -> Tensor:  # fmt: skip
    """Attend with one token and bring the tensors of the state, but for the count, up to date in place.

    u and w are given, or what they are made of.
    """
    batch, heads, group = q.shape[:3]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    made: list[Tensor | None] = [None] * 6
    if folded is not None:
        made = [folded.query, folded.query_bias, folded.key, folded.key_bias, folded.query_norm, folded.key_norm]
    step_heads[heads, batch](
        q, k, v, u, w, *made, count, sink_k, sink_v, window_k, window_v, level, mean, out,
        window_k.shape[-2], heads,
        G=group, GP=padded(group), D=q.shape[-1], DP=padded(q.shape[-1]), DV=v.shape[-1], VP=padded(v.shape[-1]),
        S=sink_k.shape[-2], SP=padded(sink_k.shape[-2]), M=level.shape[-1], MS=FEATURES, BN=COLUMNS,
        SHARES=-1 if folded is None else folded.shares, **precision(level), num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
