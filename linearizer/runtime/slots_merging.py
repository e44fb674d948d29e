"""Merging slots in PyTorch: the reference of kernel_slots_merging.py. slots.py defines a slot.

Shapes as in slots.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from .few_bits import BY_AXIS, round_counts, round_together
from .state import made_once

MAX_MERGED_ROWS = 512  # slots and tokens of a block that one program of a kernel merges at most
TINY = 1e-30  # a squared distance of values that counts as none: infinity times it is infinite

Tensor = torch.Tensor


@dataclass(frozen=True)
class Merging:
    """How some heads merge: metric (for keys that are multiplied by `root`, or kept by axes) and gain, and sizes."""

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    window: int
    block: int
    root: float = 1.0
    bits: int = 16  # of a number in the slots

    @property
    def scaled(self) -> Tensor:
        """The metric for keys as they are kept."""
        return self.metric if self.bits in BY_AXIS else self.metric * self.root

    @property
    def unrounded(self) -> Merging:
        """The same without rounding what slots hold."""
        return replace(self, metric=self.scaled, root=1.0, bits=16)


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


def merge_block(held: Slots, k: Tensor, v: Tensor, comes: Tensor, merging: Merging) -> Slots:
    """Merge a block of tokens (batch, heads, block, dim), of which some come (batch, block), into slots."""
    work, heads = held.weight.dtype, k.shape[1]
    weight = comes.to(work)[:, None].expand(-1, heads, -1)
    new = Slots(k.to(work), v.to(work), weight, torch.zeros_like(weight))
    both = Slots(held.k.to(work), held.v.to(work), held.weight, held.spread).beside(new)
    rounding = Rounding(merging.scaled, held.k.dtype, (merging.bits,) * heads)
    merged = merge_slots(both, held.weight.shape[-1], rounding)
    return replace(merged, k=merged.k.to(held.k.dtype), v=merged.v.to(held.v.dtype))


@dataclass(frozen=True)
class Rounding:
    """How the mean of a slot is kept: in a type, and in the bits of each head; and the metric by which it is seen."""

    metric: Tensor  # (heads, dim, dim)
    kept: torch.dtype
    bits: tuple[int, ...]

    def round(self, slots: Slots) -> Slots:
        """Round slots to what a state keeps of them."""
        work = slots.k.dtype
        if self.kept != work:
            slots = replace(slots, k=slots.k.to(self.kept), v=slots.v.to(self.kept))
        if len({*self.bits}) == 1:
            slots = round_alike(slots, self.bits[0])
        else:
            slots = Slots(*(x.clone() for x in slots.all()))
            for bits in {*self.bits} - {16}:
                heads = [head for head, own in enumerate(self.bits) if own == bits]
                some = round_alike(Slots(*(x[:, heads] for x in slots.all())), bits)
                for whole, part in zip(slots.all(), some.all(), strict=True):
                    whole[:, heads] = part
        return replace(slots, k=slots.k.to(work), v=slots.v.to(work))


def round_alike(slots: Slots, bits: int) -> Slots:
    """Round slots of heads that have the same bits."""
    if bits == 16:
        return slots
    counted = slots.weight, slots.spread
    k, v = round_together(slots.k, slots.v, bits)
    return Slots(k, v, *(round_counts(*counted) if bits in BY_AXIS else counted))


def merge_slots(slots: Slots, count: int | Tensor, rounding: Rounding, room: int | None = None) -> Slots:
    """Merge the cheapest pairs until at most `count` slots are not empty, and return those, in order.

    As many slots go at once as are too many: those that cost least to merge with a slot before them. Each goes into the
    slot, of those that stay, with which merging costs least. `count` is a number, or one for each head; the result has
    `room` for the largest.
    """
    (batch, heads, size), dims = slots.weight.shape, (slots.k.shape[-1], slots.v.shape[-1])
    if room is None:
        room = count if isinstance(count, int) else int(count.max())
    full = slots.weight > 0
    left = None
    if not full.all():
        most = torch.as_tensor(count, device=full.device).expand(batch, heads)
        left = torch.minimum(full.sum(-1), most).flatten()
        slots = take_slots(slots, full.to(torch.uint8).sort(dim=-1, stable=True).indices)  # what is empty comes first
    rows = merge_rows(lay_rows(slots, rounding.metric), size - room, dims, rounding, left is None, left)
    merged = slots_of_rows(rows, dims)
    return merged if left is None else keep_slots(merged, room)


def lay_rows(slots: Slots, metric: Tensor) -> Tensor:
    """Lay side by side what merging needs of slots: (batch, heads, slots, 2 · key_dim + value_dim + 4).

    These are metric·k, v, k, |metric·k|², |v|², spread and weight.
    """
    seen = slots.k @ metric.to(slots.k.dtype).mT
    vectors, counts = torch.cat([seen, slots.v, slots.k], -1), (slots.spread[..., None], slots.weight[..., None])
    if slots.k.shape[-1] == slots.v.shape[-1]:  # in one go: a call of an operation takes longer than its work
        squares = vectors[..., : 2 * seen.shape[-1]].unflatten(-1, (2, -1)).square().sum(-1)
    else:
        squares = torch.stack([seen.square().sum(-1), slots.v.square().sum(-1)], -1)
    return torch.cat([vectors, squares, *counts], -1)


def slots_of_rows(rows: Tensor, dims: tuple[int, int]) -> Slots:
    """Give the slots that `lay_rows` laid out."""
    _, v, k, numbers = rows.split([dims[0], dims[1], dims[0], 4], -1)
    return Slots(k, v, numbers[..., 3], numbers[..., 2])


def merge_rows(
    rows: Tensor, most: int, dims: tuple[int, int], rounding: Rounding, full: bool, left: Tensor | None = None
) -> Tensor:
    """Merge slots, laid out as (batch, heads, slots, …), until there are `most` fewer; `rows` is written over.

    `full` says that none is empty, `left` (batch · heads,), where empty ones go, too, the last such, how many that are
    not empty stay.
    """
    shape, rows = rows.shape, rows.flatten(0, 1)
    stay, gone, partner = choose_pairs(rows.detach(), most, dims, full, left)
    at = torch.cat([partner, gone], 1) + first_rows(*rows.shape[:2], rows.device)
    rows = rows.flatten(0, 1)
    pairs = rows.index_select(0, at.flatten())
    sums, weight = pairs * pairs[:, -1:], pairs[:, -1:]
    sums[:, -1:] = weight
    sums = sums.unflatten(0, at.shape)
    alike = (partner[:, :, None] == partner[:, None]).to(rows.dtype)  # what goes where another goes
    sums = torch.baddbmm(sums[:, :most], alike, sums[:, most:]).unflatten(0, shape[:2])
    weight = sums[..., -1:] if full else sums[..., -1:].clamp_min(1)
    seen, v, k, numbers = (sums / weight).split([dims[0], dims[1], dims[0], 4], -1)
    spread = (numbers[..., 0] + numbers[..., 2] - seen.square().sum(-1)).clamp_min_(0)
    merged = lay_rows(rounding.round(Slots(k, v, sums[..., -1], spread)), rounding.metric)
    rows.index_copy_(0, at[:, :most].flatten(), merged.flatten(0, 2))
    return rows.index_select(0, stay).view(*shape[:2], shape[2] - most, shape[3])


def drop_empty(rows: Tensor, most: int, left: Tensor) -> Tensor:
    """Leave out `most` empty slots of (batch, heads, slots, …), the last ones; `left` says how many are not empty."""
    stays, shape = ~last_empty(rows[..., -1].flatten(0, 1), most, left), rows.shape
    rows = rows.flatten(0, 2).index_select(0, stays.flatten().nonzero()[:, 0])
    return rows.view(*shape[:2], shape[2] - most, shape[3])


def last_empty(weight: Tensor, most: int, left: Tensor) -> Tensor:
    """Tell which empty slots go so that there are `most` fewer slots, `left` (rows,) of which are not empty."""
    empty = weight == 0
    return empty & (empty.cumsum(-1) > weight.shape[-1] - most - left[:, None])


@torch.no_grad()
def choose_pairs(
    rows: Tensor, most: int, dims: tuple[int, int], full: bool, left: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose which slots stay, as numbers of all rows (rows · slots), which go (rows, most), and into which (…) others.

    An empty slot that goes adds nothing, wherever it goes.
    """
    size = rows.shape[1]
    keys, values = merging_costs(rows, dims, full)
    cheapest = torch.addcmul(not_before(size, keys.dtype, keys.device), keys, values).amin(-1)
    if left is not None:
        cheapest.masked_fill_(last_empty(rows[..., -1], most, left), -1.0)
    gone = cheapest.sort(dim=-1, stable=True).indices[:, :most]
    goes = nothing(len(rows), size, keys.dtype, keys.device).scatter(1, gone, math.inf)
    partner = take_rows(keys, gone).mul_(take_rows(values, gone)).add_(goes[:, None]).argmin(-1)
    return numbers_where(goes == 0, size - most), gone, partner


def numbers_where(stays: Tensor, each: int) -> Tensor:
    """Number, among the slots of all rows, those that stay: so many of each row."""
    if torch.compiler.is_exporting():  # a graph has to know how many there are
        return torch.nonzero_static(stays.flatten(), size=len(stays) * each)[:, 0]
    return stays.flatten().nonzero()[:, 0]


def merging_costs(rows: Tensor, dims: tuple[int, int], full: bool) -> tuple[Tensor, Tensor]:
    """Compute what merging each pair costs, infinite with empty slots, unless all are full: (rows, slots, slots) each.

    The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
    of its values; the product of both is its fourth power, which takes no roots.
    """
    seen, v, weight = rows[..., : dims[0]], rows[..., dims[0] : sum(dims)], rows[..., -1]
    far = rows[..., -4] if full else rows[..., -4].masked_fill(weight == 0, math.inf)  # an empty one is far away
    inverse = (weight if full else weight.clamp_min(1)).reciprocal()
    keys = squared_distances(seen, far).square_().div_(inverse[..., None] + inverse[:, None]).square_()
    return keys, squared_distances(v, rows[..., -3]).clamp_min_(TINY)


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
    at = index + first_rows(*x.shape[:2], x.device)
    return x.flatten(0, 1).index_select(0, at.flatten()).unflatten(0, index.shape)


@made_once
def first_rows(count: int, size: int, device: torch.device) -> Tensor:
    """Number the first of `size` rows of each of so many: (count, 1)."""
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.arange(0, count * size, size, device=device)[:, None]


def squared_distances(x: Tensor, square: Tensor) -> Tensor:
    """|x_i - x_j|², given |x|²: (rows, slots, dim) -> (rows, slots, slots)."""
    return (square[..., None] + square[:, None]).baddbmm_(x, x.mT, alpha=-2)
