"""The states that clients own: files in a folder for each key, under ids that nobody can guess, within a quota."""

from __future__ import annotations

import hashlib
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from transformers.cache_utils import Cache

from linearizer.errors import FolderError, RequestError
from linearizer.run.files import UNFINISHED, remove, writing
from linearizer.run.locks import Lock
from linearizer.serve import state_files
from linearizer.serve.bodies import Refusal
from linearizer.serve.state_files import StateFile
from linearizer.student.cache import LinearizedCache
from linearizer.student.modeling_linearized import LinearizedForCausalLM

ID = re.compile("[0-9a-f]{32}")
NEW, RECEIVED = "new-", ".received"  # in names of files that are written, or received
LEFT_SECONDS = 3600  # after which a file that nobody wrote to was left by a server that was killed
CHECKING = threading.Lock()  # while a new file, or a part of it, is counted and put in its place


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

    def cards(self) -> list[dict[str, Any]]:
        states = state_files.list_states(self.folder)
        return [card(state, state.name) for state in states if ID.fullmatch(state.name)]

    def room(self, *replaced: Path) -> int:
        """Return the bytes that are left beside all states, and parts of them, that are not replaced."""
        room = self.max_bytes
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # deleted meanwhile
                stat = path.stat()
                is_unfinished = path.suffix in (RECEIVED, UNFINISHED) or path.name.startswith(NEW)
                if is_unfinished and time.time() - stat.st_mtime > LEFT_SECONDS:
                    remove(path)
                elif path not in replaced and (path.suffix == RECEIVED or ID.fullmatch(path.name)):
                    room -= stat.st_size
        return room

    def receive(self, file: BinaryIO, piece: bytes, path: Path) -> None:
        """Write a piece of a file that is received for a place, if there is room."""
        with CHECKING:
            self.check_room(file.tell() + len(piece), path, Path(file.name))
            file.write(piece)
            file.flush()

    def put(self, path: Path, write: Callable[[Path], None]) -> dict[str, Any]:
        """Write a state, whose lock the caller holds, beside its place, and then to it, if there is room."""
        unchecked = self.folder / f"{NEW}{secrets.token_hex(8)}"
        try:
            write(unchecked)
            state = state_files.describe(unchecked)
            with CHECKING:
                self.check_room(state.bytes, path)
                unchecked.replace(path)
        finally:
            unchecked.unlink(missing_ok=True)
        return card(state, path.name)

    def check_room(self, size: int, *replaced: Path) -> None:
        if size > (room := self.room(*replaced)):
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
            self.check_room(path.stat().st_size)
            state = state_files.fork(path, self.new_path())
        return card(state, state.name)


def card(state: StateFile, name: str) -> dict[str, Any]:
    """Describe a state under its name."""
    about = {"object": "state", "created": int(state.written)}
    return {"id": name, **about, "tokens": state.tokens, "bytes": state.bytes}


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
    lock = state_files.hold(path) if keep else None
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
    except FolderError:
        raise  # it is gone, or cannot be read
    except RequestError as error:
        raise Refusal(400, str(error).replace(repr(str(path)), "the state"), "state") from error
