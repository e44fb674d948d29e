"""Slots, into which all older tokens are merged, and how they merge: the reference for the kernels.

A slot begins as one token. After merging it has the mean key and the mean value of several, the weight Σ 1, and the
spread Σ |metric·(k - mean)|² / weight of their keys, where |metric·x|² is the mean of (q·x)² over queries. To a query
it is one more token, with the logit q·k + log weight + gain · spread: the mean of e^(q·k) over a slot exceeds
e^(q·mean) by more, the more its keys spread.

Merging costs more where more queries look: a slot counts by its importance, e^(mean query · key), and by how new it is.

Tokens leave the window in blocks, at places that do not depend on how a text was cut into calls: for a row at place p,
all tokens before the first multiple of the block that leaves at most `window` exact tokens, itself included, are in
slots. A block adds one slot per token; then the slots beyond the maximum are merged, each into one that stays. A period
is the places whose rows see the same slots.

Attention to them: token by token, the reference, and for a text, many periods at once (slots_torch.py); for a token of
all heads of a layer (token_buffer.py); for both in C (kernel_layer_in_c.py) and in Triton (kernel_text_slots.py,
kernel_token.py). Shapes as in features_torch.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import nn

from .packed_state import round_slots
from .state import cached_tensor, first_rows, is_traced, take_tokens

GAIN = 0.25  # half of the value for Gaussian keys: measured best, since no query sees the mean spread
MOST_IMPORTANT = 20.0  # limit of an importance's logarithm: costs stay within single precision
RECENCY = 1  # the cost of merging two slots is multiplied by this power of the newer slot's place
TINY = 1e-30  # the smallest squared distance of values: infinity times it is infinite

Tensor = torch.Tensor


class Merger(nn.Module):
    """A head's metric for distances of keys, its mean query for their importance, and the gain of a slot's spread.

    The last number of `mean_query` is the product of mean query and mean key.
    """

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.mean_query = nn.Parameter(torch.zeros(heads, dim + 1), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters: offloading libraries load them for a forward only."""
        return self.metric, self.gain, self.mean_query

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start with the same weight for all directions and all keys."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)
        self.mean_query.data.zero_()


@dataclass(frozen=True)
class Merging:
    """How some heads merge: metric and mean query (for keys multiplied by `root`), gain, and sizes."""

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    mean_query: Tensor  # (heads, dim + 1)
    window: int
    block: int
    root: float = 1.0
    bits: int = 16  # of a number in the slots

    @property
    def rows(self) -> Tensor:
        """The metric for keys as they are stored, and below it the mean query: (heads, dim + 1, dim + 1)."""
        query = torch.cat([self.mean_query[:, :-1] * self.root, self.mean_query[:, -1:]], -1)
        return torch.cat([nn.functional.pad(self.metric * self.root, (0, 1)), query[:, None]], 1)


@dataclass
class Slots:
    """Tokens, each merged of `weight` others: k, v (batch, heads, slots, dim), weight, spread (batch, heads, slots)."""

    k: Tensor
    v: Tensor
    weight: Tensor
    spread: Tensor

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.weight, self.spread

    def beside(self, extra: Slots) -> Slots:
        """Return these slots, followed by `extra`."""
        return Slots(*(torch.cat(pair, 2) for pair in zip(self.all(), extra.all(), strict=True)))


def merge_block(slots: Slots, k: Tensor, v: Tensor, incoming: Tensor, merging: Merging) -> Slots:
    """Merge the `incoming` (batch, block) tokens of a block (batch, heads, block, dim) into slots."""
    work, heads = slots.weight.dtype, k.shape[1]
    weight = incoming.to(work)[:, None].expand(-1, heads, -1)
    tokens = Slots(k.to(work), v.to(work), weight, torch.zeros_like(weight))
    joined = Slots(slots.k.to(work), slots.v.to(work), slots.weight, slots.spread).beside(tokens)
    rounding = Rounding(merging.rows, slots.k.dtype, (merging.bits,) * heads)
    merged = merge_slots(joined, slots.weight.shape[-1], rounding)
    return replace(merged, k=merged.k.to(slots.k.dtype), v=merged.v.to(slots.v.dtype))


@dataclass(frozen=True)
class Rounding:
    """How slots are stored: in a type, and in the bits of each head; and the metric of their keys."""

    metric: Tensor  # (heads, dim + 1, dim + 1) Merging.rows
    dtype: torch.dtype
    bits: tuple[int, ...]

    def round(self, slots: Slots) -> Slots:
        """Round slots as the state stores them."""
        k, v, work = slots.k, slots.v, slots.k.dtype
        if self.dtype != work:
            k, v = k.to(self.dtype), v.to(self.dtype)
        weight, spread = slots.weight, slots.spread
        if min(self.bits) < 16:
            k, v, weight, spread = round_slots(k, v, weight, spread, self.bits)
        return Slots(k.to(work), v.to(work), weight, spread)


def merge_slots(slots: Slots, count: int, rounding: Rounding) -> Slots:
    """Merge the cheapest pairs until at most `count` slots are not empty, and return those, in order.

    All slots beyond `count` are removed at once: those that cost least to merge with a slot before them. Each merges
    into the slot, of those that stay, with the lowest cost.
    """
    size, dims = slots.weight.shape[-1], (slots.k.shape[-1], slots.v.shape[-1])
    full = slots.weight > 0
    remaining = None
    if not full.all():
        remaining = full.sum(-1).clamp(max=count).flatten()
        slots = take_slots(slots, full.to(torch.uint8).sort(dim=-1, stable=True).indices)  # empty slots come first
    rows = merge_rows(lay_rows(slots, rounding.metric), size - count, dims, rounding, remaining is None, remaining)
    merged = slots_of_rows(rows, dims)
    return merged if remaining is None else keep_slots(merged, count)


def lay_rows(slots: Slots, metric: Tensor) -> Tensor:
    """Lay out what merging needs of slots: (batch, heads, slots, 2 · key_dim + value_dim + 6).

    These are metric·k, v, k, |metric·k|², |v|², spread, importance, 1 and weight.
    """
    metric, weight = metric.to(slots.k.dtype), slots.weight[..., None]
    projected, importance_logit = (slots.k @ metric[..., :-1].mT).split([slots.k.shape[-1], 1], -1)
    importance = (importance_logit - metric[:, -1:, -1:]).clamp_(-MOST_IMPORTANT, MOST_IMPORTANT).exp_()
    vectors = torch.cat([projected, slots.v, slots.k], -1)
    if slots.k.shape[-1] == slots.v.shape[-1]:  # at once: calling an operation takes longer than its work
        squares = vectors[..., : 2 * projected.shape[-1]].unflatten(-1, (2, -1)).square().sum(-1)
    else:
        squares = torch.stack([projected.square().sum(-1), slots.v.square().sum(-1)], -1)
    return torch.cat([vectors, squares, slots.spread[..., None], importance, torch.ones_like(weight), weight], -1)


def slots_of_rows(rows: Tensor, dims: tuple[int, int]) -> Slots:
    """Return the slots that `lay_rows` laid out."""
    _, v, k, numbers = rows.split([dims[0], dims[1], dims[0], 6], -1)
    return Slots(k, v, numbers[..., 5], numbers[..., 2])


def merge_rows(
    rows: Tensor, excess: int, dims: tuple[int, int], rounding: Rounding, full: bool, remaining: Tensor | None = None
) -> Tensor:
    """Remove `excess` slots, laid out as (batch, heads, slots, …), by merging; `rows` is overwritten.

    `full`: no slot is empty. `remaining` (batch · heads,): how many slots that are not empty stay; then empty slots are
    removed first, the last ones of each head.
    """
    shape, rows = rows.shape, rows.flatten(0, 1)
    stay, removed, partner = choose_pairs(rows.detach(), excess, dims, full, remaining)
    rows, at = rows.flatten(0, 1), torch.cat([partner, removed], 1)
    pairs = rows.index_select(0, at.flatten())
    sums = (pairs[:, :-1] * pairs[:, -1:]).unflatten(0, at.shape)
    alike = (partner[:, :, None] == partner[:, None]).to(rows.dtype)  # pairs that merge into the same slot
    sums = torch.baddbmm(sums[:, :excess], alike, sums[:, excess:]).unflatten(0, shape[:2])
    weight = sums[..., -1:]
    seen, v, k, numbers = (sums / (weight if full else weight.clamp_min(1))).split([dims[0], dims[1], dims[0], 5], -1)
    spread = (numbers[..., 0] + numbers[..., 2] - seen.square().sum(-1)).clamp_min_(0)
    merged = lay_rows(rounding.round(Slots(k, v, weight[..., 0], spread)), rounding.metric)
    rows.index_copy_(0, partner.flatten(), merged.flatten(0, 2))
    return rows.index_select(0, stay).view(*shape[:2], shape[2] - excess, shape[3])


def drop_empty(rows: Tensor, excess: int, remaining: Tensor) -> Tensor:
    """Remove the last `excess` empty slots of (batch, heads, slots, …), where `remaining` are not empty."""
    stays, shape = ~last_empty(rows[..., -1].flatten(0, 1), excess, remaining), rows.shape
    rows = rows.flatten(0, 2).index_select(0, stays.flatten().nonzero()[:, 0])
    return rows.view(*shape[:2], shape[2] - excess, shape[3])


def last_empty(weight: Tensor, excess: int, remaining: Tensor) -> Tensor:
    """Return which empty slots are removed if `excess` slots go and `remaining` (rows,) that are not empty stay."""
    empty = weight == 0
    return empty & (empty.cumsum(-1) > weight.shape[-1] - excess - remaining[:, None])


@torch.no_grad()
def choose_pairs(
    rows: Tensor, excess: int, dims: tuple[int, int], full: bool, remaining: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose which slots stay (rows · slots,), which are removed (rows, excess), and each one's partner.

    All are indices of slots in all rows. A removed empty slot adds nothing to its partner.
    """
    count, size, device = *rows.shape[:2], rows.device
    cost = merging_costs(rows, dims, full)
    cheapest = (cost + not_before(size, cost.dtype, device)).amin(-1)
    if remaining is not None:
        cheapest.masked_fill_(last_empty(rows[..., -1], excess, remaining), -1.0)
    removed = cheapest.sort(dim=-1, stable=True).indices[:, :excess]
    penalty = nothing(count, size, cost.dtype, device).scatter(1, removed, math.inf)
    removed = removed + first_rows(count, size, device)[:, None]
    costs = cost.flatten(0, 1).index_select(0, removed.flatten()).view(count, excess, size).add_(penalty[:, None])
    partner = costs.argmin(-1) + first_rows(count, size, device)[:, None]
    if is_traced():  # a graph cannot use nonzero, whose size depends on values
        stay = penalty.sort(dim=-1, stable=True).indices[:, : size - excess] + first_rows(count, size, device)[:, None]
        return stay.flatten(), removed, partner
    return (penalty == 0).flatten().nonzero()[:, 0], removed, partner


def merging_costs(rows: Tensor, dims: tuple[int, int], full: bool) -> Tensor:
    """Compute the cost of merging each pair, infinite with empty slots unless all are full: (rows, slots, slots).

    The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
    of its values; the product of both squares is its fourth power, which needs no roots. An error counts more where
    queries look: at keys with a large product with the mean query, and at newer ones. Slots are in the order of their
    tokens; without the weight of newer ones, the last tokens would be stored as coarsely as the first.
    """
    projected, v, weight = rows[..., : dims[0]], rows[..., dims[0] : sum(dims)], rows[..., -1]
    square = rows[..., -6] if full else rows[..., -6].masked_fill(weight == 0, math.inf)  # empty slots are far away
    inverse = (weight if full else weight.clamp_min(1)).reciprocal()
    keys = squared_distances(projected, square).square_().div_(inverse[..., None] + inverse[:, None]).square_()
    cost = keys.mul_(squared_distances(v, rows[..., -5]).clamp_min_(TINY))
    cost.mul_(torch.maximum(rows[..., -3, None], rows[..., None, :, -3]))
    if full:
        return cost.mul_(newer_places(weight.shape[-1], cost.dtype, cost.device))
    place = (weight > 0).cumsum(-1).to(cost.dtype)
    return cost.mul_(torch.maximum(place[..., None], place[:, None]) ** RECENCY)


@cached_tensor
def newer_places(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of each pair's error by the place of its newer slot: (size, size)."""
    place = torch.arange(1, size + 1, dtype=dtype, device=device)
    return torch.maximum(place[:, None], place) ** RECENCY


@cached_tensor
def nothing(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros: (count, size)."""
    return torch.zeros(count, size, dtype=dtype, device=device)


@cached_tensor
def not_before(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return infinity where a column is not before its row, 0 elsewhere: (size, size)."""
    return torch.full((size, size), math.inf, dtype=dtype, device=device).triu()


def keep_slots(slots: Slots, room: int) -> Slots:
    """Return the slots that are not empty, at most `room`, in order."""
    return take_slots(slots, (slots.weight == 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :room])


def take_slots(slots: Slots, index: Tensor) -> Slots:
    """Take slots by an index (batch, heads, count)."""
    return Slots(
        take_by_head(slots.k, index),
        take_by_head(slots.v, index),
        slots.weight.gather(2, index),
        slots.spread.gather(2, index),
    )


def take_by_head(x: Tensor, index: Tensor) -> Tensor:
    """Take slots of x (batch, heads, slots, dim) by an index (batch, heads, count)."""
    return take_tokens(x.flatten(0, 1), index.flatten(0, 1)).unflatten(0, index.shape[:2])


def squared_distances(x: Tensor, square: Tensor) -> Tensor:
    """Return |x_i - x_j|², from |x|²: (rows, slots, dim) -> (rows, slots, slots)."""
    return (square[..., None] + square[:, None]).baddbmm_(x, x.mT, alpha=-2)
