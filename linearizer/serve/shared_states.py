"""States on the Hub: a data set holds the file of one, and a card that says what it has read."""

from __future__ import annotations

import shutil
from pathlib import Path

from linearizer.amounts import size
from linearizer.errors import FolderError
from linearizer.hub.models import fetch_from_dataset
from linearizer.hub.repository import Content, Published, find_repository, refuse_other_content, upload
from linearizer.progress import Steps
from linearizer.run.files import UNFINISHED, writing
from linearizer.serve.state_files import StateFile, describe, held

FILE = "state.safetensors"  # of a data set
CARD = """---
tags:
- linearizer
- linearized-state
viewer: false
---

# A state of {tokens:,} tokens

A linearized model has read {tokens:,} tokens. This is its state after them ({bytes}), from which it answers without
reading them again. Only the model that wrote it can use it.

- student of: `{teacher}`
- revision of the student: `{revision}`

```sh
linearizer state get {repo_id} book.state
linearizer ask RUN --state book.state --prompt "What is it about?"
```
"""


def push_state(path: Path, name: str, private: bool = True, token: str | None = None) -> Steps[Published]:
    """Publish a state as a data set of the Hub; repeating this sends only what is missing."""
    state = describe(path)
    repo = find_repository(name, private, token, kind="dataset")
    if not repo.fresh and FILE not in repo.files:
        refuse_other_content(repo)
    files: dict[str, Content] = {FILE: path, "README.md": write_card(state, repo.repo_id).encode()}
    revision = yield from upload(repo, files, "Publish a state of a linearized model", (), token)
    return Published(repo.repo_id, revision, f"{repo.url}/tree/{revision}", f"linearizer state get {repo.repo_id} NEW")


def write_card(state: StateFile, repo_id: str) -> str:
    """Write the card of a state."""
    teacher, revision = (
        "".join(x for x in text if x.isprintable() and x != "`") for text in (state.teacher, state.revision)
    )
    facts = {"teacher": teacher, "revision": revision or "not published", "repo_id": repo_id}
    return CARD.format(tokens=state.tokens, bytes=size(state.bytes), **facts)


def get_state(name: str, path: Path, token: str | None = None) -> StateFile:
    """Download a state of the Hub, OWNER/NAME or OWNER/NAME@REVISION, to a new file."""
    with held(path):
        if path.exists():
            raise FolderError(f"{str(path)!r} exists already: name another file")
        found = fetch_from_dataset(name, FILE, token)
        describe(found)
        with writing(path):
            copy = path.with_name(path.name + UNFINISHED)
            shutil.copyfile(found, copy)
            copy.replace(path)
    return describe(path)
