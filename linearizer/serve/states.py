"""The states that clients own: files in a folder for each key, under ids that nobody can guess, within a quota."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.cache_utils import Cache

from linearizer.errors import FolderError, RequestError
from linearizer.run.files import writing
from linearizer.run.locks import Lock
from linearizer.serve import state_files
from linearizer.serve.bodies import Refusal
from linearizer.student.cache import LinearizedCache
from linearizer.student.modeling_linearized import LinearizedForCausalLM

ID = re.compile("[0-9a-f]{32}")
CHECKING = threading.Lock()  # while a new file is counted and put in its place


@dataclass(frozen=True)
class States:
    """The states of one key."""

    folder: Path
    max_bytes: int
    student: LinearizedForCausalLM  # whose states they are

    @classmethod
    def of(cls, folder: Path, key: str, max_bytes: int, student: LinearizedForCausalLM) -> States:
        own = folder / hashlib.sha256(key.encode()).hexdigest()[:32] if key else folder / "everyone"
        with writing(own):
            own.mkdir(mode=0o700, parents=True, exist_ok=True)
        return cls(own, max_bytes, student)

    def path(self, name: str, exists: bool = True) -> Path:
        """Return the file of a state."""
        path = self.folder / name
        if not ID.fullmatch(name) or (exists and not path.is_file()):
            raise Refusal(404, f"there is no state {name[:64]!r} here: see GET /v1/states", "state", "state_not_found")
        return path

    def new_path(self) -> Path:
        return self.folder / secrets.token_hex(16)

    def card(self, path: Path) -> dict[str, Any]:
        state = state_files.describe(path)
        about = {"object": "state", "created": int(state.written)}
        return {"id": path.name, **about, "tokens": state.tokens, "bytes": state.bytes}

    def cards(self) -> list[dict[str, Any]]:
        return [self.card(self.folder / state.name) for state in state_files.list_states(self.folder)]

    def room(self, replaced: Path) -> int:
        """Return the bytes that a state in this place may have."""
        files = [path for path in self.folder.iterdir() if ID.fullmatch(path.name) and path != replaced]
        return self.max_bytes - sum(path.stat().st_size for path in files)

    def put(self, path: Path, write: Callable[[Path], None]) -> dict[str, Any]:
        """Write a state, whose lock the caller holds, beside its place, and then to it, if there is room."""
        unchecked = self.folder / f"new-{secrets.token_hex(8)}"
        try:
            write(unchecked)
            with CHECKING:
                self.check_room(path, unchecked.stat().st_size)
                unchecked.replace(path)
        finally:
            unchecked.unlink(missing_ok=True)
        return self.card(path)

    def check_room(self, path: Path, size: int) -> None:
        if size > (room := self.room(path)):
            raise Refusal(
                413,
                f"a state of {size:,} bytes does not fit into the {max(room, 0):,} that are left of this server's "
                "--max-state-bytes: delete states",
                code="no_room_for_state",
            )

    def save(self, path: Path, cache: Cache) -> dict[str, Any]:
        assert isinstance(cache, LinearizedCache)
        return self.put(path, lambda place: state_files.save_state(self.student, cache, place))

    def fork(self, path: Path) -> dict[str, Any]:
        with CHECKING:
            self.check_room(new := self.new_path(), path.stat().st_size)
            state_files.fork(path, new)
        return self.card(new)


def hold(path: Path) -> Lock:
    """Take the lock of a state, or refuse: of two turns that begin at the same state, one would be lost."""
    try:
        return state_files.hold(path)
    except FolderError as error:
        wait = {"Retry-After": "1"}
        raise Refusal(
            409, f"another request writes the state {path.name!r}: try again", "state", headers=wait
        ) from error


@dataclass
class Beginning:
    """A state that a text continues, held by its request if the state after the text will replace it."""

    states: States
    path: Path
    cache: Cache
    lock: Lock | None
    version: str  # of its content

    @property
    def tokens(self) -> list[int]:
        """Numbers that stand for the tokens that it has read, which a file does not name: its own, below 0."""
        own = int.from_bytes(hashlib.sha256(self.version.encode()).digest()[:7], "big")
        return [-1 - own, *[-1] * (self.cache.get_seq_length() - 1)]

    def save(self, cache: Cache) -> None:
        """Replace the state by the one after the text, and let go of it."""
        self.states.save(self.path, cache)
        self.let_go()

    def let_go(self) -> None:
        if self.lock is not None:
            lock, self.lock = self.lock, None
            state_files.let_go(self.path, lock)


def begin_at(states: States, name: str, keep: bool, load: Callable[[Path], Cache]) -> Beginning:
    """Load a state for a text that continues it; to `keep` the text, hold the state."""
    path = states.path(name)
    lock = hold(path) if keep else None
    try:
        stat = path.stat()
        return Beginning(states, path, load_for_client(path, load), lock, f"{path} {stat.st_ino} {stat.st_mtime_ns}")
    except BaseException:
        if lock is not None:
            state_files.let_go(path, lock)
        raise


def load_for_client(path: Path, load: Callable[[Path], Cache]) -> Cache:
    """Load a state, or say what is wrong with it, without the place of its file."""
    try:
        return load(path)
    except RequestError as error:
        raise Refusal(400, str(error).replace(repr(str(path)), "the state"), "state") from error
