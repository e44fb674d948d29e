"""Finds the slots of a text or picture: groups of tokens with like keys, for each head, in time linear in the tokens.

Every round splits what is there into pieces of PIECE groups, matches the even with the odd groups of a piece, and
merges the pairs that change the scores least: half of all groups a round, until only the slots are left. A piece spans
more tokens in each round, and all of them in the last.
"""

import torch

PIECE = 32  # groups that are compared with each other at once


def search_keys(slots: int) -> float:
    """How many keys per token the search costs: half a piece is compared by half of the groups, without values."""
    return PIECE / 4 if slots else 0


def find_slots(keys: torch.Tensor, slots: int, piece: int = PIECE) -> torch.Tensor:
    """Return the slot of every token, (batch, heads, tokens), for keys (batch, heads, tokens, dim) in a metric.

    The distance of two keys should tell how much their scores differ; slots without a token may be left.
    """
    tokens = keys.shape[-2]
    owner = torch.arange(tokens, device=keys.device).expand(keys.shape[:-1])
    means, counts = keys, torch.ones_like(keys[..., 0])
    while (groups := means.shape[-2]) > slots:
        pieces = -(-groups // piece)
        size = -(-groups // pieces)
        size += size % 2
        kept = max(size // 2, -(-slots // pieces))
        if pieces * kept >= groups:  # the last few do not divide into pieces
            pieces, size, kept = 1, groups + groups % 2, slots
        empty = pieces * size - groups
        means, counts = pad_groups(means, empty), pad_groups(counts[..., None], empty)[..., 0]
        shape = (*means.shape[:2], pieces, size)
        means, counts, target = merge_pairs(means.view(*shape, -1), counts.view(shape), kept)
        offsets = kept * torch.arange(pieces, device=keys.device)[:, None]
        owner = (target + offsets).flatten(2).gather(2, owner)
        means, counts = means.flatten(2, 3), counts.flatten(2, 3)
    return owner


def pad_groups(groups: torch.Tensor, empty: int) -> torch.Tensor:
    """Add groups without tokens at the end."""
    return torch.nn.functional.pad(groups, (0, 0, 0, empty)) if empty else groups


def merge_pairs(
    means: torch.Tensor, counts: torch.Tensor, kept: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge groups (..., size, dim) until `kept` are left, which are half of them or more.

    Return the means and counts of what is left, and where each group went, (..., size).
    """
    even, odd, size = means[..., ::2, :], means[..., 1::2, :], means.shape[-2]
    many, others = counts[..., ::2, None], counts[..., None, 1::2]
    squares = even.square().sum(-1)[..., None] + odd.square().sum(-1)[..., None, :]
    lost = (squares - 2 * even @ odd.mT) * (many * others / (many + others).clamp_min(1))
    lowest, partner = lost.min(-1)
    order, stay = lowest.argsort(-1, descending=True), kept - size // 2
    place = torch.arange(stay, device=means.device).expand(*order.shape[:-1], stay)
    moved = (stay + partner).scatter(-1, order[..., :stay], place)
    there = stay + torch.arange(size // 2, device=means.device).expand_as(moved)
    target = torch.stack([moved, there], -1).flatten(-2)
    into = target[..., None].expand_as(means)
    sums = torch.zeros_like(means[..., :kept, :]).scatter_add(-2, into, means * counts[..., None])
    total = torch.zeros_like(counts[..., :kept]).scatter_add(-1, target, counts)
    return sums / total.clamp_min(1)[..., None], total, target
