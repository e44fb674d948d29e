"""What a far field without any resolution would leave of a head's error: its mass apart from its values.

  mass    far values are exact, and their mass is that of Gaussian keys: log n + q·mean + ½ Σ variance q²
  values  the far mass is exact, and the values are the mean of all far values
A head whose error is in its mass is served by two numbers a dimension; one whose error is in its values needs slots,
features, or a window.
"""

from __future__ import annotations

import torch

Tensor = torch.Tensor
LEAST = 1e-30  # of a share that is divided by


def far_errors(
    query: Tensor,  # (kv heads, group, rows, key_dim)
    key: Tensor,  # (kv heads, tokens, key_dim)
    value: Tensor,  # (kv heads, tokens, value_dim)
    rows: Tensor,  # (rows,) where the queries stand among the tokens
    sinks: int,
    window: int,
) -> Tensor:  # (kv heads, 3)
    """Sum |y|² over rows that see something far, and the squared errors of y by a plain mass and by plain values."""
    place = torch.arange(key.shape[1], device=rows.device)
    seen = place <= rows[:, None]
    far = (rows[:, None] - place >= window) & (place >= sinks)
    key, value = key.unsqueeze(1), value.unsqueeze(1)
    logits = (query @ key.mT).masked_fill(~seen, -torch.inf)
    total, weights = logits.logsumexp(-1, keepdim=True), logits.softmax(-1)
    share = (weights * far).sum(-1, keepdim=True)
    far_part = (weights * far) @ value
    near_part = weights @ value - far_part

    number = far.sum(-1, keepdim=True).clamp_min(1).to(query.dtype)  # (rows, 1)
    even = far.to(query.dtype) / number
    mean = even @ key  # (kv heads, 1, rows, key_dim)
    variance = (even @ key.square() - mean.square()).clamp_min(0)
    mass = number.log() + (query * mean + query.square() * variance / 2).sum(-1, keepdim=True)
    plain = (mass - total - (1 - share).clamp_min(LEAST).log()).sigmoid()
    by_mass = (1 - plain) * near_part / (1 - share).clamp_min(LEAST) + plain * far_part / share.clamp_min(LEAST)
    by_values = near_part + share * (even @ value)
    whole, some = near_part + far_part, far.any(-1)[:, None]
    return torch.stack(
        [(x.square() * some).double().sum((1, 2, 3)) for x in (whole, whole - by_mass, whole - by_values)], -1
    )
