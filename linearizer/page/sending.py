"""How a student leaves the page: published, or downloaded as a zip file.

A thread of the server publishes, so the page may be closed meanwhile; tokens stay in memory. A zip is written while it
is sent, to whoever has its address, which soon expires.
"""

from __future__ import annotations

import io
import re
import secrets
import threading
import time
import zipfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from linearizer.errors import LinearizerError, RequestError
from linearizer.progress import Progress, finish
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.hub.repository import Published

MAX_KEPT = 64  # publications that are over: logs keep what was published
OPEN_SECONDS = 60.0  # that an address is valid; a download that has begun goes on
PIECE_BYTES = 2**20
TOO_OLD = f"A link to a student works for {OPEN_SECONDS:.0f} seconds. Press Download on the page again.\n"
LOCK = threading.Lock()
FETCHED: Counter[tuple[Path, str]] = Counter()  # downloads in progress, by the keys of runs


@dataclass
class Publication:
    """A publication: in progress, done, or failed."""

    run: Run
    repo_id: str
    progress: Progress | None = None
    published: Published | None = None
    error: str | None = None

    @property
    def is_over(self) -> bool:
        return self.published is not None or self.error is not None

    def send(self, private: bool, token: str | None) -> None:
        """Publish, and keep the progress and the result."""
        from linearizer.publish import push

        def keep(step: Progress) -> None:
            self.progress = step

        try:
            self.published = finish(push.publish(self.run, self.repo_id, private=private, token=token), keep)
        except LinearizerError as error:
            self.error = str(error)
        finally:
            if not self.is_over:
                self.error = "publishing failed because of a fault in Linearizer: try again, nothing is sent twice"


PUBLICATIONS: dict[tuple[Path, str], Publication] = {}  # by the keys of runs, the newest last
OFFERED: dict[str, tuple[float, Run, Path | None]] = {}  # by the secret in the address: a student, or a state's file


def begin_publication(run: Run, repo_id: str, private: bool, token: str | None) -> Publication:
    """Start a thread that publishes a run's student."""
    with LOCK:
        refuse_while_sending(run)
        PUBLICATIONS.pop(run.key, None)
        finished = [key for key, earlier in PUBLICATIONS.items() if earlier.is_over]
        for key in finished[: max(0, len(finished) - MAX_KEPT + 1)]:
            del PUBLICATIONS[key]
        publication = PUBLICATIONS[run.key] = Publication(run, repo_id)
    threading.Thread(target=publication.send, args=(private, token), daemon=True).start()
    return publication


def refuse_while_sending(run: Run) -> None:
    """Refuse a change of a run that is being published."""
    if (publication := PUBLICATIONS.get(run.key)) is not None and not publication.is_over:
        raise RequestError(f"this run is being published to {publication.repo_id!r}: wait until that is done")


def refuse_while_leaving(run: Run) -> None:
    """Refuse to move or delete a run whose student is being published or downloaded."""
    refuse_while_sending(run)
    if FETCHED[run.key]:
        raise RequestError("the student of this run is being downloaded: wait until that is done")


def is_leaving(run: Run) -> bool:
    """Whether the student of a run is being published or downloaded, or may be downloaded soon."""
    publication, now = PUBLICATIONS.get(run.key), time.monotonic()
    with LOCK:
        offered = any(end > now and offer.key == run.key for end, offer, _ in OFFERED.values())
        return offered or bool(FETCHED[run.key]) or (publication is not None and not publication.is_over)


def offer_download(run: Run) -> str:
    """Make an address, relative to the page, for the download of a student; nobody can guess it."""
    if not run.checkpoint.is_dir():
        raise RequestError("this run has no student yet: wait until it is done")
    return f"student/{offer(run)}.zip"


def offer_state(run: Run, path: Path) -> str:
    """Make such an address for the file of a state, which is deleted once it is fetched."""
    return f"state/{offer(run, path)}"


def offer(run: Run, path: Path | None = None) -> str:
    ticket, now = secrets.token_urlsafe(16), time.monotonic()
    with LOCK:
        for expired in [key for key, (end, *_) in OFFERED.items() if end < now]:
            *_, file = OFFERED.pop(expired)
            if file is not None:
                file.unlink(missing_ok=True)
        OFFERED[ticket] = now + OPEN_SECONDS, run, path
    return ticket


def student_name(run: Run) -> str:
    """Name the student of a run after its teacher."""
    teacher = re.split(r"[/\\]", run.any_plan.model.partition("@")[0].rstrip("/"))[-1]
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', teacher)}-linearized"


def send_student(request: Request) -> Response:
    """Send the student that an address names."""
    end, run, _ = OFFERED.get(request.path_params["ticket"], (0.0, None, None))
    if run is None or end < time.monotonic() or not run.checkpoint.is_dir():
        return PlainTextResponse(TOO_OLD, 404)
    headers = {"Content-Disposition": f'attachment; filename="{(name := student_name(run))}.zip"'}
    headers["Content-Encoding"] = "identity"  # else the server would compress it again
    return StreamingResponse(fetch(run, name), media_type="application/zip", headers=headers)


def fetch(run: Run, name: str) -> Iterator[bytes]:
    """Yield the zip of a student, which is kept meanwhile."""
    with LOCK:
        FETCHED[run.key] += 1
    try:
        yield from zip_folder(run.checkpoint, name)
    finally:
        with LOCK:
            FETCHED[run.key] -= 1


def send_state(request: Request) -> Response:
    """Send the state that an address names, once."""
    end, run, path = OFFERED.pop(request.path_params["ticket"], (0.0, None, None))
    is_late = end < time.monotonic()
    if path is not None and is_late:
        path.unlink(missing_ok=True)
    if run is None or path is None or is_late:
        return PlainTextResponse(TOO_OLD.replace("student", "state").replace("Download", "Save"), 404)
    return FileResponse(path, filename=f"{student_name(run)}.state", background=BackgroundTask(path.unlink))


ROUTES = [Route("/student/{ticket}.zip", send_student), Route("/state/{ticket}", send_state)]


class ZipBuffer(io.RawIOBase):
    """A file that keeps what is written to it until `take` returns it."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def write(self, piece: Any) -> int:
        self.pieces.append(bytes(piece))
        return len(piece)

    def take(self) -> bytes:
        content, self.pieces = b"".join(self.pieces), []
        return content


def zip_folder(folder: Path, name: str) -> Iterator[bytes]:
    """Write the files of a folder as a zip under a name, piece by piece, uncompressed: weights do not get smaller."""
    buffer = ZipBuffer()
    with zipfile.ZipFile(buffer, "w") as packed:
        for path in sorted(file for file in folder.rglob("*") if file.is_file()):
            entry_name = f"{name}/{path.relative_to(folder)}"
            about = zipfile.ZipInfo.from_file(path, entry_name, strict_timestamps=False)  # a teacher's may be from 1970
            with path.open("rb") as source, packed.open(about, "w") as entry:
                while piece := source.read(PIECE_BYTES):
                    entry.write(piece)
                    yield buffer.take()
    yield buffer.take()
