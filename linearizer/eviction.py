"""A control: a cache of so many tokens per KV head that drops the least attended one whenever it is full.

  h2o   drops what got the least attention in all, and never one of the newer half (Zhang et al. 2023)
  tova  drops what the newest token attends to least (Oren et al. 2024)

Both are exact about what they keep, and decide token by token; here they read whole texts and keep no state for later.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

RULES = ("h2o", "tova")

Tensor = torch.Tensor


class Evicting(nn.Module):
    """Takes the place of a layer's student."""

    def __init__(self, tokens: Sequence[int], rule: str) -> None:
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
        self.tokens, self.rule = tokens, rule

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: None) -> Tensor:
        q = q.unflatten(1, (k.shape[1], -1))
        heads = [
            evicted(q[:, head] * scale, k[:, head], v[:, head], size, self.rule)
            for head, size in enumerate(self.tokens)
        ]
        return torch.stack(heads, 1).flatten(1, 2)


def evicted(q: Tensor, k: Tensor, v: Tensor, size: int, rule: str) -> Tensor:
    """Attend with a cache of `size` tokens: q (batch, group, tokens, dim), k and v (batch, tokens, dim)."""
    batch, tokens = k.shape[:2]
    kept = torch.zeros(batch, 0, dtype=torch.long, device=k.device)
    received = torch.zeros(batch, 0, dtype=torch.float32, device=k.device)
    rows = []
    for now in range(tokens):
        kept = torch.cat([kept, kept.new_full((batch, 1), now)], 1)
        received = torch.cat([received, received.new_zeros(batch, 1)], 1)
        index = kept[..., None]
        keys, values = (x.gather(1, index.expand(-1, -1, x.shape[-1])) for x in (k, v))
        weights = (q[:, :, now] @ keys.mT).float().softmax(-1)  # (batch, group, kept)
        rows.append(weights.to(v.dtype) @ values)
        attended = weights.mean(1)
        received = received + attended
        if kept.shape[1] > size:
            worth = attended if rule == "tova" else received.masked_fill(kept > now - size // 2, torch.inf)
            stay = worth.argsort(-1, descending=True)[:, :size].sort(-1).values
            kept, received = kept.gather(1, stay), received.gather(1, stay)
    return torch.stack(rows, 2)
