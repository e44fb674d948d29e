"""The progress that a long step yields; the command line and the page render the same events."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Product = TypeVar("Product")


@dataclass(frozen=True)
class Progress:
    """`done` of `total` units of one step."""

    step: str  # "profile", "distill", …
    done: int
    total: int
    unit: str  # of the count: "batches", "heads", "tokens"
    details: Mapping[str, object] = field(default_factory=dict)  # a loss, a rate, a warning


# A step yields Progress and returns its product:  product = yield from step(...)
Steps = Generator[Progress, None, Product]


def finish(steps: Steps[Product]) -> Product:
    """Run a step to its end and return its product, for callers that show no progress."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value
