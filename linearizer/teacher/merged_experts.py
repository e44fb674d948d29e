"""Keeps the experts of a streamed mixture on disk as its code uses them.

Most files hold each expert by itself, and transformers merges the experts of a layer while it loads them. Where they do
not fit into memory it writes them to a folder. That lies in the Hub's folder of this machine, and is removed with the
model, at the end of its process, or by the next process if that one was killed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from linearizer.hub.models import home_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "linearizer-experts-"  # then the number of the process


def load_with_experts(
    places: Mapping[str, str] | None, load: Callable[[Path | None], PreTrainedModel]
) -> PreTrainedModel:
    """Load a model whose parts lie in these places, with a folder for its experts if some stay on disk."""
    if "disk" not in (places or {}).values():
        return load(None)
    folder = make_folder()
    try:
        model = load(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def make_folder() -> Path:
    """Make a folder for the experts of one model, and remove those of processes that have ended."""
    home = home_folder()
    for folder in home.glob(f"{NAME}*"):
        process = folder.name.removeprefix(NAME).partition("-")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{NAME}{os.getpid()}-", dir=home))
