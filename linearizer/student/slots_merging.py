"""Slots, which all older tokens are merged into, and how they merge: the reference of the kernels that do it.

A slot is a token until it is merged: then it has the mean key and the mean value of several, the weight Σ 1, and the
spread Σ |metric·(k - mean)|² / weight of their keys, metric being such that |metric·x|² is the mean of (q·x)² over
queries. To a query it is one more token, with the logit q·k + log weight + gain · spread: the mean of e^(q·k) over a
slot is more than e^(q·mean) as its keys spread.

What merges costs the more, the more queries look at it: a slot counts by e^(mean query · key), and by how new it is.

Tokens leave the window in blocks, at places that do not depend on how a text was cut into calls: to a row at place p,
all tokens before the first multiple of the block that leaves at most `window` exact tokens, itself included, are in
slots. A block adds as many slots as it has tokens; then as many as are too many go, each into one that stays. The
places whose rows see the same slots are a period.

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
from .state import first_rows, is_traced, made_once

GAIN = 0.25  # half of what a Gaussian spread of keys calls for: measured best, since no query sees the mean spread
MOST_IMPORTANT = 20.0  # logarithm beyond which an importance counts no further: costs stay within single precision
RECENCY = 1  # power of the place of the newer of two slots by which what merging them costs is multiplied
TINY = 1e-30  # a squared distance of values that counts as none: infinity times it is infinite

Tensor = torch.Tensor


class Merger(nn.Module):
    """How far apart two keys are to the queries of a head, and how important; what spread adds to a slot's logit.

    A key is as important as its product with the mean query is large. Behind that stands its product with the mean key.
    """

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)
        self.mean_query = nn.Parameter(torch.zeros(heads, dim + 1), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the parameters: what offloads them brings them for a forward."""
        return self.metric, self.gain, self.mean_query

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start where all directions count alike, and all keys."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)
        self.mean_query.data.zero_()


@dataclass(frozen=True)
class Merging:
    """How some heads merge: metric and mean query (for keys that are multiplied by `root`) and gain, and sizes."""

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    mean_query: Tensor  # (heads, dim + 1)
    window: int
    block: int
    root: float = 1.0
    bits: int = 16  # of a number in the slots

    @property
    def scaled(self) -> Merging:
        """The same for keys as they are kept."""
        query = torch.cat([self.mean_query[:, :-1] * self.root, self.mean_query[:, -1:]], -1)
        return replace(self, metric=self.metric * self.root, mean_query=query, root=1.0)

    @property
    def rows(self) -> Tensor:
        """The metric for keys as they are kept, and below it the mean query: (heads, dim + 1, dim + 1)."""
        scaled = self.scaled
        return torch.cat([nn.functional.pad(scaled.metric, (0, 1)), scaled.mean_query[:, None]], 1)

    @property
    def unrounded(self) -> Merging:
        """The same without rounding what slots hold."""
        return replace(self.scaled, bits=16)


@dataclass
class Slots:
    """Tokens, each merged of `weight` others: k, v (batch, heads, slots, dim), weight, spread (batch, heads, slots)."""

    k: Tensor
    v: Tensor
    weight: Tensor
    spread: Tensor

    def all(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.k, self.v, self.weight, self.spread

    def beside(self, other: Slots) -> Slots:
        """Return these slots, then the others."""
        return Slots(*(torch.cat(pair, 2) for pair in zip(self.all(), other.all(), strict=True)))


def merge_block(held: Slots, k: Tensor, v: Tensor, comes: Tensor, merging: Merging) -> Slots:
    """Merge a block of tokens (batch, heads, block, dim), of which some come (batch, block), into slots."""
    work, heads = held.weight.dtype, k.shape[1]
    weight = comes.to(work)[:, None].expand(-1, heads, -1)
    new = Slots(k.to(work), v.to(work), weight, torch.zeros_like(weight))
    both = Slots(held.k.to(work), held.v.to(work), held.weight, held.spread).beside(new)
    rounding = Rounding(merging.rows, held.k.dtype, (merging.bits,) * heads)
    merged = merge_slots(both, held.weight.shape[-1], rounding)
    return replace(merged, k=merged.k.to(held.k.dtype), v=merged.v.to(held.v.dtype))


@dataclass(frozen=True)
class Rounding:
    """How the mean of a slot is kept: in a type, and in the bits of each head; and the metric by which it is seen."""

    metric: Tensor  # (heads, dim + 1, dim + 1) Merging.rows
    kept: torch.dtype
    bits: tuple[int, ...]

    def round(self, slots: Slots) -> Slots:
        """Round slots to what a state keeps of them."""
        k, v, work = slots.k, slots.v, slots.k.dtype
        if self.kept != work:
            k, v = k.to(self.kept), v.to(self.kept)
        weight, spread = slots.weight, slots.spread
        if min(self.bits) < 16:
            k, v, weight, spread = round_slots(k, v, weight, spread, self.bits)
        return Slots(k.to(work), v.to(work), weight, spread)


def merge_slots(slots: Slots, count: int, rounding: Rounding) -> Slots:
    """Merge the cheapest pairs until at most `count` slots are not empty, and return those, in order.

    As many slots go at once as are too many: those that cost least to merge with a slot before them. Each goes into the
    slot, of those that stay, with which merging costs least.
    """
    size, dims = slots.weight.shape[-1], (slots.k.shape[-1], slots.v.shape[-1])
    full = slots.weight > 0
    left = None
    if not full.all():
        left = full.sum(-1).clamp(max=count).flatten()
        slots = take_slots(slots, full.to(torch.uint8).sort(dim=-1, stable=True).indices)  # what is empty comes first
    rows = merge_rows(lay_rows(slots, rounding.metric), size - count, dims, rounding, left is None, left)
    merged = slots_of_rows(rows, dims)
    return merged if left is None else keep_slots(merged, count)


def lay_rows(slots: Slots, metric: Tensor) -> Tensor:
    """Lay side by side what merging needs of slots: (batch, heads, slots, 2 · key_dim + value_dim + 6).

    These are metric·k, v, k, |metric·k|², |v|², spread, importance, 1 and weight.
    """
    metric, weight = metric.to(slots.k.dtype), slots.weight[..., None]
    seen, asked = (slots.k @ metric[..., :-1].mT).split([slots.k.shape[-1], 1], -1)
    importance = (asked - metric[:, -1:, -1:]).clamp_(-MOST_IMPORTANT, MOST_IMPORTANT).exp_()
    vectors = torch.cat([seen, slots.v, slots.k], -1)
    if slots.k.shape[-1] == slots.v.shape[-1]:  # in one go: a call of an operation takes longer than its work
        squares = vectors[..., : 2 * seen.shape[-1]].unflatten(-1, (2, -1)).square().sum(-1)
    else:
        squares = torch.stack([seen.square().sum(-1), slots.v.square().sum(-1)], -1)
    return torch.cat([vectors, squares, slots.spread[..., None], importance, torch.ones_like(weight), weight], -1)


def slots_of_rows(rows: Tensor, dims: tuple[int, int]) -> Slots:
    """Return the slots that `lay_rows` laid out."""
    _, v, k, numbers = rows.split([dims[0], dims[1], dims[0], 6], -1)
    return Slots(k, v, numbers[..., 5], numbers[..., 2])


def merge_rows(
    rows: Tensor, most: int, dims: tuple[int, int], rounding: Rounding, full: bool, left: Tensor | None = None
) -> Tensor:
    """Merge slots, laid out as (batch, heads, slots, …), until there are `most` fewer; `rows` is written over.

    `full` says that none is empty, `left` (batch · heads,), where empty ones go, too, the last such, how many that are
    not empty stay.
    """
    shape, rows = rows.shape, rows.flatten(0, 1)
    stay, gone, partner = choose_pairs(rows.detach(), most, dims, full, left)
    rows, at = rows.flatten(0, 1), torch.cat([partner, gone], 1)
    pairs = rows.index_select(0, at.flatten())
    sums = (pairs[:, :-1] * pairs[:, -1:]).unflatten(0, at.shape)
    alike = (partner[:, :, None] == partner[:, None]).to(rows.dtype)  # what goes where another goes
    sums = torch.baddbmm(sums[:, :most], alike, sums[:, most:]).unflatten(0, shape[:2])
    weight = sums[..., -1:]
    seen, v, k, numbers = (sums / (weight if full else weight.clamp_min(1))).split([dims[0], dims[1], dims[0], 5], -1)
    spread = (numbers[..., 0] + numbers[..., 2] - seen.square().sum(-1)).clamp_min_(0)
    merged = lay_rows(rounding.round(Slots(k, v, weight[..., 0], spread)), rounding.metric)
    rows.index_copy_(0, partner.flatten(), merged.flatten(0, 2))
    return rows.index_select(0, stay).view(*shape[:2], shape[2] - most, shape[3])


def drop_empty(rows: Tensor, most: int, left: Tensor) -> Tensor:
    """Leave out `most` empty slots of (batch, heads, slots, …), the last ones; `left` says how many are not empty."""
    stays, shape = ~last_empty(rows[..., -1].flatten(0, 1), most, left), rows.shape
    rows = rows.flatten(0, 2).index_select(0, stays.flatten().nonzero()[:, 0])
    return rows.view(*shape[:2], shape[2] - most, shape[3])


def last_empty(weight: Tensor, most: int, left: Tensor) -> Tensor:
    """Return which empty slots go so that there are `most` fewer slots, `left` (rows,) of which are not empty."""
    empty = weight == 0
    return empty & (empty.cumsum(-1) > weight.shape[-1] - most - left[:, None])


@torch.no_grad()
def choose_pairs(
    rows: Tensor, most: int, dims: tuple[int, int], full: bool, left: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose which slots stay (rows · slots,), which go (rows, most), and into which others, as numbers in all rows.

    An empty slot that goes adds nothing, wherever it goes.
    """
    count, size, device = *rows.shape[:2], rows.device
    cost = merging_costs(rows, dims, full)
    cheapest = (cost + not_before(size, cost.dtype, device)).amin(-1)
    if left is not None:
        cheapest.masked_fill_(last_empty(rows[..., -1], most, left), -1.0)
    gone = cheapest.sort(dim=-1, stable=True).indices[:, :most]
    goes = nothing(count, size, cost.dtype, device).scatter(1, gone, math.inf)
    gone = gone + first_rows(count, size, device)[:, None]
    partner = cost.flatten(0, 1).index_select(0, gone.flatten()).view(count, most, size).add_(goes[:, None]).argmin(-1)
    partner += first_rows(count, size, device)[:, None]
    if is_traced():  # a graph does not know how many are not 0
        stay = goes.sort(dim=-1, stable=True).indices[:, : size - most] + first_rows(count, size, device)[:, None]
        return stay.flatten(), gone, partner
    return (goes == 0).flatten().nonzero()[:, 0], gone, partner


def merging_costs(rows: Tensor, dims: tuple[int, int], full: bool) -> Tensor:
    """Compute what merging each pair costs, infinite with empty slots, unless all are full: (rows, slots, slots).

    The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
    of its values; the product of both is its fourth power, which takes no roots. An error counts for more where queries
    look: at keys with a large product with the mean query, and at newer ones. Slots stand in the order of their tokens;
    without that, what is read last would be remembered as coarsely as what was read first, and the worse the longer a
    text is.
    """
    seen, v, weight = rows[..., : dims[0]], rows[..., dims[0] : sum(dims)], rows[..., -1]
    far = rows[..., -6] if full else rows[..., -6].masked_fill(weight == 0, math.inf)  # an empty one is far away
    inverse = (weight if full else weight.clamp_min(1)).reciprocal()
    keys = squared_distances(seen, far).square_().div_(inverse[..., None] + inverse[:, None]).square_()
    cost = keys.mul_(squared_distances(v, rows[..., -5]).clamp_min_(TINY))
    cost.mul_(torch.maximum(rows[..., -3, None], rows[..., None, :, -3]))
    if full:
        return cost.mul_(newer_places(weight.shape[-1], cost.dtype, cost.device))
    place = (weight > 0).cumsum(-1).to(cost.dtype)
    return cost.mul_(torch.maximum(place[..., None], place[:, None]) ** RECENCY)


@made_once
def newer_places(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the weight of an error by the place of the newer slot of each pair: (size, size)."""
    place = torch.arange(1, size + 1, dtype=dtype, device=device)
    return torch.maximum(place[:, None], place) ** RECENCY


@made_once
def nothing(count: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros: (count, size)."""
    return torch.zeros(count, size, dtype=dtype, device=device)


@made_once
def not_before(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Infinity where a column is not before its row, 0 elsewhere: (size, size)."""
    return torch.full((size, size), math.inf, dtype=dtype, device=device).triu()


def keep_slots(slots: Slots, room: int) -> Slots:
    """Return the slots that are not empty, in order, where at most `room` are."""
    return take_slots(slots, (slots.weight == 0).to(torch.uint8).sort(dim=-1, stable=True).indices[..., :room])


def take_slots(slots: Slots, index: Tensor) -> Slots:
    """Take slots by an index (batch, heads, some)."""
    index, shape = index.flatten(0, 1), slots.weight.shape[:2]
    k, v = (take_rows(x.flatten(0, 1), index).unflatten(0, shape) for x in (slots.k, slots.v))
    weight, spread = (x.flatten(0, 1).gather(1, index).unflatten(0, shape) for x in (slots.weight, slots.spread))
    return Slots(k, v, weight, spread)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Take rows of x (batch, rows, dim) by an index (batch, some): whole rows, where a gather takes single numbers."""
    at = index + first_rows(*x.shape[:2], x.device)[:, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, index.shape)


def squared_distances(x: Tensor, square: Tensor) -> Tensor:
    """|x_i - x_j|², given |x|²: (rows, slots, dim) -> (rows, slots, slots)."""
    return (square[..., None] + square[:, None]).baddbmm_(x, x.mT, alpha=-2)
