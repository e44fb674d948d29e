"""Attention in both directions, in time linear in the tokens: near tokens exactly, all others through their slot.

    out_i = softmax_j( q_i·k_j if j is near i, else q_i·k̄_c(j) + spread_c(j) ) v_j

c(j) is the slot of token j, k̄_c the mean key of a slot, and its spread half of the variance of its tokens' scores: to
second order, the mean of exp(score) is exp(mean + variance / 2). It is computed as slots over all tokens, corrected at
the near ones. Near are the tokens of the same block and of the blocks around it, and the global tokens at either end,
such as [CLS] and [SEP], which also see every token exactly.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from .slots_of_all import find_slots, search_keys

CHUNK = 4096  # queries at once: bounds the copies of near keys and values


@dataclass(frozen=True)
class BothWays:
    """How a head attends. `block`: its tokens along each axis, one of a text and two of a picture."""

    block: tuple[int, ...]
    slots: int = 0
    first: int = 0  # global tokens before the others
    last: int = 0  # and after them

    @property
    def keys(self) -> float:
        """How many keys a token sees, with what finding its slots costs; global tokens see all, and are seen by all."""
        near = math.prod(3 * size for size in self.block)
        return near + self.slots + search_keys(self.slots) + 2 * (self.first + self.last)

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Sequence[int] = ()
    ) -> torch.Tensor:
        """Attend with rows of whole texts or pictures: (batch, heads, tokens, dim) each.

        A row of no more tokens than the keys that a token sees is read as by the teacher. `grid`: patches along each
        axis of a picture.
        """
        tokens = query.shape[2]
        if tokens <= self.keys:
            return scaled_dot_product_attention(query, key, value, scale=scale)
        ends = self.first, tokens - self.last
        query = query * scale
        edge = [*range(ends[0]), *range(ends[1], tokens)]
        own, inner_keys, inner_values = (x[:, :, ends[0] : ends[1]] for x in (query, key, value))
        inner = self.attend_within(own, inner_keys, inner_values, key[:, :, edge], value[:, :, edge], grid)
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
        """Attend with all tokens but the global ones, which are seen by each."""
        tokens = key.shape[2]
        blocks = block_layout(tuple(grid) or (tokens,), self.block, key.device)
        slots = Slots.of(query, key, value, self.slots) if self.slots else None
        padded = [pad(x, (0, 0, 0, 1)) for x in (query, key, value)]
        outputs = []
        for members, near in blocks.chunks(CHUNK):
            own, near_keys, near_values = padded[0][:, :, members], padded[1][:, :, near], padded[2][:, :, near]
            shown = own @ near_keys.mT
            shown = shown.masked_fill((near == tokens)[:, None], torch.finfo(shown.dtype).min)
            scores = [own @ edge_keys[:, :, None].mT, shown]
            if slots is not None:
                far, owner = slots.far_from(near)
                scores.append(slots.scores(own, far))
            weights = torch.cat(scores, -1).softmax(-1).split([x.shape[-1] for x in scores], -1)
            of_near = weights[1]
            if slots is not None:
                each = weights[2] / far[..., None, :].clamp_min(1)  # the weight of a token of the slot
                of_near = of_near - each.gather(-1, owner[..., None, :].expand_as(of_near))
            out = weights[0] @ edge_values[:, :, None] + of_near @ near_values
            outputs.append(out if slots is None else out + each @ slots.values[:, :, None])
        return torch.cat(outputs, 2).flatten(2, 3)[:, :, blocks.places]


@dataclass(frozen=True)
class HeadsOfLayer:
    """How each head of a layer attends; heads that attend alike do so together."""

    ways: tuple[BothWays, ...]

    @property
    def keys(self) -> float:
        """How many keys a token sees, a mean over the heads."""
        return sum(how.keys for how in self.ways) / len(self.ways)

    @property
    def first(self) -> int:
        return self.ways[0].first

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Sequence[int] = ()
    ) -> torch.Tensor:
        """Attend as BothWays does."""
        heads = {how: [i for i, each in enumerate(self.ways) if each == how] for how in dict.fromkeys(self.ways)}
        if len(heads) == 1:
            return self.ways[0].attend(query, key, value, scale, grid)
        parts = [how.attend(query[:, at], key[:, at], value[:, at], scale, grid) for how, at in heads.items()]
        order = [head for at in heads.values() for head in at]
        return torch.cat(parts, 1)[:, [order.index(head) for head in range(len(order))]]


def read_layers(
    ways: Sequence[tuple[Sequence[int], int]], heads: Sequence[Sequence[int]], first: int, last: int
) -> list[HeadsOfLayer]:
    """Return how the heads of each layer attend, by their numbers among some ways: a block and a number of slots."""
    different = [BothWays(tuple(block), slots, first, last) for block, slots in ways]
    return [HeadsOfLayer(tuple(different[way] for way in layer)) for layer in heads]


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
        """Find slots: a difference of two keys counts along each axis by how large the queries are there."""
        metric = query.detach().square().mean(-2, keepdim=True)
        weighted = key.detach() * metric.sqrt()
        owner = find_slots(weighted, slots)
        counts = torch.zeros_like(key[:, :, :slots, 0]).scatter_add(-1, owner, torch.ones_like(key[..., 0]))

        def gather(each: torch.Tensor) -> torch.Tensor:
            into = owner[..., None].expand_as(each)
            return torch.zeros_like(each[:, :, :slots]).scatter_add(-2, into, each)

        keys = gather(key) / counts.clamp_min(1)[..., None]
        lengths = gather((key.square() * metric).sum(-1, keepdim=True))[..., 0] / counts.clamp_min(1)
        spreads = (lengths - (keys.square() * metric).sum(-1)).clamp_min(0)
        return cls(keys, gather(value), counts, spreads / 2, owner)

    def far_from(self, near: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Count the tokens of each slot that are not near a block, and tell the slots of those that are.

        near: (blocks, near tokens); where a block has fewer, a number beyond the last. A slot whose tokens are all
        near is left out by its count, a whole number: the difference of its scores would be rounding alone.
        """
        owner = pad(self.owner, (0, 1))[:, :, near]
        there = (near < self.owner.shape[-1]).to(self.counts.dtype).expand(owner.shape)
        far = self.counts[:, :, None].expand(-1, -1, len(near), -1)
        return far.scatter_add(-1, owner, -there), owner

    def scores(self, query: torch.Tensor, far: torch.Tensor) -> torch.Tensor:
        """Score slots for queries (batch, heads, blocks, queries, dim) by all of their tokens that are far."""
        level = self.spreads[:, :, None] + far.clamp_min(1).log()
        level = level.masked_fill(far < 0.5, torch.finfo(level.dtype).min)
        return query @ self.keys[:, :, None].mT + level[..., None, :]


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a text or picture, whose tokens have numbers; the number after the last stands for no token."""

    members: torch.Tensor  # (blocks, tokens of a block)
    near: torch.Tensor  # (blocks, tokens near it)
    places: torch.Tensor  # where each token is among all members

    def chunks(self, queries: int) -> zip:
        """Cut the blocks into chunks of some number of queries."""
        blocks = max(1, queries // self.members.shape[1])
        return zip(self.members.split(blocks), self.near.split(blocks), strict=True)


@lru_cache(maxsize=32)
def block_layout(grid: tuple[int, ...], block: tuple[int, ...], device: torch.device) -> BlockLayout:
    """Lay blocks over the axes of a grid; near are a block and those around it."""
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
        own = tuple(slice(start + size, start + 2 * size) for start, size in zip(corner, block, strict=True))
        near.append(padded[around].flatten())
        members.append(padded[own].flatten())
    stacked = torch.stack(members)
    places = torch.empty(tokens + 1, dtype=torch.long)
    places[stacked.flatten()] = torch.arange(stacked.numel())
    return BlockLayout(stacked.to(device), torch.stack(near).to(device), places[:-1].to(device))
