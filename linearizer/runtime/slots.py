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

from .linear_attention import by_head, combine, only
from .state import EMPTY, Columns, Near, lay_columns, remember_sinks, remember_window, take, working_dtype

GAIN = 0.25  # half of what a Gaussian spread of keys calls for: measured best, since no query sees the mean spread

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

    def take(self, index: Tensor) -> Slots:
        """Take slots by an index (batch, heads, slots)."""

        def rows(x: Tensor) -> Tensor:
            return x.gather(2, index[..., None].expand(*index.shape, x.shape[-1]))

        return Slots(rows(self.k), rows(self.v), self.weight.gather(2, index), self.spread.gather(2, index))


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
    alone = tokens == 1
    parts = []
    for _ in range(turns):
        start = window + block * (turn - 1)
        merges = (turn >= 1) & (start >= first) & (start < end)
        if merges.any():
            absorb(state, columns, merging, turn, merges)
        place = (first if alone else start)[:, None] + torch.arange(1 if alone else block, device=q.device)
        rows = take(q, (place - end[:, None] + tokens).clamp(0, tokens - 1))
        parts.append(look(rows, place, turn * block, columns, merging, state))
        turn = turn + 1
    state.count = end
    remember_window(state, columns, tokens)
    if alone:
        return parts[0]
    began = window + block * (turn - turns - 1)
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = take(torch.cat(parts, -2), (place - began[:, None]).clamp_min(0))
    return out if order is None else take(out, order.argsort(-1))


def look(rows: Tensor, place: Tensor, merged: Tensor, columns: Columns, merging: Merging, state: SlotState) -> Tensor:
    """Attend with rows at places (batch, rows) that see as merged the tokens before `merged` (batch,)."""
    rows = rows.to(working_dtype(rows))
    merged = merged.clamp_min(0)[:, None]
    near = merged + torch.arange(columns.window, device=rows.device)
    index = near - columns.first[:, None]
    here = (index >= columns.empty[:, None]) & (index < columns.k.shape[-2])
    seen = here[:, None] & (near[:, None] <= place[..., None])
    index = index.clamp(0, columns.k.shape[-2] - 1)
    parts = [(only(by_head(rows, take(columns.k, index).to(rows.dtype).mT), seen), take(columns.v, index))]
    if sinks := state.sink_k.shape[-2]:
        gone = (torch.arange(sinks, device=rows.device) < merged)[:, None].expand(-1, rows.shape[-2], -1)
        parts.append((only(by_head(rows, state.sink_k.to(rows.dtype).mT), gone), state.sink_v))
    level = state.weight.clamp_min(1).log() + merging.gain.to(rows.dtype)[:, None] * state.spread
    level = level.masked_fill(state.weight == 0, EMPTY)
    parts.append((by_head(rows, state.slot_k.to(rows.dtype).mT) + level[:, :, None, None], state.slot_v))
    return combine(parts)


def absorb(state: SlotState, columns: Columns, merging: Merging, turn: Tensor, merges: Tensor) -> None:
    """Merge the block of tokens that leaves the window at a turn, in the rows of a batch where `merges` says so."""
    block = merging.block
    place = (turn - 1)[:, None] * block + torch.arange(block, device=turn.device)
    index = (place - columns.first[:, None]).clamp(0, columns.k.shape[-2] - 1)
    comes = merges[:, None] & (place >= state.sink_k.shape[-2])
    k, v = (
        torch.cat([old, take(new, index)], 2) for old, new in ((state.slot_k, columns.k), (state.slot_v, columns.v))
    )
    weight = torch.cat([state.weight, comes[:, None].expand(-1, k.shape[1], -1).to(state.weight)], 2)
    spread = torch.cat([state.spread, state.spread.new_zeros(*weight.shape[:2], block)], 2)
    work = state.weight.dtype
    found = merge_slots(Slots(k.to(work), v.to(work), weight, spread), state.weight.shape[-1], merging.metric)
    state.slot_k, state.slot_v = found.k.to(k.dtype), found.v.to(v.dtype)
    state.weight, state.spread = found.weight, found.spread


def merge_slots(given: Slots, count: int, metric: Tensor) -> Slots:
    """Merge what is cheapest to merge until at most `count` slots hold anything, and give those, in order.

    What a pair costs a query goes with how much weight it has, how far apart its keys are to the query, and its values.
    In each round the slots with the cheapest partners go into them, as many as have to; one whose partner goes, too,
    waits for the next round.
    """
    number = torch.arange(given.weight.shape[-1], device=given.weight.device)
    while True:
        surplus = ((given.weight > 0).sum(-1, keepdim=True) - count).clamp_min(0)  # (batch, heads, 1)
        if not surplus.any():
            break
        cheapest, partner = merging_costs(given, metric).min(-1)
        stays = (partner.gather(-1, partner) == number) & (number < partner) | cheapest.isinf()
        rank = cheapest.masked_fill(stays, float("inf")).argsort(-1).argsort(-1)
        goes = ~stays & (rank < surplus)
        given = join(given, partner, goes & ~goes.gather(-1, partner), metric)
    return given.take((given.weight == 0).to(torch.int8).argsort(dim=-1, stable=True)[..., :count])


def merging_costs(given: Slots, metric: Tensor) -> Tensor:
    """Price every pair: (batch, heads, slots, slots)."""
    apart, values = squared_distances(given.k @ metric.to(given.k.dtype).mT), squared_distances(given.v)
    weight = given.weight[..., None] * given.weight[..., None, :]
    weight = weight / (given.weight[..., None] + given.weight[..., None, :]).clamp_min(1)
    empty = given.weight == 0
    never = empty[..., None] | empty[..., None, :] | torch.eye(empty.shape[-1], dtype=torch.bool, device=empty.device)
    return (weight.sqrt() * apart * values.pow(0.25)).masked_fill(never, float("inf"))


def squared_distances(x: Tensor) -> Tensor:
    """|x_i - x_j|²: (…, rows, dim) -> (…, rows, rows)."""
    x = x.detach()
    square = x.square().sum(-1)
    return (square[..., None] + square[..., None, :] - 2 * x @ x.mT).clamp_min(0)


def join(given: Slots, partner: Tensor, goes: Tensor, metric: Tensor) -> Slots:
    """Merge every slot that goes into its partner, which stays."""
    number = torch.arange(partner.shape[-1], device=partner.device).expand_as(partner)
    target = torch.where(goes, partner, number)
    total = torch.zeros_like(given.weight).scatter_add(-1, target, given.weight)
    share = (given.weight / total.gather(-1, target).clamp_min(1))[..., None]  # of each in what it becomes

    def mean(x: Tensor) -> Tensor:
        return torch.zeros_like(x).scatter_add(2, target[..., None].expand_as(x), share * x)

    k = mean(given.k)
    moved = (given.k - k.gather(2, target[..., None].expand_as(k))) @ metric.to(k.dtype).mT
    spread = mean((given.spread + moved.square().sum(-1))[..., None])[..., 0]
    return Slots(k, mean(given.v), total, spread)
