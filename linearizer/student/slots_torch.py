"""Attention to slots in PyTorch: a text, some periods at a time, and single tokens. slots_merging.py defines slots.

The rows of a period see the same slots, which change when the next block leaves the window.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

import torch

from .slots_merging import (
    Merging,
    Rounding,
    Slots,
    drop_empty,
    keep_slots,
    lay_rows,
    merge_block,
    merge_rows,
    slots_of_rows,
    take_by_head,
)
from .softmax_parts import attend_seen, join_rows, split_rows
from .state import (
    Columns,
    SlotState,
    Text,
    first_rows,
    is_traced,
    take_tokens,
    working_dtype,
)

Tensor = torch.Tensor
SlotSteps = Generator["MergeRequest", Tensor, Tensor]
MAX_PADDING = 2**14  # pairs with empty slots that take as long as merging heads of two sizes one after the other
PERIODS_AT_ONCE = 16  # periods whose rows attend at once: more need memory, fewer need more operations


def block_leaves(place: int, window: int, block: int) -> bool:
    """Whether a block is merged just before the token at a place attends."""
    return place >= window and (place - window) % block == 0


def merge_leaving(state: SlotState, merging: Merging, places: Sequence[int]) -> Slots:
    """Return a state's slots after merging the blocks that leave before the tokens at these places attend."""
    window, block, device = merging.window, merging.block, state.weight.device
    slots, sinks = slots_of_state(state), state.sink_k.shape[-2]
    leaves = torch.tensor([block_leaves(place, window, block) for place in places], device=device)[:, None]
    place = torch.tensor([place - window for place in places], device=device)[:, None]
    place = place + torch.arange(block, device=device)
    k, v = (take_tokens(x, place % window) for x in (state.window_k, state.window_v))
    return merge_block(slots, k, v, leaves & (place >= sinks), merging)


def slot_levels(slots: SlotState | Slots, merging: Merging) -> Tensor:
    """Return what weight and spread add to the logits of slots, -∞ for empty ones: (batch, heads, slots)."""
    return torch.addcmul(slots.weight.log(), merging.gain.to(slots.weight.dtype)[:, None], slots.spread)


def read_together(texts: Sequence[tuple[Text, Merging]]) -> list[Tensor]:
    """Let heads of several kinds read one text, so that all merge a block at once; return their outputs."""
    readings = [read_text(text, merging) for text, merging in texts]
    requests = {index: next(reading) for index, reading in enumerate(readings)}
    outputs: dict[int, Tensor] = {}
    while requests:
        slots = merge_requests([*requests.values()])
        for (index, request), merged in zip([*requests.items()], slots, strict=True):
            try:
                requests[index] = readings[index].send(attend_rows(request, merged))
            except StopIteration as end:
                outputs[index] = end.value
                del requests[index]
    return [outputs[index] for index in range(len(readings))]


def read_text(text: Text, merging: Merging) -> SlotSteps:
    """Read a text: yield some periods at a time, receive the outputs of their rows, return those of all tokens."""
    q, columns, state = text.q, text.columns, text.state
    tokens, window, block = q.shape[-2], merging.window, merging.block
    first, end = state.count, columns.first + window + tokens
    period = torch.div(first - window, block, rounding_mode="floor") + 1  # how many blocks are merged for a row's place
    periods = (tokens + block - 2) // block + 1  # at most, wherever the text begins
    if not is_traced():
        periods = max(1, int((torch.div(end - 1 - window, block, rounding_mode="floor") + 2 - period).max()))
    period = period[:, None] + torch.arange(periods, device=q.device)
    start = window + block * (period - 1)  # the first place that sees a period's blocks merged
    begin, rows = (start, block) if tokens > 1 else (first[:, None], 1)
    place = begin[..., None] + torch.arange(rows, device=q.device)
    merges = (period >= 1) & (start >= first[:, None]) & (start < end[:, None])
    parts = []
    for chunk in torch.arange(periods, device=q.device).split(PERIODS_AT_ONCE):
        leaving = LeavingBlocks.of(columns, period[:, chunk], merges[:, chunk], block, state.sink_k.shape[-2])
        queries = take_tokens(q, (place[:, chunk].flatten(1) - end[:, None] + tokens).clamp(0, tokens - 1))
        request = MergeRequest(queries, place[:, chunk], period[:, chunk] * block, leaving, columns, merging, state)
        parts.append((yield request))
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = torch.cat(parts, -2) if tokens > 1 else parts[0]
    return text.end(take_tokens(out, (place - start[:, :1]).clamp_min(0)) if tokens > 1 else out)


@dataclass
class LeavingBlocks:
    """The blocks that leave the window at the begin of some periods, in this call."""

    index: Tensor  # (batch, periods, block) the columns of their tokens
    present: Tensor  # (batch, periods, block) whether a token is merged: sinks and other calls' blocks are not

    @classmethod
    def of(cls, columns: Columns, period: Tensor, merges: Tensor, block: int, sinks: int) -> LeavingBlocks:
        place = (period - 1)[..., None] * block + torch.arange(block, device=period.device)
        index = (place - columns.first[:, None, None]).clamp(0, columns.k.shape[-2] - 1)
        return cls(index, merges[..., None] & (place >= sinks))


@dataclass
class MergeRequest:
    """Some periods of a text, and the rows that attend in them."""

    q: Tensor  # (batch, heads, group, periods · rows, dim)
    place: Tensor  # (batch, periods, rows)
    merged: Tensor  # (batch, periods) tokens before this place are in slots
    leaving: LeavingBlocks
    columns: Columns
    merging: Merging
    state: SlotState


def merge_requests(requests: list[MergeRequest]) -> list[Slots]:
    """Merge the blocks of all requests, together where block and type are the same; update the states."""
    slots: dict[int, Slots] = {}
    alike: dict[tuple, list[list[int]]] = {}
    rows = [request.state.weight.shape[2] + request.merging.block for request in requests]
    for index in sorted(range(len(requests)), key=lambda index: -rows[index]):
        request = requests[index]
        groups = alike.setdefault((request.merging.block, request.state.slot_k.dtype), [])
        heads = request.state.weight.shape[:2].numel()
        if not groups or heads * (max(rows[member] for member in groups[-1]) ** 2 - rows[index] ** 2) > MAX_PADDING:
            groups.append([])
        groups[-1].append(index)
        groups[-1].sort(key=lambda index: requests[index].merging.bits)  # heads of the same bits lie together
    for indices in (indices for groups in alike.values() for indices in groups):
        slots.update(zip(indices, merge_blocks([requests[index] for index in indices]), strict=True))
    return [slots[index] for index in range(len(requests))]


def slots_of_state(state: SlotState) -> Slots:
    """Return the slots of a state."""
    return Slots(state.slot_k, state.slot_v, state.weight, state.spread)


def merge_blocks(requests: list[MergeRequest]) -> list[Slots]:
    """Merge the blocks that leave the windows at the begin of some periods; update the states.

    Return the slots of each period and request: a batch with the periods of each text in order. The heads of all
    requests lie side by side; heads with fewer slots than others get empty ones at the front.
    """
    sizes, states = [request.state.weight.shape[1:] for request in requests], [request.state for request in requests]
    room, periods = max(count for _, count in sizes), max(request.merged.shape[1] for request in requests)
    dims = (states[0].slot_k.shape[-1], states[0].slot_v.shape[-1])
    metric = torch.cat([request.merging.rows for request in requests])
    bits = tuple(
        request.merging.bits for request, (heads, _) in zip(requests, sizes, strict=True) for _ in range(heads)
    )
    rounding = Rounding(metric, states[0].slot_k.dtype, bits)
    now = torch.cat([pad(rows_of_state(request), 2, room, at_end=False) for request in requests], 1)
    blocks = torch.cat([pad(rows_of_blocks(request), 2, periods) for request in requests], 1)
    counts = torch.tensor([count for heads, count in sizes for _ in range(heads)], device=now.device)
    plan, after = plan_merging(now[..., -1] > 0, blocks[..., -1] > 0, counts), []
    for block, step in zip(blocks.movedim(2, 0), plan, strict=True):
        if step.has_block:
            joined, excess = torch.cat([now, block], 2), block.shape[2]
            if is_traced():
                now = merge_in_graph(now, block, step.remaining, dims, rounding)
            elif step.merges:
                now = merge_rows(joined, excess, dims, rounding, step.full, step.remaining if step.drops else None)
            else:
                now = drop_empty(joined, excess, step.remaining)
        after.append(now)
    by_period = torch.stack(after, 1)  # (batch, periods, heads, room, numbers)
    slots, begin = [], 0
    for request, state, (heads, count) in zip(requests, states, sizes, strict=True):
        of_request = slots_of_rows(by_period[:, : request.merged.shape[1], begin : begin + heads, room - count :], dims)
        last = Slots(*(x[:, -1] for x in of_request.all()))
        if is_traced() or not bool(last.weight.all()):
            last = keep_slots(last, count)
        state.slot_k, state.slot_v = last.k.to(state.slot_k.dtype), last.v.to(state.slot_v.dtype)
        state.weight, state.spread, begin = last.weight, last.spread, begin + heads
        slots.append(Slots(*(x.flatten(0, 1) for x in of_request.all())))
    return slots


def merge_in_graph(now: Tensor, block: Tensor, remaining: Tensor, dims: tuple[int, int], rounding: Rounding) -> Tensor:
    """Merge a block in the texts that have one; the graph computes nothing if none has."""
    incoming = (block[..., -1:] > 0).any(2, keepdim=True)

    def merge(now: Tensor, block: Tensor, remaining: Tensor, incoming: Tensor, metric: Tensor) -> Tensor:
        joined, traced_rounding = torch.cat([now, block], 2), replace(rounding, metric=metric)
        return torch.where(incoming, merge_rows(joined, block.shape[2], dims, traced_rounding, False, remaining), now)

    def keep(now: Tensor, *unused: Tensor) -> Tensor:
        return now.clone()

    operands = now, block.contiguous(), remaining.contiguous(), incoming, rounding.metric
    return torch.cond(incoming.any(), merge, keep, operands)


def rows_of_state(request: MergeRequest) -> Tensor:
    """Lay out the slots of a state, empty ones first: (batch, heads, slots, numbers)."""
    state, work = request.state, request.state.weight.dtype
    slots = Slots(state.slot_k.to(work), state.slot_v.to(work), state.weight, state.spread)
    rows, full, size = lay_rows(slots, request.merging.rows), (state.weight > 0).sum(-1), state.weight.shape[-1]
    if not is_traced() and bool((full == size).all()):
        return rows
    index = (full[..., None] + torch.arange(size, device=full.device)) % size
    return take_by_head(rows, index)


def rows_of_blocks(request: MergeRequest) -> Tensor:
    """Lay out the tokens of leaving blocks: (batch, heads, periods, block, numbers)."""
    leaving, columns, work = request.leaving, request.columns, request.state.weight.dtype
    k, v = (take_tokens(x, leaving.index.flatten(1)).to(work) for x in (columns.k, columns.v))
    weight = leaving.present.flatten(1).to(work)[:, None].expand(-1, k.shape[1], -1)
    rows = lay_rows(Slots(k, v, weight, torch.zeros_like(weight)), request.merging.rows)
    return rows.unflatten(2, leaving.index.shape[1:])


@dataclass
class PeriodStep:
    """What happens to the slots of all heads at the begin of a period."""

    has_block: bool  # whether any head takes a block
    merges: bool  # whether any has too many slots then
    drops: bool  # whether any removes fewer slots by merging than a block has
    full: bool  # whether none has an empty slot
    remaining: Tensor  # (batch · heads,) how many are not empty afterwards


def plan_merging(filled: Tensor, incoming: Tensor, counts: Tensor) -> list[PeriodStep]:
    """Plan the steps; filled (batch, heads, room), incoming (batch, heads, periods, block), counts (heads,).

    In a graph values are unknown, so all that may happen is planned.
    """
    before, added, block = filled.sum(-1, keepdim=True), incoming.sum(-1), incoming.shape[-1]
    remaining = torch.minimum(before + added.cumsum(-1), counts[:, None])
    if is_traced():
        return [PeriodStep(True, True, True, False, count) for count in remaining.flatten(0, 1).unbind(-1)]
    have = torch.cat([before, remaining[..., :-1]], -1) + added
    facts = torch.stack([added > 0, have > remaining, have < remaining + block, have < filled.shape[-1] + block])
    numbers = zip(*facts.flatten(1, 2).any(1).tolist(), remaining.flatten(0, 1).unbind(-1), strict=True)
    return [PeriodStep(added, merges, drops, not empty, count) for added, merges, drops, empty, count in numbers]


def pad(x: Tensor, dim: int, size: int, at_end: bool = True) -> Tensor:
    """Extend a dimension to a size by zeros at one end."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    zeros = x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])
    return torch.cat([x, zeros] if at_end else [zeros, x], dim)


def attend_rows(request: MergeRequest, slots: Slots) -> Tensor:
    """Attend with the rows of some periods, each to its period's slots.

    Rows at places outside of this call are computed, too, and dropped.
    """
    place, columns, state = request.place, request.columns, request.state
    periods, merged = place.shape[1], request.merged.clamp_min(0)
    q = split_rows(request.q.to(working_dtype(request.q)), periods)
    offset = torch.arange(columns.window, device=place.device)
    index = (offset + (merged - columns.first[:, None])[..., None]).clamp_(0, columns.k.shape[-2] - 1)
    sinks = torch.arange(state.sink_k.shape[-2], device=place.device).expand(*place.shape, -1)

    def lay(tokens: Tensor, sinks: Tensor, slots: Tensor) -> Tensor:
        return torch.cat([take_periods(tokens, index), sinks.repeat_interleave(periods, 0), slots], -2)

    outside = torch.cat([offset - (place - merged[..., None])[..., None], sinks - (merged - 1)[..., None, None]], -1)
    return join_rows(
        attend_seen(
            q,
            lay(columns.k, state.sink_k, slots.k),
            lay(columns.v, state.sink_v, slots.v),
            outside.flatten(0, 1),
            slot_levels(slots, request.merging),
        ),
        periods,
    )


def take_periods(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of x (batch, heads, tokens, dim) by an index (batch, periods, count): (batch · periods, heads, …)."""
    batch, heads, tokens, dim = x.shape
    at = first_rows(batch * heads, tokens, x.device).view(batch, 1, heads, 1) + index[:, :, None]
    return x.reshape(-1, dim).index_select(0, at.flatten()).view(-1, heads, index.shape[-1], dim)
