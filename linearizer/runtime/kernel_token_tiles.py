"""Features of one token that are products (folded.py), some dimensions DS at a time.

q is a pointer to the query heads of one KV head, G rows of D numbers that lie q_stride apart, which og numbers. k is a
pointer to the key that leaves for the far field.
"""

from __future__ import annotations

try:  # as in kernel_tiles.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import ABSENT, EMPTY, load_part, load_tile


@triton.jit
def query_features(
    q, q_stride, weight, om, og, M, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    SCALE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of the query heads, (heads, features), and |q|²/2 of each head."""
    out, square = tl.zeros([og.shape[0], om.shape[0]], ACC), tl.zeros([og.shape[0]], ACC)
    for d in tl.static_range(0, DP, DS):
        od = d + tl.arange(0, DS)
        rows = load_part(q, og, od, G, q_stride, D).to(ACC) * SCALE
        tile = load_tile(weight, om, od, M, D).to(ACC)
        out = tl.dot(rows, tl.trans(tile), acc=out, out_dtype=ACC, input_precision=PRECISION)
        square += tl.sum(rows * rows, 1) / 2
    return out, square


@triton.jit
def key_features(
    k, weight, bias, om, M, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    ACC: tl.constexpr,
):  # fmt: skip
    """Products of the leaving key with their biases, and |k|²/2 as often."""
    out, square = tl.load(bias + om, mask=om < M, other=0.0).to(ACC), tl.zeros([om.shape[0]], ACC)
    for d in tl.static_range(0, DP, DS):
        od = d + tl.arange(0, DS)
        key = tl.load(k + od, mask=od < D, other=0.0).to(ACC)
        out += tl.sum(load_tile(weight, om, od, M, D).to(ACC) * key[None, :], 1)
        square += tl.sum(key * key, 0) / 2
    return out, square


@triton.jit
def more(top, total, x, live, AXIS: tl.constexpr):
    """Let running log-sum-exps see some more numbers."""
    new = tl.maximum(top, tl.max(tl.where(live, x, 2 * ABSENT), AXIS))
    shifted = tl.exp(x - (new[:, None] if AXIS == 1 else new))
    return new, total * tl.exp(top - new) + tl.sum(tl.where(live, shifted, 0.0), AXIS)


@triton.jit
def key_shares(
    k, weight, bias, M, HALF, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    MS: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """What a key's log-features lack to be logs of shares, in the first half and beyond; and which is the largest."""
    top, beyond_top = tl.full([], EMPTY, ACC), tl.full([], EMPTY, ACC)
    total, beyond, nearest = tl.full([], 0.0, ACC), tl.full([], 0.0, ACC), tl.full([], 0, tl.int32)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        w, _ = key_features(k, weight, bias, om, M, D, DP, DS, ACC)
        w = tl.where(om < M, w, ABSENT)
        nearest = tl.where(tl.max(w, 0) > top, m + tl.argmax(w, 0), nearest)
        top, total = more(top, total, w, om < HALF, 0)
        beyond_top, beyond = more(beyond_top, beyond, w, (om >= HALF) & (om < M), 0)
    least = 1e-37  # of a row without features, and of all features in one half
    return top + tl.log(tl.maximum(total, least)), beyond_top + tl.log(tl.maximum(beyond, least)), nearest


@triton.jit
def query_shares(
    q, q_stride, weight, og, M, HALF, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DS: tl.constexpr,
    MS: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What log-features of the query heads lack to be logs of shares, in the first half and in the second."""
    top, beyond_top = tl.full([og.shape[0]], EMPTY, ACC), tl.full([og.shape[0]], EMPTY, ACC)
    total, beyond = tl.zeros([og.shape[0]], ACC), tl.zeros([og.shape[0]], ACC)
    for m in range(0, M, MS):
        om = m + tl.arange(0, MS)
        u, _ = query_features(q, q_stride, weight, om, og, M, G, D, DP, DS, SCALE, ACC, PRECISION)
        top, total = more(top, total, u, (om < HALF)[None, :] & (og >= 0)[:, None], 1)
        beyond_top, beyond = more(beyond_top, beyond, u, ((om >= HALF) & (om < M))[None, :] & (og >= 0)[:, None], 1)
    least = 1e-37
    return top + tl.log(tl.maximum(total, least)), beyond_top + tl.log(tl.maximum(beyond, least))
