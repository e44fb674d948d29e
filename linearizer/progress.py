"""The progress that long steps yield; the command line and the page show the same events."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

Product = TypeVar("Product")
Piece = TypeVar("Piece")


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


def finish(steps: Generator[Piece, None, Product], show: Callable[[Piece], object] | None = None) -> Product:
    """Run a generator to its end and return its product; `show` receives each value that it yields."""
    while True:
        try:
            piece = next(steps)
        except StopIteration as end:
            return end.value
        if show is not None:
            show(piece)
