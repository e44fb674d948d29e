"""Attention with a state of fixed size, in plain PyTorch: the definition, which every kernel has to equal.

What a layer promises, for each KV head and the query heads that share it:
  1. A row sees every earlier token: the first `sinks` tokens exactly, the newest ones exactly (the window), and all
     others through slots. One softmax runs over all of them.
  2. A slot is the mean key and the mean value of `weight` tokens, and the spread of their keys as queries see it.
     Its logit is q·k + log weight + gain · spread. A slot of one token is that token.
  3. Tokens leave the window in blocks, just before the row at the place p attends, if p ≥ window and p - window is a
     multiple of the block. A block adds a slot per token; then the cheapest slots merge until `slots` remain.
  4. The state is `HeadState`: as many bytes after a thousand tokens as after a million.
  5. Reading a text in any cuts gives the same state and the same outputs: a token is rounded before anyone sees it,
     and places, not calls, decide what merges. Padding is not read: a row of a batch equals the row alone.
  6. Where the model caps its scores, or has learned sinks (logits without a value that take weight), so does a student.
  7. Keys and values of few bits are stored in a basis of their own (layer_student.py); sinks are never rounded so.
  8. A text whose cache is no larger than the state has that cache instead, and its rows are the teacher's
     (cache.py); with the first token too many its heads read it from its begin.

Shapes: q (batch, heads, group, tokens, dim), scaled; k, v (batch, heads, tokens, dim): KV heads of one kind. Texts that
have read equally many tokens are read together, as so many more heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import torch
from torch import nn

Tensor = torch.Tensor
GAIN = 0.25  # half of the value for Gaussian keys: measured best, since no query sees the mean spread
MOST_IMPORTANT = 20.0  # limit of an importance's logarithm: costs stay within single precision
TINY = 1e-30  # the smallest squared distance of values: infinity times it is infinite
ROWS = 64  # of heads without slots that attend at once
FEWER = (4, 5, 6)  # bits of a number: the lowest four lie two numbers to a byte, the others in bytes after them
SCALE_BYTES = 2  # after the numbers of such a vector
TRIED = (1.0, 0.85, 0.7)  # of the scale at which all numbers fit: smaller ones clip the largest numbers
TINIEST = 2.0**-100  # the smallest scale: below it numbers are 0
LOWEST, HIGHEST = -24, 121  # exponents of scales in 8 bits: fp16 has no numbers below the first, fp32 above the second
MOST_TOKENS = 32767  # the largest weight of a slot in two bytes; further tokens do not count
SINK_TYPE = torch.bfloat16  # of sinks in heads of few bits


@dataclass(frozen=True)
class HeadKind:
    """What a KV head keeps; `block` tokens leave the window at once, and `bits` is the size of a number."""

    window: int
    slots: int = 0
    block: int = 0
    bits: int = 16

    def merged(self, count: int) -> int:
        """Count the tokens, sinks among them, that left the window before the last of `count` tokens attended."""
        if not self.slots or count <= self.window:
            return 0
        return ((count - 1 - self.window) // self.block + 1) * self.block

    def first_near(self, count: int, sinks: int) -> int:
        """Return the place of the oldest token in the window, which sinks never enter."""
        return min(count, max(sinks, self.merged(count) if self.slots else count - self.window))

    def filled(self, count: int, sinks: int) -> int:
        """Count the slots that hold something."""
        return min(self.slots, max(0, self.merged(count) - sinks))

    def leaves(self, place: int) -> bool:
        """Whether a block leaves the window just before the token at a place attends."""
        return self.slots > 0 and place >= self.window and (place - self.window) % self.block == 0

    def rows(self, place: int, tokens: int) -> int:
        """Count the next tokens that see the same slots."""
        if not self.slots:
            return min(tokens, ROWS)
        ahead = self.window - place if place < self.window else self.block - (place - self.window) % self.block
        return min(tokens, ahead)


@dataclass
class HeadState:
    """The state of heads of one kind. The window is a ring: the token at place p is at p mod window.

    Keys and values of window and slots are packed. Whoever changes a state replaces its count.
    """

    count: Tensor  # (batch,) real tokens read so far
    sink_k: Tensor  # (batch, heads, sinks, dim)
    sink_v: Tensor
    window_k: Tensor  # (batch, heads, window, numbers or bytes)
    window_v: Tensor
    slot_k: Tensor  # (batch, heads, slots, numbers or bytes)
    slot_v: Tensor
    weight: Tensor  # (batch, heads, slots) tokens in a slot: 0 if it is empty
    spread: Tensor  # (batch, heads, slots)

    @classmethod
    def empty(cls, kind: HeadKind, k: Tensor, v: Tensor, sinks: int) -> HeadState:
        """Make the state before the first token of texts with such keys and values."""
        shape, sink_type = k.shape[:2], k.dtype if kind.bits == 16 else SINK_TYPE
        counts = torch.int16 if kind.bits in FEWER else working_dtype(v)
        return cls(
            torch.zeros(len(k), dtype=torch.long, device=k.device),
            *(x.new_zeros(*shape, sinks, x.shape[-1], dtype=sink_type) for x in (k, v)),
            *(pack(x.new_zeros(*shape, kind.window, x.shape[-1]), kind.bits) for x in (k, v)),
            *(pack(x.new_zeros(*shape, kind.slots, x.shape[-1]), kind.bits) for x in (k, v)),
            *(v.new_zeros(*shape, kind.slots, dtype=counts) for _ in range(2)),
        )


@dataclass(frozen=True)
class Merging:
    """How heads merge: metric and mean query (for keys multiplied by `root`), and the gain of a slot's spread.

    |metric·x|² is the mean of (q·x)² over queries; the last number of `mean_query` is mean query · mean key.
    """

    metric: Tensor  # (heads, dim, dim)
    gain: Tensor  # (heads,)
    mean_query: Tensor  # (heads, dim + 1)
    root: float = 1.0

    def for_texts(self, texts: int, dtype: torch.dtype) -> Merging:
        """Return the same for the heads of so many texts, side by side, with the root multiplied in."""
        query = torch.cat([self.mean_query[:, :-1] * self.root, self.mean_query[:, -1:]], -1)
        metric, gain, query = (x.to(dtype) for x in (self.metric * self.root, self.gain, query))
        return Merging(metric.repeat(texts, 1, 1), gain.repeat(texts), query.repeat(texts, 1))


@dataclass(frozen=True)
class Scores:
    """How scores become weights, where softmax is not all that a model does."""

    cap: float | None = None  # scores become cap · tanh(score / cap)
    sink: Tensor | None = None  # (heads, group) the logits of learned sinks
    offset: Tensor | None = None  # (batch, heads, group, tokens) what the basis of keys leaves out of a row's scores

    def of_text(self, text: int, tokens: Tensor | slice) -> Scores:
        """Return the scores of some tokens of one text."""
        return self if self.offset is None else replace(self, offset=self.offset[text : text + 1][..., tokens])

    def of_heads(self, texts: int) -> Scores:
        """Return the scores of the heads of so many texts, side by side."""
        sink = None if self.sink is None else self.sink.repeat(texts, 1)
        return Scores(self.cap, sink, None if self.offset is None else self.offset.flatten(0, 1))

    def weights(self, logits: Tensor, bias: Tensor, rows: slice) -> Tensor:
        """Weigh the columns of some rows of (heads, group, rows, columns)."""
        if self.offset is not None:
            logits = logits + self.offset[:, :, rows, None]
        logits = (logits if self.cap is None else self.cap * (logits / self.cap).tanh()) + bias
        if self.sink is None:
            return logits.softmax(-1)
        sink = self.sink.to(logits.dtype)[:, :, None, None].expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1]


@dataclass
class Slots:
    """Merged tokens: k, v (heads, slots, dim), weight and spread (heads, slots)."""

    k: Tensor
    v: Tensor
    weight: Tensor
    spread: Tensor


@dataclass
class OpenState:
    """A state while tokens are read: unpacked, in order, without room for what is to come; the heads of all texts."""

    count: int
    stored: torch.dtype  # of numbers in 16 bits
    sink_k: Tensor  # (heads, sinks read, dim)
    sink_v: Tensor
    near_k: Tensor  # (heads, tokens in the window, dim)
    near_v: Tensor
    slots: Slots


def read(
    kind: HeadKind, merging: Merging | None, sinks: int, state: HeadState | None, q: Tensor, k: Tensor, v: Tensor,
    real: Tensor | None = None, scores: Scores | None = None,
) -> tuple[Tensor, HeadState]:  # fmt: skip
    """Read tokens, of which some may be padding (`real` (batch, tokens) is false): return outputs and the new state."""
    state = HeadState.empty(kind, k, v, sinks) if state is None else state
    work, counts = working_dtype(v), state.count.tolist()
    q, k, v = q.to(work), k.to(work), v.to(work)
    if real is None and len({*counts}) == 1:
        return read_alike(kind, merging, sinks, state, counts[0], q, k, v, scores or Scores())
    out, states = v.new_zeros(*q.shape[:-1], v.shape[-1]), []
    for text, count in enumerate(counts):
        one, at = slice(text, text + 1), slice(None) if real is None else real[text].nonzero()[:, 0]
        of_text = change_tensors(state, partial(torch.narrow, dim=0, start=text, length=1))
        new = q[one][:, :, :, at], k[one][:, :, at], v[one][:, :, at]
        of_rows = Scores() if scores is None else scores.of_text(text, at)
        part, after = read_alike(kind, merging, sinks, of_text, count, *new, of_rows)
        out[text, :, :, at] = part[0]
        states.append(after)
    return out, HeadState(*(torch.cat(parts) for parts in zip(*(tensors(x).values() for x in states), strict=True)))


def read_alike(
    kind: HeadKind, merging: Merging | None, sinks: int, state: HeadState, count: int, q: Tensor, k: Tensor, v: Tensor,
    scores: Scores,
) -> tuple[Tensor, HeadState]:  # fmt: skip
    """Read tokens of texts that have all read `count` tokens."""
    texts, done, parts = len(q), 0, [q.new_zeros(*q.shape[:3], 0, v.shape[-1]).flatten(0, 1)]
    first = max(0, min(sinks - count, k.shape[-2]))  # which are sinks
    k, v = (torch.cat([as_sink(x[:, :, :first], kind.bits), x[:, :, first:]], 2) for x in (k, v))
    opened = open_state(kind, state, count, sinks, k.dtype)
    merging, scores = None if merging is None else merging.for_texts(texts, k.dtype), scores.of_heads(texts)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    while done < k.shape[1]:
        if kind.leaves(opened.count):
            merge_oldest_block(kind, merging, opened, sinks)
        new = slice(done, done + kind.rows(opened.count, k.shape[1] - done))
        append(kind, opened, k[:, new], v[:, new], sinks)
        parts.append(attend(kind, merging, opened, q[:, :, new], scores, new))
        done = new.stop
    return torch.cat(parts, 2).unflatten(0, (texts, -1)), close_state(kind, state, opened, k, v)


def append(kind: HeadKind, state: OpenState, k: Tensor, v: Tensor, sinks: int) -> None:
    """Add tokens: the first of a text to its sinks, all others to the window; forget those that no row sees."""
    new = max(0, min(sinks - state.count, k.shape[1]))
    state.sink_k, state.sink_v = (
        torch.cat([stored, x[:, :new]], 1) for stored, x in ((state.sink_k, k), (state.sink_v, v))
    )
    unseen = 0 if kind.slots else max(0, state.near_k.shape[1] - max(kind.window - 1, 0))
    state.near_k, state.near_v = (
        torch.cat([stored[:, unseen:], round_vectors(x[:, new:], kind.bits)], 1)
        for stored, x in ((state.near_k, k), (state.near_v, v))
    )
    state.count += k.shape[1]


def attend(kind: HeadKind, merging: Merging | None, state: OpenState, q: Tensor, scores: Scores, rows: slice) -> Tensor:
    """Take one softmax over sinks, window and slots, for the rows of the newest tokens."""
    near, slots, device = state.near_k.shape[1], state.slots, q.device
    row = torch.arange(state.count - q.shape[2], state.count, device=device)[:, None]
    sink = torch.arange(state.sink_k.shape[1], device=device)
    place = torch.arange(state.count - near, state.count, device=device)
    hidden = place > row if kind.slots else (place > row) | (row - place >= kind.window)
    hidden = torch.cat([sink > row, hidden], -1)
    k, v = torch.cat([state.sink_k, state.near_k, slots.k], 1), torch.cat([state.sink_v, state.near_v, slots.v], 1)
    logits = (q.flatten(1, 2) @ k.mT).unflatten(1, q.shape[1:3])
    bias = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
    levels = [bias.expand(len(k), 1, -1, -1)]
    if merging is not None:
        level = torch.addcmul(slots.weight.log(), merging.gain[:, None], slots.spread)
        levels.append(level[:, None, None].expand(-1, 1, len(row), -1))
    weights = scores.weights(logits, torch.cat(levels, -1), rows)
    return (weights.flatten(1, 2) @ v).unflatten(1, q.shape[1:3])


def merge_oldest_block(kind: HeadKind, merging: Merging | None, state: OpenState, sinks: int) -> None:
    """Move the oldest block out of the window into slots; merge the cheapest of them until they fit."""
    assert merging is not None
    first = state.count - kind.window
    leaving = kind.block - max(0, min(kind.block, sinks - first))  # sinks are not in the window
    slots, block_k, block_v = state.slots, state.near_k[:, :leaving], state.near_v[:, :leaving]
    ones = torch.ones_like(block_k[..., 0])
    pairs = (slots.k, block_k), (slots.v, block_v), (slots.weight, ones), (slots.spread, 0 * ones)
    state.slots = merge(Slots(*(torch.cat(pair, 1) for pair in pairs)), kind, merging, state.stored)
    state.near_k, state.near_v = state.near_k[:, leaving:], state.near_v[:, leaving:]


def merge(slots: Slots, kind: HeadKind, merging: Merging, stored: torch.dtype) -> Slots:
    """Remove all slots beyond the maximum at once: those that cost least to merge with an earlier one.

    Each merges into the slot, of those that stay, with the lowest cost.
    """
    if (excess := slots.k.shape[1] - kind.slots) <= 0:
        return slots
    seen = slots.k @ merging.metric.mT
    with torch.no_grad():
        pairs = choose_pairs(merging_costs(slots, seen, merging), excess)
    return merge_pairs(slots, seen, pairs, kind, stored)


Pairs = tuple[Tensor, Tensor, Tensor]  # slots that are removed, each one's partner, the order of those that stay


def choose_pairs(cost: Tensor, excess: int) -> Pairs:
    """Choose `excess` slots to remove and their partners, by head, from the costs (heads, slots, slots) of pairs."""
    later = torch.full_like(cost[0], math.inf).triu()
    removed = (cost + later).amin(-1).sort(dim=-1, stable=True).indices[:, :excess]
    gone = torch.zeros_like(cost[:, 0], dtype=torch.uint8).scatter(1, removed, 1)
    partner = take(cost, removed).masked_fill(gone[:, None].bool(), math.inf).argmin(-1)
    return removed, partner, gone.sort(dim=-1, stable=True).indices[:, : cost.shape[1] - excess]


def merge_pairs(slots: Slots, seen: Tensor, pairs: Pairs, kind: HeadKind, stored: torch.dtype) -> Slots:
    """Merge slots into their partners; `seen` has their keys times the metric."""
    k, v, weight, spread = slots.k, slots.v, slots.weight, slots.spread
    removed, partner, order = pairs
    into = weight.new_zeros(*partner.shape, k.shape[1]).scatter(2, partner[..., None], 1.0)  # (heads, removed, slots)
    total = weight + (into.mT @ take(weight, removed)[..., None])[..., 0]

    def mean(x: Tensor) -> Tensor:
        weighted = x * weight[..., None]
        return (weighted + into.mT @ take(weighted, removed)) / total[..., None]

    square = mean((seen.square().sum(-1) + spread)[..., None])[..., 0]
    merged = into.sum(1) > 0
    new_spread = (square - mean(seen).square().sum(-1)).clamp_min(0)
    k, v = (torch.where(merged[..., None], round_vectors(mean(x), kind.bits, stored), x) for x in (k, v))
    spread = torch.where(merged, new_spread, spread)
    if kind.bits in FEWER:
        total, spread = total.clamp(max=MOST_TOKENS), spread.to(torch.bfloat16).to(spread.dtype)
    return Slots(*(take(x, order) for x in (k, v, total, spread)))


def merging_costs(slots: Slots, seen: Tensor, merging: Merging) -> Tensor:
    """Compute the cost of merging each pair of slots: (heads, slots, slots).

    The error that a query sees grows with the weight of a pair, and with the distances of its keys (to queries) and
    of its values; the product of both squares is its fourth power, which needs no roots. It counts more where queries
    look: at keys with a large product with the mean query. It counts old tokens as much as new ones.
    """
    importance = (slots.k @ merging.mean_query[:, :-1, None])[..., 0] - merging.mean_query[:, -1:]
    importance = importance.clamp(-MOST_IMPORTANT, MOST_IMPORTANT).exp()
    return errors_of_pairs(slots, seen) * torch.maximum(importance[..., None], importance[:, None])


def errors_of_pairs(slots: Slots, seen: Tensor) -> Tensor:
    """Compute the fourth power of the error of merging each pair of slots, wherever queries look."""
    inverse = slots.weight.reciprocal()
    keys = squared_distances(seen).square() / (inverse[..., None] + inverse[:, None])
    return keys.square() * squared_distances(slots.v).clamp_min(TINY)


def squared_distances(x: Tensor) -> Tensor:
    """Return |x_i - x_j|²: (heads, slots, dim) -> (heads, slots, slots)."""
    square = x.square().sum(-1)
    return (square[..., None] + square[:, None]).baddbmm(x, x.mT, alpha=-2)


def take(x: Tensor, index: Tensor) -> Tensor:
    """Take slots of x (heads, slots, …) by an index (heads, count)."""
    return x[torch.arange(len(x), device=x.device)[:, None], index]


# From a state to what is read, and back.


def open_state(kind: HeadKind, state: HeadState, count: int, sinks: int, dtype: torch.dtype) -> OpenState:
    """Unpack the state of texts that have all read `count` tokens."""
    ring = torch.arange(kind.first_near(count, sinks), count, device=state.count.device) % max(kind.window, 1)
    filled = kind.filled(count, sinks)
    k, v = (
        unpack(torch.cat([window[:, :, ring], slots[:, :, :filled]], 2).flatten(0, 1), kind.bits, dtype)
        for window, slots in ((state.window_k, state.slot_k), (state.window_v, state.slot_v))
    )
    sink_k, sink_v = (x[:, :, :count].flatten(0, 1).to(dtype) for x in (state.sink_k, state.sink_v))
    weight, spread = (x[:, :, :filled].flatten(0, 1) for x in (state.weight, state.spread))
    spread = spread.view(torch.bfloat16) if kind.bits in FEWER else spread
    near = len(ring)
    slots = Slots(k[:, near:], v[:, near:], weight.to(dtype), spread.to(dtype))
    return OpenState(count, state.sink_k.dtype, sink_k, sink_v, k[:, :near], v[:, :near], slots)


def close_state(kind: HeadKind, state: HeadState, opened: OpenState, k: Tensor, v: Tensor) -> HeadState:
    """Return the state after new tokens with these keys and values (heads of all texts, tokens, dim)."""
    tokens, slots, named = k.shape[1], opened.slots, {}

    def put(name: str, x: Tensor) -> None:
        """Let a tensor of the state begin with x; what is behind it stays."""
        stored = getattr(state, name)
        x = x.to(stored.dtype).unflatten(0, stored.shape[:2])
        named[name] = torch.cat([x, stored[:, :, x.shape[2] :]], 2)

    last = min(tokens, kind.window)
    place = torch.arange(opened.count - last, opened.count, device=k.device) % max(kind.window, 1)
    for side, x in (("k", k), ("v", v)):
        window = getattr(state, f"window_{side}")
        new = pack(x[:, tokens - last :], kind.bits).to(window.dtype).unflatten(0, window.shape[:2])
        named[f"window_{side}"] = window.index_copy(2, place, new)
        if opened.count - tokens < state.sink_k.shape[2]:
            put(f"sink_{side}", getattr(opened, f"sink_{side}"))
    if kind.merged(opened.count) > kind.merged(opened.count - tokens):
        put("slot_k", pack(slots.k, kind.bits))
        put("slot_v", pack(slots.v, kind.bits))
        put("weight", slots.weight)
        put("spread", slots.spread.to(torch.bfloat16).view(torch.int16) if kind.bits in FEWER else slots.spread)
    return replace(state, count=state.count + tokens, **named)


def tensors(state: Any) -> dict[str, Tensor]:
    """Return the tensors of a state by name; the batch is their first dimension."""
    return {field.name: getattr(state, field.name) for field in fields(state)}


def change_tensors(state: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a state with `change` applied to every tensor."""
    return replace(state, **{name: change(x) for name, x in tensors(state).items()})


def working_dtype(x: Tensor) -> torch.dtype:
    """Return the type of sums and exponentials, at least fp32: a bf16 sum loses every term below 1/512 of it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# Vectors in few bits a number: codes times one scale. A rounded vector does not change when it is rounded again.


def round_vectors(x: Tensor, bits: int, stored: torch.dtype | None = None) -> Tensor:
    """Round vectors (…, dim) as they are stored, in 16 bits as numbers of a type; gradients pass unchanged."""
    if bits == 16:
        return x if stored is None else x.to(stored).to(x.dtype)
    codes, scale = codes_of(x.detach(), bits)
    rounded = (codes * scale).to(x.dtype)
    return rounded + (x - x.detach()) if x.requires_grad else rounded


def codes_of(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the codes of vectors and the scale of each: (…, dim), (…, 1).

    In 8 bits codes are integers, and the scale is the least power of two at which the largest number fits. In fewer
    they lie half way between integers; of a few scales with 8 digits the one with the smallest error is taken.
    """
    x = x.to(working_dtype(x))
    largest = x.abs().amax(-1, keepdim=True)
    if bits == 8:
        scale = ((largest.float().view(torch.int32) + 0x1FFFF) & 0x7F800000).view(torch.float32) * 2.0**-6
        scale = scale.clamp(2.0**LOWEST, 2.0**HIGHEST)
        return (x / scale).round(), scale
    limit = limit_of(bits)
    tried = (largest[..., None] / limit) * torch.tensor(TRIED, dtype=x.dtype, device=x.device)[:, None]
    tried = nn.functional.threshold(tried.to(torch.bfloat16).to(x.dtype), TINIEST, 0.0)
    codes = ((x[..., None, :] / tried.clamp_min(TINIEST)).floor() + 0.5).clamp(-limit, limit)
    best = (codes * tried - x[..., None, :]).square().sum(-1).argmin(-1)[..., None, None]
    codes = codes.gather(-2, best.expand(*best.shape[:-1], x.shape[-1]))[..., 0, :]
    return codes, tried.gather(-2, best)[..., 0]


def limit_of(bits: int) -> float:
    """Return the largest code of 4 to 6 bits."""
    return (2**bits - 1) / 2


def packed_bytes(dim: int, bits: int) -> int:
    """Return the bytes that `pack` writes for a vector in few bits."""
    return dim + 1 if bits == 8 else dim * bits // 8 + SCALE_BYTES


def pack(x: Tensor, bits: int) -> Tensor:
    """Pack vectors into bytes: the low four bits of two numbers in each, the high bits, then the scale.

    In 8 bits each number takes a byte, and the exponent of the scale another; 16 bits are left as they are.
    """
    if bits == 16:
        return x
    codes, scale = codes_of(x.detach(), bits)
    if bits == 8:
        exponent = (scale.view(torch.int32) >> 23) - 127
        return torch.cat([codes, exponent.to(codes.dtype)], -1).to(torch.int8)
    numbers = (codes + limit_of(bits)).to(torch.uint8)
    even, odd = (numbers & 15).chunk(2, -1)
    parts = [even | odd << 4]
    if bits > 4:
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=x.device)[:, None]
        parts.append(((numbers >> 4).unflatten(-1, (len(shifts), -1)) << shifts).sum(-2, dtype=torch.uint8))
    return torch.cat([*parts, scale.to(torch.bfloat16).view(torch.uint8)], -1)


def unpack(x: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    """Read what `pack` wrote."""
    if bits == 16:
        return x.to(dtype)
    if bits == 8:
        scale = ((x[..., -1:].int() + 127) << 23).view(torch.float32)
        return (x[..., :-1] * scale).to(dtype)
    half = (x.shape[-1] - SCALE_BYTES) * 4 // bits
    numbers = torch.cat([x[..., :half] & 15, x[..., :half] >> 4], -1)
    if bits > 4:
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=x.device)[:, None]
        numbers |= (x[..., half:-SCALE_BYTES][..., None, :] >> shifts & 2 ** (bits - 4) - 1).flatten(-2) << 4
    scale = x[..., -SCALE_BYTES:].clone(memory_format=torch.contiguous_format).view(torch.bfloat16).float()
    return ((numbers.float() - limit_of(bits)) * scale).to(dtype)


def as_sink(x: Tensor, bits: int) -> Tensor:
    """Round vectors to the type of stored sinks: most heads depend on their keys, which are larger than all others."""
    return x if bits == 16 else x.to(SINK_TYPE).to(x.dtype)
