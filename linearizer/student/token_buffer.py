"""One token for all heads of a layer with windows, alone or with slots, in a few operations of PyTorch.

A token's time is mostly the calls of operations. So the states of heads of the same bits lie in one buffer, and their
tensors are views of it: one product computes all logits, one softmax all weights. A row of the buffer is a place of the
ring or a slot. All sinks come before the rows, in separate tensors, since they have other bits. `level` is added to the
logits: EMPTY for what a query does not see. Except for the new token's row, levels change only when a block is merged
or a sink leaves a window, which follows from the number of tokens read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .packed_state import Turns, pack_counts, unpack_counts
from .rounding import codes_in, pack_vectors, scales_in, unpack_vectors
from .slots_merging import Merging
from .slots_torch import block_leaves, merge_leaving, slot_levels
from .state import EMPTY, as_slice, first_places, is_traced, must_be_copied, tensors, working_dtype

Tensor = torch.Tensor


@dataclass(frozen=True)
class WindowGroup:
    """KV heads of one kind: their indices in the layer, their state, and how they merge, if they do."""

    heads: list[int]
    state: Any
    merging: Merging | None
    bits: int

    @property
    def window(self) -> int:
        return self.state.window_k.shape[-2]

    @property
    def rows(self) -> int:
        return sum(x.shape[-2] for name, x in tensors(self.state).items() if name in ("window_k", "slot_k"))

    @property
    def sinks(self) -> int:
        return self.state.sink_k.shape[-2]

    @property
    def slots(self) -> int:
        return self.rows - self.window


@dataclass
class TokenBuffer:
    groups: list[WindowGroup]
    indices: list[int]  # of the groups in the layer
    spots: list[Any]  # positions of each group's heads in the buffer
    order: list[int]  # the layer's heads in the buffer, in order
    heads: Tensor  # the same
    all_heads: bool  # whether they are all heads of the layer
    buffers: list[Tensor]  # (keys and values, batch, heads, rows, numbers), or one each if their sizes differ
    sinks: tuple[Tensor, Tensor]  # keys and values of all heads (batch, heads, sinks, dim)
    level: Tensor  # (batch, heads, sinks and rows)
    views: list[dict[str, Tensor]]  # of every state
    count: Tensor  # (batch,) tokens read, as all states have it
    ring: Tensor  # (keys and values, or 1, batch, heads) the row of a buffer where each ring begins
    windows: Tensor  # (heads,)
    bits: int  # of a number in keys and values
    kinds: int  # buffers of the layer, one for each number of bits
    turns: Turns | None  # of the layer, if these heads turn keys and values

    @classmethod
    def of(
        cls, served: dict[int, WindowGroup], k: Tensor, turns: Turns | None, kinds: int, count: Tensor
    ) -> TokenBuffer:
        """Lay the states of some groups, by their indices, into a buffer, for tokens of a layer with keys like k."""
        dtype = working_dtype(k)
        groups = list(served.values())
        state = groups[0].state
        names_of = [[name for name in ("window", "slot") if hasattr(group.state, f"{name}_k")] for group in groups]
        order, spots = order_heads([group.heads for group in groups])
        rows, device = max(group.rows for group in groups), state.window_k.device
        widths = [state.window_k.shape[-1], state.window_v.shape[-1]]
        shape = len(state.count), len(order)
        pairs = [(2, widths[0])] if widths[0] == widths[1] else [(1, width) for width in widths]
        buffers = [state.window_k.new_zeros(parts, *shape, rows, width) for parts, width in pairs]
        level = torch.full((*shape, groups[0].sinks + rows), EMPTY, dtype=dtype, device=device)
        sinks = tuple(torch.cat([getattr(group.state, name) for group in groups], 1) for name in ("sink_k", "sink_v"))
        if order != (unordered := sum((group.heads for group in groups), [])):
            at = torch.tensor([unordered.index(head) for head in order], device=device)
            sinks = tuple(x.index_select(1, at) for x in sinks)
        views: list[dict[str, Tensor]] = []
        for group, names, spot in zip(groups, names_of, spots, strict=True):
            row, group_views = 0, {}
            for name in names:
                size = getattr(group.state, f"{name}_k").shape[-2]
                for kind, buffer in (("k", buffers[0][0]), ("v", buffers[-1][-1])):
                    tensor = getattr(group.state, f"{name}_{kind}")
                    group_views[f"{name}_{kind}"] = view = buffer[:, spot, row : row + size]
                    view.copy_(tensor)
                    setattr(group.state, f"{name}_{kind}", view)
                row += size
            group.state.count = count
            views.append(group_views)
        parts = len(buffers[0])
        ring = (torch.arange(parts * shape[0] * shape[1], device=device) * rows).view(parts, *shape)
        sizes = {head: group.window for group in groups for head in group.heads}
        windows = torch.tensor([sizes[head] for head in order], device=device)
        heads = torch.tensor(order, device=device), order == list(range(k.shape[1]))
        fields = count, ring, windows, groups[0].bits, kinds, turns
        result = cls(groups, list(served), spots, order, *heads, buffers, sinks, level, views, *fields)  # type: ignore[arg-type]
        for index in range(len(groups)):
            result.set_levels(index, [place - 1 for place in count.tolist()])
        return result

    def holds(self, memory: list) -> bool:
        """Whether the states are still views of this buffer, and it may be written: any other change of a state
        replaces its count, too."""
        if must_be_copied(self.level):
            return False
        for index, group, views in zip(self.indices, self.groups, self.views, strict=True):
            state = group.state
            if memory[index] is not state or state.count is not self.count or state.window_k is not views["window_k"]:
                return False
        return True

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Attend with a token, into `out`; q (batch, heads, group, 1, dim), k and v have all heads of the layer."""
        places = self.count.tolist()
        for index, group in enumerate(self.groups):
            if any(merges(group, place) for place in places):
                self.merge(index, places, k.dtype if self.turns is None else self.level.dtype)
                self.set_levels(index, places)
        self.attend_rows(q, k, v, scale, out)

    def attend_rows(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Store the token, then let its queries attend to all rows."""
        if not self.all_heads:
            q, k, v = (x.index_select(1, self.heads) for x in (q, k, v))
        if self.turns is not None:
            heads = as_slice(self.order)
            q, k, v = self.turns(self.turns.turn, q, k, v, scale**0.5, heads)
        q = q * scale
        place = self.count[:, None] % self.windows
        self.remember((self.ring + place).flatten(), k[..., 0, :], v[..., 0, :])
        self.level.scatter_(-1, (place + self.sinks[0].shape[2])[..., None], 0.0)
        part = self.read_rows(q[..., 0, :])
        if self.turns is not None:
            part = self.turns(self.turns.turn_back, part[..., None, :], heads)[..., 0, :]
        if self.all_heads:
            out[..., 0, :] = part
        else:
            out[..., 0, :].index_copy_(1, self.heads, part.to(out.dtype))

    def remember(self, at: Tensor, k: Tensor, v: Tensor) -> None:
        """Write a token into the rings, at these rows."""
        for buffer, x in zip(self.buffers, self.joined(k, v), strict=True):
            if self.bits < 16:
                x = pack_vectors(x, self.bits)
            buffer.view(-1, buffer.shape[-1]).index_copy_(0, at, x.flatten(0, -2))

    def joined(self, k: Tensor, v: Tensor) -> list[Tensor]:
        """Return keys and values as the buffers have them: together, or apart if their sizes differ."""
        return [torch.stack([k, v])] if len(self.buffers) == 1 else [k[None], v[None]]

    def read_rows(self, q: Tensor) -> Tensor:
        """Attend to all sinks and rows: (batch, heads, group, dim)."""
        work, is_packed, shape, sinks = working_dtype(q), self.bits < 16, q.shape[:2], self.sinks[0].shape[2]
        parts = [(codes_in(x, self.bits) if is_packed else x).to(work) for x in self.buffers]
        keys, values = (x.flatten(0, 1) for x in (parts[0][0], parts[-1][-1]))
        level, q = self.level.flatten(0, 1)[:, None].to(work), q.to(work).flatten(0, 1)
        logits, scales = torch.bmm(q, keys.mT), list[Tensor]()
        if is_packed:
            scales = [scales_in(x, self.bits)[..., 0].flatten(1, 2)[:, :, None].to(work) for x in self.buffers]
            logits = logits * scales[0][0]
        if sinks:
            sink_keys, sink_values = (x.to(work).flatten(0, 1) for x in self.sinks)
            logits = torch.cat([torch.bmm(q, sink_keys.mT), logits], -1)
        weights = (logits + level).softmax(-1)
        of_rows = weights[..., sinks:] * scales[-1][-1] if is_packed else weights[..., sinks:]
        out = torch.bmm(of_rows, values)
        if sinks:
            out = torch.baddbmm(out, weights[..., :sinks], sink_values)
        return out.unflatten(0, shape)

    def set_levels(self, index: int, places: list[int]) -> None:
        """Set the levels of a group after a token at these places."""
        levels = levels_of(self.groups[index], places, self.level.dtype)
        self.level_of(index)[..., : levels.shape[-1]] = levels

    def level_of(self, index: int) -> Tensor:
        """Return the levels of a group's heads: (batch, heads, rows)."""
        return self.level[:, self.spots[index]]

    def merge(self, index: int, places: list[int], dtype: torch.dtype) -> None:
        """Merge the blocks that leave the windows of a group, in `dtype`, before the next token."""
        group, state, window = self.groups[index], self.groups[index].state, self.groups[index].window
        assert group.merging is not None
        bits, rows = group.bits, [buffer[:, :, self.spots[index], : group.rows] for buffer in self.buffers]
        unpacked = [unpack_vectors(x, dtype, bits) if bits < 16 else x for x in rows]
        k, v = unpacked[0][0], unpacked[-1][-1]
        vectors = {"window_k": k[:, :, :window], "window_v": v[:, :, :window]}
        vectors |= {"slot_k": k[:, :, window:], "slot_v": v[:, :, window:]}
        before = replace(state, **vectors, **unpack_counts(state, self.level.dtype))
        slots = merge_leaving(before, group.merging, places)
        counts = pack_counts(slots, bits)
        state.weight, state.spread = counts.get("weight", slots.weight), counts.get("spread", slots.spread)
        for buffer_rows, x in zip(rows, self.joined(slots.k, slots.v), strict=True):
            buffer_rows[..., window:, :] = pack_vectors(x, bits) if bits < 16 else x


def order_heads(groups: list[list[int]]) -> tuple[list[int], list[Any]]:
    """Order the heads of groups as in their layer, if each group's heads are evenly spaced then, else by groups.

    Return also the positions of each group's heads, as a slice, which selects without a copy.
    """
    order = sorted(sum(groups, []))
    spots = [as_slice([order.index(head) for head in heads]) for heads in groups]
    if all(isinstance(spot, slice) for spot in spots):
        return order, spots
    order = sum(groups, [])
    return order, [as_slice([order.index(head) for head in heads]) for heads in groups]


def merges(group: WindowGroup, place: int) -> bool:
    return group.merging is not None and block_leaves(place, group.window, group.merging.block)


def merged_before(group: WindowGroup, place: int) -> int:
    """Count the tokens in slots, and the sinks before them, when the token at a place attends."""
    assert group.merging is not None
    return max(0, (place - group.window) // group.merging.block + 1) * group.merging.block


def levels_of(group: WindowGroup, places: list[int], dtype: torch.dtype) -> Tensor:
    """Return the levels of a group's heads after a token at these places: (batch, heads, sinks and rows)."""
    window, device = group.window, group.state.sink_k.device
    place = torch.tensor(places, device=device)
    if group.merging is None:
        merged = (place - window + 1).clamp_min(0)
    else:
        merged = torch.tensor([merged_before(group, place) for place in places], device=device)
    age = (place[:, None] - torch.arange(window, device=device)) % window
    oldest = torch.maximum(merged, torch.tensor(group.sinks, device=device))  # sinks are seen among the sinks
    visible = [first_places(group.sinks, place), age <= (place - oldest)[:, None]]
    levels = torch.where(torch.cat(visible, -1), 0.0, EMPTY).to(dtype)[:, None].expand(-1, len(group.heads), -1)
    if group.merging is None:
        return levels
    slots = slot_levels(replace(group.state, **unpack_counts(group.state, dtype)), group.merging)
    return torch.cat([levels, slots.clamp_min(EMPTY)], -1)


def attend_token_in_buffer(
    groups: Sequence[Any], memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None,
    out: Tensor, done: Sequence[int], turns: Turns | None = None,
) -> list[int]:  # fmt: skip
    """Attend with a token, all windows and slots at once, into `out`; return the indices of the groups served.

    q (batch, heads, group, 1, dim), k, v and out have all heads of the layer, and `memory` its groups' states.
    """
    if real is not None or q.shape[-2] > 1 or memory is None or len(memory) < len(groups):
        return []
    if torch.is_grad_enabled() or is_traced():
        return []
    buffers = held_buffers(memory) or make_buffers(groups, memory, k, scale, turns, done)
    for buffer in buffers:
        buffer.attend(q, k, v, scale, out)
    served = [index for buffer in buffers for index in buffer.indices]
    if buffers:
        count = buffers[0].count + 1
        for buffer in buffers:
            buffer.count = count
        for index in served:
            memory[index].count = count
    return served


def held_buffers(memory: list) -> list[TokenBuffer]:
    """Return the buffers that read the last token, if they still hold the states."""
    buffers = [state.token_buffer for state in memory if getattr(state, "token_buffer", None) is not None]
    if any(len(buffers) != buffer.kinds or not buffer.holds(memory) for buffer in buffers):
        return []
    return buffers


def find_groups(
    groups: Sequence[Any], memory: list, k: Tensor, scale: float, done: Sequence[int]
) -> dict[int, WindowGroup]:
    """Find the groups with windows, alone or with slots, by their indices; none until all sinks are read."""
    served = {}
    for index, (group, state) in enumerate(zip(groups, memory, strict=False)):
        candidate = None if index in done or state is None else group.window_group(scale, state)
        if candidate is None or not candidate.window or state.sink_k.device != k.device:
            continue
        if candidate.bits < 16 or state.window_k.dtype == k.dtype:
            served[index] = candidate
    states = [group.state for group in served.values()]
    return served if states and min(states[0].count.tolist()) >= states[0].sink_k.shape[-2] else {}


def make_buffers(
    groups: Sequence[Any], memory: list, k: Tensor, scale: float, turns: Turns | None, done: Sequence[int]
) -> list[TokenBuffer]:
    """Lay the states of windows and slots into buffers, one for each number of bits."""
    kinds: dict[int, dict[int, WindowGroup]] = {}
    for index, group in find_groups(groups, memory, k, scale, done).items():
        group.state.token_buffer = None
        kinds.setdefault(group.bits, {})[index] = group
    if not kinds:
        return []
    count, buffers = memory[min(next(iter(kinds.values())))].count.clone(), []
    for bits, same_bits in kinds.items():
        buffer = TokenBuffer.of(same_bits, k, turns if bits < 16 else None, len(kinds), count)
        next(iter(same_bits.values())).state.token_buffer = buffer
        buffers.append(buffer)
    return buffers
