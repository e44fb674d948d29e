"""The states of heads, and how new tokens are laid next to them.

real (batch, tokens) is false at padding, which may stand anywhere; None means that every token is real. A token's place
is its rank among the real ones.
"""

from __future__ import annotations

import functools
import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

EMPTY = -1e30  # the logit of what is not seen, the level of what has seen nothing: finite, so that differences are
ABSENT = 2 * EMPTY  # the log-feature of a key that is not there, or does not touch it: vanishes next to an empty level
HEADROOM = 60.0  # fp32 spans e^±87: shifting by 60 leaves 147 below a stabiliser that a row may not have reached

Tensor = torch.Tensor


def made_once(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Keep what a function makes of sizes; what is made in a graph belongs to it alone."""
    keep = functools.lru_cache(maxsize=512)(make)

    @functools.wraps(make)
    def made(*sizes: Any) -> Tensor:
        return make(*sizes) if is_traced() else keep(*sizes)

    return made


@dataclass
class ExactState:
    """Exact tokens of heads: sinks and window. The window is a ring: the token at place p lies at p mod window."""

    count: Tensor  # (batch,) real tokens read so far
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor
    window_k: Tensor  # (batch, heads, window, dim)
    window_v: Tensor

    token_buffer = None  # type: object  # where its tensors may lie (token_buffer.py)
    state_pool = None  # type: object  # the same for Triton (state_pool.py)
    layer_in_c = None  # type: object  # what a kernel knows of its layer (kernel_layer_in_c.py)

    @staticmethod
    def nothing(k: Tensor, v: Tensor, window: int, sinks: int) -> dict[str, Tensor]:
        batch, heads = k.shape[:2]
        return {
            "count": torch.zeros(batch, dtype=torch.long, device=k.device),
            "sink_k": k.new_zeros(batch, heads, sinks, k.shape[-1]),
            "sink_v": v.new_zeros(batch, heads, sinks, v.shape[-1]),
            "window_k": k.new_zeros(batch, heads, window, k.shape[-1]),
            "window_v": v.new_zeros(batch, heads, window, v.shape[-1]),
        }


@dataclass
class FeatureState(ExactState):
    """The state of heads with a window and features."""

    level: Tensor  # (batch, heads, features)
    mean: Tensor  # (batch, heads, features, value_dim)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int, sinks: int, features: int) -> FeatureState:
        batch, heads = k.shape[:2]
        work = working_dtype(v)
        return cls(
            **ExactState.nothing(k, v, window, sinks),
            level=torch.full((batch, heads, features), EMPTY, dtype=work, device=v.device),
            mean=torch.zeros(batch, heads, features, v.shape[-1], dtype=work, device=v.device),
        )


@dataclass
class SlotState(ExactState):
    """The state of heads with a window and slots."""

    slot_k: Tensor  # (batch, heads, slots, dim)
    slot_v: Tensor
    weight: Tensor  # (batch, heads, slots) tokens in a slot: 0 if it is empty
    spread: Tensor  # (batch, heads, slots)

    @classmethod
    def empty(cls, k: Tensor, v: Tensor, window: int, sinks: int, slots: int) -> SlotState:
        shape = (*k.shape[:2], slots)
        return cls(
            **ExactState.nothing(k, v, window, sinks),
            slot_k=k.new_zeros(*shape, k.shape[-1]),
            slot_v=v.new_zeros(*shape, v.shape[-1]),
            weight=torch.zeros(shape, dtype=working_dtype(v), device=v.device),
            spread=torch.zeros(shape, dtype=working_dtype(v), device=v.device),
        )


@dataclass
class SoftmaxState:
    """The whole cache of softmax heads; those of few bits have their sinks once more, exactly."""

    k: Tensor  # (batch, heads, tokens, dim)
    v: Tensor
    real: Tensor  # (batch, tokens)
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor


@dataclass
class MatrixState(ExactState):
    """The state of heads with a window and a matrix; what a rule does not keep has no numbers."""

    matrix: Tensor  # (batch, heads, memories, rows, columns)
    key_mean: Tensor  # (batch, heads, key_dim)
    key_variance: Tensor
    value_mean: Tensor  # (batch, heads, value_dim)
    taps: Tensor  # (batch, heads, taps - 1, key_dim) the last keys
    query_taps: Tensor  # (batch, heads, group, taps - 1, key_dim) the last queries; no group before the first token


def is_exact(state: object) -> bool:
    """Whether a state is an ExactState, of this copy of the code or of another checkpoint's."""
    return hasattr(state, "window_k")


def tensors(state: object) -> dict[str, Tensor]:
    """The tensors of a state by name; each has the batch first."""
    return {field.name: getattr(state, field.name) for field in fields(state)}  # type: ignore[arg-type]


def change_tensors(state: object, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every tensor of a state by what `change` makes of it."""
    for name, tensor in tensors(state).items():
        setattr(state, name, change(tensor))


def working_dtype(x: Tensor) -> torch.dtype:
    """Sums and exponentials are taken in at least fp32: a bf16 sum loses every term below 1/512 of it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


@dataclass
class Columns:
    """The remembered window and the new tokens in one row, real tokens at the right end without gaps, so that
    distances in columns are distances in places."""

    k: Tensor  # (batch, heads, window + tokens, dim)
    v: Tensor
    first: Tensor  # (batch,) the place of column 0
    empty: Tensor  # (batch,) how many columns at the left hold nothing
    window: int

    def place(self, start: int, stop: int) -> Tensor:
        """Places of the columns start … stop - 1: (batch, columns)."""
        return self.first[:, None] + torch.arange(start, stop, device=self.k.device)

    def filled(self, start: int, stop: int) -> Tensor:
        """Return which of these columns hold a token: (batch, columns)."""
        return torch.arange(start, stop, device=self.k.device) >= self.empty[:, None]


def lay_columns(k: Tensor, v: Tensor, window: int, real: Tensor | None, state: ExactState) -> Columns:
    """Lay the window before the new keys and values; move padding and empty places to the left end."""
    if window:
        slot = ring_slots(state.count, window)
        k = torch.cat([take_tokens(state.window_k, slot), k], -2)
        v = torch.cat([take_tokens(state.window_v, slot), v], -2)
    held = state.count.clamp(max=window)
    new = k.new_full(held.shape, k.shape[-2] - window, dtype=torch.long) if real is None else real.sum(-1)
    if real is not None:
        old = torch.arange(window, device=k.device) >= window - held[:, None]
        order = torch.cat([old, real], -1).to(torch.int8).argsort(dim=-1, stable=True)
        k, v = take_tokens(k, order), take_tokens(v, order)
    return Columns(k, v, state.count + new - k.shape[-2], k.shape[-2] - held - new, window)


def ring_slots(count: Tensor, window: int) -> Tensor:
    """The slots of a ring from the oldest to the newest token, once `count` tokens were read: (batch, window)."""
    return (count[:, None] + torch.arange(window, device=count.device)) % max(window, 1)


def take_tokens(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens of x (batch, …, tokens, dim) by an index (batch, tokens); a gather would take each number alone."""
    shape, tokens = x.shape[:-2], x.shape[-2]
    first = first_rows(math.prod(shape), tokens, x.device).view(*shape, 1)
    at = first + index.view(len(x), *[1] * (x.dim() - 3), -1)
    return x.reshape(-1, x.shape[-1]).index_select(0, at.flatten()).view(*shape, index.shape[1], x.shape[-1])


@made_once
def first_rows(count: int, size: int, device: torch.device) -> Tensor:
    """Return the number of the first row of each of `count` blocks of `size` rows."""
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.arange(count, device=device) * size


def remember_token(state: ExactState, k: Tensor, v: Tensor) -> None:
    """Write one token of every text into the ring, in place."""
    if not (window := state.window_k.shape[-2]):
        return
    own_tensors(state, ("window_k", "window_v"))
    rows, slot = torch.arange(len(k), device=k.device), state.count % window
    state.window_k[rows, :, slot], state.window_v[rows, :, slot] = k[:, :, 0], v[:, :, 0]


def remember_sink(state: ExactState, k: Tensor, v: Tensor, least: int) -> None:
    """Write one token of every text among the sinks, in place, where it is one of them.

    No text has read fewer than `least` tokens before it.
    """
    if least >= (sinks := state.sink_k.shape[-2]):
        return
    own_tensors(state, ("sink_k", "sink_v"))
    rows, slot = torch.arange(len(k), device=k.device), state.count.clamp(max=sinks - 1)
    first = (state.count < sinks)[:, None, None]
    for held, x in ((state.sink_k, k), (state.sink_v, v)):
        held[rows, :, slot] = torch.where(first, x[:, :, 0].to(held.dtype), held[rows, :, slot])


def own_tensors(state: ExactState, names: tuple[str, ...]) -> None:
    """Copy tensors of a state that must not be written over."""
    for name in names:
        if must_be_copied(getattr(state, name)):
            setattr(state, name, getattr(state, name).clone())


def must_be_copied(x: Tensor) -> bool:
    """Whether x must not be written over: gradients may need it, a graph changes no state that it is given, or x
    was made in inference mode, which ended."""
    if torch.is_grad_enabled() or is_traced():
        return True
    return x.is_inference() and not torch.is_inference_mode_enabled()


def first_places(size: int, last: Tensor) -> Tensor:
    """Return which of the places 0 … size - 1 are at most a text's `last` (batch,): (batch, size)."""
    return torch.arange(size, device=last.device) <= last[:, None]


def least_count(count: Tensor) -> int:
    """Return the least count on a CPU, and 0 elsewhere: waiting for a device would take longer."""
    return min(count.tolist()) if count.device.type == "cpu" and not is_traced() else 0


def is_traced() -> bool:
    """Whether a graph is being compiled: each number that Python looks at breaks one in two."""
    return torch.compiler.is_compiling()


def is_compiled() -> bool:
    """Whether torch.compile makes a graph that computes no gradients: its steps may write over a state."""
    return torch.compiler.is_dynamo_compiling() and not torch.is_grad_enabled()


def in_graphs(schema: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a function be one step of a compiled graph: PyTorch looks at its schema, which says what it writes over.

    Checkpoints bring a copy of this code each, so its package is part of the name.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = f"linearizer_{hashlib.sha256(function.__module__.encode()).hexdigest()[:8]}::{function.__name__}"
        written = re.findall(r"!\)(?:\[\])? (\w+)", schema)
        step = torch.library.custom_op(name, function, mutates_args=written, schema=schema)
        step.register_fake(lambda *given: None)

        @functools.wraps(function, updated=())  # or it might be kept out of graphs as the function is
        def call(*given: Any) -> None:
            (step if is_traced() else function)(*given)

        return call

    return register


def remember_sinks(state: ExactState, columns: Columns) -> None:
    """Copy the first tokens of the text to where they stay, if they are among the columns."""
    sinks = state.sink_k.shape[-2]
    if least_count(state.count) >= sinks:
        return
    column = torch.arange(sinks, device=columns.k.device) - columns.first[:, None]
    length = columns.k.shape[-2]
    here = ((column >= columns.empty[:, None]) & (column < length))[:, None, :, None]
    column = column.clamp(0, length - 1)
    state.sink_k = torch.where(here, take_tokens(columns.k, column), state.sink_k)
    state.sink_v = torch.where(here, take_tokens(columns.v, column), state.sink_v)


def remember_window(state: ExactState, columns: Columns, tokens: int) -> None:
    """Put the last columns into the ring, once the state counts the new tokens."""
    slot = ring_slots(state.count, columns.window).argsort(-1)
    state.window_k = take_tokens(columns.k[:, :, tokens:], slot)
    state.window_v = take_tokens(columns.v[:, :, tokens:], slot)


def as_index(heads: list[int], device: torch.device) -> slice | Tensor:
    """Return indices of heads that select on a device, which does not wait for them."""
    even = as_slice(heads)
    return even if isinstance(even, slice) else index_of(tuple(heads), device)


@made_once
def index_of(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # so that a later training may use it, too
        return torch.tensor(numbers, device=device)


def as_slice(heads: list[int]) -> slice | list[int]:
    """Return indices of heads as a slice where they are evenly spaced: it selects without a copy."""
    apart = heads[1] - heads[0] if len(heads) > 1 else 1
    even = slice(heads[0], heads[-1] + 1, apart)
    return even if list(range(even.stop))[even] == heads else heads
