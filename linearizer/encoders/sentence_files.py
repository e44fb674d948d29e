"""The files by which sentence-transformers knows an encoder: its modules, such as the pooling, and their weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from linearizer.errors import ModelNotAvailable, RequestError
from linearizer.hub.models import Source, fetch
from linearizer.hub.weight_files import SINGLE
from linearizer.plan.json_products import read_json

MODULES, LENGTHS_OF = "modules.json", "sentence_bert_config.json"
FILES = (MODULES, LENGTHS_OF, "config_sentence_transformers.json", "*_*/config.json", f"*_*/{SINGLE}")
WEIGHTLESS = ("Transformer", "Pooling", "Normalize", "Dropout")  # kinds of modules; a transformer is the encoder itself


@dataclass(frozen=True)
class Module:
    """A module of a sentence encoder: its class, and its folder."""

    type: str
    path: str


def read_modules(source: Source, token: str | None = None) -> list[Module]:
    """Read the modules of a sentence encoder; another encoder has none."""
    path = fetch(source, (MODULES,), token) / MODULES
    try:
        return read_json(list[Module], path.read_text(encoding="utf-8"), "ignore") if path.is_file() else []
    except (UnicodeDecodeError, RequestError) as error:
        raise ModelNotAvailable(f"{source.name!r} has a damaged {MODULES} ({error}): repair or remove it") from error


def check_modules(source: Source, token: str | None = None) -> None:
    """Refuse modules without weights that can be read without running code: the student could not be loaded either."""
    folder = fetch(source, FILES, token)
    for module in read_modules(source, token):
        if not module.type.endswith(WEIGHTLESS) and not (folder / module.path / SINGLE).is_file():
            raise ModelNotAvailable(
                f"{source.name!r} has no {module.path}/{SINGLE}, and a pickle can run any code when it is opened: "
                "ask its author for safetensors, or save it again with sentence-transformers where that is harmless"
            )


def read_sentence_files(source: Source, tokens: int | None, token: str | None = None) -> Iterator[tuple[Path, bytes]]:
    """Read these files of a teacher by their places; `tokens`: the length of stretched texts."""
    folder = fetch(source, FILES, token)
    for path in (path for pattern in FILES for path in folder.glob(pattern) if path.is_file()):
        content = path.read_bytes()
        if path.name == LENGTHS_OF and tokens is not None:
            content = json.dumps({**json.loads(content), "max_seq_length": tokens}).encode()
        yield path.relative_to(folder), content
