"""Finds runs by their names, and names new ones."""

from __future__ import annotations

import os
import re
from difflib import get_close_matches
from itertools import count
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.run.folder import Run
from linearizer.run.plan import Plan

SHOWN = 9  # names of runs that an error lists


def runs_root() -> Path:
    """Give the folder that runs are in unless another is named."""
    return Path(os.environ.get("LINEARIZER_RUNS") or "runs")


def find_run(name: str, root: Path | None = None) -> Run:
    """Open a run by its name under the root, or by its folder; where there is none, say which may be meant."""
    root = root or runs_root()
    for folder in (root / name, Path(name)):
        if os.path.isfile(folder / "plan.json"):  # unlike Path's, this takes any name
            return Run(folder)
    known = sorted(plan.parent.name for plan in root.glob("*/plan.json"))
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    if near:
        said = f"did you mean {' or '.join(near)}?"
    elif known:
        said = f"{str(root)!r} has {', '.join(known[:SHOWN])}{', …' if len(known) > SHOWN else ''}"
    else:
        said = f"{str(root)!r} has none; start a run with `linearizer run MODEL`"
    held = "that folder holds no run; " if os.path.isdir(name) else ""
    raise FolderError(f"there is no run {name!r}: {held}{said}")


def fresh_folder(plan: Plan, root: Path | None = None) -> Path:
    """Choose a folder for a new run, by its model and its dial."""
    model = re.sub(r"[^A-Za-z0-9._+/-]", "-", plan.model).rstrip("/").split("/")[-1]
    name = f"{model}-{plan.budget}" if plan.features is None else f"{model}-c{plan.features}"
    root = root or runs_root()
    return next(path for n in count(1) if not (path := root / (name if n == 1 else f"{name}-{n}")).exists())
