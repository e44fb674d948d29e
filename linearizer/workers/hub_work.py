"""Works on a run inside a job of the Hub: fetches its folder from the bucket, and sends it back there as it grows.

python -m linearizer.workers.hub_work BUCKET RUN PUSH is the program of a job. It sends its log to the bucket every few
seconds, where `hub_jobs` reads it, and its whole folder from time to time.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from linearizer.errors import LinearizerError, Stopped
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import Account
from linearizer.progress import finish
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.workers.control import end_process, lock_and_queue
from linearizer.workers.hub_jobs import NOT_SENT, REQUESTS, bucket_folder, retried
from linearizer.workers.worker import keep_faults, stop_on_sigterm, work_in_turn, work_on

SAVE_SECONDS = 60.0  # between two saves of the run's folder
ASK_SECONDS = 3.0  # between two checks for requests


def main(arguments: Sequence[str]) -> int:
    """Continue a run from its folder in the bucket; return an exit code."""
    bucket, run_id, push = arguments
    account, run = Account(os.environ.get("HF_TOKEN")), Run(Path(tempfile.mkdtemp(prefix="linearizer-"), "run"))
    account.bucket, place = bucket, bucket_folder(run_id)
    (run.folder / "state").mkdir(parents=True)
    retried(lambda: account.fetch_folder(place, run.folder, exclude=REQUESTS))
    try:
        with exchanging(run, account, place):
            if not run.done:
                with lock_and_queue(run), stop_on_sigterm(run), keep_faults(run, account.token):
                    finish(work_in_turn(run, lambda: work_on(run, account.token)))
            if push:
                publish_student(run, push, account.token)
    except Stopped:
        return 0
    except LinearizerError as error:
        return error.exit_code
    return 0


def publish_student(run: Run, repo_id: str, token: str) -> None:
    """Publish the student; if that fails, the run is done nevertheless, and its log says why."""
    from linearizer.method.checkpoint import link_missing_weights
    from linearizer.publish import push

    try:
        link_missing_weights(run, token, in_job=True)  # of a checkpoint that an earlier job made
        finish(push.publish(run, repo_id, token=token))
    except LinearizerError as error:
        run.log(EventName.UNPUBLISHED, error=str(error))


@contextmanager
def exchanging(run: Run, account: Account, place: str) -> Iterator[None]:
    """Send the log, fetch requests, and save while the context lasts; save once more at its end."""
    ended = threading.Event()
    thread = threading.Thread(target=exchange, args=(run, account, place, ended), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(SAVE_SECONDS)
        retried(lambda: save(run, account, place))


def exchange(run: Run, account: Account, place: str, ended: threading.Event) -> None:
    """Exchange until the work has ended; repeat later what the Hub did not serve."""
    saved = time.monotonic()
    while not ended.wait(ASK_SECONDS):
        try:
            account.fetch_folder(place, run.folder, include=REQUESTS)
            account.send_folder(run.folder, place, (), ["events.jsonl"])
            if time.monotonic() > saved + SAVE_SECONDS:
                save(run, account, place)
                saved = time.monotonic()
        except Exception as error:  # the work goes on, and what was lost is sent later
            sys.stderr.write(f"the bucket cannot be reached now: {redact(error)}\n")


def save(run: Run, account: Account, place: str) -> None:
    """Make the bucket's folder equal to the run's."""
    account.send_folder(run.folder, place, (*NOT_SENT, *REQUESTS))


if __name__ == "__main__":
    end_process(lambda: main(sys.argv[1:]))
