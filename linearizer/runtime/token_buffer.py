"""One token for all heads of a layer with windows, alone or with slots, in a few operations of PyTorch.

A token costs mostly the calls of operations. So what these heads hold lies in one buffer, and the tensors of their
states are views of it: a product gives all logits, one softmax all weights. A row of the buffer is a sink, a place of
the ring or a slot; `level` is added to its logit: EMPTY where a query does not see it. All but the row of the new token
change only when a block is merged or a sink leaves a window, which the number of tokens read tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .few_bits import (
    BY_AXIS,
    codes_in,
    pack_vectors,
    scales_in,
    unpack_vectors,
)
from .slots_merging import Merging
from .slots_torch import block_leaves, merge_leaving, slot_levels
from .state import EMPTY, as_slice, first_places, is_traced, must_be_copied, number, tensors, working_dtype
from .state_in_few_bits import Axes, AxisBytes, pack_counts, unpack_counts

Tensor = torch.Tensor


@dataclass(frozen=True)
class WindowGroup:
    """KV heads that hold the same: their indices in the layer, their state, and how they merge, if they do."""

    heads: list[int]
    state: Any
    merging: Merging | None
    bits: int

    @property
    def window(self) -> int:
        return self.state.window_k.shape[-2]

    @property
    def rows(self) -> int:
        return sum(x.shape[-2] for name, x in tensors(self.state).items() if name in ("sink_k", "window_k", "slot_k"))


@dataclass(slots=True)  # no __dict__: exporters of transformers look into each, and states hold what holds them
class TokenBuffer:
    groups: list[WindowGroup]
    indices: list[int]  # of the groups among those of the layer
    spots: list[Any]  # where the heads of each group lie
    order: list[int]  # the heads of the layer that lie here, in order
    chosen: Tensor | None  # the same, if they are not all heads in the order of the layer
    buffers: list[Tensor]  # (keys and values, batch, heads, rows, numbers), or one for each where they differ in size
    level: Tensor  # (batch, heads, rows)
    views: list[dict[str, Tensor]]  # of every state
    count: Tensor  # (batch,) tokens read, as all states have it
    places: list[int]  # the same, known without asking a device
    ring: Tensor  # (keys and values, or 1, batch, heads) the row of a buffer where each ring begins
    windows: Tensor  # (heads,)
    bits: int  # of a number in keys and values; of those along axes, the least
    kinds: int  # buffers that the layer has, one for 16 bits, one for 8, and one for fewer
    axis_bytes: AxisBytes | None

    @classmethod
    def of(
        cls, some: dict[int, WindowGroup], q: Tensor, k: Tensor, v: Tensor, scale: float, axes: Axes | None, kinds: int
    ) -> TokenBuffer:
        """Lay the states of some groups, by their indices, into a buffer, for tokens of a layer like q, k and v."""
        all_heads, dtype = k.shape[1], working_dtype(k)
        groups = list(some.values())
        first = groups[0].state
        names_of = [
            [name for name in ("sink", "window", "slot") if hasattr(group.state, f"{name}_k")] for group in groups
        ]
        order, spots = order_heads([group.heads for group in groups])
        rows = max(group.rows for group in groups)
        widths = [max(getattr(group.state, name).shape[-1] for group in groups) for name in ("sink_k", "sink_v")]
        shape, bits = (
            (len(first.count), len(order), rows),
            {head: group.bits for group in groups for head in group.heads},
        )
        pairs = [(2, widths[0])] if widths[0] == widths[1] else [(1, width) for width in widths]
        buffers = [first.sink_k.new_zeros(parts, *shape, width) for parts, width in pairs]
        level = torch.full(shape, EMPTY, dtype=dtype, device=first.sink_k.device)
        views: list[dict[str, Tensor]] = []
        for group, names, heads in zip(groups, names_of, spots, strict=True):
            row, own = 0, {}
            for name in names:
                size = getattr(group.state, f"{name}_k").shape[-2]
                for kind, buffer in (("k", buffers[0][0]), ("v", buffers[-1][-1])):
                    held = getattr(group.state, f"{name}_{kind}")
                    own[f"{name}_{kind}"] = view = buffer[:, heads, row : row + size, -held.shape[-1] :]
                    view.copy_(held)
                    setattr(group.state, f"{name}_{kind}", view)
                row += size
            group.state.count = first.count
            views.append(own)
        device, parts = level.device, len(buffers[0])
        before = torch.arange(parts * shape[0] * shape[1], device=device)
        ring = (before * rows + first.sink_k.shape[-2]).view(parts, *shape[:2])
        sizes = {head: group.window for group in groups for head in group.heads}
        windows = torch.tensor([sizes[head] for head in order], device=device)
        chosen = None if order == list(range(all_heads)) else torch.tensor(order, device=device)
        axis_bytes, least = None, min(bits.values())
        if axes is not None and least in BY_AXIS:
            axis_bytes = axes(AxisBytes.of, axes, order, tuple(bits[head] for head in order), scale, dtype)
        kept = first.count, first.count.tolist(), ring, windows, least, kinds, axis_bytes
        made = cls(groups, list(some), spots, order, chosen, buffers, level, views, *kept)
        for index in range(len(groups)):
            made.see(index, [place - 1 for place in made.places])
        return made

    def holds(self, memory: list) -> bool:
        """Tell whether the states are still views of this buffer, which may be written: all that changes one replaces
        its count, too."""
        if must_be_copied(self.level):
            return False
        for index, group, views in zip(self.indices, self.groups, self.views, strict=True):
            state = group.state
            if memory[index] is not state or state.count is not self.count or state.window_k is not views["window_k"]:
                return False
        return True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Attend with a token, into `out`; q (batch, heads, group, 1, dim), k and v are those of the whole layer."""
        before = self.places
        for index, group in enumerate(self.groups):
            if any(merges(group, place) for place in before):
                self.merge(index, k.dtype if self.axis_bytes is None else self.level.dtype)
                self.see_merged(index, before)
            if any(sink_leaves(group, place) for place in before):
                self.see(index, before)
        self.attend_rows(q, k, v, scale, out)
        self.count, self.places = self.count + 1, [place + 1 for place in before]
        for group in self.groups:
            group.state.count = self.count

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Remember the token, then let its queries look at all rows."""
        if self.chosen is not None:
            q, k, v = (x.index_select(1, self.chosen) for x in (q, k, v))
        if self.axis_bytes is None:
            q = q * number(scale, q.dtype, q.device)
        own = self.ring + self.count[:, None] % self.windows
        self.remember(own.flatten(), k[..., 0, :], v[..., 0, :])
        self.level.view(-1).index_fill_(0, own[0].flatten(), 0.0)
        part = self.look(q[..., 0, :])
        if self.chosen is None:
            out[..., 0, :] = part
        else:
            out[..., 0, :].index_copy_(1, self.chosen, part.to(out.dtype))

    def remember(self, own: Tensor, k: Tensor, v: Tensor) -> None:
        """Write a token into the rings, at these rows."""
        for side, (buffer, x) in enumerate(zip(self.buffers, self.joined(k, v), strict=True)):
            if self.axis_bytes is not None:
                x = self.axis_bytes.sides[side].pack_vectors(x[..., None, :])
            elif self.bits < 16:
                x = pack_vectors(x, self.bits)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, own, x.flatten(0, -2))

    def joined(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Give keys and values as the buffers have them: together, or apart where they differ in size."""
        return [torch.stack([k, v])] if len(self.buffers) == 1 else [k[None], v[None]]

    def look(self, q: Tensor) -> Tensor:
        """One softmax over all rows: (batch, heads, group, dim)."""
        work = working_dtype(q)
        if self.axis_bytes is not None:
            return self.axis_bytes.attend(q.to(work), self.buffers, self.level.to(work))
        few, shape = self.bits < 16, q.shape[:2]
        parts = [(codes_in(x, self.bits) if few else x).to(work) for x in self.buffers]
        keys, values = (x.flatten(0, 1) for x in (parts[0][0], parts[-1][-1]))
        level, q = self.level.flatten(0, 1)[:, None], q.to(work).flatten(0, 1)
        if not few:
            weights = torch.baddbmm(level.to(work), q, keys.mT).softmax(-1)
            return torch.bmm(weights, values).unflatten(0, shape)
        scales = [scales_in(x, self.bits)[..., 0].flatten(1, 2)[:, :, None].to(work) for x in self.buffers]
        logits = torch.addcmul(level.to(work), torch.bmm(q, keys.mT), scales[0][0])
        return torch.bmm(logits.softmax(-1).mul_(scales[-1][-1]), values).unflatten(0, shape)

    def see(self, index: int, places: list[int]) -> None:
        """Set the levels of a group after a token at these places: what is seen of sinks, ring and slots."""
        group = self.groups[index]
        state, window = group.state, group.window
        place, device = torch.tensor(places, device=self.level.device), self.level.device
        if group.merging is None:
            merged = (place - window + 1).clamp_min(0)
        else:
            merged = torch.tensor([merged_before(group, place) for place in places], device=device)
        age = (place[:, None] - torch.arange(window, device=device)) % window
        seen = [first_places(state.sink_k.shape[-2], merged - 1), age <= (place - merged)[:, None]]
        levels = torch.where(torch.cat(seen, -1), 0.0, EMPTY).to(self.level.dtype)[:, None]
        own = self.level_of(index)
        own[..., : levels.shape[-1]] = levels
        if group.merging is not None:
            levels = self.levels_of_slots(index)
            own[..., group.rows - levels.shape[-1] : group.rows] = levels.clamp_min(EMPTY)

    def see_merged(self, index: int, places: list[int]) -> None:
        """Set the levels of a group whose block has merged before a token at these places."""
        group, place = self.groups[index], places[0]
        state, merging, sinks = group.state, group.merging, group.state.sink_k.shape[-2]
        assert merging is not None
        if len({*places}) > 1 or merged_before(group, place) - merging.block < sinks:
            self.see(index, places)
            return
        own, first = self.level_of(index), (place - group.window) % group.window
        last = first + merging.block
        own[..., sinks + first : sinks + min(last, group.window)] = EMPTY
        own[..., sinks : sinks + max(0, last - group.window)] = EMPTY
        own[..., group.rows - state.weight.shape[-1] : group.rows] = self.levels_of_slots(index).clamp_min_(EMPTY)

    def levels_of_slots(self, index: int) -> Tensor:
        """Give the levels of a group's slots: (batch, heads, slots)."""
        group = self.groups[index]
        assert group.merging is not None
        return slot_levels(replace(group.state, **unpack_counts(group.state, self.level.dtype)), group.merging)

    def level_of(self, index: int) -> Tensor:
        """Give the levels of a group's heads: (batch, heads, rows)."""
        return self.level[:, self.spots[index]]

    def merge(self, index: int, dtype: torch.dtype) -> None:
        """Merge the blocks that leave the windows of a group, in `dtype`, before the next token."""
        group, state, window = self.groups[index], self.groups[index].state, self.groups[index].window
        assert group.merging is not None
        rows = slice(state.sink_k.shape[-2], group.rows)
        bits, names = group.bits, ("sink_k", "sink_v")
        widths = [getattr(state, name).shape[-1] for name in names][-len(self.buffers) :]
        kept = [
            buffer[:, :, self.spots[index], rows, -width:] for buffer, width in zip(self.buffers, widths, strict=True)
        ]
        numbers = [unpack_vectors(x, dtype, bits) if bits < 16 else x for x in kept]
        k, v = numbers[0][0], numbers[-1][-1]
        vectors = {"window_k": k[:, :, :window], "window_v": v[:, :, :window]}
        vectors |= {"slot_k": k[:, :, window:], "slot_v": v[:, :, window:]}
        before = replace(state, **vectors, **unpack_counts(state, self.level.dtype))
        slots = merge_leaving(before, group.merging, self.places)
        counts = pack_counts(slots, bits)
        state.weight, state.spread = counts.get("weight", slots.weight), counts.get("spread", slots.spread)
        for own, new in zip(kept, self.joined(slots.k, slots.v), strict=True):
            own[..., window:, :] = pack_vectors(new, bits) if bits < 16 else new


def order_heads(groups: list[list[int]]) -> tuple[list[int], list[Any]]:
    """Order the heads of groups as in their layer, where those of each group are evenly spaced then; say where each
    group's heads lie, as a slice, which selects without a copy."""
    order = sorted(sum(groups, []))
    spots = [as_slice([order.index(head) for head in heads]) for heads in groups]
    if all(isinstance(spot, slice) for spot in spots):
        return order, spots
    order = sum(groups, [])
    return order, [as_slice([order.index(head) for head in heads]) for heads in groups]


def merges(group: WindowGroup, place: int) -> bool:
    return group.merging is not None and block_leaves(place, group.window, group.merging.block)


def merged_before(group: WindowGroup, place: int) -> int:
    """Count the tokens that are in slots, or are sinks before them, as the token at a place attends."""
    assert group.merging is not None
    return max(0, (place - group.window) // group.merging.block + 1) * group.merging.block


def sink_leaves(group: WindowGroup, place: int) -> bool:
    return group.merging is None and 0 <= place - group.window < group.state.sink_k.shape[-2]


def attend_token_in_buffer(
    groups: Sequence[Any], memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None,
    out: Tensor, done: Sequence[int], axes: Axes | None = None,
) -> list[int]:  # fmt: skip
    """Attend with a token, all windows and slots at once, into `out`; return the indices of the groups served.

    q (batch, heads, group, 1, dim), k, v and out are those of the whole layer, and their heads' states in `memory`.
    """
    if real is not None or q.shape[-2] > 1 or memory is None or len(memory) < len(groups):
        return []
    if torch.is_grad_enabled() or is_traced():
        return []
    served: list[int] = []
    for buffer in held_buffers(memory) or make_buffers(groups, memory, (q, k, v), scale, axes, done):
        buffer.attend(q, k, v, scale, out)
        served += buffer.indices
    return served


def held_buffers(memory: list) -> list[TokenBuffer]:
    """List the buffers in which the last token was attended to, if the states that lay there still do."""
    buffers = [state.token_buffer for state in memory if getattr(state, "token_buffer", None) is not None]
    if any(len(buffers) != buffer.kinds or not buffer.holds(memory) for buffer in buffers):
        return []
    return buffers


def make_buffers(
    groups: Sequence[Any], memory: list, token: tuple[Tensor, Tensor, Tensor], scale: float, axes: Axes | None,
    done: Sequence[int],
) -> list[TokenBuffer]:  # fmt: skip
    """Lay the states of windows and slots into buffers, one for those of 16 bits, of 8, of fewer, once all sinks are
    there."""
    kinds: dict[int, dict[int, WindowGroup]] = {}  # by the bits of a number, 4 to 6 alike
    for index, (group, state) in enumerate(zip(groups, memory, strict=False)):
        held = None if index in done else group.window_group(scale, state)
        if held is not None and held.window and state.sink_k.device == token[1].device:
            state.token_buffer = None
            kinds.setdefault(min(BY_AXIS) if group.bits in BY_AXIS else group.bits, {})[index] = held
    made = []
    for some in kinds.values():
        own = list(some.values())
        first = own[0].state
        if min(first.count.tolist()) >= first.sink_k.shape[-2]:
            first.token_buffer = TokenBuffer.of(some, *token, scale, axes, len(kinds))
            made.append(first.token_buffer)
    return made
