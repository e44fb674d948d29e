"""Merging slots in PyTorch: the reference of kernel_slots_merging.py. slots.py defines a slot.

Shapes as in slots.py.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .few_bits import ROTATED, rotate

MAX_MERGED_ROWS = 512  # slots and tokens of a block that one program of a kernel merges at most
TINY = 1e-30  # a squared distance of values that counts as none: infinity times it is infinite

Tensor = torch.Tensor


@dataclass(frozen=True)
class Merging:
    """How some heads merge: metric (for keys that are multiplied by `root`) and gain of a Merger, and sizes."""

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    window: int
    block: int
    root: float = 1.0
    bits: int = 16  # of a number in the slots

    @property
    def scaled(self) -> Tensor:
        """The metric for keys as they are kept."""
        return (rotate(self.metric) if self.bits in ROTATED else self.metric) * self.root


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
        """Give these slots, then the others."""
        return Slots(*(torch.cat(pair, 2) for pair in zip(self.all(), other.all(), strict=True)))


def merge_slots(slots: Slots, count: int | Tensor, metric: Tensor, room: int | None = None) -> Slots:
    """Merge the cheapest pairs until at most `count` slots are not empty, and return those, in order.

    As many slots go at once as are too many: those that cost least to merge with a slot before them. Each goes into the
    slot, of those that stay, with which merging costs least. `count` is a number, or one for each head; the result has
    `room` for the largest.
    """
    batch, heads, size = slots.weight.shape
    room = int(torch.as_tensor(count).max()) if room is None else room
    counts = torch.as_tensor(count, device=slots.weight.device).expand(batch, heads).reshape(-1, 1)
    seen, v, k = slots.k @ metric.to(slots.k.dtype).mT, slots.v, slots.k
    row, weight, spread = (
        torch.cat([seen, v, k], -1).flatten(0, 1),
        slots.weight.flatten(0, 1),
        slots.spread.flatten(0, 1),
    )
    chosen = choose_pairs(seen.flatten(0, 1), v.flatten(0, 1), weight, counts, size - room)
    row, weight, spread = join_pairs(row, weight, spread, chosen, k.shape[-1])
    _, v, k = row.unflatten(0, (batch, heads)).split([x.shape[-1] for x in (seen, v, k)], -1)
    return Slots(k, v, weight.unflatten(0, (batch, heads)), spread.unflatten(0, (batch, heads)))


@dataclass
class Pairs:
    """Which slots of a head go into which: rows are pairs of a text and a head."""

    stay: Tensor  # (rows, room) the slots that stay, in order; then any
    stays: Tensor  # (rows, room) whether one does
    gone: Tensor  # (rows, most) the slots that go
    goes: Tensor  # (rows, most) whether one does
    into: Tensor  # (rows, most) the number, among those that stay, of the slot that it goes into


@torch.no_grad()
def choose_pairs(seen: Tensor, v: Tensor, weight: Tensor, counts: Tensor, most: int) -> Pairs:
    """Choose the pairs that merge until each row has at most its count; no more than `most` slots are too many."""
    size, cost = weight.shape[-1], merging_costs(seen, v, weight)
    cheapest, present = (cost + not_before(size, cost.dtype, cost.device)).amin(-1), weight > 0
    gone = cheapest.sort(dim=-1, stable=True).indices[:, :most]
    goes = torch.arange(most, device=gone.device) < present.sum(-1, keepdim=True) - counts
    stays = present.scatter(1, gone, present.gather(1, gone).logical_and_(~goes))
    partner = take_rows(cost, gone).masked_fill_(~stays[:, None], float("inf")).argmin(-1)
    into = (stays.cumsum(-1) - 1).gather(1, partner).clamp_min_(0)
    stay = stays.logical_not().to(torch.uint8).sort(dim=-1, stable=True).indices[:, : size - most]
    return Pairs(stay, stays.gather(1, stay), gone, goes, into)


def merging_costs(seen: Tensor, v: Tensor, weight: Tensor) -> Tensor:
    """Compute what merging each pair costs, infinite with empty slots: (rows, slots, slots).

    The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
    of its values; this is its fourth power, which takes no roots.
    """
    inverse = weight.clamp_min(1).reciprocal()
    never = torch.zeros_like(weight).masked_fill_(weight == 0, float("inf"))  # empty: as far away as can be
    cost, light = squared_distances(seen, never).square_().square_(), inverse[..., None] + inverse[..., None, :]
    return cost.mul_(squared_distances(v, None).clamp_min_(TINY)).div_(light).div_(light)


@functools.lru_cache(maxsize=64)
def not_before(size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Infinity where a column is not before its row, 0 elsewhere: (size, size)."""
    return torch.full((size, size), float("inf"), dtype=dtype, device=device).triu()


def join_pairs(row: Tensor, weight: Tensor, spread: Tensor, pairs: Pairs, seen: int) -> tuple[Tensor, Tensor, Tensor]:
    """Merge pairs: means of what lies side by side in `row` (rows, slots, dims), at first metric·k with `seen` dims."""
    own, other = take_rows(row, pairs.stay), take_rows(row, pairs.gone)
    weights = weight.gather(1, pairs.stay) * pairs.stays, weight.gather(1, pairs.gone) * pairs.goes
    total = weights[0].scatter_add(1, pairs.into, weights[1])
    total_or_one = total.clamp_min(1)
    shares = weights[0] / total_or_one, weights[1] / total_or_one.gather(1, pairs.into)
    into = pairs.into[..., None].expand_as(other)
    mean = (own * shares[0][..., None]).scatter_add(1, into, other * shares[1][..., None])
    at = mean[..., :seen]
    moved = [(own[..., :seen] - at).square().sum(-1), (other[..., :seen] - take_rows(at, pairs.into)).square().sum(-1)]
    spreads = shares[0] * (spread.gather(1, pairs.stay) + moved[0])
    spreads = spreads.scatter_add(1, pairs.into, shares[1] * (spread.gather(1, pairs.gone) + moved[1]))
    return mean, total, spreads


def keep_slots(slots: Slots, room: int) -> Slots:
    """Return the slots that are not empty, in order, where at most `room` are."""
    full = (slots.weight == 0).flatten(0, 1).to(torch.uint8).sort(dim=-1, stable=True).indices[:, :room]
    shape = slots.weight.shape[:2]
    k, v = (take_rows(x.flatten(0, 1), full).unflatten(0, shape) for x in (slots.k, slots.v))
    weight, spread = (x.flatten(0, 1).gather(1, full).unflatten(0, shape) for x in (slots.weight, slots.spread))
    return Slots(k, v, weight, spread)


def take_rows(x: Tensor, index: Tensor) -> Tensor:
    """Take rows of x (batch, rows, dim) by an index (batch, some): whole rows, where a gather takes single numbers."""
    at = index + torch.arange(0, x.shape[0] * x.shape[1], x.shape[1], device=x.device)[:, None]
    return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, index.shape)


def squared_distances(x: Tensor, more: Tensor | None) -> Tensor:
    """|x_i - x_j|², and more_i + more_j: (rows, slots, dim) -> (rows, slots, slots)."""
    square = x.square().sum(-1)
    if more is not None:
        square = square.add_(more)
    return torch.baddbmm(square[..., None] + square[:, None], x, x.mT, alpha=-2)
