"""Texts and tokens of all heads of a layer with windows, alone or with slots, by Triton's kernels.

The states of all these heads, in all numbers of bits, lie in one pool of bytes, and their tensors are views of it. A
table lists the position of each head's tensors, so one launch serves them all. The host decides nothing: kernels decide
from the number of tokens read when to merge, and every token takes the same launches, so that a graph may repeat them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from linearizer.kernels.compiled import is_traced
from linearizer.kernels.features import first_places
from linearizer.kernels.triton.dispatch import launch_text, launch_token
from linearizer.student.attention_of_student import (
    FEWER,
    SINK_TYPE,
    HeadState,
    Merging,
    Scores,
    packed_bytes,
    working_dtype,
)
from linearizer.student.columns import EMPTY
from linearizer.student.layer_student import StoredBasis, as_slice, rotation

Tensor = torch.Tensor
ALIGNED = 16  # a head's tensor begins at a multiple of these bytes
COUNTS = ("weight", "spread")
NAMES = ("k", "v", "sink_k", "sink_v", "level", *COUNTS)  # of each head's tensors; rows are those of ring and slots


@dataclass
class PoolLayout:
    """Where the tensors of heads lie in a pool, and what else depends on no text; made once for states of a kind, since
    copying a table to a device waits for the device."""

    kind: tuple
    groups: dict[int, Any]  # by their indices in the layer
    row_bytes: int
    places: dict[tuple[int, str], tuple[int, int, torch.Size, torch.dtype]]  # begin, bytes of a head, shape, type
    table: Tensor  # (heads, fields of packed_rows.py)
    sizes: list[int]  # in the order of sizes_of
    learned: list[tuple[Tensor, int, int]]  # the parameters that `merging` was computed from, their addresses, versions
    merging: list[Tensor]  # rows_of and gain of all heads with slots, if there are any

    def __reduce__(self) -> tuple:
        """Become None in a copy, whose parameters are others."""
        return type(None), ()

    @staticmethod
    def of(groups: dict[int, Any], kind: tuple, k: Tensor, v: Tensor) -> PoolLayout:
        """Lay out the heads of some groups, by their indices, for keys and values like these."""
        end, merged, table, places = 0, 0, [], {}
        for index, group in groups.items():
            slots, block = group.kind.slots, group.kind.block
            sizes = group.bits, group.window, slots, block
            rows = [[head, *sizes, merged + place if slots else 0] for place, head in enumerate(group.heads)]
            merged += len(group.heads) if slots else 0
            for name, (shape, dtype) in shapes_of(group, k, v).items():
                size = -(-shape.numel() * dtype.itemsize // ALIGNED) * ALIGNED
                places[index, name] = end, size, shape, dtype
                for row in rows:
                    row.append(end)
                    end += size
            table += rows
        sinks = next(iter(groups.values())).sinks
        return PoolLayout(
            kind, groups, end, places, torch.tensor(table, device=k.device), sizes_of(sinks, table), [], []
        )

    @property
    def first_tokens(self) -> int:
        """How many tokens of a text the kernels for texts have to read."""
        return max(self.sizes[0], 1)

    def views(self, pool: Tensor) -> dict[int, dict[str, Tensor]]:
        """Return the views of a pool (rows, row_bytes) that are all tensors of each group's heads, by name."""
        views: dict[int, dict[str, Tensor]] = {index: {} for index in self.groups}
        typed = {dtype: pool.view(dtype) for dtype in {place[3] for place in self.places.values()}}
        for (index, name), (begin, size, shape, dtype) in self.places.items():
            heads, width = len(self.groups[index].heads), dtype.itemsize
            strides = pool.stride(0) // width, size // width, *([shape[-1]] if len(shape) > 1 else []), 1
            place = typed[dtype].storage_offset() + begin // width
            views[index][name] = typed[dtype].as_strided((len(pool), heads, *shape), strides, place)
        return views

    def find_merging(self, scale: float, work: torch.dtype) -> list[Tensor]:
        """Return `merging`; compute it again only if a parameter has changed."""
        mergers = [x for group in self.groups.values() if (x := group.merging(scale)) is not None]
        parameters = [x for merging in mergers for x in (merging.metric, merging.gain, merging.mean_query)]
        same = len(parameters) == len(self.learned) and all(
            x is known and x.data_ptr() == address and x._version == version
            for x, (known, address, version) in zip(parameters, self.learned, strict=True)
        )
        if not same:
            numbers = [[rows_of(merging) for merging in mergers], [merging.gain for merging in mergers]]
            self.merging = [torch.cat(parts).to(work) for parts in numbers if parts]
            tracked = not any(x.is_inference() for x in parameters)  # only then have they versions
            self.learned = [(x, x.data_ptr(), x._version) for x in parameters if tracked]
        return self.merging


@dataclass
class StatePool:
    pool: Tensor  # (rows, bytes)
    rows: Tensor  # (batch,) of the pool: those of the texts
    count: Tensor  # (batch,) tokens read, as all states have it
    layout: PoolLayout
    merging: list[Tensor]  # PoolLayout.merging
    turns: list[Tensor]  # how heads turn keys and values, if they do
    dtype: torch.dtype  # of heads of 16 bits
    dims: tuple[int, int]  # of keys and values
    views: dict[int, dict[str, Tensor]]  # of the pool
    windows: dict[int, Tensor]  # window_k of each group's state
    missing: int  # the most of its first tokens that a text still has to read

    def __reduce__(self) -> tuple:
        """Become None in a copy, whose states lie elsewhere."""
        return type(None), ()

    @staticmethod
    @torch.inference_mode(False)  # so that later calls may write to the pool
    @torch.no_grad()
    def of(student: Any, served: dict[int, Any], memory: list, k: Tensor, v: Tensor, scale: float) -> StatePool:
        """Lay the states of some groups of a layer, by their indices, into a pool; groups without a state start an
        empty one there."""
        work, dims = working_dtype(k), (k.shape[-1], v.shape[-1])
        kinds = tuple((index, group, group.kind) for index, group in served.items())
        kind = kinds, k.dtype, k.device, dims, scale
        if (layout := getattr(student, "pool_layout", None)) is None or layout.kind != kind:
            layout = student.pool_layout = PoolLayout.of(served, kind, k, v)
        pool = torch.zeros(len(k), layout.row_bytes, dtype=torch.uint8, device=k.device)
        result = StatePool(
            pool,
            first_rows(len(k), k.device),
            torch.zeros(len(k), dtype=torch.long, device=k.device),
            layout,
            layout.find_merging(scale, work),
            [] if student.turns is None else turning(student.turns, work),
            k.dtype,
            dims,
            layout.views(pool),
            {},
            layout.first_tokens,
        )
        if memory[min(served)] is not None:
            result.lay(0, memory, scale)
        result.show(memory)
        return result

    @torch.inference_mode(False)
    @torch.no_grad()
    def copy(self, change: Callable[[Tensor], Tensor]) -> StatePool:
        """Return a pool of its own; `change` copies the texts (first axis) of the states."""
        pool, count = change(self.pool), change(self.count)
        rows, views = first_rows(len(pool), pool.device), self.layout.views(pool)
        return replace(self, pool=pool, rows=rows, count=count, views=views, windows={})

    def show(self, memory: list) -> None:
        """Let a layer's states be those of this pool."""
        groups = self.layout.groups
        memory += [None] * (max(groups) + 1 - len(memory))
        for index in groups:
            memory[index] = self.state_of(index)
            self.windows[index] = memory[index].window_k
        memory[min(groups)].state_pool = self

    def state_of(self, index: int) -> Any:
        """Return the state of a group whose tensors are views of this pool."""
        window, views = self.layout.groups[index].window, self.views[index]
        named = {name: views[name] for name in ("sink_k", "sink_v", *COUNTS)}
        for side in ("k", "v"):
            named |= {f"window_{side}": views[side][:, :, :window], f"slot_{side}": views[side][:, :, window:]}
        return HeadState(count=self.count, **named)

    def lay(self, at: int, memory: list, scale: float = 1.0) -> None:
        """Copy the states of other texts into this pool, from text `at` on."""
        source = held_pool(memory, self.pool.new_empty(0, dtype=self.dtype))
        if source is not None and source.layout.kind == self.layout.kind:
            return self.lay_pool(at, source)
        work = working_dtype(self.pool.new_empty(0, dtype=self.dtype))
        for index, group in self.layout.groups.items():
            state = memory[index]
            for name, part in contents(group, state, scale, work).items():
                self.views[index][name][at : at + len(part)].copy_(part)
            self.count[at : at + len(state.count)].copy_(state.count)

    def lay_pool(self, at: int, source: StatePool) -> None:
        """Copy the states of another pool of the same kind into this one, from text `at` on."""
        self.pool[at : at + len(source.pool)].copy_(source.pool)
        self.count[at : at + len(source.count)].copy_(source.count)

    def holds(self, memory: list, k: Tensor) -> bool:
        """Whether the states are still views of this pool: any other change of a state replaces its count, too."""
        states = [(memory[index], window) for index, window in self.windows.items()]
        same = all(state.count is self.count and state.window_k is window for state, window in states)
        return same and self.dtype == k.dtype

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, out: Tensor,
        scored: Tensor | None = None, cap: float = 0.0,
    ) -> None:  # fmt: skip
        """Attend with a text or a token, into `out`; q (batch, heads, group, tokens, dim), k and v have all heads of
        the layer."""
        layout, tokens = self.layout, q.shape[-2]
        scales, operands = [scale, cap], (layout.table, self.merging, self.turns)
        texts = [self.rows, self.count]
        if self.reads_token(tokens, real):
            launch_token(q, k, v, scales, out, self.pool, texts, *operands, layout.sizes[:5], scored)
            self.count.add_(1)
        elif real is None:
            launch_text(q, k, v, scales, out, self.pool, texts, *operands, layout.sizes, scored)
            self.count.add_(tokens)
            self.missing = max(self.missing - tokens, 0)
        else:
            added, order = real.sum(-1), real.to(torch.int8).argsort(dim=-1, stable=True)
            texts += [added, order]
            launch_text(q, k, v, scales, out.zero_(), self.pool, texts, *operands, layout.sizes, scored)
            self.count.add_(added)

    def reads_token(self, tokens: int, real: Tensor | None) -> bool:
        """Whether the kernels for a token can read this: they write neither sinks nor the levels of an empty state."""
        if tokens > 1 or real is not None:
            return False
        if self.missing and not is_traced():
            self.missing = max(self.layout.first_tokens - int(self.count.min()), 0)
        return not self.missing


@functools.lru_cache(maxsize=32)
@torch.inference_mode(False)  # so that graphs may read it
def first_rows(count: int, device: torch.device) -> Tensor:
    """Return the indices of the first rows: those of the texts in a pool of their own."""
    return torch.arange(count, device=device)


def sizes_of(sinks: int, table: list[list[int]]) -> list[int]:
    """Return the sinks of a head; the most slots, tokens in a block, and rows; the fewest bits; the widest window; and
    the fewest tokens in a block, or 0."""
    _, bits, windows, slots, blocks, *_ = zip(*table, strict=True)
    rows = [sum(pair) for pair in zip(windows, slots, strict=True)]
    return [sinks, max(slots), max(blocks), max(rows), min(bits), max(windows), min(filter(None, blocks), default=0)]


def shapes_of(group: Any, k: Tensor, v: Tensor) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return the shapes and types of a head's tensors in a pool, in the order of its table."""
    work, slots = working_dtype(k), group.kind.slots
    rows = group.window + slots
    kinds = {"k": (k.shape[-1], k.dtype), "v": (v.shape[-1], v.dtype)}
    sinks = {f"sink_{name}": (group.sinks, dim) for name, (dim, _) in kinds.items()}
    if group.bits < 16:
        packed = torch.int8 if group.bits == 8 else torch.uint8
        kinds = {name: (packed_bytes(dim, group.bits), packed) for name, (dim, _) in kinds.items()}
    counts = torch.int16 if group.bits in FEWER else work
    shapes = {
        **{name: ((rows, dim), dtype) for name, (dim, dtype) in kinds.items()},
        **{name: (shape, k.dtype if group.bits == 16 else SINK_TYPE) for name, shape in sinks.items()},
        "level": ((group.sinks + rows,), work),
        **{name: ((slots,), counts) for name in COUNTS},
    }
    return {name: (torch.Size(shape), dtype) for name, (shape, dtype) in shapes.items()}


def contents(group: Any, state: HeadState, scale: float, work: torch.dtype) -> dict[str, Tensor]:
    """Return the tensors of a group's state as a pool stores them, by name."""
    named = {
        "k": torch.cat([state.window_k, state.slot_k], 2),
        "v": torch.cat([state.window_v, state.slot_v], 2),
        "level": levels_of(group, state, scale, work),
    }
    return named | {name: getattr(state, name) for name in ("sink_k", "sink_v", *COUNTS)}


def levels_of(group: Any, state: HeadState, scale: float, work: torch.dtype) -> Tensor:
    """Return what is added to the logits of sinks, window and slots, EMPTY where a query sees nothing:
    (batch, heads, rows)."""
    kind, device = group.kind, state.count.device
    places = [count - 1 for count in state.count.tolist()]
    place = torch.tensor(places, device=device)
    oldest = torch.tensor([kind.first_near(place + 1, group.sinks) for place in places], device=device)
    age = (place[:, None] - torch.arange(kind.window, device=device)) % kind.window
    visible = [first_places(group.sinks, place), age <= (place - oldest)[:, None]]
    levels = torch.where(torch.cat(visible, -1), 0.0, EMPTY).to(work)[:, None].expand(-1, len(group.heads), -1)
    if (merging := group.merging(scale)) is None:
        return levels
    spread = state.spread.view(torch.bfloat16) if kind.bits in FEWER else state.spread
    slots = torch.addcmul(state.weight.to(work).log(), merging.gain.to(work)[:, None], spread.to(work))
    return torch.cat([levels, slots.clamp_min(EMPTY)], -1)


def rows_of(merging: Merging) -> Tensor:
    """Return the metric for keys as they are stored, and below it the mean query: (heads, dim + 1, dim + 1)."""
    query = torch.cat([merging.mean_query[:, :-1] * merging.root, merging.mean_query[:, -1:]], -1)
    return torch.cat([torch.nn.functional.pad(merging.metric * merging.root, (0, 1)), query[:, None]], 1)


def turning(turns: StoredBasis, work: torch.dtype) -> list[Tensor]:
    """Return steps and middle of keys, middle and steps of values, and the rotations of both."""
    middle, dims = turns.value_middle, (turns.key_middle.shape[-1], turns.value_middle.shape[-1])
    steps = [turns.key_steps, turns.key_middle, middle, torch.ones_like(middle[0])]
    return [x.detach() for x in steps] + [rotation(dim, work, middle.device) for dim in dims]


def attend_in_pool(
    student: Any, memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, out: Tensor,
    done: Sequence[int], scores: Scores | None = None,
) -> list[int]:  # fmt: skip
    """Attend with a text or a token, windows and slots at once, into `out`; return the indices of the groups served.

    q (batch, heads, group, tokens, dim), k, v and out have all heads of the layer, and `memory` its groups' states.
    """
    memory, groups = [] if memory is None else memory, student.groups
    pool = held_pool(memory, k)
    if is_traced() and (pool is None or not pool.reads_token(q.shape[-2], real)):
        return []
    if pool is None:
        memory += [None] * (len(groups) - len(memory))
        if not (served := find_groups(groups, memory, k, scale, done)):
            return []
        pool = StatePool.of(student, served, memory, k, v, scale)
    of_scores = () if scores is None else (scored_rows(student, scores, q, scale), scores.cap or 0.0)
    pool.attend(q, k, v, scale, real, out, *of_scores)
    return list(pool.layout.groups)


def scored_rows(student: Any, scores: Scores, q: Tensor, scale: float) -> Tensor:
    """Return for every query what the basis of keys leaves out of its scores, and the logit of its learned sink:
    (batch, tokens, heads, group, 2)."""
    work = working_dtype(q)
    rows = torch.zeros(len(q), q.shape[3], *q.shape[1:3], 2, dtype=work, device=q.device)
    left_out, sinks = rows.unbind(-1)
    for group in student.groups:
        if student.turns is not None and group.has_basis:
            heads = as_slice(group.heads)
            of_heads = student.turns(student.turns.left_out, q[:, heads], heads) * scale**0.5
            left_out[:, :, heads] = of_heads.permute(0, 3, 1, 2).to(work)
    sinks.fill_(EMPTY) if scores.sink is None else sinks.copy_(scores.sink)
    return rows


def find_groups(groups: Sequence[Any], memory: list, k: Tensor, scale: float, done: Sequence[int]) -> dict[int, Any]:
    """Find the groups with windows, alone or with slots, that a pool can serve, by their indices."""
    served = {}
    for index, (group, state) in enumerate(zip(groups, memory, strict=True)):
        if index in done or not group.window or group.kind is None:
            continue
        if state is not None:
            state.state_pool = None
        if state is None or group.bits < 16 or state.window_k.dtype == k.dtype:
            served[index] = group
    return served


def held_pool(memory: list | None, k: Tensor) -> StatePool | None:
    """Return the pool of a layer's states, if a kernel was the last to read them."""
    pools = [state.state_pool for state in memory or () if getattr(state, "state_pool", None) is not None]
    return pools[0] if len(pools) == 1 and pools[0].holds(memory or [], k) else None


def whole_pool(memory: list | None) -> StatePool | None:
    """Return the pool of a layer's states, if it has all of them."""
    pool = next((pool for state in memory or () if (pool := getattr(state, "state_pool", None)) is not None), None)
    if pool is None or len(pool.windows) < len(memory or ()):
        return None
    return held_pool(memory, pool.pool.new_empty(0, dtype=pool.dtype))


def pools_of(cache: Any) -> list[StatePool] | None:
    """Return the pools of a cache's layers; None if there are states elsewhere."""
    pools = [pool for layer in cache.layers if (pool := whole_pool(getattr(layer, "memory", None))) is not None]
    return pools if len(pools) == len(cache.layers) else None


def pool_for_token(memory: list | None, k: Tensor) -> StatePool | None:
    """Return the pool of a layer's states, if a kernel may read a token there."""
    pool = held_pool(memory, k)
    return None if pool is None or pool.missing else pool
