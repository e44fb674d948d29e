"""Attention in both directions, in time linear in the tokens: near tokens exactly, all others through their slot.

    out_i = softmax_j( q_i·k_j if j is near i, else q_i·k̄_c(j) + spread_c(j) ) v_j

c(j) is the slot of token j, k̄_c the mean key of a slot, and its spread half of the variance of its tokens' scores: to
second order, the mean of exp(score) is exp(mean + variance / 2). The code computes slots over all tokens, and corrects
them at the near ones. Near tokens are those of the same block and of the blocks around it, and the global tokens at
either end, such as [CLS] and [SEP], which also see every token exactly.

Slots are groups of tokens with similar keys, found for each head in linear time. Every round splits the groups into
pieces of PIECE, matches even with odd groups of a piece, and merges the pairs that change the scores least: half of all
groups a round, until only the slots remain. A piece spans more tokens in each round, and all of them in the last.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

CHUNK = 4096  # queries at once: bounds the copies of near keys and values
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
        means, counts = pad(means, (0, 0, 0, empty)), pad(counts, (0, empty))  # by groups without tokens
        shape = (*means.shape[:2], pieces, size)
        means, counts, target = merge_pairs(means.view(*shape, -1), counts.view(shape), remaining)
        offsets = remaining * torch.arange(pieces, device=keys.device)[:, None]
        owner = (target + offsets).flatten(2).gather(2, owner)
        means, counts = means.flatten(2, 3), counts.flatten(2, 3)
    return owner


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


@dataclass(frozen=True)
class BothWays:
    """How a head attends. `block`: tokens along each axis; a text has one axis, a picture two."""

    block: tuple[int, ...]
    slots: int = 0
    first: int = 0  # global tokens before the others
    last: int = 0  # and after them

    @property
    def keys(self) -> float:
        """Keys that a token sees, including the cost of finding slots; global tokens see all and are seen by all."""
        near = math.prod(3 * size for size in self.block)
        return near + self.slots + search_keys(self.slots) + 2 * (self.first + self.last)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Sequence[int] = ()
    ) -> torch.Tensor:
        """Attend with rows of whole texts or pictures: (batch, heads, tokens, dim) each.

        A row with no more tokens than `keys` is read with softmax, as the teacher does. `grid`: patches along each axis
        of a picture.
        """
        tokens = query.shape[2]
        if tokens <= self.keys:
            return scaled_dot_product_attention(query, key, value, scale=scale)
        ends = self.first, tokens - self.last
        query = query * scale
        edge = [*range(ends[0]), *range(ends[1], tokens)]
        inner_queries, inner_keys, inner_values = (x[:, :, ends[0] : ends[1]] for x in (query, key, value))
        inner = self.attend_within(inner_queries, inner_keys, inner_values, key[:, :, edge], value[:, :, edge], grid)
        outer = scaled_dot_product_attention(query[:, :, edge], key, value, scale=1.0)
        return torch.cat([outer[:, :, : self.first], inner, outer[:, :, self.first :]], 2)

    def attend_within(
        self,
        query: torch.Tensor,  # scaled
        key: torch.Tensor,
        value: torch.Tensor,
        edge_keys: torch.Tensor,  # of the global tokens
        edge_values: torch.Tensor,
        grid: Sequence[int],
    ) -> torch.Tensor:
        """Attend with all tokens except the global ones, which every token sees."""
        tokens = key.shape[2]
        blocks = block_layout(tuple(grid) or (tokens,), self.block, key.device)
        slots = Slots.of(query, key, value, self.slots) if self.slots else None
        padded = [pad(x, (0, 0, 0, 1)) for x in (query, key, value)]
        outputs = []
        for members, near in blocks.chunks(CHUNK):
            queries, near_keys, near_values = padded[0][:, :, members], padded[1][:, :, near], padded[2][:, :, near]
            shown = queries @ near_keys.mT
            shown = shown.masked_fill((near == tokens)[:, None], torch.finfo(shown.dtype).min)
            scores = [queries @ edge_keys[:, :, None].mT, shown]
            if slots is not None:
                far_counts, owner = slots.far_from(near)
                scores.append(slots.scores(queries, far_counts))
            weights = torch.cat(scores, -1).softmax(-1).split([x.shape[-1] for x in scores], -1)
            of_near = weights[1]
            if slots is not None:
                token_weights = weights[2] / far_counts[..., None, :].clamp_min(1)  # the weight of a token of the slot
                of_near = of_near - token_weights.gather(-1, owner[..., None, :].expand_as(of_near))
            out = weights[0] @ edge_values[:, :, None] + of_near @ near_values
            outputs.append(out if slots is None else out + token_weights @ slots.values[:, :, None])
        return torch.cat(outputs, 2).flatten(2, 3)[:, :, blocks.places]


@dataclass(frozen=True)
class HeadsOfLayer:
    """How each head of a layer attends; heads with the same way attend together."""

    ways: tuple[BothWays, ...]

    @property
    def first(self) -> int:
        return self.ways[0].first

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Sequence[int] = ()
    ) -> torch.Tensor:
        """Attend as BothWays does."""
        heads = {way: [i for i, x in enumerate(self.ways) if x == way] for way in dict.fromkeys(self.ways)}
        if len(heads) == 1:
            return self.ways[0].attend(query, key, value, scale, grid)
        parts = [way.attend(query[:, at], key[:, at], value[:, at], scale, grid) for way, at in heads.items()]
        order = [head for at in heads.values() for head in at]
        return torch.cat(parts, 1)[:, [order.index(head) for head in range(len(order))]]


def read_layers(
    ways: Sequence[tuple[Sequence[int], int]], heads: Sequence[Sequence[int]], first: int, last: int
) -> list[HeadsOfLayer]:
    """Return the ways of the heads of each layer, from indices into `ways`: pairs of a block and a number of slots."""
    different = [BothWays(tuple(block), slots, first, last) for block, slots in ways]
    return [HeadsOfLayer(tuple(different[index] for index in layer)) for layer in heads]


@dataclass(frozen=True)
class Slots:
    """The slots of every head: mean keys (batch, heads, slots, dim), sums of values, numbers of tokens, and spreads."""

    keys: torch.Tensor
    values: torch.Tensor
    counts: torch.Tensor
    spreads: torch.Tensor
    owner: torch.Tensor  # the slot of every token, (batch, heads, tokens)

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: int) -> "Slots":
        """Find slots: a difference of two keys is weighted along each axis by the size of the queries there."""
        metric = query.detach().square().mean(-2, keepdim=True)
        weighted = key.detach() * metric.sqrt()
        owner = find_slots(weighted, slots)
        counts = torch.zeros_like(key[:, :, :slots, 0]).scatter_add(-1, owner, torch.ones_like(key[..., 0]))

        def gather(x: torch.Tensor) -> torch.Tensor:
            into = owner[..., None].expand_as(x)
            return torch.zeros_like(x[:, :, :slots]).scatter_add(-2, into, x)

        keys = gather(key) / counts.clamp_min(1)[..., None]
        lengths = gather((key.square() * metric).sum(-1, keepdim=True))[..., 0] / counts.clamp_min(1)
        spreads = (lengths - (keys.square() * metric).sum(-1)).clamp_min(0)
        return cls(keys, gather(value), counts, spreads / 2, owner)

    def far_from(self, near: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the tokens of each slot that are not near a block, and return the slots of those that are.

        near: (blocks, near tokens), padded by a number beyond the last token. A slot with only near tokens is left out
        by its count, an integer: the difference of its scores would be only rounding.
        """
        owner = pad(self.owner, (0, 1))[:, :, near]
        is_token = (near < self.owner.shape[-1]).to(self.counts.dtype).expand(owner.shape)
        counts = self.counts[:, :, None].expand(-1, -1, len(near), -1)
        return counts.scatter_add(-1, owner, -is_token), owner

    def scores(self, query: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Score slots, by all their far tokens, for queries (batch, heads, blocks, queries, dim)."""
        level = self.spreads[:, :, None] + counts.clamp_min(1).log()
        level = level.masked_fill(counts < 0.5, torch.finfo(level.dtype).min)
        return query @ self.keys[:, :, None].mT + level[..., None, :]


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a text or picture by the numbers of their tokens; the number after the last means no token."""

    members: torch.Tensor  # (blocks, tokens of a block)
    near: torch.Tensor  # (blocks, tokens near it)
    places: torch.Tensor  # where each token is among all members

    def chunks(self, queries: int) -> zip:
        """Split the blocks into chunks of at most `queries` queries, or of one block."""
        blocks = max(1, queries // self.members.shape[1])
        return zip(self.members.split(blocks), self.near.split(blocks), strict=True)


@lru_cache(maxsize=32)
@torch.inference_mode(False)  # no gradient can be computed with indices that were made in inference mode
def block_layout(grid: tuple[int, ...], block: tuple[int, ...], device: torch.device) -> BlockLayout:
    """Lay blocks over the axes of a grid; near a block are itself and those around it."""
    if len(grid) != len(block):
        raise ValueError(f"blocks of {block} tokens cannot lie on a grid of {grid}")
    tokens = math.prod(grid)
    along = [-(-length // size) for length, size in zip(grid, block, strict=True)]
    padded = torch.full([n * size + 2 * size for n, size in zip(along, block, strict=True)], tokens)
    inside = tuple(slice(size, size + length) for size, length in zip(block, grid, strict=True))
    padded[inside] = torch.arange(tokens).view(grid)
    near, members = [], []
    for corner in itertools.product(*(range(0, n * size, size) for n, size in zip(along, block, strict=True))):
        around = tuple(slice(start, start + 3 * size) for start, size in zip(corner, block, strict=True))
        inside_block = tuple(slice(start + size, start + 2 * size) for start, size in zip(corner, block, strict=True))
        near.append(padded[around].flatten())
        members.append(padded[inside_block].flatten())
    stacked = torch.stack(members)
    places = torch.empty(tokens + 1, dtype=torch.long)
    places[stacked.flatten()] = torch.arange(stacked.numel())
    return BlockLayout(stacked.to(device), torch.stack(near).to(device), places[:-1].to(device))
