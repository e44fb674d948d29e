"""Rows of the kernels' benchmark: attention to a text."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

from linearizer.student.features_torch import ScaledMap, attend_text_with_features
from linearizer.student.kernel_dispatch import linear_attention
from linearizer.student.layer_student import FeatureGroup
from linearizer.student.state import FeatureState
from tests.benchmarks.timing import DEVICE, GPU, attempt, compiled, draw, own
from tests.support.log_features import reference


def group_of(heads, dim, features, kind="prf"):
    group = FeatureGroup(list(range(heads)), 0, features, 0, dim, kind).to(DEVICE)
    group.feature_map.reset(torch.Generator().manual_seed(0))
    return group


def texts(batch, tokens, heads, group, dim):
    """As many inputs as a GPU's cache cannot hold."""
    size = batch * tokens * heads * (group + 2) * dim * 2
    copies = min(8, max(1, 2 * 60 * 2**20 // size)) if GPU else 1
    return [
        (
            draw(batch, heads, group, tokens, dim, seed=s),
            *(draw(batch, heads, tokens, dim, seed=s + n) for n in (9, 99)),
        )
        for s in range(copies)
    ]


def rivals_of_prefill(inputs, scale, group, features, feature_map):
    """Names and what makes their calls."""

    def softmax(backend):
        def call(q, k, v):
            with sdpa_kernel(backend):
                return sdpa(q.flatten(1, 2), k, v, is_causal=True, scale=scale, enable_gqa=group > 1)

        return lambda: [lambda x=x: call(*x) for x in inputs]

    def pytorch(q, k, v):
        return attend_text_with_features(
            q * scale, k, v, feature_map, 0, None, FeatureState.empty(k, v, 0, 0, features)
        )

    def chunks():
        call = compiled(pytorch)
        return [lambda x=x: call(*x) for x in inputs]

    yield "chunked pytorch", lambda: [lambda x=x: pytorch(*x) for x in inputs]
    if not GPU:
        yield "sdpa", softmax([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
        return
    yield "chunked pytorch, compiled", chunks  # takes minutes on a CPU
    yield "sdpa flash", softmax(SDPBackend.FLASH_ATTENTION)
    yield "sdpa cudnn", softmax(SDPBackend.CUDNN_ATTENTION)
    yield "flex attention", lambda: flex(inputs, scale)
    for name in ("chunk_linear_attn", "fused_chunk_linear_attn"):
        for normalize in (True, False):
            yield (
                f"fla {name} normalize={normalize}",
                lambda name=name, normalize=normalize: fla(inputs, name, normalize, feature_map),
            )


def flex(inputs, scale):
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tokens = inputs[0][1].shape[-2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens, device=DEVICE)
    attend = compiled(flex_attention)
    return [
        lambda x=x: attend(x[0].flatten(1, 2), x[1], x[2], block_mask=mask, scale=scale, enable_gqa=True)
        for x in inputs
    ]


def fla(inputs, name, normalize, feature_map):
    """fla's kernels with features made eagerly, its keys repeated for each query head as its layers do."""
    from fla.ops import linear_attn

    attend = getattr(linear_attn, name)

    def call(q, k, v):
        u = feature_map.queries(q.float()).flatten(1, 2).exp().to(q.dtype).transpose(1, 2)
        w = feature_map.keys(k.float()).exp().to(k.dtype)
        w, v = (x.repeat_interleave(q.shape[2], 1).transpose(1, 2) for x in (w, v))
        return attend(u, w, v, scale=1.0, normalize=normalize)

    return [lambda x=x: call(*x) for x in inputs]


@torch.no_grad()
def prefill(limits, quick):
    heads, group, dim = (8, 4, 128) if GPU else (8, 1, 64)
    lengths = [2**n for n in range(9, 18)] if GPU else [4096, 16384]
    if quick:
        lengths = lengths[:2] if GPU else lengths[:1]
    for features in (64, 128, 182, 256) if GPU and not quick else (64,):
        for batch in (1, 8) if GPU and not quick else (1,):
            for tokens in lengths:
                yield prefill_row(limits, batch, tokens, heads, group, dim, features)


def prefill_row(limits, batch, tokens, heads, group, dim, features):
    scale, inputs = dim**-0.5, texts(batch, tokens, heads, group, dim)
    feature_map = ScaledMap(group_of(heads, dim, features).feature_map, scale)

    def ours(q, k, v):
        return linear_attention(
            q * scale, k, v, feature_map, 0, None, FeatureState.empty(k, v, 0, 0, features)
        )  # the door

    calls = [lambda x=x: ours(*x) for x in inputs]
    values = batch * tokens * heads * (2 * group + 2) * dim * inputs[0][0].element_size()
    work = batch * tokens * heads * (group * 4 + 4) * dim * features
    part = [x[:1, ..., :300, :] for x in inputs[0]]
    exact = reference(*(x.double() for x in (part[0] * scale, *part[1:])), feature_map, 0, 0)
    row = {
        "op": "prefill", "batch": batch, "tokens": tokens, "heads": heads * group, "kv_heads": heads, "dim": dim,
        "features": features, **own(calls),
        "floor": max(values / limits["copy"], work / limits["product"]),
        "error": ((ours(*part).double() - exact).norm() / exact.norm()).item(),
    }  # fmt: skip
    if GPU:
        row["ours in a graph"] = attempt("graph", lambda: calls, graph=True)
    rivals = rivals_of_prefill(inputs, scale, group, features, feature_map)
    return row | {"rivals": {name: attempt(name, make) for name, make in rivals}}
