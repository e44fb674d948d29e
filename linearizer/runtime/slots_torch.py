"""Attention to slots in PyTorch: a text, some periods at a time, and single tokens. slots.py defines what it computes.

The rows of a period see the same slots: those that hold until the next block leaves the window.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .slots_merging import Merging, Slots, keep_slots, merge_slots
from .softmax_parts import combine_parts, exact_part, mask_logits, multiply_by_head, softmax_over
from .state import (
    Columns,
    SlotState,
    first_places,
    lay_columns,
    remember_sinks,
    remember_token,
    remember_window,
    take_tokens,
    working_dtype,
)
from .state_8bit import round_vectors

Tensor = torch.Tensor
Attend = Callable[[Tensor, Tensor, Tensor, "LeavingBlocks", Columns, Merging, SlotState], Tensor]
PERIODS_AT_ONCE = 64  # periods whose rows attend at once


def attend_token_with_slots(q: Tensor, k: Tensor, v: Tensor, merging: Merging, state: SlotState) -> Tensor:
    """Attend with one token; the state is changed in place, but for slots when a block is merged."""
    q, sinks, window, block = q.to(working_dtype(q)), state.sink_k.shape[-2], merging.window, merging.block
    places = state.count.tolist()  # plain numbers: on a CPU one operation on tensors takes longer than all of this
    periods = [(place - window) // block + 1 for place in places]
    merges = [
        period >= 1 and (period - 1) * block == place - window for period, place in zip(periods, places, strict=True)
    ]
    if any(merges):
        columns = lay_columns(k, v, window, None, state)
        period, comes = (torch.tensor(x, device=q.device)[:, None] for x in (periods, merges))
        merge_blocks(state, columns, merging, LeavingBlocks.of(columns, period, comes, block, sinks))
    remember_token(state, k, v, min(places))
    merged, place = torch.tensor([max(period, 0) * block for period in periods], device=q.device), state.count
    state.count = place + 1

    parts, rows = [], q[..., 0, :]
    if sinks:
        gone = None if min(periods) * block >= sinks else first_places(sinks, merged - 1)
        parts.append(exact_part(rows, state.sink_k, state.sink_v, gone))
    age = (place[:, None] - torch.arange(window, device=q.device)) % window
    parts.append(exact_part(rows, state.window_k, state.window_v, age <= (place - merged)[:, None]))
    logits, values = exact_part(rows, state.slot_k, state.slot_v, None)
    return softmax_over([*parts, (logits + slot_levels(state, merging)[:, :, None], values)])[..., None, :]


def slot_levels(held: SlotState | Slots, merging: Merging) -> Tensor:
    """What the weight and the spread of slots add to their logits, -∞ if they are empty: (batch, heads, slots)."""
    return torch.addcmul(held.weight.log(), merging.gain.to(held.weight.dtype)[:, None], held.spread)


def attend_text_with_slots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    merging: Merging,
    real: Tensor | None,
    state: SlotState,
    attend: Attend | None = None,
) -> Tensor:
    """Attend to the state and to the new tokens, some periods at a time, as `attend` does it."""
    tokens, window, block, order = q.shape[-2], merging.window, merging.block, None
    if real is not None:
        order = real.to(torch.int8).argsort(dim=-1, stable=True)
        q = take_tokens(q, order)
    columns = lay_columns(k, v, window, real, state)
    remember_sinks(state, columns)
    first, end = state.count, columns.first + window + tokens
    period = torch.div(first - window, block, rounding_mode="floor") + 1  # how many blocks are merged for a row's place
    periods = max(1, int((torch.div(end - 1 - window, block, rounding_mode="floor") + 2 - period).max()))
    period = period[:, None] + torch.arange(periods, device=q.device)
    start = window + block * (period - 1)  # the first place that sees a period's blocks merged
    begin, rows = (start, block) if tokens > 1 else (first[:, None], 1)
    place = begin[..., None] + torch.arange(rows, device=q.device)
    merges = (period >= 1) & (start >= first[:, None]) & (start < end[:, None])
    parts = []
    for some in torch.arange(periods, device=q.device).split(PERIODS_AT_ONCE):
        leaving = LeavingBlocks.of(columns, period[:, some], merges[:, some], block, state.sink_k.shape[-2])
        asks = take_tokens(q, (place[:, some].flatten(1) - end[:, None] + tokens).clamp(0, tokens - 1))
        parts.append(
            (attend or attend_periods)(asks, place[:, some], period[:, some] * block, leaving, columns, merging, state)
        )
    state.count = end
    remember_window(state, columns, tokens)
    if tokens == 1:
        return parts[0]
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = take_tokens(torch.cat(parts, -2), (place - start[:, :1]).clamp_min(0))
    return out if order is None else take_tokens(out, order.argsort(-1))


@dataclass
class LeavingBlocks:
    """The blocks that leave the window as some periods begin."""

    index: Tensor  # (batch, periods, block) the columns of their tokens
    present: Tensor  # (batch, periods, block) whether a token is merged: sinks and other calls' blocks are not
    merges: Tensor  # (batch, periods) whether the block leaves in this call

    @classmethod
    def of(cls, columns: Columns, period: Tensor, merges: Tensor, block: int, sinks: int) -> LeavingBlocks:
        place = (period - 1)[..., None] * block + torch.arange(block, device=period.device)
        index = (place - columns.first[:, None, None]).clamp(0, columns.k.shape[-2] - 1)
        return cls(index, merges[..., None] & (place >= sinks), merges)


def attend_periods(
    q: Tensor,
    place: Tensor,
    merged: Tensor,
    leaving: LeavingBlocks,
    columns: Columns,
    merging: Merging,
    state: SlotState,
) -> Tensor:
    """Merge the blocks of some periods, one after the other, then attend with the rows of all of them."""
    return attend_rows(q, place, merged, merge_blocks(state, columns, merging, leaving), columns, merging, state)


def merge_blocks(state: SlotState, columns: Columns, merging: Merging, leaving: LeavingBlocks) -> Slots:
    """Merge the blocks that leave the window as some periods begin; update the state.

    Return the slots of each period: a batch in which every text's periods follow one another.
    """
    work, index = state.weight.dtype, leaving.index.flatten(1)
    weight = leaving.present.to(work)[:, None].expand(-1, columns.k.shape[1], -1, -1)
    k, v = (take_tokens(x, index).to(work).unflatten(2, leaving.index.shape[1:]) for x in (columns.k, columns.v))
    now, after, count = Slots(state.slot_k, state.slot_v, state.weight, state.spread), [], state.weight.shape[-1]
    held = (state.weight > 0).sum(-1).amax(-1, keepdim=True) + leaving.present.sum(-1).cumsum(
        -1
    )  # if nothing is merged
    periods = zip(leaving.merges.any(0).tolist(), (held > count).any(0).tolist(), strict=True)
    for number, (any_leaves, too_many) in enumerate(periods):
        if any_leaves:
            new = (k[:, :, number], v[:, :, number], weight[:, :, number], torch.zeros_like(weight[:, :, number]))
            all_of = [torch.cat(pair, 2) for pair in zip((now.k, now.v, now.weight, now.spread), new, strict=True)]
            now = merge_slots(Slots(*all_of), count, merging.scaled) if too_many else keep_slots(Slots(*all_of), count)
            now.k, now.v = now.k.to(state.slot_k.dtype), now.v.to(state.slot_v.dtype)
            if merging.bits == 8:
                now.k, now.v = round_vectors(now.k), round_vectors(now.v)
        after.append(now)
    state.slot_k, state.slot_v, state.weight, state.spread = now.k, now.v, now.weight, now.spread
    each = ([getattr(slots, name) for slots in after] for name in ("k", "v", "weight", "spread"))
    return Slots(*(torch.stack(xs, 1).flatten(0, 1) for xs in each))


def attend_rows(
    q: Tensor, place: Tensor, merged: Tensor, held: Slots, columns: Columns, merging: Merging, state: SlotState
) -> Tensor:
    """Attend with rows at places (batch, periods, rows); tokens before `merged` (batch, periods) are in slots."""
    periods, work = place.shape[1], working_dtype(q)

    def by_period(x: Tensor) -> Tensor:
        """(batch, …, periods * tokens, dim) -> (batch * periods, …, tokens, dim)"""
        return x.unflatten(-2, (periods, -1)).movedim(-3, 1).flatten(0, 1)

    q, merged = by_period(q.to(work)), merged.clamp_min(0)[..., None]
    near = merged + torch.arange(columns.window, device=q.device)
    index = near - columns.first[:, None, None]
    here = (index >= columns.empty[:, None, None]) & (index < columns.k.shape[-2])
    seen = (here[:, :, None] & (near[:, :, None] <= place[..., None])).flatten(0, 1)
    index = index.clamp(0, columns.k.shape[-2] - 1).flatten(1)
    parts = [
        (
            mask_logits(multiply_by_head(q, by_period(take_tokens(columns.k, index)).to(work).mT), seen),
            by_period(take_tokens(columns.v, index)),
        )
    ]
    if sinks := state.sink_k.shape[-2]:
        gone = (torch.arange(sinks, device=q.device) < merged).flatten(0, 1)[:, None].expand(-1, q.shape[-2], -1)
        sink_k, sink_v = (x.repeat_interleave(periods, 0) for x in (state.sink_k, state.sink_v))
        parts.append((mask_logits(multiply_by_head(q, sink_k.to(work).mT), gone), sink_v))
    parts.append((multiply_by_head(q, held.k.to(work).mT) + slot_levels(held, merging)[:, :, None, None], held.v))
    return combine_parts(parts).unflatten(0, place.shape[:2]).movedim(1, -3).flatten(-3, -2)
