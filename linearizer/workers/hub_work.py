"""Work on a run inside a job of the Hub: its folder comes from the bucket, and goes back there while it grows.

python -m linearizer.workers.hub_work BUCKET RUN PUSH is what a job does. Every event is a line of standard output,
which `hub_follow` reads. The work itself is done by a process of its own, as anywhere: if that dies, what it
left is saved.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from linearizer.errors import LinearizerError
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import TROUBLE, Account
from linearizer.progress import finish
from linearizer.run.events import EventName, read_events
from linearizer.run.folder import Run
from linearizer.workers import control
from linearizer.workers.hub_follow import bucket_folder, files_to_keep, request_path

PACE = float(os.environ.get("LINEARIZER_JOB_PACE") or 1.0)  # shortens both pauses
SAVE_SECONDS = 60.0 * PACE  # between two savings of the run's folder
ASK_SECONDS = 5.0 * PACE  # between two looks for requests
LAST_PAUSES = (1, 5, 20, 60)  # between tries to save at the end
FORWARDED = ("stop", "use")


def main(arguments: Sequence[str]) -> int:
    """Work on a run from where it stands in the bucket; return an exit code."""
    bucket, run_id, push = arguments
    account = Account(os.environ.get("HF_TOKEN"))
    account.bucket = bucket
    run = fetch_run(account, run_id)
    signal.signal(signal.SIGTERM, lambda *_: run.make_request("stop"))
    keeper = Keeper(run, account, run_id)
    keeper.thread.start()
    place = read_events(run.log_file)[1]
    ended = run.done
    if not ended:
        control.start(run, account.token)
    while not ended:
        ended = not run.is_locked and control.state_of(run) not in control.LIVE  # before the log is read
        place = print_events(run, place)
        time.sleep(control.LOG_POLL_SECONDS)
    note_loss(run)
    if run.done and push:
        publish_student(run, push, account.token)
    print_events(run, place)
    keeper.save_last()
    return 0 if control.state_of(run) in ("done", "stopped") else 1


def fetch_run(account: Account, run_id: str) -> Run:
    """Bring the folder of a run from the bucket."""
    folder, place = Path(tempfile.mkdtemp(prefix="linearizer-")) / "run", bucket_folder(run_id)
    (folder / "state").mkdir(parents=True)
    there = account.list_files(place)
    account.fetch({folder / path.removeprefix(f"{place}/"): file for path, file in there.items()})
    return Run(folder)


def print_events(run: Run, place: int) -> int:
    """Print the events from a byte of the log on, but that this machine's own queue was entered."""
    events, place = read_events(run.log_file, place)
    for event in events:
        if event["event"] != EventName.QUEUED:
            print(json.dumps(event), flush=True)  # noqa: T201
    return place


def note_loss(run: Run) -> None:
    """Log how a process ended that could not do so itself, and show what it wrote to standard error."""
    status = control.status(run)
    if status.state == "lost":
        run.log(EventName.FAILED, error=status.error)
    if status.state in ("lost", "failed") and run.has_file("worker.log"):
        sys.stderr.write(run.read("worker.log"))


def publish_student(run: Run, repo_id: str, token: str) -> None:
    """Publish the student; where that fails, the run is done all the same, and its log says why."""
    from linearizer.method.checkpoint import link_missing_weights
    from linearizer.publish import push

    try:
        link_missing_weights(run, token, in_job=True)  # of a checkpoint that an earlier job made
        finish(push.publish(run, repo_id, token=token))
    except LinearizerError as error:
        run.log(EventName.UNPUBLISHED, error=str(error))


class Keeper:
    """Keeps the bucket's folder as the run's is, and looks there for requests (in a thread)."""

    def __init__(self, run: Run, account: Account, run_id: str) -> None:
        self.run, self.account, self.run_id = run, account, run_id
        self.saved = self.facts()  # what the bucket has
        self.over, self.saving = threading.Event(), threading.Lock()
        self.thread = threading.Thread(target=self.keep, daemon=True)

    def facts(self) -> dict[str, tuple[int, int]]:
        """Give size and time of every file to keep."""
        facts = {}
        for name, path in files_to_keep(self.run):
            with suppress(FileNotFoundError):  # replaced meanwhile
                own = path.stat()
                facts[name] = own.st_size, own.st_mtime_ns
        return facts

    def save(self) -> None:
        """Send what has changed, and remove what is gone."""
        with self.saving:
            now, place = self.facts(), bucket_folder(self.run_id)
            changed: dict[str, Path | bytes] = {
                f"{place}/{name}": self.run.folder / name for name in now if now[name] != self.saved.get(name)
            }
            gone = [f"{place}/{name}" for name in self.saved if name not in now]
            if changed or gone:
                self.account.send(changed, gone)
                self.saved = now

    def keep(self) -> None:
        """Save, and pass requests on, until all is over; what the Hub did not serve is done the next time."""
        saved = time.monotonic()
        while not self.over.wait(ASK_SECONDS):
            try:
                self.pass_requests_on()
                if time.monotonic() > saved + SAVE_SECONDS:
                    self.save()
                    saved = time.monotonic()
            except TROUBLE as error:
                sys.stderr.write(f"the bucket cannot be reached now: {redact(error)}\n")

    def pass_requests_on(self) -> None:
        """Make the requests of the run that are in the bucket."""
        paths = {request_path(self.run_id, name): name for name in FORWARDED}
        for path in self.account.has_files(paths):
            if self.run.is_locked and not self.run.has_request(paths[path]):
                reason = self.run.folder.parent / "reason"
                self.account.fetch({reason: path})
                self.run.make_request(paths[path], reason.read_text(encoding="utf-8").strip())
                self.account.send({}, [path])

    def save_last(self) -> None:
        """Save what there is at the end."""
        self.over.set()
        self.thread.join(SAVE_SECONDS)  # a thread at work while Python ends can turn its exit code into a failure
        for pause in LAST_PAUSES:
            try:
                self.save()
                return
            except TROUBLE as error:
                sys.stderr.write(f"the bucket cannot be reached now: {redact(error)}\n")
            time.sleep(pause)
        self.save()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
