"""States in few bits: how heads turn keys and values before rounding, and how states are packed into bytes.

Heads without features turn keys and values (`Turns`). They subtract the head's mean; divide keys, and multiply queries,
by steps that make both about equally large in every direction; then rotate, so that no few numbers are large. A common
shift of all keys does not change a softmax, and the mean of the values is added to its output. The state is stored
turned, and such heads compute in at least fp32; with fewer than 8 bits, the weight and the spread of a slot take two
bytes each. Sinks are never rounded to few bits: most heads depend on their keys, which are larger than all others.
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

MOST_TOKENS = 32767  # the largest weight of a slot in two bytes; further tokens do not count
KEPT_AS_BYTES = (torch.int8, torch.uint8, torch.int16)
PACKED = ("window_k", "window_v", "slot_k", "slot_v", "k", "v")
SINKS = ("sink_k", "sink_v")
KEYS_AND_VALUES = (*SINKS, *PACKED)
SINK_TYPE = torch.bfloat16  # of sinks in heads of few bits

Tensor = torch.Tensor


class Turns(nn.Module):
    """How the heads of a layer turn keys and values before rounding.

    A key x, multiplied by `root`, becomes the rotated (x - middle) / steps, a value the rotated x - middle.
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
        """Call one of the methods: offloading libraries load parameters for a forward only."""
        return compute(*inputs)

    @torch.no_grad()
    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start for vectors around 0 with the same variance in all directions."""
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
        """Turn outputs of some heads, (batch, heads, group, tokens, dim), back to unturned values."""
        return rotate(out) + self.value_middle[heads].to(out.dtype)[:, None, None]

    def steps_and_middles(self, dtype: torch.dtype) -> list[Tensor]:
        """Return the steps and the middle of keys, and the middle of values, each (heads, dim)."""
        return [x.to(dtype).contiguous() for x in (self.key_steps, self.key_middle, self.value_middle)]

    def turn_metric(self, metric: Tensor, head: int) -> Tensor:
        """Turn a metric of keys multiplied by `root` into one of keys as a head stores them."""
        return rotate(metric.to(self.key_steps) * self.key_steps[head])


def round_tokens(xs: Sequence[Tensor], bits: int, is_sink: Tensor | None) -> list[Tensor]:
    """Round keys and values as they are attended to: all but sinks, where `is_sink` (batch, tokens) is true."""
    rounded = change_together(lambda x: round_vectors(x, bits), xs)
    if is_sink is None:
        return rounded
    return [torch.where(is_sink[:, None, :, None], as_sink(x), vectors) for x, vectors in zip(xs, rounded, strict=True)]


def change_together(change: Callable[[Tensor], Tensor], xs: Sequence[Tensor]) -> list[Tensor]:
    """Change vectors (…, rows, dim) at once if their shapes allow it: a call takes longer than its work."""
    if len({(x.shape[:-2], x.shape[-1], x.dtype) for x in xs}) != 1:
        return [change(x) for x in xs]
    return [*change(torch.cat([*xs], -2)).split([x.shape[-2] for x in xs], -2)]


def as_sink(x: Tensor) -> Tensor:
    """Round vectors to the type of stored sinks."""
    return x.to(SINK_TYPE).to(x.dtype)


def first_tokens(state: Any, tokens: int, real: Tensor | None, sinks: int, like: Tensor) -> Tensor | None:
    """Return which of the new tokens are sinks: (batch, tokens); None if there are none."""
    count = None if state is None else tokens_read(state)
    if not sinks or (count is not None and least_count(count) >= sinks):
        return None
    place = torch.arange(tokens, device=like.device).expand(len(like), -1) if real is None else real.cumsum(-1) - 1
    is_sink = (place if count is None else place + count[:, None]) < sinks
    return is_sink if real is None else is_sink & real


def tokens_read(state: Any) -> Tensor:  # (batch,)
    return state.count if is_exact(state) else state.real.sum(-1)


def pack_state(state: Any, bits: int = 8, before: Any = None) -> Any:
    """Return a state with keys and values packed into bytes, except sinks; in a softmax cache only new rows change."""
    rows = 0 if before is None or is_exact(state) else before.k.shape[-2]
    vectors = {name: x[:, :, rows:] for name, x in tensors(state).items() if name in PACKED}
    packed = dict(zip(vectors, change_together(lambda x: pack_vectors(x, bits), [*vectors.values()]), strict=True))
    if rows:
        packed = {name: torch.cat([getattr(before, name), x], -2) for name, x in packed.items()}
    sinks = {name: x.to(SINK_TYPE) for name, x in tensors(state).items() if name in SINKS}
    return replace(state, **packed, **sinks, **pack_counts(state, bits))


def unpack_state(state: Any, bits: int, key_dtype: torch.dtype, value_dtype: torch.dtype) -> Any:
    """Return a state with unpacked keys and values."""
    dtypes, named = {"k": key_dtype, "v": value_dtype}, tensors(state)
    vectors: dict[str, Tensor] = {}
    for kind in [("k", "v")] if key_dtype == value_dtype else ["k", "v"]:
        packed = {name: x for name, x in named.items() if name in PACKED and name[-1] in kind}
        unpack = partial(unpack_vectors, dtype=dtypes[kind[0]], bits=bits)
        vectors |= dict(zip(packed, change_together(unpack, [*packed.values()]), strict=True))
    vectors |= {name: x.to(dtypes[name[-1]]) for name, x in named.items() if name in SINKS}
    return put_sinks_back(replace(state, **vectors, **unpack_counts(state, key_dtype)))


def put_sinks_back(state: Any) -> Any:
    """Return a state with exact sinks in its window or softmax cache."""
    sinks = state.sink_k.shape[-2]
    names = {"window_k": "sink_k", "window_v": "sink_v"} if is_exact(state) else {"k": "sink_k", "v": "sink_v"}
    rows = getattr(state, next(iter(names))).shape[-2]
    if not sinks or not rows:
        return state
    if is_exact(state):
        if least_count(state.count) >= rows + sinks:
            return state
        row, newest = torch.arange(rows, device=state.sink_k.device), state.count[:, None] - 1
        place = newest - (newest - row) % rows  # of the newest token in each row of the ring; below 0: none
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
    """Take the first real tokens of a softmax cache (batch, heads, tokens, dim); any others if there are fewer."""
    if not sinks:
        return k[:, :, :0], v[:, :, :0]
    order = (~real).to(torch.int8).argsort(dim=-1, stable=True)
    at = order[:, torch.arange(sinks, device=k.device).clamp(max=k.shape[-2] - 1)][:, None, :, None]
    return k.take_along_dim(at, 2), v.take_along_dim(at, 2)


def round_slots(
    k: Tensor, v: Tensor, weight: Tensor, spread: Tensor, bits: tuple[int, ...]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round slots (batch, heads, slots, dim), their weights and spreads, to the bits of each head."""
    if len({*bits}) == 1:
        return round_alike(k, v, weight, spread, bits[0])
    rounded = [x.clone() for x in (k, v, weight, spread)]
    for kind in {*bits} - {16}:
        at = as_slice([head for head, head_bits in enumerate(bits) if head_bits == kind])
        parts = round_alike(k[:, at], v[:, at], weight[:, at], spread[:, at], kind)
        for x, part in zip(rounded, parts, strict=True):
            x[:, at] = part
    return rounded[0], rounded[1], rounded[2], rounded[3]


def round_alike(
    k: Tensor, v: Tensor, weight: Tensor, spread: Tensor, bits: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Round the slots of heads that have the same bits."""
    k, v = change_together(lambda x: round_vectors(x, bits), [k, v])
    return k, v, *(round_counts(weight, spread) if bits in FEWER else (weight, spread))


def pack_counts(state: Any, bits: int) -> dict[str, Tensor]:
    """Return the weights and spreads of slots of few bits in two bytes each; they are rounded already."""
    if bits not in FEWER or not hasattr(state, "weight"):
        return {}
    return {"weight": state.weight.to(torch.int16), "spread": state.spread.to(torch.bfloat16).view(torch.int16)}


def unpack_counts(state: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read what `pack_counts` wrote."""
    if getattr(state, "weight", None) is None or state.weight.dtype != torch.int16:
        return {}
    return {"weight": state.weight.to(dtype), "spread": state.spread.view(torch.bfloat16).to(dtype)}


def round_counts(weight: Tensor, spread: Tensor) -> tuple[Tensor, Tensor]:
    """Round weights and spreads of slots to two bytes each."""
    return weight.clamp(max=MOST_TOKENS), spread.to(torch.bfloat16).to(spread.dtype)
