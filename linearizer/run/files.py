"""Writes files completely or not at all, turns the system's errors into sentences, and finds the package's files."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from linearizer.amounts import size
from linearizer.errors import FolderError

PACKAGE = Path(__file__).parents[1]
SEAL = "sha256"  # the name of a digest in a JSON object
UNFINISHED = ".unfinished"  # suffix of a file or folder that is being written; a killed process leaves it behind


def find_carried(name: str) -> Path:
    """Find a file or folder of the package: inside it if it is installed, next to it in a checkout."""
    return PACKAGE / name if (PACKAGE / name).exists() else PACKAGE.parent / name


def project_folder() -> Path:
    """Find the folder with the project's files: the package's parent in a checkout, or inside an installed package."""
    carried = find_carried("project")
    return carried if carried.is_dir() else PACKAGE.parent


def seal(text: str) -> str:
    """Add the digest of a JSON object to it, which reveals a later change of any bit."""
    return f'{text.rstrip()[:-1]},\n"{SEAL}": "{hashlib.sha256(text.rstrip().encode()).hexdigest()}"}}'


def unseal(text: str, check: bool = True) -> str:
    """Remove the digest of a JSON object, and check it; an object that was written by hand has none."""
    sealed = re.fullmatch(rf'(.*),\n"{SEAL}": "(\w*)"\}}\s*', text, re.DOTALL)
    if sealed is None:
        return text
    if check and hashlib.sha256(f"{sealed[1]}}}".encode()).hexdigest() != sealed[2]:
        raise ValueError("its content has changed since it was written")
    return f"{sealed[1]}}}"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn the system's error about a path that cannot be written into a sentence."""
    try:
        yield
    except Exception as error:
        # By its name: a signal's handler also writes, and an import there breaks the import that it interrupts.
        in_rust = type(error).__name__ == "SafetensorError" or "(os error " in str(error)
        if not isinstance(error, OSError) and not in_rust:
            raise
        if getattr(error, "errno", None) == errno.ELOOP:
            raise link_error(Path(error.filename or path)) from error  # type: ignore[attr-defined]
        reason = getattr(error, "strerror", None) or error
        raise FolderError(
            f"{str(path)!r} cannot be written ({reason}): free the disk, or name a folder that you may write to; "
            "older files are unchanged"
        ) from error


def link_error(path: Path) -> FolderError:
    return FolderError(
        f"{str(path)!r} is a link, and only files of the folder itself are written: remove it, or replace it by a "
        "copy of its target"
    )


def open_in_place(path: str | os.PathLike[str], flags: int) -> int:
    """Open a file that is written in place (for `open`'s opener); refuse a link, which may lead anywhere."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file at once, so that no reader and no crash leaves half of it."""
    unfinished = path.with_name(path.name + UNFINISHED)
    with writing(path):
        try:
            with open(unfinished, "wb", opener=open_in_place) as file:
                file.write(content.encode() if isinstance(content, str) else content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk, safe from a later crash of the machine."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill; once complete it replaces `folder`, otherwise nothing changes."""
    unfinished = folder.with_name(folder.name + UNFINISHED)
    with writing(folder):
        remove(unfinished)
        try:
            yield unfinished
            for path in unfinished.rglob("*"):
                sync(path)
            remove(folder)
            unfinished.rename(folder)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, or a folder with its contents, if it exists."""
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise FolderError(
            f"{str(path)!r} cannot be removed ({error.strerror}): make its folder writable for you, then try again"
        ) from error


def check_free_disk(folder: Path, needed: int) -> None:
    """Refuse to start if the disk has no room."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise FolderError(
            f"{str(folder)!r} is on a disk with {size(free)} free, and {size(needed)} are needed: make room, or name "
            "another folder"
        )
