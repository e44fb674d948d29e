"""What resuming a training needs, as one file of tensors and facts; the one before it is kept.

A file is replaced at once and carries a digest of itself, so that one that was damaged is known to be, and the one
before it is used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from linearizer.errors import FaultError
from linearizer.run.files import write_whole, writing

NEWEST, BEFORE = "training.safetensors", "training.before.safetensors"


@dataclass(frozen=True)
class TrainingState:
    """Tensors by name, and everything else as JSON."""

    tensors: Mapping[str, torch.Tensor]
    facts: Mapping[str, Any]
    warning: str | None = None  # what was wrong with a newer one


def write_state(folder: Path, state: TrainingState) -> None:
    """Write a state, and keep the one that was the newest."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in state.tensors.items()}
    facts = json.dumps(dict(state.facts))
    content = save(tensors, {"facts": facts, "digest": digest(tensors, facts)})
    with writing(folder):
        folder.mkdir(exist_ok=True)  # without its parents: a run that was deleted stays so
        if (folder / NEWEST).exists():
            (folder / NEWEST).replace(folder / BEFORE)
    write_whole(folder / NEWEST, content)


def read_state(folder: Path) -> TrainingState | None:
    """Read the newest state that is whole; None if none was ever written."""
    there = [folder / name for name in (NEWEST, BEFORE) if (folder / name).exists()]
    damage = []
    for path in there:
        try:
            state = read_file(path)
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            damage.append(f"{path.name} is damaged ({error})")
            continue
        warning = f"{'; '.join(damage)}: going on from {path.name}" if damage else None
        return TrainingState(state.tensors, state.facts, warning)
    if not there:
        return None
    raise FaultError(f"no state in {str(folder)!r} can be used: {'; '.join(damage)}: train again without resuming")


def step_in(folder: Path) -> int:
    """Say which step the newest state is of, without reading it; 0 where there is none, or it is damaged."""
    try:
        with safe_open(folder / NEWEST, "pt") as file:
            return int(json.loads((file.metadata() or {})["facts"])["step"])
    except (OSError, SafetensorError, ValueError, KeyError):
        return 0


def read_file(path: Path) -> TrainingState:
    """Read one file, or say with an error that it is damaged."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        metadata = file.metadata() or {}
    if digest(tensors, metadata["facts"]) != metadata["digest"]:
        raise ValueError("its content is not what was written")
    return TrainingState(tensors, json.loads(metadata["facts"]))


def remove_states(folder: Path) -> None:
    """Forget the states of an earlier training."""
    with writing(folder):
        for name in (NEWEST, BEFORE):
            (folder / name).unlink(missing_ok=True)


def digest(tensors: Mapping[str, torch.Tensor], more: str = "") -> str:
    """Tell one content from another."""
    found = hashlib.sha256(more.encode())
    for name in sorted(tensors):
        found.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        found.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
