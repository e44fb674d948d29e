"""Random log-features that the losses of attention are tested on."""

from __future__ import annotations

import torch

DIM = 6


def make(tokens, batch=2, heads=2, group=2, features=5, size=1.0, dtype=torch.float64, seed=0):
    """Random log-features of positive random features, and what they come from."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    q, k = draw(batch, heads, group, tokens, DIM) * size, draw(batch, heads, tokens, DIM) * size
    z, other = draw(heads, features, DIM), draw(heads, features, DIM)
    u = q @ z[:, None].mT - q.square().sum(-1, keepdim=True) / 2
    w = k @ (z + 0.1 * other).mT - k.square().sum(-1, keepdim=True) / 2
    return tuple(x.to(dtype) for x in (u, w, q, k))
