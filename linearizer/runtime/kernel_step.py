"""One token: features (where they are affine), state and output in one launch, the state in place.

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

from .kernel_tiles import ABSENT, EMPTY, for_chip, load_tile, padded, precision, take_in

Tensor = torch.Tensor

# (features, columns) at a time: what spills least; other chips are like the last row.
BLOCKS = {(8, 0): (16, 32), (12, 0): (16, 32), None: (32, 16)}


@triton.jit
def replaced(tile, index, slot, new):
    """A tile (index, dim) with the row `slot` replaced."""
    return tl.where((index == slot)[:, None], new[None, :], tile)


@triton.jit
def step_heads(
    q_ptr, k_ptr, v_ptr, u_ptr, w_ptr, z_ptr, bias_ptr, count_ptr, sink_k_ptr, sink_v_ptr, window_k_ptr, window_v_ptr,
    level_ptr, mean_ptr, out_ptr, root, WINDOW, H,
    G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, VP: tl.constexpr,
    S: tl.constexpr, SP: tl.constexpr, M: tl.constexpr, MS: tl.constexpr, BN: tl.constexpr, AFFINE: tl.constexpr,
    ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (heads, batch)."""
    head = (tl.program_id(1) * H + tl.program_id(0)).to(tl.int64)
    place = tl.load(count_ptr + tl.program_id(1))
    og, od, ov = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, VP)
    q = load_tile(q_ptr + head * G * D, og, od, G, D).to(ACC)
    new_k = tl.load(k_ptr + head * D + od, mask=od < D, other=0.0).to(ACC)
    new_v = tl.load(v_ptr + head * DV + ov, mask=ov < DV, other=0.0).to(ACC)
    slot, old_k, old_v = place * 0, new_k, new_v
    if WINDOW > 0:
        slot = place % WINDOW
        old_k = tl.load(window_k_ptr + (head * WINDOW + slot) * D + od, mask=od < D, other=0.0).to(ACC)
        old_v = tl.load(window_v_ptr + (head * WINDOW + slot) * DV + ov, mask=ov < DV, other=0.0).to(ACC)
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
    tl.debug_barrier()  # a warp must not overwrite what another has yet to read
    if WINDOW > 0:
        own = head * WINDOW + slot
        tl.store(window_k_ptr + own * D + od, new_k.to(window_k_ptr.dtype.element_ty), mask=od < D)
        tl.store(window_v_ptr + own * DV + ov, new_v.to(window_v_ptr.dtype.element_ty), mask=ov < DV)
    if S > 0:
        sink = head * S + place
        tl.store(sink_k_ptr + sink * D + od, new_k.to(sink_k_ptr.dtype.element_ty), mask=od < tl.where(place < S, D, 0))
        tl.store(
            sink_v_ptr + sink * DV + ov, new_v.to(sink_v_ptr.dtype.element_ty), mask=ov < tl.where(place < S, DV, 0)
        )
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        inside, at = om < M, head * M + om
        if AFFINE:
            z = load_tile(z_ptr + tl.program_id(0) * M * D, om, od, M, D).to(ACC)
            bias = tl.load(bias_ptr + tl.program_id(0) * M + om, mask=inside, other=0.0).to(ACC)
            w = tl.sum(z * old_k[None, :], 1) * root + bias - tl.sum(old_k * old_k, 0) * root * root / 2
            q = load_tile(q_ptr + head * G * D, og, od, G, D).to(ACC)  # again: it would fill the registers meanwhile
            u = tl.dot(q, tl.trans(z), out_dtype=ACC, input_precision=PRECISION) / root + bias[None, :]
            u -= (tl.sum(q * q, 1) / (2 * root * root))[:, None]
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
    q: Tensor, k: Tensor, v: Tensor, u: Tensor | None, w: Tensor | None, affine: tuple[Tensor, Tensor, float] | None,
    count: Tensor, sink_k: Tensor, sink_v: Tensor, window_k: Tensor, window_v: Tensor, level: Tensor, mean: Tensor,
) -> Tensor:  # fmt: skip
    """Attend with one token and bring the tensors of the state, but for the count, up to date in place.

    affine: z (heads, features, dim), a bias (heads, features) and a root, in place of u and w, where
    u = z·(q / root) - |q / root|² / 2 + bias and w = z·(k root) - |k root|² / 2 + bias.
    """
    batch, heads, group = q.shape[:3]
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    z, bias, root = affine if affine is not None else (None, None, 1.0)
    features, columns = for_chip(BLOCKS, q)
    step_heads[heads, batch](
        q, k, v, u, w, z, bias, count, sink_k, sink_v, window_k, window_v, level, mean, out,
        root, window_k.shape[-2], heads,
        G=group, GP=padded(group), D=q.shape[-1], DP=padded(q.shape[-1]), DV=v.shape[-1], VP=padded(v.shape[-1]),
        S=sink_k.shape[-2], SP=padded(sink_k.shape[-2]), M=level.shape[-1], MS=features, BN=columns,
        AFFINE=affine is not None, **precision(level), num_warps=8, num_stages=1,
    )  # fmt: skip
    return out
