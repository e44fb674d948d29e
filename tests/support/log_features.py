"""Texts, keys and feature maps to run linear attention on, and what it is."""

from __future__ import annotations

import torch

from linearizer.method.untrained import draw as draw_map
from linearizer.student.columns import EMPTY
from linearizer.student.feature_maps import FEATURE_MAPS, ScaledMap, far_logits_exactly

DIM, VALUE_DIM = 6, 5


def make(tokens, heads=2, group=2, batch=2, features=4, kind="prf", dtype=torch.float64, size=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = draw(batch, heads, group, tokens, DIM) * size, draw(batch, heads, tokens, DIM) * size
    v = draw(batch, heads, tokens, VALUE_DIM)
    feature_map = None
    if features:
        feature_map = FEATURE_MAPS[kind](heads, DIM, features).double().eval()
        draw_map(feature_map, generator)
    return q.to(dtype), k.to(dtype), v.to(dtype), feature_map


def extreme(case, tokens=48, **sizes):
    """Texts on which features or scores leave the range of fp32's exponential."""
    q, k, v, feature_map = make(tokens, features=16, **sizes)
    if case == "a first key of norm 60":
        k[:, :, 0] *= 60 / k[:, :, 0].norm(dim=-1, keepdim=True)
    elif case == "all keys of norm 60":
        k *= 60 / k.norm(dim=-1, keepdim=True)
    elif case == "a later key of norm 60":
        k[:, :, :-1] *= 60 / k[:, :, :-1].norm(dim=-1, keepdim=True)
    elif case == "logits of ±80":
        k *= (80 / DIM) ** 0.5 / k.square().mean(-1, keepdim=True).sqrt() ** 1
        q = k[:, :, None].expand_as(q) * torch.where(torch.arange(tokens)[:, None] % 2 == 0, 1.0, -1.0)
    return q, k, v, feature_map


def far_of(feature_map):
    """The far field of a map, for queries and keys that are scaled alike."""
    return ScaledMap(feature_map) if feature_map else None


def reference(q, k, v, feature_map, window, sinks, real=None):
    """softmax over j ≤ i of (q_i·k_j where j is near, log Σ_m exp(u_im + w_jm) elsewhere), times v."""
    tokens = q.shape[-2]
    real = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device) if real is None else real
    place = real.cumsum(-1) - 1
    near = (place[:, None, :] < sinks) | (place[:, :, None] - place[:, None, :] < window)
    seen = real[:, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    logits = q @ k[:, :, None].mT
    if feature_map is None:
        seen = seen & near
    else:
        far = far_logits_exactly(feature_map.queries(q), feature_map.keys(k))
        logits = torch.where(near[:, None, None], logits, far)
    return logits.masked_fill(~seen[:, None, None], EMPTY).softmax(-1) @ v[:, :, None]
