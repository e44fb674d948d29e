"""Digests of a checkpoint's weights: damage is seen before a student is loaded or published."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.run.files import parse_json
from linearizer.run.folder import Run

DIGESTS = "state/checkpoint.json"  # of a run's folder
PIECE_BYTES = 1 << 20  # that are read at a time


def write_digests(run: Run) -> None:
    """Note the digests of the weights of a checkpoint."""
    run.write_product(DIGESTS, json.dumps(weight_digests(run.checkpoint)))


def check_weights(run: Run) -> None:
    """Refuse weights that are not those that the run wrote."""
    if not run.has_file(DIGESTS):
        return
    written, present = run.parse_file(DIGESTS, parse_json, again=False), weight_digests(run.checkpoint)
    if changed := [name for name, digest in written.items() if present.get(name) != digest]:
        raise FolderError(
            f"{str(run.checkpoint / changed[0])!r} is not as the run wrote it: remove the folder checkpoint, and "
            f"`linearizer runs resume {run.folder}` makes it anew"
        )


def weight_digests(folder: Path) -> dict[str, str]:
    """Hash the weight files of a checkpoint."""
    return {path.name: hash_file(path) for path in sorted(folder.glob("*.safetensors"))}


def hash_file(path: Path) -> str:
    """Hash a file, however large."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            hashed.update(piece)
    return hashed.hexdigest()
