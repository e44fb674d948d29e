"""What heads hold in few bits: how they turn their keys and values before these are rounded, and their state as bytes.

Heads without features turn what they take (`Turns`): less the mean of what the head holds, keys divided and queries
multiplied by steps that make both about equally large in every direction, then rotated, so that no few numbers are
large. A softmax does not see that all keys are shifted alike, and the mean of the values is added to what it gives.
Such heads hold all they hold so, and compute in at least fp32; with fewer than 8 bits what their slots count takes two
bytes each. Sinks are never rounded to few bits: most heads lean on their keys, which are larger than all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from .rounding import FEWER, pack_vectors, rotate, round_vectors, unpack_vectors
from .state import as_slice, is_exact, least_count, tensors, working_dtype

MOST_TOKENS = 32767  # that a slot of two bytes counts; more tokens make it no heavier
KEPT_AS_BYTES = (torch.int8, torch.uint8, torch.int16)
PACKED = ("window_k", "window_v", "slot_k", "slot_v", "k", "v")
SINKS = ("sink_k", "sink_v")
KEYS_AND_VALUES = (*SINKS, *PACKED)
SINK_TYPE = torch.bfloat16  # in which heads of few bits keep sinks

Tensor = torch.Tensor


class Turns(nn.Module):
    """How the heads of a layer turn keys and values before they are rounded.

    A key x that is multiplied by `root` becomes the rotated (x - middle) / steps, a value the rotated x - middle.
    """

    key_steps: Tensor  # (heads, key_dim)
    key_middle: Tensor
    value_middle: Tensor  # (heads, value_dim)

    def __init__(self, heads: int, key_dim: int, value_dim: int) -> None:
        super().__init__()
        for name, dim in (("key_steps", key_dim), ("key_middle", key_dim), ("value_middle", value_dim)):
            self.register_parameter(name, nn.Parameter(torch.zeros(heads, dim), requires_grad=False))
        nn.init.ones_(self.key_steps)

    def forward(self, compute: Any, *inputs: Any) -> Any:
        """Compute one of the methods: what offloads parameters brings them for a forward."""
        return compute(*inputs)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start with vectors that differ alike in all directions, around nothing."""
        self.key_steps.fill_(1.0)
        self.key_middle.zero_()
        self.value_middle.zero_()

    def turn(
        self, q: Tensor, k: Tensor, v: Tensor | None, root: float, heads: Any = slice(None)
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Turn queries (batch, heads, group, tokens, dim), keys and values (batch, heads, tokens, dim)."""
        q, k = (x.to(working_dtype(x)) for x in (q, k))
        steps, middle = (x[heads].to(k.dtype)[:, None] for x in (self.key_steps, self.key_middle))
        query, key = rotate(q * (steps / root)[:, None]), rotate((k * root - middle) / steps)
        if v is None:
            return query, key, None
        return query, key, rotate(v.to(working_dtype(v)) - self.value_middle[heads].to(working_dtype(v))[:, None])

    def turn_back(self, out: Tensor, heads: Any) -> Tensor:
        """Turn outputs of some heads, (batch, heads, group, tokens, dim), back to the values as they came."""
        return rotate(out) + self.value_middle[heads].to(out.dtype)[:, None, None]

    def steps_and_middles(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the steps and the middle of keys, and the middle of values, each (heads, dim)."""
        return [x.to(dtype).contiguous() for x in (self.key_steps, self.key_middle, self.value_middle)]

    def turn_metric(self, metric: Tensor, head: int) -> Tensor:
        """Turn a metric of keys that are multiplied by `root` into that of keys as a head keeps them."""
        return rotate(metric.to(self.key_steps) * self.key_steps[head])


def round_tokens(xs: Sequence[Tensor], bits: int, first: Tensor | None) -> list[Tensor]:
    """Round keys and values as they are attended to: all but sinks, which `first` (batch, tokens) names."""
    rounded = in_one(lambda x: round_vectors(x, bits), xs)
    if first is None:
        return rounded
    return [torch.where(first[:, None, :, None], as_sink(x), own) for x, own in zip(xs, rounded, strict=True)]


def in_one(change: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """Change vectors (…, rows, dim) all at once where they are alike: a call takes longer than its work."""
    if len({(x.shape[:-2], x.shape[-1], x.dtype) for x in xs}) != 1:
        return [change(x) for x in xs]
    return [*change(torch.cat([*xs], -2)).split([x.shape[-2] for x in xs], -2)]


def as_sink(x: Tensor) -> Tensor:
    """Round vectors to what sinks are kept in."""
    return x.to(SINK_TYPE).to(x.dtype)


def first_tokens(state: Any, tokens: int, real: Tensor | None, sinks: int, like: Tensor) -> Tensor | None:
    """Return which of the new tokens are sinks: (batch, tokens); None: there are none."""
    count = None if state is None else tokens_read(state)
    if not sinks or (count is not None and least_count(count) >= sinks):
        return None
    place = torch.arange(tokens, device=like.device).expand(len(like), -1) if real is None else real.cumsum(-1) - 1
    first = (place if count is None else place + count[:, None]) < sinks
    return first if real is None else first & real


def tokens_read(state: Any) -> Tensor:  # (batch,)
    return state.count if is_exact(state) else state.real.sum(-1)


def pack_state(state: Any, bits: int = 8, before: Any = None) -> Any:
    """Return a state whose keys and values are bytes, but for sinks; of a whole cache only what is new is packed."""
    rows = 0 if before is None or is_exact(state) else before.k.shape[-2]
    new = {name: x[:, :, rows:] for name, x in tensors(state).items() if name in PACKED}
    packed = dict(zip(new, in_one(lambda x: pack_vectors(x, bits), [*new.values()]), strict=True))
    if rows:
        packed = {name: torch.cat([getattr(before, name), x], -2) for name, x in packed.items()}
    sinks = {name: x.to(SINK_TYPE) for name, x in tensors(state).items() if name in SINKS}
    return replace(state, **packed, **sinks, **pack_counts(state, bits))


def unpack_state(state: Any, bits: int, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Return a state whose keys and values can be computed with."""
    dtypes, named = {"k": key_dtype, "v": value_dtype}, tensors(state)
    vectors: dict[str, Tensor] = {}
    for kind in [("k", "v")] if key_dtype == value_dtype else ["k", "v"]:
        held = {name: x for name, x in named.items() if name in PACKED and name[-1] in kind}
        unpack = partial(unpack_vectors, dtype=dtypes[kind[0]], bits=bits)
        vectors |= dict(zip(held, in_one(unpack, [*held.values()]), strict=True))
    vectors |= {name: x.to(dtypes[name[-1]]) for name, x in named.items() if name in SINKS}
    return put_sinks_back(replace(state, **vectors, **unpack_counts(state, key_dtype)))


def put_sinks_back(state: Any) -> Any:
    """Return a state in whose window, or whole cache, sinks are exact again."""
    sinks = state.sink_k.shape[-2]
    names = {"window_k": "sink_k", "window_v": "sink_v"} if is_exact(state) else {"k": "sink_k", "v": "sink_v"}
    rows = getattr(state, next(iter(names))).shape[-2]
    if not sinks or not rows:
        return state
    if is_exact(state):
        if least_count(state.count) >= rows + sinks:
            return state
        row, last = torch.arange(rows, device=state.sink_k.device), state.count[:, None] - 1
        place = last - (last - row) % rows  # of the newest token that lies in a row of the ring; before 0: none
    else:
        place = torch.where(state.real, state.real.cumsum(-1) - 1, sinks)
    is_sink = ((place >= 0) & (place < sinks))[:, None, :, None]
    at = place.clamp(0, sinks - 1)[:, None, :, None]
    return replace(
        state,
        **{
            name: torch.where(is_sink, getattr(state, sink).gather(2, at.expand(*x.shape[:2], -1, x.shape[-1])), x)
            for name, sink in names.items()
            for x in (getattr(state, name),)
        },
    )


def first_columns(k: Tensor, v: Tensor, real: Tensor, sinks: int) -> tuple[Tensor, Tensor]:
    """Take the first real tokens of a whole cache (batch, heads, tokens, dim); any where there are fewer."""
    if not sinks:
        return k[:, :, :0], v[:, :, :0]
    order = (~real).to(torch.int8).argsort(dim=-1, stable=True)
    at = order[:, torch.arange(sinks, device=k.device).clamp(max=k.shape[-2] - 1)][:, None, :, None]
    return k.take_along_dim(at, 2), v.take_along_dim(at, 2)


def round_slots(
    k: Tensor, v: Tensor, weight: Tensor, spread: Tensor, bits: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round slots (batch, heads, slots, dim), and what they count, to what the bits of each head can hold."""
    if len({*bits}) == 1:
        return round_alike(k, v, weight, spread, bits[0])
    rounded = [x.clone() for x in (k, v, weight, spread)]
    for kind in {*bits} - {16}:
        at = as_slice([head for head, own in enumerate(bits) if own == kind])
        parts = round_alike(k[:, at], v[:, at], weight[:, at], spread[:, at], kind)
        for x, part in zip(rounded, parts, strict=True):
            x[:, at] = part
    return rounded[0], rounded[1], rounded[2], rounded[3]


def round_alike(
    k: Tensor, v: Tensor, weight: Tensor, spread: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round the slots of heads that have the same bits."""
    if k.shape == v.shape and k.dtype == v.dtype:  # in one go: a call of an operation takes longer than its work
        k, v = round_vectors(torch.stack([k, v]), bits)
    else:
        k, v = round_vectors(k, bits), round_vectors(v, bits)
    return k, v, *(round_counts(weight, spread) if bits in FEWER else (weight, spread))


def pack_counts(state: Any, bits: int) -> dict[str, Tensor]:
    """Return the counts of slots in two bytes each, where they have few bits: they were rounded before."""
    if bits not in FEWER or not hasattr(state, "weight"):
        return {}
    return {"weight": state.weight.to(torch.int16), "spread": state.spread.to(torch.bfloat16).view(torch.int16)}


def unpack_counts(state: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read what `pack_counts` wrote."""
    if getattr(state, "weight", None) is None or state.weight.dtype != torch.int16:
        return {}
    return {"weight": state.weight.to(dtype), "spread": state.spread.view(torch.bfloat16).to(dtype)}


def round_counts(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Round what slots count to what two bytes hold."""
    return weight.clamp(max=MOST_TOKENS), spread.to(torch.bfloat16).to(spread.dtype)
