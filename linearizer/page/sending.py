"""Publishing in threads of the server, so that the page may be closed meanwhile. Tokens stay in memory."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from linearizer.errors import LinearizerError, RequestError
from linearizer.progress import Progress, finish
from linearizer.run.folder import Run

if TYPE_CHECKING:
    from linearizer.hub.repository import Published


@dataclass
class Publication:
    """One publication: under way, done, or broken off."""

    run: Run
    repo_id: str
    progress: Progress | None = None
    published: Published | None = None
    error: str | None = None

    @property
    def over(self) -> bool:
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
            if not self.over:
                self.error = "publishing failed by a fault of Linearizer: try again, nothing is sent twice"


PUBLICATIONS: dict[tuple[Path, str], Publication] = {}  # by the keys of runs, the newest last
MAX_KEPT = 64  # publications that are over: logs keep what was published
LOCK = threading.Lock()


def begin_publication(run: Run, repo_id: str, private: bool, token: str | None) -> Publication:
    """Start a thread that publishes a run's student."""
    with LOCK:
        before = PUBLICATIONS.get(run.key)
        if before is not None and not before.over:
            raise RequestError(f"this run is being published to {before.repo_id!r}: wait until that is done")
        PUBLICATIONS.pop(run.key, None)
        over = [key for key, kept in PUBLICATIONS.items() if kept.over]
        for key in over[: max(0, len(over) - MAX_KEPT + 1)]:
            del PUBLICATIONS[key]
        publication = PUBLICATIONS[run.key] = Publication(run, repo_id)
    threading.Thread(target=publication.send, args=(private, token), daemon=True).start()
    return publication
