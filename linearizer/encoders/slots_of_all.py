"""Finds the slots of a text or picture: groups of tokens with similar keys, for each head, in linear time.

Every round splits the groups into pieces of PIECE, matches even with odd groups of a piece, and merges the pairs that
change the scores least: half of all groups a round, until only the slots remain. A piece spans more tokens in each
round, and all of them in the last.
"""

import torch

PIECE = 32  # groups that are compared with each other


def search_keys(slots: int) -> float:
    """Return the search's cost in keys per token: half of the groups are compared with half a piece, without values."""
    return PIECE / 4 if slots else 0


def find_slots(keys: torch.Tensor, slots: int, piece: int = PIECE) -> torch.Tensor:
    """Return the slot of every token, (batch, heads, tokens), for keys (batch, heads, tokens, dim) in a metric.

    The distance of two keys should measure how much their scores differ; some slots may stay without a token.
    """
    tokens = keys.shape[-2]
    owner = torch.arange(tokens, device=keys.device).expand(keys.shape[:-1])
    means, counts = keys, torch.ones_like(keys[..., 0])
    while (groups := means.shape[-2]) > slots:
        pieces = -(-groups // piece)
        size = -(-groups // pieces)
        size += size % 2
        remaining = max(size // 2, -(-slots // pieces))
        if pieces * remaining >= groups:  # the last few do not divide into pieces
            pieces, size, remaining = 1, groups + groups % 2, slots
        empty = pieces * size - groups
        means, counts = pad_groups(means, empty), pad_groups(counts[..., None], empty)[..., 0]
        shape = (*means.shape[:2], pieces, size)
        means, counts, target = merge_pairs(means.view(*shape, -1), counts.view(shape), remaining)
        offsets = remaining * torch.arange(pieces, device=keys.device)[:, None]
        owner = (target + offsets).flatten(2).gather(2, owner)
        means, counts = means.flatten(2, 3), counts.flatten(2, 3)
    return owner


def pad_groups(groups: torch.Tensor, empty: int) -> torch.Tensor:
    """Add groups without tokens at the end."""
    return torch.nn.functional.pad(groups, (0, 0, 0, empty)) if empty else groups


def merge_pairs(
    means: torch.Tensor, counts: torch.Tensor, remaining: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge groups (..., size, dim) until `remaining` are left, which are half of them or more.

    Return the means and counts of these, and the index of each group's target, (..., size).
    """
    even, odd, size = means[..., ::2, :], means[..., 1::2, :], means.shape[-2]
    even_counts, odd_counts = counts[..., ::2, None], counts[..., None, 1::2]
    squares = even.square().sum(-1)[..., None] + odd.square().sum(-1)[..., None, :]
    lost = (squares - 2 * even @ odd.mT) * (even_counts * odd_counts / (even_counts + odd_counts).clamp_min(1))
    lowest, partner = lost.min(-1)
    order, unmerged = lowest.argsort(-1, descending=True), remaining - size // 2
    place = torch.arange(unmerged, device=means.device).expand(*order.shape[:-1], unmerged)
    even_target = (unmerged + partner).scatter(-1, order[..., :unmerged], place)
    odd_target = unmerged + torch.arange(size // 2, device=means.device).expand_as(even_target)
    target = torch.stack([even_target, odd_target], -1).flatten(-2)
    into = target[..., None].expand_as(means)
    sums = torch.zeros_like(means[..., :remaining, :]).scatter_add(-2, into, means * counts[..., None])
    total = torch.zeros_like(counts[..., :remaining]).scatter_add(-1, target, counts)
    return sums / total.clamp_min(1)[..., None], total, target
