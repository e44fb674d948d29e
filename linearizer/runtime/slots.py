"""Attention to a few exact tokens and to slots that all older tokens are merged into, in one softmax.

A slot is a token until it is merged: then it has the mean key and the mean value of several, the weight Σ 1, and the
spread Σ |metric·(k - mean)|² / weight of their keys, metric being such that |metric·x|² is the mean of (q·x)² over
queries. To a query it is one more token, with the logit q·k + log weight + gain · spread: the mean of e^(q·k) over a
slot is more than e^(q·mean) as its keys spread.

Tokens leave the window in blocks, at places that do not depend on how a text was cut into calls: a row at place p sees
as merged the tokens before the first multiple of the block that leaves it at most `window` exact ones, itself among
them. With a block come as many slots too many; the pairs that are cheapest to merge are merged until there are `slots`
again.

Shapes as in linear_attention.py, whose softmax this uses.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .parts import by_head, combine, only
from .state import EMPTY, Columns, Near, lay_columns, remember_sinks, remember_window, take, working_dtype

GAIN = 0.25  # half of what a Gaussian spread of keys calls for: measured best, since no query sees the mean spread

WAITING = 2  # rounds of merging before what waits is taken along: more make hardly better slots
TOGETHER = 64  # turns whose rows attend at once

Tensor = torch.Tensor


@dataclass
class SlotState(Near):
    """What heads with slots remember."""

    slot_k: Tensor  # (batch, heads, slots, dim)
    slot_v: Tensor
    weight: Tensor  # (batch, heads, slots) tokens in a slot: 0 if it is empty
    spread: Tensor  # (batch, heads, slots)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int, sinks: int, slots: int) -> SlotState:
        shape = (*k.shape[:2], slots)
        return cls(
            **Near.nothing(k, v, window, sinks),
            slot_k=k.new_zeros(*shape, k.shape[-1]),
            slot_v=v.new_zeros(*shape, v.shape[-1]),
            weight=torch.zeros(shape, dtype=working_dtype(v), device=v.device),
            spread=torch.zeros(shape, dtype=working_dtype(v), device=v.device),
        )


class Merger(nn.Module):
    """How far apart two keys are to the queries of a head, and what their spread adds to a slot's logit."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)

    def reset(self) -> None:
        """Start where all directions count alike."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)


@dataclass(frozen=True)
class Merging:
    """How some heads merge: the metric and gain of a Merger, the metric for keys as they are, and the sizes."""

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    window: int
    block: int


@dataclass
class Slots:
    """Tokens, each merged of `weight` others: k, v (batch, heads, slots, dim), weight, spread (batch, heads, slots)."""

    k: Tensor
    v: Tensor
    weight: Tensor
    spread: Tensor


def slot_attention(q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> Tensor:
    """Attend and bring the state up to date; q is multiplied by the scale of the scores."""
    tokens, window, block, order = q.shape[-2], merging.window, merging.block, None
    if real is not None:
        order = real.to(torch.int8).argsort(dim=-1, stable=True)
        q = take(q, order)
    columns = lay_columns(k, v, window, real, state)
    remember_sinks(state, columns)
    first, end = state.count, columns.first + window + tokens
    turn = torch.div(first - window, block, rounding_mode="floor") + 1  # how many blocks are merged for a row's place
    turns = int((torch.div(end - 1 - window, block, rounding_mode="floor") + 2 - turn).max())
    turn = turn[:, None] + torch.arange(turns, device=q.device)
    start = window + block * (turn - 1)  # the first place that sees a turn's blocks merged
    begin, rows = (start, block) if tokens > 1 else (first[:, None], 1)
    place = begin[..., None] + torch.arange(rows, device=q.device)
    merges = (turn >= 1) & (start >= first[:, None]) & (start < end[:, None])
    parts = []
    for some in torch.arange(turns, device=q.device).split(TOGETHER):
        held = absorb(state, columns, merging, turn[:, some], merges[:, some])
        asks = take(q, (place[:, some].flatten(1) - end[:, None] + tokens).clamp(0, tokens - 1))
        parts.append(look(asks, place[:, some], turn[:, some] * block, held, columns, merging, state))
    state.count = end
    remember_window(state, columns, tokens)
    if tokens == 1:
        return parts[0]
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = take(torch.cat(parts, -2), (place - start[:, :1]).clamp_min(0))
    return out if order is None else take(out, order.argsort(-1))


def absorb(state: SlotState, columns: Columns, merging: Merging, turn: Tensor, merges: Tensor) -> Slots:
    """Merge the blocks that leave the window at turns (batch, turns), where `merges` says so; update the state.

    Give the slots after each turn: a batch in which every text's turns follow one another.
    """
    place = (turn - 1)[..., None] * merging.block + torch.arange(merging.block, device=turn.device)
    index = (place - columns.first[:, None, None]).clamp(0, columns.k.shape[-2] - 1).flatten(1)
    comes = merges[..., None] & (place >= state.sink_k.shape[-2])
    weight, work = comes.to(state.weight.dtype)[:, None].expand(-1, columns.k.shape[1], -1, -1), state.weight.dtype
    k, v = (take(x, index).to(work).unflatten(2, place.shape[1:]) for x in (columns.k, columns.v))
    now, found = Slots(state.slot_k, state.slot_v, state.weight, state.spread), []
    for number, any_merges in enumerate(merges.any(0).tolist()):
        if any_merges:
            new = (k[:, :, number], v[:, :, number], weight[:, :, number], torch.zeros_like(weight[:, :, number]))
            all_of = [torch.cat(pair, 2) for pair in zip((now.k, now.v, now.weight, now.spread), new, strict=True)]
            now = merge_slots(Slots(*all_of), state.weight.shape[-1], merging.metric)
            now.k, now.v = now.k.to(state.slot_k.dtype), now.v.to(state.slot_v.dtype)
        found.append(now)
    state.slot_k, state.slot_v, state.weight, state.spread = now.k, now.v, now.weight, now.spread
    each = ([getattr(one, name) for one in found] for name in ("k", "v", "weight", "spread"))
    return Slots(*(torch.stack(xs, 1).flatten(0, 1) for xs in each))


def look(
    q: Tensor, place: Tensor, merged: Tensor, held: Slots, columns: Columns, merging: Merging, state: SlotState
) -> Tensor:
    """Attend with rows at places (batch, turns, rows) that see as merged the tokens before `merged` (batch, turns)."""
    turns, work = place.shape[1], working_dtype(q)

    def by_turn(x: Tensor) -> Tensor:
        """(batch, …, turns * tokens, dim) -> (batch * turns, …, tokens, dim)"""
        return x.unflatten(-2, (turns, -1)).movedim(-3, 1).flatten(0, 1)

    q, merged = by_turn(q.to(work)), merged.clamp_min(0)[..., None]
    near = merged + torch.arange(columns.window, device=q.device)
    index = near - columns.first[:, None, None]
    here = (index >= columns.empty[:, None, None]) & (index < columns.k.shape[-2])
    seen = (here[:, :, None] & (near[:, :, None] <= place[..., None])).flatten(0, 1)
    index = index.clamp(0, columns.k.shape[-2] - 1).flatten(1)
    parts = [(only(by_head(q, by_turn(take(columns.k, index)).to(work).mT), seen), by_turn(take(columns.v, index)))]
    if sinks := state.sink_k.shape[-2]:
        gone = (torch.arange(sinks, device=q.device) < merged).flatten(0, 1)[:, None].expand(-1, q.shape[-2], -1)
        sink_k, sink_v = (x.repeat_interleave(turns, 0) for x in (state.sink_k, state.sink_v))
        parts.append((only(by_head(q, sink_k.to(work).mT), gone), sink_v))
    level = held.weight.clamp_min(1).log() + merging.gain.to(work)[:, None] * held.spread
    level = level.masked_fill(held.weight == 0, EMPTY)
    parts.append((by_head(q, held.k.to(work).mT) + level[:, :, None, None], held.v))
    return combine(parts).unflatten(0, place.shape[:2]).movedim(1, -3).flatten(-3, -2)


def merge_slots(given: Slots, count: int, metric: Tensor) -> Slots:
    """Merge what is cheapest to merge until at most `count` slots hold anything, and give those, in order.

    In a round the slots with the cheapest partners go into them, as many as have to. At first one whose partner goes,
    too, waits for the next round; at last it is taken along. Of two that are partners of each other one stays, so that
    a round can always halve what there is, and the number of rounds is known before.
    """
    heads, slots = given.weight.shape[:2], given.weight.shape[2]
    row = torch.cat([given.k @ metric.to(given.k.dtype).mT, given.v, given.k], -1).flatten(0, 1)
    dims = given.k.shape[-1], given.v.shape[-1]
    held = Rows(row, given.weight.flatten(0, 1), given.spread.flatten(0, 1), *dims)
    for _ in range(WAITING):
        held = held.joined(held.targets(count, waits=True))
    while slots > count:
        slots = max(count, -(-slots // 2))
        held = held.joined(held.targets(slots, waits=False))
    full = (held.weight == 0).to(torch.int8).argsort(dim=-1, stable=True)[:, :count]
    row = held.row.gather(1, full[..., None].expand(-1, -1, row.shape[-1]))
    weight, spread = held.weight.gather(1, full), held.spread.gather(1, full)
    _, v, k = row.unflatten(0, heads).split([dims[0], *dims[::-1]], -1)
    return Slots(k, v, weight.unflatten(0, heads), spread.unflatten(0, heads))


@dataclass
class Rows:
    """Slots while they merge: all that is averaged lies side by side, metric·k, v and k."""

    row: Tensor  # (heads, slots, dims)
    weight: Tensor  # (heads, slots)
    spread: Tensor
    key_dim: int
    value_dim: int

    @torch.no_grad()
    def targets(self, count: int, waits: bool) -> Tensor:
        """Say into which slot each goes, most of them into themselves, until `count` are left: (heads, slots)."""
        cost = self.costs()
        partner = cost.argmin(-1)
        number = torch.arange(partner.shape[-1], device=partner.device)
        stays = (partner.gather(-1, partner) == number) & (number < partner)
        cheapest = cost.gather(-1, partner[..., None])[..., 0].masked_fill(stays, float("inf"))
        surplus = (self.weight > 0).sum(-1, keepdim=True) - count
        goes = (cheapest.argsort(-1).argsort(-1) < surplus) & ~cheapest.isinf()
        if waits:
            return torch.where(goes & ~goes.gather(-1, partner), partner, number)
        target = torch.where(goes, partner, number)
        for _ in range((partner.shape[-1] - count).bit_length()):
            target = target.gather(-1, target)
        return target

    def costs(self) -> Tensor:
        """Price every pair, the same both ways: (heads, slots, slots).

        What it costs a query goes with how much weight a pair has, how far apart its keys are to the query, and its
        values; here the square of that.
        """
        seen, v, _ = self.row.split([self.key_dim, self.value_dim, self.key_dim], -1)
        one = self.weight.clamp_min(1).reciprocal()
        apart = squared_distances(seen).square() * squared_distances(v).sqrt()
        cost = apart / (one[..., None] + one[..., None, :])
        empty = torch.where(self.weight == 0, float("inf"), 0.0).to(cost.dtype)
        cost = torch.maximum(cost, cost.mT) + (empty[..., None] + empty[..., None, :])
        cost.diagonal(dim1=-2, dim2=-1).fill_(float("inf"))
        return cost

    def joined(self, target: Tensor) -> Rows:
        """Merge every slot into its target."""
        total = torch.zeros_like(self.weight).scatter_add(-1, target, self.weight)
        share = self.weight / total.gather(-1, target).clamp_min(1)  # of each in what it becomes
        index = target[..., None].expand_as(self.row)
        row = torch.zeros_like(self.row).scatter_add(1, index, share[..., None] * self.row)
        moved = (self.row - row.gather(1, index))[..., : self.key_dim].square().sum(-1)
        spread = torch.zeros_like(share).scatter_add(-1, target, share * (self.spread + moved))
        return Rows(row, total, spread, self.key_dim, self.value_dim)


def squared_distances(x: Tensor) -> Tensor:
    """|x_i - x_j|²: (heads, rows, dim) -> (heads, rows, rows)."""
    square = x.square().sum(-1)
    return torch.baddbmm(square[..., None] + square[:, None], x, x.mT, alpha=-2).clamp_min(0)
