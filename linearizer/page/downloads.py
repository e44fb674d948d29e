"""A student as a zip file, written while it is sent: an address is made for whoever may have it, and soon forgotten."""

from __future__ import annotations

import io
import re
import secrets
import threading
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from linearizer.errors import RequestError
from linearizer.run.folder import Run

OPEN_SECONDS = 60.0  # that an address can be used; a download that has begun goes on
PIECE_BYTES = 2**20
TOO_OLD = f"A link to a student works for {OPEN_SECONDS:.0f} seconds. Press Download on the page again.\n"
OFFERED: dict[str, tuple[float, Run]] = {}  # by the secret in the address
OFFERED_LOCK = threading.Lock()


def offer(run: Run) -> str:
    """Make an address, relative to the page, at which a student can be fetched; nobody can guess it."""
    if not run.checkpoint.is_dir():
        raise RequestError("this run has no student yet: wait until it is done")
    ticket, now = secrets.token_urlsafe(16), time.monotonic()
    with OFFERED_LOCK:
        for old in [each for each, (end, _) in OFFERED.items() if end < now]:
            del OFFERED[old]
        OFFERED[ticket] = now + OPEN_SECONDS, run
    return f"student/{ticket}.zip"


def student_name(run: Run) -> str:
    """Name the student of a run after its teacher."""
    teacher = re.split(r"[/\\]", run.any_plan.model.partition("@")[0].rstrip("/"))[-1]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', teacher)}-linearized"


def send(request: Request) -> Response:
    """Send the student that an address names."""
    end, run = OFFERED.get(request.path_params["ticket"], (0.0, None))
    if run is None or end < time.monotonic() or not run.checkpoint.is_dir():
        return PlainTextResponse(TOO_OLD, 404)
    headers = {"Content-Disposition": f'attachment; filename="{(name := student_name(run))}.zip"'}
    return StreamingResponse(zip_folder(run.checkpoint, name), media_type="application/zip", headers=headers)


ROUTE = Route("/student/{ticket}.zip", send)


class Written(io.RawIOBase):
    """A file that keeps what is written to it until it is taken."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        taken, self.pieces = b"".join(self.pieces), []
        return taken


def zip_folder(folder: Path, name: str) -> Iterator[bytes]:
    """Write the files of a folder as a zip under a name, a piece at a time; weights do not get smaller."""
    written = Written()
    with zipfile.ZipFile(written, "w") as packed:
        for path in sorted(each for each in folder.rglob("*") if each.is_file()):
            about = zipfile.ZipInfo.from_file(path, f"{name}/{path.relative_to(folder)}")
            with path.open("rb") as file, packed.open(about, "w") as entry:
                while piece := file.read(PIECE_BYTES):
                    entry.write(piece)
                    yield written.take()
    yield written.take()
