"""Attention to slots in PyTorch: a text, some periods at a time, and single tokens. slots_merging.py defines slots.

The rows of a period see the same slots: those that hold until the next block leaves the window.
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
    take_rows,
)
from .softmax_parts import attend_seen, join_rows, split_rows
from .state import (
    Columns,
    SlotState,
    first_rows,
    is_traced,
    lay_columns,
    remember_sinks,
    remember_window,
    take_tokens,
    working_dtype,
)

Tensor = torch.Tensor
SlotSteps = Generator["MergeRequest", Tensor, Tensor]
MAX_PADDING = 2**14  # pairs with empty slots that take as long as merging heads of two sizes one after the other
PERIODS_AT_ONCE = 16  # periods whose rows attend at once: more take memory, fewer take more operations


def block_leaves(place: int, window: int, block: int) -> bool:
    """Whether a block is merged before the token at a place attends."""
    return place >= window and (place - window) % block == 0


def merge_leaving(state: SlotState, merging: Merging, places: Sequence[int]) -> Slots:
    """Return the slots of a state after blocks have merged that leave before the tokens at these places attend."""
    window, block, device = merging.window, merging.block, state.weight.device
    before, sinks = slots_of_state(state), state.sink_k.shape[-2]
    comes = torch.tensor([block_leaves(place, window, block) for place in places], device=device)[:, None]
    place = torch.tensor([place - window for place in places], device=device)[:, None]
    place = place + torch.arange(block, device=device)
    k, v = (take_tokens(x, place % window) for x in (state.window_k, state.window_v))
    return merge_block(before, k, v, comes & (place >= sinks), merging)


def slot_levels(slots: SlotState | Slots, merging: Merging) -> Tensor:
    """What the weight and the spread of slots add to their logits, -∞ if they are empty: (batch, heads, slots)."""
    return torch.addcmul(slots.weight.log(), merging.gain.to(slots.weight.dtype)[:, None], slots.spread)


def read_together(texts: Sequence[SlotText]) -> list[Tensor]:
    """Let heads of several kinds read one text, so that all of them merge a block at once; return what each gives."""
    readings = [read_text(text) for text in texts]
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


@dataclass
class SlotText:
    """A text laid out for heads that read it: new tokens behind the window, real ones at the right end."""

    q: Tensor  # (batch, heads, group, tokens, dim)
    columns: Columns
    merging: Merging
    state: SlotState
    order: Tensor | None  # (batch, tokens) of the tokens, where some are no real ones
    new: Tensor | int  # how many are real

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> SlotText:
        order = None if real is None else real.to(torch.int8).argsort(dim=-1, stable=True)
        columns = lay_columns(k, v, merging.window, real, state)
        remember_sinks(state, columns)
        q = q if order is None else take_tokens(q, order)
        return cls(q, columns, merging, state, order, q.shape[-2] if real is None else real.sum(-1))

    def end(self, out: Tensor) -> Tensor:
        """Let the state count and remember the tokens; return what they saw in the order in which they came."""
        self.state.count = self.state.count + self.new
        remember_window(self.state, self.columns, self.q.shape[-2])
        return out if self.order is None else take_tokens(out, self.order.argsort(-1))


def read_text(text: SlotText) -> SlotSteps:
    """Read a text: yield some periods at a time, be sent what their rows see, return what all tokens see."""
    q, columns, merging, state = text.q, text.columns, text.merging, text.state
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
    """The blocks that leave the window as some periods begin, in this call."""

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
    """Merge the blocks of all requests, those that merge alike together; update the states."""
    slots: dict[int, Slots] = {}
    alike: dict[tuple, list[list[int]]] = {}
    rows = [request.state.weight.shape[2] + request.merging.block for request in requests]
    for index in sorted(range(len(requests)), key=lambda index: -rows[index]):
        request = requests[index]
        groups = alike.setdefault((request.merging.block, request.state.slot_k.dtype), [])
        heads = request.state.weight.shape[:2].numel()
        if not groups or heads * (max(rows[other] for other in groups[-1]) ** 2 - rows[index] ** 2) > MAX_PADDING:
            groups.append([])
        groups[-1].append(index)
        groups[-1].sort(key=lambda index: requests[index].merging.bits)  # heads that are rounded alike lie together
    for indices in (indices for groups in alike.values() for indices in groups):
        slots.update(zip(indices, merge_blocks([requests[index] for index in indices]), strict=True))
    return [slots[index] for index in range(len(requests))]


def slots_of_state(state: SlotState) -> Slots:
    """Return the slots of a state."""
    return Slots(state.slot_k, state.slot_v, state.weight, state.spread)


def merge_blocks(requests: list[MergeRequest]) -> list[Slots]:
    """Merge the blocks that leave the windows as some periods begin; update the states.

    Return the slots of each period and request: a batch in which every text's periods follow one another. The heads of
    all requests lie side by side, with empty slots before those of a head that has fewer than another.
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
    new = torch.cat([pad(rows_of_blocks(request), 2, periods) for request in requests], 1)
    counts = torch.tensor([count for heads, count in sizes for _ in range(heads)], device=now.device)
    plan, after = plan_merging(now[..., -1] > 0, new[..., -1] > 0, counts), []
    for block, step in zip(new.movedim(2, 0), plan, strict=True):
        if step.comes:
            both, most = torch.cat([now, block], 2), block.shape[2]
            if is_traced():
                now = merge_in_graph(now, block, step.left, dims, rounding)
            elif step.merges:
                now = merge_rows(both, most, dims, rounding, step.full, step.left if step.drops else None)
            else:
                now = drop_empty(both, most, step.left)
        after.append(now)
    each = torch.stack(after, 1)  # (batch, periods, heads, room, numbers)
    slots, begin = [], 0
    for request, state, (heads, count) in zip(requests, states, sizes, strict=True):
        of_request = slots_of_rows(each[:, : request.merged.shape[1], begin : begin + heads, room - count :], dims)
        last = Slots(*(x[:, -1] for x in of_request.all()))
        if is_traced() or not bool(last.weight.all()):
            last = keep_slots(last, count)
        state.slot_k, state.slot_v = last.k.to(state.slot_k.dtype), last.v.to(state.slot_v.dtype)
        state.weight, state.spread, begin = last.weight, last.spread, begin + heads
        slots.append(Slots(*(x.flatten(0, 1) for x in of_request.all())))
    return slots


def merge_in_graph(now: Tensor, block: Tensor, left: Tensor, dims: tuple[int, int], rounding: Rounding) -> Tensor:
    """Merge a block in the texts to which it comes; what runs the graph computes nothing where it comes to none."""
    comes = (block[..., -1:] > 0).any(2, keepdim=True)

    def merge(now: Tensor, block: Tensor, left: Tensor, comes: Tensor, metric: Tensor) -> Tensor:
        both, own = torch.cat([now, block], 2), replace(rounding, metric=metric)
        return torch.where(comes, merge_rows(both, block.shape[2], dims, own, False, left), now)

    def keep(now: Tensor, *others: Tensor) -> Tensor:
        return now.clone()

    given = now, block.contiguous(), left.contiguous(), comes, rounding.metric
    return torch.cond(comes.any(), merge, keep, given)


def rows_of_state(request: MergeRequest) -> Tensor:
    """Lay out the slots of a state, those that are empty before the others: (batch, heads, slots, numbers)."""
    state, work = request.state, request.state.weight.dtype
    slots = Slots(state.slot_k.to(work), state.slot_v.to(work), state.weight, state.spread)
    rows, full, size = lay_rows(slots, request.merging.rows), (state.weight > 0).sum(-1), state.weight.shape[-1]
    if not is_traced() and bool((full == size).all()):
        return rows
    index = (full[..., None] + torch.arange(size, device=full.device)) % size
    return take_rows(rows.flatten(0, 1), index.flatten(0, 1)).unflatten(0, full.shape)


def rows_of_blocks(request: MergeRequest) -> Tensor:
    """Lay out the tokens of leaving blocks: (batch, heads, periods, block, numbers)."""
    leaving, columns, work = request.leaving, request.columns, request.state.weight.dtype
    k, v = (take_tokens(x, leaving.index.flatten(1)).to(work) for x in (columns.k, columns.v))
    weight = leaving.present.flatten(1).to(work)[:, None].expand(-1, k.shape[1], -1)
    rows = lay_rows(Slots(k, v, weight, torch.zeros_like(weight)), request.merging.rows)
    return rows.unflatten(2, leaving.index.shape[1:])


@dataclass
class Step:
    """What happens to the slots of all heads as a period begins."""

    comes: bool  # whether a block comes to any
    merges: bool  # whether any has too many then
    drops: bool  # whether any has fewer too many than a block
    full: bool  # whether none has an empty slot
    left: Tensor  # (batch · heads,) how many are not empty after it


def plan_merging(held: Tensor, comes: Tensor, counts: Tensor) -> list[Step]:
    """Plan the steps; held (batch, heads, room), comes (batch, heads, periods, block), counts (heads,).

    A graph that is being made knows no numbers: there all that may happen does.
    """
    before, new, block = held.sum(-1, keepdim=True), comes.sum(-1), comes.shape[-1]
    left = torch.minimum(before + new.cumsum(-1), counts[:, None])
    if is_traced():
        return [Step(True, True, True, False, own) for own in left.flatten(0, 1).unbind(-1)]
    have = torch.cat([before, left[..., :-1]], -1) + new
    facts = torch.stack([new > 0, have > left, have < left + block, have < held.shape[-1] + block])
    numbers = zip(*facts.flatten(1, 2).any(1).tolist(), left.flatten(0, 1).unbind(-1), strict=True)
    return [Step(new, merges, drops, not empty, own) for new, merges, drops, empty, own in numbers]


def pad(x: Tensor, dim: int, size: int, at_end: bool = True) -> Tensor:
    """Add zeros at an end of a dimension until it has a size."""
    missing = size - x.shape[dim]
    if not missing:
        return x
    zeros = x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])
    return torch.cat([x, zeros] if at_end else [zeros, x], dim)


def attend_rows(request: MergeRequest, held: Slots) -> Tensor:
    """Attend with the rows of some periods, each to the slots of its own.

    Rows whose places are not in this call see something, too, and are dropped.
    """
    place, columns, state = request.place, request.columns, request.state
    periods, merged = place.shape[1], request.merged.clamp_min(0)
    q = split_rows(request.q.to(working_dtype(request.q)), periods)
    near = torch.arange(columns.window, device=place.device)
    index = (near + (merged - columns.first[:, None])[..., None]).clamp_(0, columns.k.shape[-2] - 1)
    sinks = torch.arange(state.sink_k.shape[-2], device=place.device).expand(*place.shape, -1)

    def lay(tokens: Tensor, sinks: Tensor, slots: Tensor) -> Tensor:
        return torch.cat([take_periods(tokens, index), sinks.repeat_interleave(periods, 0), slots], -2)

    late = torch.cat([near - (place - merged[..., None])[..., None], sinks - (merged - 1)[..., None, None]], -1)
    return join_rows(
        attend_seen(
            q,
            lay(columns.k, state.sink_k, held.k),
            lay(columns.v, state.sink_v, held.v),
            late.flatten(0, 1),
            slot_levels(held, request.merging),
        ),
        periods,
    )


def take_periods(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of x (batch, heads, tokens, dim) by an index (batch, periods, some): (batch · periods, heads, …)."""
    batch, heads, tokens, dim = x.shape
    at = first_rows(batch * heads, tokens, x.device).view(batch, 1, heads, 1) + index[:, :, None]
    return x.reshape(-1, dim).index_select(0, at.flatten()).view(-1, heads, index.shape[-1], dim)
