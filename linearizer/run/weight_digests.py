"""Digests of a checkpoint's weights, config and tokenizer, to notice damage before a student is loaded or published."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from linearizer.errors import FolderError
from linearizer.plan.json_products import parse_object
from linearizer.run.folder import Run

DIGESTS = "state/checkpoint.json"  # of a run's folder
KNOWN_FILES = 256  # digests that a process remembers
TOKENIZER = (  # files of a tokenizer of any kind
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja"
)  # fmt: skip
PROCESSOR = ("*processor_config.json", "chat_template.json")  # files of what prepares pictures
CONFIG = ("config.json", "*.index.json")  # another digit in them makes another model, which also answers
OF_THIS_MACHINE = ("is_local", "local_files_only")  # transformers writes them into a tokenizer's settings


def write_digests(run: Run, linked: Sequence[Path] = ()) -> None:
    """Store the digests of a checkpoint's files; the name of a linked file of the Hub's cache is its digest."""
    blobs = [path.resolve() for path in linked]
    known = {path.stat().st_ino: path.name for path in blobs if re.fullmatch("[0-9a-f]{64}", path.name)}
    files = digested_files(run.checkpoint)
    digests = {path.name: known.get(path.stat().st_ino) or hash_file(path) for path in files}
    run.write_product(DIGESTS, json.dumps(digests))


def check_weights(run: Run) -> None:
    """Refuse files that have changed since the run wrote them."""
    present = {path.name: path for path in digested_files(run.checkpoint)}
    for name, digest in read_digests(run).items():
        facts = present[name].stat() if name in present else None
        if facts is None or known_digest(present[name], facts.st_size, facts.st_mtime_ns, facts.st_ino) != digest:
            raise FolderError(
                f"{str(run.checkpoint / name)!r} is not as the run wrote it: remove the folder checkpoint, and "
                f"`linearizer runs resume {run.folder}` makes it again"
            )


def read_digests(run: Run) -> dict[str, str]:
    """Read the digests of the files that a run wrote; none until they are stored."""
    return run.parse_file(DIGESTS, parse_object, again=False) if run.has_file(DIGESTS) else {}


def digested_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint in which damage would not be noticed otherwise."""
    small = {path for pattern in (*CONFIG, *TOKENIZER, *PROCESSOR) for path in folder.glob(pattern) if path.is_file()}
    return [*weight_files(folder), *sorted(small)]


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


@lru_cache(maxsize=KNOWN_FILES)
def known_digest(path: Path, size: int, changed: int, node: int) -> str:
    """Hash a file once while it does not change, so that a publication equals its preview."""
    return hash_file(path)


def hash_file(path: Path) -> str:
    """Hash a file of any size."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return hashed.hexdigest()
