"""What a teacher and its student wrote after the same prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Side:
    """What one model has written, its speed, and what it remembers, in the units of every other size."""

    text: str
    tokens: int
    first_token_seconds: float
    tokens_per_second: float  # after the first token
    tokens_read: int
    state_bytes: int  # of cache or state once these are read; in the layers that the student replaces


@dataclass(frozen=True)
class Difference:
    """The first token that the student chose otherwise than its teacher."""

    place: int  # tokens that both wrote alike
    alike: str  # the text of these
    teacher: str  # the token of each
    student: str


@dataclass(frozen=True)
class Comparison:
    """What both models have written so far."""

    prompt: str
    prompt_tokens: int
    teacher: Side
    student: Side
    difference: Difference | None = None
