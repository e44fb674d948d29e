"""Digests of a checkpoint's weights, config and tokenizer: damage is seen before a student is loaded or published."""

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
KNOWN_FILES = 256  # whose digests a process remembers
TOKENIZER = (  # the files of one, of any kind
    "tokenizer*", "vocab*", "merges*", "special_tokens_map.json", "added_tokens.json", "*.model", "*.jinja"
)  # fmt: skip
CONFIG = ("config.json", "*.index.json")  # a digit of it makes another model, which answers as well
OF_THIS_MACHINE = ("is_local", "local_files_only")  # what transformers writes into a tokenizer's settings


def write_digests(run: Run, linked: Sequence[Path] = ()) -> None:
    """Note the digests of a checkpoint's files; a linked file of the Hub's cache has its digest for a name."""
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
    """Read the digests of the files that a run wrote; none until they are noted."""
    return run.parse_file(DIGESTS, parse_object, again=False) if run.has_file(DIGESTS) else {}


def digested_files(folder: Path) -> list[Path]:
    """List the files of a checkpoint whose damage nothing else shows before it matters."""
    small = {path for pattern in (*CONFIG, *TOKENIZER) for path in folder.glob(pattern) if path.is_file()}
    return [*weight_files(folder), *sorted(small)]


def weight_files(folder: Path) -> list[Path]:
    """List the weight files of a checkpoint."""
    return sorted(folder.glob("*.safetensors"))


@lru_cache(maxsize=KNOWN_FILES)
def known_digest(path: Path, size: int, changed: int, node: int) -> str:
    """Hash a file once, as long as it does not change: what was previewed is then published."""
    return hash_file(path)


def hash_file(path: Path) -> str:
    """Hash a file, however large."""
    hashed = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            hashed.update(piece)
    return hashed.hexdigest()
