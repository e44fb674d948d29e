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
from .kernel_features import key_features, key_shares, query_features, query_shares, replaced, scores
from .kernel_tiles import ABSENT, EMPTY, at_once, load_tile, padded, precision, take_in

Tensor = torch.Tensor
NONE, NEAREST, HALVES = tl.constexpr(forms.NONE), tl.constexpr(forms.NEAREST), tl.constexpr(forms.HALVES)


@triton.jit
def step_heads(
    q_ptr, k_ptr, v_ptr, u_ptr, w_ptr, query_ptr, query_bias_ptr, key_ptr, key_bias_ptr, query_norm_ptr, key_norm_ptr,
    count_ptr, sink_k_ptr, sink_v_ptr, window_k_ptr, window_v_ptr, level_ptr, mean_ptr, out_ptr, WINDOW, H,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr, DV: tl.constexpr,
    VP: tl.constexpr, S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr,
    SHARES: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, batch)."""
    own, head = tl.program_id(0), (tl.program_id(1) * H + tl.program_id(0)).to(tl.int64)
    place = tl.load(count_ptr + tl.program_id(1))
    og, od, ov = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, VP)
    q_ptr += head * G * D
    k_ptr += head * D
    new_v = tl.load(v_ptr + head * DV + ov, mask=ov < DV, other=0.0).to(ACC)
    slot = place % tl.maximum(WINDOW, 1)
    top = tl.full([GP], EMPTY, ACC)
    total = tl.zeros([GP], ACC)
    acc = tl.zeros([GP, VP], ACC)
    for s0 in range(0, tl.minimum(place + 1, WINDOW), BN):
        os = s0 + tl.arange(0, BN)
        logits = scores(
            q_ptr, window_k_ptr + head * WINDOW * D, k_ptr, os, slot, og, WINDOW, G, D, DP, DS, ACC, PRECISION
        )
        v = replaced(load_tile(window_v_ptr + head * WINDOW * DV, os, ov, WINDOW, DV).to(ACC), os, slot, new_v)
        live = ((os <= place) & (os < WINDOW))[None, :] & (og >= 0)[:, None]
        top, total, acc = take_in(top, total, acc, logits, live, v, PRECISION)
    if S > 0:
        os = tl.arange(0, SP)
        sink_logits = scores(q_ptr, sink_k_ptr + head * S * D, k_ptr, os, place, og, S, G, D, DP, DS, ACC, PRECISION)
        sink_v = replaced(load_tile(sink_v_ptr + head * S * DV, os, ov, S, DV).to(ACC), os, place, new_v)
        gone = ((os < S) & (os <= place - WINDOW))[None, :] & (og >= 0)[:, None]
        top, total, acc = take_in(top, total, acc, sink_logits, gone, sink_v, PRECISION)
    old_k_ptr, old_v_ptr = k_ptr, v_ptr + head * DV
    if WINDOW > 0:
        old_k_ptr, old_v_ptr = window_k_ptr + (head * WINDOW + slot) * D, window_v_ptr + (head * WINDOW + slot) * DV
    old_v = tl.load(old_v_ptr + ov, mask=ov < DV, other=0.0).to(ACC)
    HALF: tl.constexpr = M // 2 if SHARES == HALVES else M
    if SHARES >= 0:
        query_ptr += own * M * D
        query_bias_ptr += own * M
        key_ptr += own * M * D
        key_bias_ptr += own * M
    if SHARES > 0:
        first, beyond, nearest = key_shares(old_k_ptr, key_ptr, key_bias_ptr, D, DP, DS, M, MS, HALF, ACC)
    if SHARES == HALVES:
        q_first, q_beyond = query_shares(q_ptr, query_ptr, og, G, D, DP, DS, M, MS, HALF, ACC, PRECISION)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        inside, at = om < M, head * M + om
        if SHARES >= 0:
            u, q_square = query_features(q_ptr, query_ptr, om, og, G, D, DP, DS, M, ACC, PRECISION)
            w, k_square = key_features(old_k_ptr, key_ptr, key_bias_ptr, om, D, DP, DS, M, ACC)
            if SHARES == NONE:
                u -= (q_square * tl.load(query_norm_ptr + own).to(ACC))[:, None]
                w -= k_square * tl.load(key_norm_ptr + own).to(ACC)
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
        tl.debug_barrier()  # a warp must not overwrite what another has yet to read
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
    new_k = tl.load(k_ptr + od, mask=od < D, other=0.0)
    tl.debug_barrier()
    if WINDOW > 0:
        tl.store(window_k_ptr + (head * WINDOW + slot) * D + od, new_k.to(window_k_ptr.dtype.element_ty), mask=od < D)
        tl.store(window_v_ptr + (head * WINDOW + slot) * DV + ov, new_v.to(window_v_ptr.dtype.element_ty), mask=ov < DV)
    if S > 0:
        sink = head * S + place
        tl.store(sink_k_ptr + sink * D + od, new_k.to(sink_k_ptr.dtype.element_ty), mask=od < tl.where(place < S, D, 0))
        tl.store(
            sink_v_ptr + sink * DV + ov, new_v.to(sink_v_ptr.dtype.element_ty), mask=ov < tl.where(place < S, DV, 0)
        )


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
    wide = padded(q.shape[-1])
    size = 32 if at_once(q) == wide and padded(v.shape[-1]) <= 128 else 16
    step_heads[heads, batch](
        q, k, v, u, w, *made, count, sink_k, sink_v, window_k, window_v, level, mean, out,
        window_k.shape[-2], heads,
        G=group, GP=padded(group), D=q.shape[-1], DP=wide, DS=at_once(q), DV=v.shape[-1], VP=padded(v.shape[-1]),
        S=sink_k.shape[-2], SP=padded(sink_k.shape[-2]), M=level.shape[-1], MS=size, BN=size,
        SHARES=-1 if folded is None else folded.shares, **precision(level), num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
