"""The progress that long steps yield; the command line and the page show the same events. Libraries stay quiet."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from logging import ERROR, getLogger
from threading import Lock
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


LOCK = Lock()
HELD: dict[tuple[Any, ...], tuple[int, AbstractContextManager[None]]] = {}  # with the number of their users


@contextmanager
def shared(change: Callable[..., AbstractContextManager[None]], *arguments: Any) -> Iterator[None]:
    """Hold a change of the whole process that threads share: it ends with its last user, whoever began it."""
    key = (change, *arguments)
    with LOCK:
        users, held = HELD.get(key) or (0, change(*arguments))
        if not users:
            held.__enter__()
        HELD[key] = users + 1, held
    try:
        yield
    finally:
        with LOCK:
            users, held = HELD.pop(key)
            if users > 1:
                HELD[key] = users - 1, held
            else:
                held.__exit__(None, None, None)


@contextmanager
def quiet(*loggings: Any) -> Iterator[None]:
    """Keep transformers, and libraries with the same kind of `logging`, from printing: they raise their errors."""
    from transformers.utils import logging

    with ExitStack() as undo:
        undo.enter_context(shared(quiet_accelerate))
        for each in (logging, *loggings):
            undo.enter_context(shared(quiet_library, each))
        yield


@contextmanager
def quiet_library(library: Any) -> Iterator[None]:
    level, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    yield
    library.set_verbosity(level)
    if bars:
        library.enable_progress_bar()


@contextmanager
def quiet_accelerate() -> Iterator[None]:
    accelerate = getLogger("accelerate")
    level = accelerate.level
    accelerate.setLevel(ERROR)
    yield
    accelerate.setLevel(level)
