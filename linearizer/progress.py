"""The progress that long steps yield; the command line and the page show the same events. Libraries stay quiet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from typing import Any, TypeVar

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


@contextmanager
def quiet(*loggings: Any) -> Iterator[None]:
    """Keep transformers, and libraries with the same kind of `logging`, from printing: they raise their errors."""
    from transformers.utils import logging

    accelerate = getLogger("accelerate")
    its_level = accelerate.level
    before = [(each, each.get_verbosity(), each.is_progress_bar_enabled()) for each in (logging, *loggings)]
    accelerate.setLevel(ERROR)
    for each, *_ in before:
        each.set_verbosity_error()
        each.disable_progress_bar()
    try:
        yield
    finally:
        accelerate.setLevel(its_level)
        for each, level, bars in before:
            each.set_verbosity(level)
            if bars:
                each.enable_progress_bar()
