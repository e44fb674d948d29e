"""The state of a training: a file of tensors and facts with a digest of itself, replaced at once.

The previous file serves if the newest is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from linearizer.errors import FaultError
from linearizer.hub.weight_files import read_tensors, write_tensors
from linearizer.plan.json_products import parse_json
from linearizer.run.files import writing

NEWEST, PREVIOUS = "training.safetensors", "training.before.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """Tensors by name, and everything else as JSON."""

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    warning: str | None = None  # the damage of a newer state


def write_state(folder: Path, state: TrainingState) -> None:
    """Write a state, and keep the one before it."""
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without its parents: a deleted run stays deleted
        if (folder / NEWEST).exists():
            (folder / NEWEST).replace(folder / PREVIOUS)
    write_tensors(folder / NEWEST, state.tensors, json.dumps(dict(state.facts)))


def read_state(folder: Path) -> TrainingState | None:
    """Read the newest state that is undamaged; return None if none was ever written."""
    paths = [folder / name for name in (NEWEST, PREVIOUS) if (folder / name).exists()]
    damage = []
    for path in paths:
        try:
            tensors, facts = read_tensors(path)
            parsed = parse_json(facts)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            damage.append(f"{path.name} is damaged ({error})")
            continue
        warning = f"{'; '.join(damage)}: going on from {path.name}" if damage else None
        return TrainingState(tensors, parsed, warning)
    if not paths:
        return None
    raise FaultError(
        f"no state in {str(folder)!r} can be used: {'; '.join(damage)}: remove it, and the training begins again"
    )
