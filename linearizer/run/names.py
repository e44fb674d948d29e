"""The names of models and of texts as users write them: paths, ids of the Hub, and addresses of its pages."""

from __future__ import annotations

import os
import re

ADDRESS = re.compile(r"https?://(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/(?:tree|blob)/([\w.-]+)(?:/.*)?)?/?")


def absolute_source(source: str) -> str:
    """Name a source of text so that it is found from any folder."""
    kind, _, rest = source.partition(":")
    place, colon, more = (rest, "", "") if kind == "file" else rest.partition(":")
    return f"{kind}:{absolute_path(place)}{colon}{more}" if kind in ("file", "dataset") else source


def absolute_path(name: str) -> str:
    """Write out where a file or folder lies; a name that is none stays."""
    path = os.path.expanduser(name)
    return os.path.abspath(path) if name and os.path.exists(path) else name


def id_of_address(name: str) -> str:
    """Turn the address of a model's page on the Hub into its id, with the revision that it names."""
    page = ADDRESS.fullmatch(name)
    return f"{page[1]}@{page[2]}" if page and page[2] else page[1] if page else name
