"""Bytes that teacher and student remember of a text, by its length: the one count that is stated everywhere."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from linearizer.amounts import from_length, growing, size
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer, cache_bytes, find_breakeven

STATED_LENGTHS = (4096, 32768, 131072)  # tokens of text for which sizes are stated


@dataclass(frozen=True)
class Reading:
    """The tokens that a student has read, and the bytes that remember them in the layers that have a student."""

    tokens: int
    state_bytes: int
    cache_bytes: int  # of a teacher that has read as many tokens


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
        return self.fixed + self.growth * tokens

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
        """State length, cache, state, and by what the state is smaller, for every stated length."""
        return [size_row(tokens, self.teacher_bytes(tokens), self.student_bytes(tokens)) for tokens in STATED_LENGTHS]


ROW_TITLES = ("after", "teacher", "student", "smaller by")


def size_row(tokens: int, cache: int, state: int, sign: str = "") -> tuple[str, str, str, str]:
    """State the sizes after a number of tokens; the `sign` ≤ marks a state that is only known to be no larger."""
    times = cache / state if state else math.inf
    factor = "∞" if times == math.inf else f"{times:,.0f}×" if times >= 100 else f"{times:.3g}×"
    bound = "≥ " if sign else ""
    return f"{thousands(tokens)} tokens", size(cache), f"{sign} {size(state)}".strip(), bound + factor


def thousands(tokens: int) -> str:
    return f"{tokens // 1024}k"
