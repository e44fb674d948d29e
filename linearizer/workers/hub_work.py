"""Work on a run inside a job of the Hub: its folder comes from the bucket, and goes back there while it grows.

python -m linearizer.workers.hub_work BUCKET RUN PUSH is what a job does. Every event is a line of standard output, and
soon in the bucket, where `hub_follow` reads it. The work itself is done by a process of its own, as anywhere: if that
dies, what it left is saved.
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
from pathlib import Path

from linearizer.errors import LinearizerError
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import TROUBLE, Account
from linearizer.progress import finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.workers import control
from linearizer.workers.hub_follow import NOT_SENT, bucket_folder, request_path, retried

PACE = float(os.environ.get("LINEARIZER_JOB_PACE") or 1.0)  # shortens both pauses
SAVE_SECONDS = 60.0 * PACE  # between two savings of the run's folder
ASK_SECONDS = 5.0 * PACE  # between two looks for requests
FORWARDED = ("stop", "use")


def main(arguments: Sequence[str]) -> int:
    """Work on a run from where it stands in the bucket; return an exit code."""
    bucket, run_id, push = arguments
    account = Account(os.environ.get("HF_TOKEN"))
    account.bucket = bucket
    run, over = fetch_run(account, run_id), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: run.make_request("stop"))
    keeper = threading.Thread(target=keep, args=(run, account, run_id, over), daemon=True)
    keeper.start()
    if not run.done:
        control.start(run, account.token)
        for events in control.follow(run):
            print(*map(json.dumps, events), sep="\n", flush=True)  # noqa: T201
    note_loss(run)
    if run.done and push:
        publish_student(run, push, account.token)
    over.set()
    keeper.join(SAVE_SECONDS)  # a thread at work while Python ends can turn its exit code into a failure
    retried(lambda: save(run, account, run_id))
    return 0 if control.state_of(run) in ("done", "stopped") else 1


def fetch_run(account: Account, run_id: str) -> Run:
    """Bring the folder of a run from the bucket."""
    folder = Path(tempfile.mkdtemp(prefix="linearizer-")) / "run"
    (folder / "state").mkdir(parents=True)
    account.fetch_folder(bucket_folder(run_id), folder)
    return Run(folder)


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


def keep(run: Run, account: Account, run_id: str, over: threading.Event) -> None:
    """Save, and pass requests on, until all is over; what the Hub did not serve is done the next time."""
    saved = time.monotonic()
    while not over.wait(ASK_SECONDS):
        try:
            pass_requests_on(run, account, run_id)
            account.send_folder(run.folder, bucket_folder(run_id), include=["events.jsonl"])
            if time.monotonic() > saved + SAVE_SECONDS:
                save(run, account, run_id)
                saved = time.monotonic()
        except TROUBLE as error:
            sys.stderr.write(f"the bucket cannot be reached now: {redact(error)}\n")


def save(run: Run, account: Account, run_id: str) -> None:
    """Make the bucket's folder as the run's is."""
    account.send_folder(run.folder, bucket_folder(run_id), delete=True, exclude=[*NOT_SENT])


def pass_requests_on(run: Run, account: Account, run_id: str) -> None:
    """Make the requests of the run that are in the bucket."""
    paths = {request_path(run_id, name): name for name in FORWARDED}
    for path in account.find_files(paths):
        if run.is_locked and not run.has_request(paths[path]):
            reason = run.folder.parent / "reason"
            account.fetch({reason: path})
            run.make_request(paths[path], reason.read_text(encoding="utf-8").strip())
            account.send({}, [path])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
