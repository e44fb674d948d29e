"""Merging slots in PyTorch: the reference of kernel_slots_merging.py. slots.py defines a slot.

Shapes as in slots.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_MERGED_ROWS = 512  # slots and tokens of a block that one program of a kernel merges at most
DEFERRING_ROUNDS = 2  # rounds in which a slot whose partner goes, too, is deferred: more hardly improve slots

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
        """The metric for keys as they are."""
        return self.metric * self.root


@dataclass
class Slots:
    """Tokens, each merged of `weight` others: k, v (batch, heads, slots, dim), weight, spread (batch, heads, slots)."""

    k: Tensor
    v: Tensor
    weight: Tensor
    spread: Tensor


def count_rounds(slots: int, count: int) -> int:
    """Count the rounds that merge so many slots into `count`."""
    halvings = 0
    while -(-slots // 2**halvings) > count:
        halvings += 1
    return DEFERRING_ROUNDS + halvings


def merge_slots(slots: Slots, count: int, metric: Tensor) -> Slots:
    """Merge the cheapest pairs until at most `count` slots are not empty, and return those, in order.

    In a round as many slots as necessary go into their cheapest partners. In the first rounds a slot whose partner
    goes, too, is deferred to the next round; later it follows its partner. Of two slots that are partners of each
    other one stays, so that a round can always halve the slots, and the number of rounds is known in advance.
    """
    heads, size = slots.weight.shape[:2], slots.weight.shape[2]
    row = torch.cat([slots.k @ metric.to(slots.k.dtype).mT, slots.v, slots.k], -1).flatten(0, 1)
    dims = slots.k.shape[-1], slots.v.shape[-1]
    held = MergingRows(row, slots.weight.flatten(0, 1), slots.spread.flatten(0, 1), *dims)
    counts = [count] * DEFERRING_ROUNDS
    while size > count:
        size = max(count, -(-size // 2))
        counts.append(size)
    for number, most in enumerate(counts):
        if (held.weight > 0).sum(-1).amax() > most:
            held = held.joined(held.targets(most, defers=number < DEFERRING_ROUNDS))
    full = (held.weight == 0).to(torch.int8).argsort(dim=-1, stable=True)[:, :count]
    row = held.row[..., dims[0] :].gather(1, full[..., None].expand(-1, -1, sum(dims)))
    weight, spread = held.weight.gather(1, full), held.spread.gather(1, full)
    v, k = row.unflatten(0, heads).split(dims[::-1], -1)
    return Slots(k, v, weight.unflatten(0, heads), spread.unflatten(0, heads))


def keep_slots(slots: Slots, count: int) -> Slots:
    """Return the slots that are not empty, in order, where at most `count` are."""
    full = (slots.weight == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count]
    k, v = (x.gather(2, full[..., None].expand(-1, -1, -1, x.shape[-1])) for x in (slots.k, slots.v))
    return Slots(k, v, slots.weight.gather(2, full), slots.spread.gather(2, full))


@dataclass
class MergingRows:
    """Slots while they merge: what is averaged lies side by side, metric·k, v and k."""

    row: Tensor  # (heads, slots, dims)
    weight: Tensor  # (heads, slots)
    spread: Tensor
    key_dim: int
    value_dim: int

    @torch.no_grad()
    def targets(self, count: int, defers: bool) -> Tensor:
        """Return the slot that each goes into, most into themselves, so that `count` are left: (heads, slots)."""
        cheapest, partner = self.costs().min(-1)
        number = torch.arange(partner.shape[-1], device=partner.device)
        stays = (partner.gather(-1, partner) == number) & (number < partner)
        cheapest = cheapest.masked_fill(stays, float("inf"))
        surplus = (self.weight > 0).sum(-1, keepdim=True) - count
        first = torch.zeros_like(stays).scatter(-1, cheapest.argsort(dim=-1, stable=True), number < surplus)
        goes = first & ~cheapest.isinf()
        if defers:
            return torch.where(goes & ~goes.gather(-1, partner), partner, number)
        target = torch.where(goes, partner, number)
        for _ in range((partner.shape[-1] - count).bit_length()):
            target = target.gather(-1, target)
        return target

    def costs(self) -> Tensor:
        """Compute what merging each pair costs, symmetrically: (heads, slots, slots).

        The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
        of its values; this is its square.
        """
        seen, v, _ = self.row.split([self.key_dim, self.value_dim, self.key_dim], -1)
        one = self.weight.clamp_min(1).reciprocal()
        empty = torch.where(self.weight == 0, float("inf"), 0.0).to(one.dtype)  # as far away as can be
        cost = squared_distances(seen, empty).square_().mul_(squared_distances(v, empty).sqrt_())
        cost.div_(one[..., None] + one[..., None, :])
        cost = torch.maximum(cost, cost.mT)
        cost.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
        return cost

    def joined(self, target: Tensor) -> MergingRows:
        """Merge every slot into its target."""
        total = torch.zeros_like(self.weight).scatter_add(-1, target, self.weight)
        share = self.weight / total.gather(-1, target).clamp_min(1)  # of each slot in its target
        index = target[..., None].expand_as(self.row)
        row = torch.zeros_like(self.row).scatter_add(1, index, share[..., None] * self.row)
        seen = self.row[..., : self.key_dim]
        moved = (seen - row.gather(1, index[..., : self.key_dim])).square().sum(-1)
        spread = torch.zeros_like(share).scatter_add(-1, target, share * (self.spread + moved))
        return MergingRows(row, total, spread, self.key_dim, self.value_dim)


def squared_distances(x: Tensor, more: Tensor) -> Tensor:
    """|x_i - x_j|², and more_i + more_j: (heads, rows, dim) -> (heads, rows, rows)."""
    square = x.square().sum(-1) + more
    return torch.baddbmm(square[..., None] + square[:, None], x, x.mT, alpha=-2).clamp_min_(0)
