"""An allocation: what every KV head holds, and the bytes that follow from it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from linearizer.amounts import from_length, growing, size
from linearizer.errors import RequestError
from linearizer.plan import head_bytes
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, find_breakeven
from linearizer.plan.json_products import JsonProduct
from linearizer.student.update_rules import UPDATE_RULES

STATED_LENGTHS = (4096, 32768, 131072)  # tokens of text for which sizes are stated


@dataclass(frozen=True)
class Allocation(JsonProduct):
    """The contents of every KV head of every layer; a native layer, which the teacher bounds itself, has none here."""

    strategy: str
    sinks: int
    heads: tuple[tuple[Head, ...], ...]  # [layer][kv head]

    def __post_init__(self) -> None:
        if self.sinks < 0:
            raise RequestError(f"an allocation keeps {self.sinks} sinks: ask for 0 or more")
        for head in (head for row in self.heads for head in row):
            if (fault := fault_of(head)) is not None:
                raise RequestError(f"{head} is not a head: {fault}")

    @property
    def bits(self) -> int:
        """The bits of a number in the keys and values of most heads."""
        counts = Counter(head.bits for row in self.heads for head in row)
        return max(counts, key=lambda bits: (counts[bits], bits), default=16)

    @property
    def bits_in_words(self) -> str:
        """Name the bits of a number in the heads, or their range."""
        counts = {head.bits for row in self.heads for head in row} or {16}
        return f"{min(counts)} to {max(counts)}" if len(counts) > 1 else str(*counts)

    @property
    def features_mean(self) -> float:
        """The mean number of features over the heads that do not stay softmax."""
        counts = [head.features for row in self.heads for head in row if not head.softmax]
        return sum(counts) / len(counts) if counts else 0.0

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Count the bytes of the student's state after `length` tokens."""
        return head_bytes.state_bytes(self.heads, layers, self.sinks, length)

    @property
    def longest_exact(self) -> int:
        """The most tokens that a head keeps exactly: its window and the sinks."""
        return self.sinks + max((head.window for row in self.heads for head in row), default=0)

    def breakeven_tokens(self, layers: Sequence[Layer]) -> int | None:
        """Return the length from which on the teacher's cache is no smaller; None: never."""
        return head_bytes.breakeven_tokens(self.heads, layers, self.sinks)

    def exact_until(self, layers: Sequence[Layer]) -> int:
        """Return the tokens of the longest text whose cache takes the place of the student's state."""
        return self.breakeven_tokens(layers) or 0

    def growth(self, layers: Sequence[Layer]) -> int:
        """Count the bytes that every token adds to the student's state: 0 unless heads stay softmax."""
        return self.state_bytes(layers, 1) - self.state_bytes(layers, 0)

    def summary(self, layers: Sequence[Layer], length: int) -> dict[str, Any]:
        """List the allocation and its sizes after `length` tokens, as plain values."""
        return {
            **asdict(self),
            "features_mean": self.features_mean,
            "state_bytes": self.state_bytes(layers, length),
            "state_tokens": length,
            "bytes_a_token": self.growth(layers),
            "breakeven_tokens": self.breakeven_tokens(layers),
        }


def fault_of(head: Head) -> str | None:
    """Return the reason why no student can have such a head; None: it can."""
    faults = {
        "window, features and slots are 0 or more": min(head.window, head.features, head.slots) < 0,
        "its numbers have 4, 5, 6, 8 or 16 bits": head.bits not in head_bytes.BITS,
        "with features its numbers have 8 or 16 bits": head.features and head.bits < 8,
        "slots need a window, and exclude features": head.slots and (head.features or not head.window),
        f"its memory is one of {', '.join(UPDATE_RULES)}, and without slots": head.memory
        and (head.memory not in UPDATE_RULES or head.slots),
        "a softmax head has its whole cache, and nothing else": head.softmax
        and (head.window or head.features or head.slots),
    }
    return next((fault for fault, holds in faults.items() if holds), None)


def check_allocation(allocation: Allocation, layers: Sequence[Layer]) -> None:
    """Refuse the allocation of another model."""
    if len(allocation.heads) != len(layers):
        raise RequestError(f"the allocation is for {len(allocation.heads)} layers, the model has {len(layers)}")
    for index, (heads, layer) in enumerate(zip(allocation.heads, layers, strict=True)):
        if len(heads) != heads_replaced(layer):
            raise RequestError(
                f"layer {index}: the allocation has {len(heads)} KV heads, the model has {heads_replaced(layer)} to "
                "replace: allocate again from the profile of this model"
            )


def heads_replaced(layer: Layer) -> int:
    """Count the KV heads of a layer that a student replaces: none in a native layer."""
    return layer.kv_heads if layer.native_window is None else 0


def window_control(allocation: Allocation, layers: Sequence[Layer], length: int) -> Allocation:
    """Make plain windows and sinks, in the student's bits, that together take its bytes at a length."""
    bits, room = allocation.bits, allocation.state_bytes(layers, length)
    counts = [(len(row), layer) for row, layer in zip(allocation.heads, layers, strict=True)]
    of_token, of_sink = (
        max(1, sum(heads * head_bytes.token_bytes(layer, width) for heads, layer in counts)) for width in (bits, 16)
    )
    sinks = min(head_bytes.SINKS, room // of_token // 8)  # not the student's: one with slots may need none
    window = max((room - sinks * of_sink) // of_token, 1)
    rows = tuple((Head(window=window, bits=bits),) * len(row) for row in allocation.heads)
    return Allocation("window", sinks, rows)


@dataclass(frozen=True)
class ReadingSize:
    """The tokens that a student has read, and the bytes that remember them in the layers that have a student."""

    tokens: int
    state_bytes: int
    cache_bytes: int  # of a teacher that has read the same tokens
    recurrent_bytes: int = 0  # beside both, in recurrent layers
    readings: int = 1  # of the text: 2 if it was read twice


@dataclass(frozen=True)
class StateSize:
    """Bytes of a student's state, `fixed` and `growth` for every token, and of its teacher's cache.

    They are counted from shapes, so the type that weights are computed in makes no difference.
    """

    cache: int  # bytes that every token adds to the teacher's cache, in the layers that the student replaces
    fixed: int
    growth: int = 0

    @staticmethod
    def of(allocation: Allocation, layers: Sequence[Layer]) -> StateSize:
        return StateSize(cache_bytes(layers, 1), allocation.state_bytes(layers, 0), allocation.growth(layers))

    def teacher_bytes(self, tokens: int) -> int:
        return self.cache * tokens

    def student_bytes(self, tokens: int) -> int:
        """The bytes after some tokens; a text whose cache is no larger than the state keeps that cache."""
        return min(self.fixed + self.growth * tokens, self.teacher_bytes(tokens))

    @property
    def breakeven(self) -> int | None:
        """The length from which on the teacher's cache is no smaller; None: never."""
        return find_breakeven(self.fixed, self.cache - self.growth) if self.cache > self.growth else None

    @property
    def beside_cache(self) -> str:
        """The length from which on the state is smaller than the teacher's cache, in words."""
        if self.breakeven is None:
            return "never smaller than the teacher's cache"
        return f"smaller than the teacher's cache {from_length(self.breakeven)}"

    @property
    def in_words(self) -> str:
        """The size for every length: 228 kB, whatever the length; or the sizes at some lengths."""
        if not self.growth:
            return f"{size(self.fixed)}, whatever the length"
        lengths = (f"{size(self.student_bytes(tokens))} after {thousands(tokens)}" for tokens in STATED_LENGTHS)
        return f"{growing(self.fixed, self.growth)}: {', '.join(lengths)} tokens"

    def rows(self) -> list[tuple[str, str, str, str]]:
        """State length, cache, state, and the factor between them, for every stated length."""
        return [size_row(tokens, self.teacher_bytes(tokens), self.student_bytes(tokens)) for tokens in STATED_LENGTHS]


ROW_TITLES = ("after", "teacher", "student", "smaller by")


def size_row(tokens: int, cache: int, state: int, sign: str = "") -> tuple[str, str, str, str]:
    """State the sizes after a number of tokens; the `sign` ≤ marks an upper bound of the state."""
    times = cache / state if state else math.inf
    factor = "∞" if times == math.inf else f"{times:,.0f}×" if times >= 100 else f"{times:.3g}×"
    smaller = "not yet" if times <= 1 else f"≥ {factor}" if sign else factor
    return f"{thousands(tokens)} tokens", size(cache), f"{sign} {size(state)}".strip(), smaller


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k"
