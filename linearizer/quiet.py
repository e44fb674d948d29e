"""Keeps transformers, and accelerate in it, from printing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger
from typing import Any


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
