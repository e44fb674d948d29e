"""States as files: loaded and saved, listed, forked, deleted, and written by one process at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from linearizer.errors import FolderError, RequestError
from linearizer.run.files import UNFINISHED, writing
from linearizer.run.locks import Lock, take_lock
from linearizer.serve.saved_state import read_state, write_state
from linearizer.student.cache import LinearizedCache
from linearizer.student.modeling_linearized import LinearizedForCausalLM

LOCK = ".lock"  # suffix of a file that lies beside a state while a process writes it


@dataclass(frozen=True)
class StateFile:
    """What the file of a state says about itself."""

    name: str
    tokens: int
    bytes: int
    teacher: str
    written: float  # seconds since 1970
    revision: str = ""  # of the student, if it is published


class NoState(FolderError):
    """There is no file of a state, or no longer."""


class BusyState(FolderError):
    """Another process or request writes the state."""


def describe(path: Path) -> StateFile:
    """Read the description in the file of a state."""
    try:
        stat = path.stat()
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        if facts.get("format", "").startswith("linearized state "):
            size, model = stat.st_size, (facts["teacher"], stat.st_mtime, facts.get("revision", ""))
            return StateFile(path.name, int(facts["tokens"]), size, *model)
    except FileNotFoundError as error:
        raise no_state(path) from error
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError):  # the last of torch, which opens it again
        pass
    raise RequestError(
        f"{str(path)!r} is not the state of a linearized model: name a file that `linearizer read` wrote"
    )


def list_states(folder: Path) -> list[StateFile]:
    """Describe the states in a folder, by their names."""
    if not folder.is_dir():
        raise FolderError(f"there is no folder {str(folder)!r}: name one with states")
    states = []
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix not in (LOCK, UNFINISHED):
            with suppress(RequestError):
                states.append(describe(path))
    return states


def fork(path: str | Path, new: str | Path) -> StateFile:
    """Make a second state of one: what either reads later does not change the other."""
    path, new = Path(path), Path(new)
    describe(path)
    with held(new), writing(new):
        try:
            os.link(path, new)  # a state's file is replaced, never written in place
        except FileExistsError as error:
            raise FolderError(f"{str(new)!r} exists already: name another file") from error
        except FileNotFoundError as error:
            raise no_state(path) from error
        except OSError:  # on another disk, or one without links
            copy = new.with_name(new.name + UNFINISHED)
            shutil.copyfile(path, copy)
            copy.replace(new)
    return describe(new)


def delete(path: Path) -> None:
    """Delete a state, and no other file."""
    describe(path)
    with held(path), writing(path):
        path.unlink(missing_ok=True)


def no_state(path: Path) -> NoState:
    return NoState(f"there is no state {str(path)!r}: `linearizer read` writes a state")


def load_state(student: LinearizedForCausalLM, path: Path) -> LinearizedCache:
    """Load the state in a file."""
    with reading(path):
        return read_state(student, path)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn the errors of a file that is no state of this model into sentences."""
    try:
        yield
    except FileNotFoundError as error:
        raise no_state(path) from error
    except RuntimeError as error:  # of torch, which opens it again
        if path.exists():
            raise
        raise no_state(path) from error
    except OSError as error:
        why = error.strerror or error
        raise FolderError(f"{str(path)!r} cannot be read ({why}): name the file of a state") from error
    except ValueError as error:
        raise RequestError(str(error)) from error


def save_state(student: LinearizedForCausalLM, cache: LinearizedCache, path: Path) -> None:
    """Write a state to a file; an older file stays until the new one is complete."""
    with writing(path):
        write_state(student, cache, path)


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from writing a state meanwhile: of two turns that begin at the same state, one is lost."""
    lock = hold(path)
    try:
        yield
    finally:
        let_go(path, lock)


def hold(path: Path) -> Lock:
    """Take the lock of a state, whose file lies beside the state's while it is held."""
    check_place(path)
    with writing(path):
        lock = take_lock(lock_file(path), 0)
    if lock is None:
        raise BusyState(f"another process is writing the state {str(path)!r}: repeat this when it has finished")
    return lock


def let_go(path: Path, lock: Lock) -> None:
    """Release the lock of a state; `take_lock` notices that its file is gone."""
    lock_file(path).unlink(missing_ok=True)
    lock.release()


def lock_file(path: Path) -> Path:
    return path.with_name(path.name + LOCK)


def check_place(path: Path) -> None:
    """Refuse, before anything is read, a path to which no state can be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is a folder" if path.is_dir() else "cannot be written there"
        raise FolderError(f"the state {str(path)!r} {why}: name a file in a folder that is yours to write")
