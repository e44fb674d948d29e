"""One token for all heads of a layer with windows, alone or with slots, by Triton's kernels.

The states of all these heads, in all numbers of bits, lie in one pool of bytes, and their tensors are views of it. A
table says where each head's tensors lie, so one launch serves them all. Nothing is decided on the host: kernels merge
as the number of tokens read tells, and what is launched is the same for every token, so that a graph may repeat it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .kernel_dispatch import launch_token
from .packed_state import Turns
from .rounding import rotation
from .state import is_traced, tensors, working_dtype
from .token_buffer import WindowGroup, find_groups, levels_of

Tensor = torch.Tensor
ALIGNED = 16  # bytes at which a tensor of a head begins
COUNTS = ("weight", "spread")
TENSORS = 5 + len(COUNTS)  # of each head: keys, values, sinks of both, levels


@dataclass
class TokenPool:
    pool: Tensor  # (batch, bytes)
    count: Tensor  # (batch,) tokens read, as all states have it
    table: Tensor  # (heads, fields of kernel_token.py)
    merging: list[Tensor]  # Merging.rows and gain of all heads with slots, if there are any
    turns: list[Tensor]  # how heads turn what they take, if they do
    sizes: list[int]  # sinks; of all heads the most rows, slots and tokens that merge at once, and the fewest bits
    kept: torch.dtype  # of heads of 16 bits
    windows: dict[int, Tensor]  # a view of each group's state, by the group's index
    groups: dict[int, tuple[WindowGroup, list[Tensor]]]  # with the views of all that the pool has of each

    @staticmethod
    @torch.inference_mode(False)  # so that later calls may write what this one makes
    @torch.no_grad()
    def of(served: dict[int, WindowGroup], k: Tensor, turns: Turns | None) -> TokenPool:
        """Lay the states of some groups, by their indices, into a pool, for tokens of a layer with keys like k."""
        groups, work, device = [*served.values()], working_dtype(k), k.device
        count, end, mergers, laid, table = groups[0].state.count.clone(), 0, 0, [], []
        parameters = [group.merging for group in groups if group.merging is not None]
        for group in groups:
            block = 0 if group.merging is None else group.merging.block
            sizes = group.bits, group.window, group.slots, block
            rows = [[head, *sizes, mergers + place] for place, head in enumerate(group.heads)]
            for part in contents(group, work):
                size = -(-part[0, 0].numel() * part.element_size() // ALIGNED) * ALIGNED
                laid.append((end, size, part))
                for row in rows:
                    row.append(end)
                    end += size
            table += rows
            mergers += len(rows) if block else 0
        pool = torch.zeros(len(count), end, dtype=torch.uint8, device=device)
        views = []
        for begin, size, part in laid:
            (texts, heads), shape = part.shape[:2], part.shape[2:]
            view = pool[:, begin : begin + heads * size].view(part.dtype).view(texts, heads, size // part.itemsize)
            views.append(view[..., : shape.numel()].unflatten(-1, shape).copy_(part))
        of_group = [views[begin : begin + TENSORS] for begin in range(0, len(views), TENSORS)]
        for group, own in zip(groups, of_group, strict=True):
            give_views(group, own, count)
        return TokenPool(
            pool,
            count,
            torch.tensor(table, device=device),
            [torch.cat([getattr(own, x) for own in parameters]).to(work) for x in ("rows", "gain") if parameters],
            [] if turns is None else turning(turns, work),
            [groups[0].sinks, *(max(row[i] for row in table) for i in (3, 4)), max(x.rows for x in groups),
             min(group.bits for group in groups)],
            k.dtype,
            {index: group.state.window_k for index, group in served.items()},
            dict(zip(served, zip(groups, of_group, strict=True), strict=True)),
        )  # fmt: skip

    def lay(self, at: int, memory: list) -> None:
        """Lay the states of other texts here, in the places of some of these."""
        work = working_dtype(self.pool.new_empty(0, dtype=self.kept))
        for index, (group, views) in self.groups.items():
            other = replace(group, state=memory[index])
            for view, part in zip(views, contents(other, work), strict=True):
                view[at : at + len(part)].copy_(part)
            self.count[at : at + len(other.state.count)].copy_(other.state.count)

    def holds(self, memory: list, k: Tensor) -> bool:
        """Whether the states are still views of this pool: all that changes one replaces its count, too."""
        states = [(memory[index], window) for index, window in self.windows.items()]
        same = all(state.count is self.count and state.window_k is window for state, window in states)
        return same and self.kept == k.dtype

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor) -> None:
        """Attend with a token, into `out`; q (batch, heads, group, 1, dim), k and v are those of the whole layer."""
        given = self.pool, self.count, self.table, self.merging, self.turns, self.sizes
        launch_token(q, k, v, scale, out, *given)
        self.count.add_(1)


def contents(group: WindowGroup, work: torch.dtype) -> list[Tensor]:
    """Return what a pool has of a group: keys, values, sinks, levels and counts."""
    state = group.state
    rows = [[getattr(state, f"{name}_{kind}") for name in names_of(state)] for kind in ("k", "v")]
    levels = levels_of(group, [place - 1 for place in state.count.tolist()], work)
    counts = [getattr(state, name, levels[..., :0]) for name in COUNTS]
    counts = [x.to(work) if x.is_floating_point() else x for x in counts]
    return [*(torch.cat(kind, 2) for kind in rows), state.sink_k, state.sink_v, levels, *counts]


def names_of(state: Any) -> list[str]:
    return [name for name in ("window", "slot") if hasattr(state, f"{name}_k")]


def give_views(group: WindowGroup, views: list[Tensor], count: Tensor) -> None:
    """Let the tensors of a group's state be views of a pool."""
    state, named = group.state, dict(zip(("k", "v", "sink_k", "sink_v", "level", *COUNTS), views, strict=True))
    for kind in ("k", "v"):
        sizes = [tensors(state)[f"{name}_{kind}"].shape[2] for name in names_of(state)]
        for name, view in zip(names_of(state), named[kind].split(sizes, 2), strict=True):
            setattr(state, f"{name}_{kind}", view)
        setattr(state, f"sink_{kind}", named[f"sink_{kind}"])
    if group.merging is not None:
        state.weight, state.spread = named["weight"], named["spread"]
    state.count = count


def turning(turns: Turns, work: torch.dtype) -> list[Tensor]:
    """Return steps and middle of keys, middle and steps of values, and the rotations of both."""
    middle, dims = turns.value_middle, (turns.key_middle.shape[-1], turns.value_middle.shape[-1])
    steps = [turns.key_steps, turns.key_middle, middle, torch.ones_like(middle[0])]
    return [x.detach() for x in steps] + [rotation(dim, work, middle.device) for dim in dims]


def attend_token_in_pool(
    groups: Sequence[Any], memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None,
    out: Tensor, done: Sequence[int], turns: Turns | None,
) -> list[int]:  # fmt: skip
    """Attend with a token, all windows and slots at once, into `out`; return the indices of the groups served.

    q (batch, heads, group, 1, dim), k, v and out are those of the whole layer, and their heads' states in `memory`.
    """
    if real is not None or q.shape[-2] > 1 or memory is None or len(memory) < len(groups) or torch.is_grad_enabled():
        return []
    if (pool := held_pool(memory, k)) is None:
        if is_traced() or not (served := find_groups(groups, memory, k, scale, done)):
            return []
        for index in served:
            memory[index].token_pool = None
        pool = memory[min(served)].token_pool = TokenPool.of(served, k, turns)
    pool.attend(q, k, v, scale, out)
    return list(pool.windows)


def held_pool(memory: list | None, k: Tensor) -> TokenPool | None:
    """Return the pool of a layer's states, where a kernel read them last."""
    pools = [state.token_pool for state in memory or () if getattr(state, "token_pool", None) is not None]
    return pools[0] if len(pools) == 1 and pools[0].holds(memory or [], k) else None
