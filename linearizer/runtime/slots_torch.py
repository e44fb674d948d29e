"""Attention to slots in PyTorch: a text, some periods at a time, and single tokens. slots.py defines what it computes.

The rows of a period see the same slots: those that hold until the next block leaves the window.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch

from .few_bits import ROTATED, round_counts, round_together
from .slots_merging import Merging, Slots, keep_slots, merge_slots
from .softmax_parts import attend_seen, exact_part, join_rows, softmax_over, split_rows
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

Tensor = torch.Tensor
Attend = Callable[["Piece"], Tensor]
Reading = Generator["Piece", Tensor, Tensor]
PERIODS_AT_ONCE = 32  # periods whose rows attend at once: more take memory, fewer take more operations


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
        leaving = LeavingBlocks.of(columns, period, comes, block, sinks)
        merge_blocks([Piece(q, state.count, period, leaving, columns, merging, state)])
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

    def attend_all(pieces: list[Piece]) -> list[Tensor]:
        return [(attend or attend_periods)(piece) for piece in pieces]

    return read_together([read_text(q, k, v, merging, real, state)], attend_all)[0]


def read_together(
    readings: Sequence[Reading], attend: Callable[[list[Piece]], list[Tensor]] | None = None
) -> list[Tensor]:
    """Let heads of several kinds read one text, so that all of them merge a block at once; return what each gives."""
    pieces = {index: next(reading) for index, reading in enumerate(readings)}
    outputs: dict[int, Tensor] = {}
    while pieces:
        parts = (attend or attend_pieces)(list(pieces.values()))
        for index, part in zip(list(pieces), parts, strict=True):
            try:
                pieces[index] = readings[index].send(part)
            except StopIteration as end:
                outputs[index] = end.value
                del pieces[index]
    return [outputs[index] for index in range(len(readings))]


def read_text(q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> Reading:
    """Read a text: yield some periods at a time, be sent what their rows see, return what all tokens see."""
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
        parts.append((yield Piece(asks, place[:, some], period[:, some] * block, leaving, columns, merging, state)))
    state.count = end
    remember_window(state, columns, tokens)
    if tokens == 1:
        return parts[0]
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = take_tokens(torch.cat(parts, -2), (place - start[:, :1]).clamp_min(0))
    return out if order is None else take_tokens(out, order.argsort(-1))


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

    def tokens(self, columns: Columns, dtype: torch.dtype) -> Slots:
        """Give the tokens of each block: (batch, heads, periods, block, …)."""
        index, shape = self.index.flatten(1), self.index.shape[1:]
        k, v = (take_tokens(x, index).to(dtype).unflatten(2, shape) for x in (columns.k, columns.v))
        weight = self.present.to(dtype)[:, None].expand(-1, k.shape[1], -1, -1)
        return Slots(k, v, weight, torch.zeros_like(weight))


@dataclass
class Piece:
    """Some periods of a text, and the rows that attend in them."""

    q: Tensor  # (batch, heads, group, periods · rows, dim)
    place: Tensor  # (batch, periods, rows)
    merged: Tensor  # (batch, periods) tokens before this place are in slots
    leaving: LeavingBlocks
    columns: Columns
    merging: Merging
    state: SlotState


def attend_periods(piece: Piece) -> Tensor:
    """Merge the blocks of some periods, one after the other, then attend with the rows of all of them."""
    return attend_pieces([piece])[0]


def attend_pieces(pieces: list[Piece]) -> list[Tensor]:
    """Merge the blocks of all pieces, then attend with each."""
    return [attend_rows(piece, slots) for piece, slots in zip(pieces, merge_pieces(pieces), strict=True)]


def merge_pieces(pieces: list[Piece]) -> list[Slots]:
    """Merge the blocks of all pieces, those that merge alike together; update the states."""
    alike: dict[tuple, list[int]] = {}
    for index, piece in enumerate(pieces):
        alike.setdefault((piece.merging.block, piece.state.slot_k.dtype), []).append(index)
    slots: dict[int, Slots] = {}
    for indices in alike.values():
        slots.update(zip(indices, merge_blocks([pieces[index] for index in indices]), strict=True))
    return [slots[index] for index in range(len(pieces))]


def merge_blocks(pieces: list[Piece]) -> list[Slots]:
    """Merge the blocks that leave the windows as some periods begin; update the states.

    Return the slots of each period and piece: a batch in which every text's periods follow one another. The heads of
    all pieces lie side by side, with empty slots where a head has fewer than another.
    """
    sizes = [piece.state.weight.shape[1:] for piece in pieces]
    room, periods = max(count for _, count in sizes), max(piece.merged.shape[1] for piece in pieces)
    work, kept = pieces[0].state.weight.dtype, pieces[0].state.slot_k.dtype
    bits = [piece.merging.bits for piece, (heads, _) in zip(pieces, sizes, strict=True) for _ in range(heads)]
    now = side_by_side([slots_of(piece.state, room) for piece in pieces])
    new = side_by_side([pad(piece.leaving.tokens(piece.columns, work), 2, periods) for piece in pieces])
    counts = torch.tensor([count for heads, count in sizes for _ in range(heads)], device=now.weight.device)
    metric = torch.cat([piece.merging.scaled for piece in pieces])
    blocks = [Slots(*(x[:, :, number] for x in new.all())) for number in range(periods)]
    leaves = new.weight.sum((0, 1, 3)).tolist()
    held = (now.weight > 0).sum(-1, keepdim=True) + new.weight.sum(-1).cumsum(-1)  # if nothing is merged
    too_many = (held > counts[:, None]).flatten(0, 1).any(0).tolist()
    after = []
    for number, block in enumerate(blocks):
        if leaves[number]:
            both = now.beside(block)
            now = merge_slots(both, counts, metric, room) if too_many[number] else keep_slots(both, room)
            now.k, now.v = now.k.to(kept), now.v.to(kept)
            now = round_slots(now, bits)
        after.append(now)
    each = Slots(*(torch.stack(x, 1) for x in zip(*(slots.all() for slots in after), strict=True)))
    slots, first = [], 0
    for piece, (heads, count) in zip(pieces, sizes, strict=True):
        own = [x[:, : piece.merged.shape[1], first : first + heads, :count] for x in each.all()]
        state, first = piece.state, first + heads
        state.slot_k, state.slot_v, state.weight, state.spread = (x[:, -1].clone() for x in own)
        slots.append(Slots(*(x.flatten(0, 1) for x in own)))
    return slots


def round_slots(slots: Slots, bits: Sequence[int]) -> Slots:
    """Round slots to what the bits of each head hold."""
    if len(set(bits)) == 1:
        return round_alike(slots, bits[0])
    rounded = Slots(*(x.clone() for x in slots.all()))
    for count in set(bits) - {16}:
        heads = [head for head, own in enumerate(bits) if own == count]
        some = round_alike(Slots(*(x[:, heads] for x in slots.all())), count)
        for whole, part in zip(rounded.all(), some.all(), strict=True):
            whole[:, heads] = part
    return rounded


def round_alike(slots: Slots, bits: int) -> Slots:
    """Round slots of heads that have the same bits."""
    k, v = (slots.k, slots.v) if bits == 16 else round_together(slots.k, slots.v, bits)
    counted = slots.weight, slots.spread
    return Slots(k, v, *(round_counts(*counted) if bits in ROTATED else counted))


def slots_of(state: SlotState, room: int) -> Slots:
    """Give the slots of a state, and empty ones until there are as many as there is room for."""
    return pad(Slots(state.slot_k, state.slot_v, state.weight, state.spread), 2, room)


def pad(slots: Slots, dim: int, size: int) -> Slots:
    """Add empty slots at the end of a dimension until it has a size."""
    missing = size - slots.weight.shape[dim]
    if not missing:
        return slots

    def longer(x: Tensor) -> Tensor:
        return torch.cat([x, x.new_zeros(*x.shape[:dim], missing, *x.shape[dim + 1 :])], dim)

    return Slots(*map(longer, slots.all()))


def side_by_side(some: Sequence[Slots]) -> Slots:
    """Lay the heads of several beside each other."""
    return (
        some[0]
        if len(some) == 1
        else Slots(*(torch.cat(x, 1) for x in zip(*(slots.all() for slots in some), strict=True)))
    )


def attend_rows(piece: Piece, held: Slots) -> Tensor:
    """Attend with the rows of some periods, each to the slots of its own."""
    place, columns, state = piece.place, piece.columns, piece.state
    periods, merged = place.shape[1], piece.merged.clamp_min(0)[..., None]
    near = merged + torch.arange(columns.window, device=place.device)
    index = near - columns.first[:, None, None]
    here = (index >= columns.empty[:, None, None]) & (index < columns.k.shape[-2])
    seen = here[:, :, None] & (near[:, :, None] <= place[..., None])
    gone = (torch.arange(state.sink_k.shape[-2], device=place.device) < merged)[:, :, None]
    index = index.clamp(0, columns.k.shape[-2] - 1).flatten(1)

    def lay(tokens: Tensor, sinks: Tensor, slots: Tensor) -> Tensor:
        parts = split_rows(take_tokens(tokens, index), periods), sinks.repeat_interleave(periods, 0), slots
        return torch.cat(parts, -2)

    out = attend_seen(
        split_rows(piece.q.to(working_dtype(piece.q)), periods),
        lay(columns.k, state.sink_k, held.k),
        lay(columns.v, state.sink_v, held.v),
        torch.cat([seen, gone.expand(-1, -1, place.shape[-1], -1)], -1).flatten(0, 1),
        slot_levels(held, piece.merging),
    )
    return join_rows(out, periods)
