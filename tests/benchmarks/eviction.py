"""A control: a cache of so many tokens per KV head that drops the least attended one whenever it is full.

  h2o   drops what got the least attention in all, and never one of the newer half (Zhang et al. 2023)
  tova  drops what the newest token attends to least (Oren et al. 2024)

Both are exact about what they keep, and decide token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

RULES = ("h2o", "tova")

Tensor = torch.Tensor


@dataclass
class Kept:
    """What the cache of one KV head holds, the oldest first."""

    k: Tensor  # (batch, kept, dim)
    v: Tensor
    places: Tensor  # (batch, kept) in the text
    received: Tensor  # (batch, kept) attention, in all
    read: int = 0  # tokens

    @staticmethod
    def empty(k: Tensor, v: Tensor) -> Kept:
        places = torch.zeros(len(k), 0, dtype=torch.long, device=k.device)
        return Kept(k[:, :0], v[:, :0], places, places.float())


class Evicting(nn.Module):
    """Takes the place of a layer's student."""

    def __init__(self, tokens: Sequence[int], rule: str) -> None:
        super().__init__()
        if rule not in RULES:
            raise ValueError(f"rule {rule!r} is none of {', '.join(RULES)}")
        self.tokens, self.rule = tokens, rule

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: list | None
    ) -> Tensor:
        """Attend; `memory` is a list of what every KV head keeps, which is brought up to date."""
        q, memory = q.unflatten(1, (k.shape[1], -1)), [] if memory is None else memory
        if not memory:
            memory += [Kept.empty(k[:, head], v[:, head]) for head in range(k.shape[1])]
        heads = [
            evicted(q[:, head] * scale, k[:, head], v[:, head], size, self.rule, memory[head])
            for head, size in enumerate(self.tokens)
        ]
        return torch.stack(heads, 1).flatten(1, 2)


def evicted(q: Tensor, k: Tensor, v: Tensor, size: int, rule: str, kept: Kept) -> Tensor:
    """Attend with a cache of `size` tokens: q (batch, group, tokens, dim), k and v (batch, tokens, dim)."""
    rows = []
    for now in range(k.shape[1]):
        kept.k, kept.v = torch.cat([kept.k, k[:, now, None]], 1), torch.cat([kept.v, v[:, now, None]], 1)
        kept.places = torch.cat([kept.places, kept.places.new_full((len(k), 1), kept.read)], 1)
        weights = (q[:, :, now] @ kept.k.mT).float().softmax(-1)  # (batch, group, kept)
        rows.append(weights.to(v.dtype) @ kept.v)
        attended = weights.mean(1)
        kept.received = torch.cat([kept.received, kept.received.new_zeros(len(k), 1)], 1) + attended
        if kept.places.shape[1] > size:
            newer = kept.places > kept.read - size // 2
            worth = attended if rule == "tova" else kept.received.masked_fill(newer, torch.inf)
            stay = worth.argsort(-1, descending=True)[:, :size].sort(-1).values
            kept.k, kept.v = (x.gather(1, stay[..., None].expand(-1, -1, x.shape[-1])) for x in (kept.k, kept.v))
            kept.places, kept.received = kept.places.gather(1, stay), kept.received.gather(1, stay)
        kept.read += 1
    return torch.stack(rows, 2)
