"""The models of a run in memory, of one run at a time, and the states that they keep of chats."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearizer.errors import ModelNotAvailable, RequestError
from linearizer.page import limits
from linearizer.page.visitors import Visitor, is_example
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.evaluate.side_by_side import Reader
    from linearizer.evaluate.subjects import Subject

WAIT_SECONDS = 120  # for other visitors


@dataclass(frozen=True)
class Models:
    """Teacher, student and a plain window of its bytes."""

    run_key: tuple[Path, str]
    subjects: tuple[Subject, ...]
    tokenizer: Any
    kept: OrderedDict[Hashable, list[Reader]] = field(default_factory=OrderedDict)

    @contextmanager
    def readers(self, key: Hashable, window: bool) -> Iterator[list[Reader]]:
        """Lend the readers of a chat, with the states that are kept of it, and keep them afterwards.

        The caller may put others in their place. After an error they are gone, as they may have read half a text.
        """
        from linearizer.evaluate.side_by_side import Reader

        subjects = [each for each in self.subjects if window or each.name != "window"]
        readers = self.kept.pop(key, None) or [Reader.of(each) for each in subjects]
        try:
            yield readers
        except GeneratorExit:  # it was stopped between two pieces or tokens
            self.keep(key, readers)
            raise
        self.keep(key, readers)

    def keep(self, key: Hashable, readers: list[Reader]) -> None:
        """Keep the states of a chat; those that were used longest ago make room."""
        if key is None or not any(reader.tokens for reader in readers):
            return
        self.kept[key] = readers
        sizes = [sum(reader.bytes() for reader in each) for each in [*self.kept.values()]]
        while len(sizes) > 1 and sum(sizes) > limits.MAX_STATE_BYTES:
            self.kept.popitem(last=False)
            sizes.pop(0)


LOCK = threading.Lock()  # the models of one run in memory, and one visitor who uses them
LOADED: list[Models] = []


@contextmanager
def lent_models(run: Run, visitor: Visitor) -> Iterator[Models]:
    """Lend the models of a run to one call after the other; those that were loaded last stay in memory."""
    if not LOCK.acquire(timeout=WAIT_SECONDS):
        raise RequestError("other visitors are comparing: try again in a minute")
    try:
        if not LOADED or LOADED[0].run_key != run.key:
            LOADED.clear()
            LOADED.append(load(run, visitor))
        yield LOADED[0]
    finally:
        LOCK.release()


def load(run: Run, visitor: Visitor) -> Models:
    """Load the models of a run; the example's student is made again."""
    from linearizer.evaluate.setup import assembled, make_again

    if is_example(run):
        setup = make_again(run, visitor.token)
    else:
        with assembled(run, visitor.token) as setup:
            if setup.teacher is None:
                raise ModelNotAvailable(setup.alone or "the teacher is not available: nothing can be compared")
    return Models(run.key, tuple(setup.compared(run.positions)), setup.tokenizer)


def forget(key: Hashable) -> None:
    """Free the states of a chat."""
    for models in LOADED:
        models.kept.pop(key, None)
