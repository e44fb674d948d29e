"""Keeps transformers, and accelerate in it, from printing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from logging import ERROR, getLogger


@contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers from printing: what matters is raised."""
    from transformers.utils import logging

    accelerate = getLogger("accelerate")
    level, bars, its_level = logging.get_verbosity(), logging.is_progress_bar_enabled(), accelerate.level
    logging.set_verbosity_error()
    accelerate.setLevel(ERROR)
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        accelerate.setLevel(its_level)
        if bars:
            logging.enable_progress_bar()
