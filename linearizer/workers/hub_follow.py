"""Follow the job of a run: its log becomes the run's log, and its products the run's; begin a job where there is none.

The job keeps its log in the bucket. Its lines are appended unchanged, so everything that reads a run needs nothing new.
The lines that end a run wait until its products are here. Whoever follows after a crash skips the lines that are there
already.
"""

from __future__ import annotations

import io
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from fnmatch import fnmatch
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from linearizer.errors import FaultError, RequestError, Stopped
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import TROUBLE, Account, Job, explain_job_errors, status_of
from linearizer.hub.repository import bytes_of
from linearizer.publish.space import job_requirements, package_files
from linearizer.run.events import EventName, append_line, newest_events, parse_line, parse_lines
from linearizer.run.files import UNFINISHED, remove
from linearizer.run.folder import Run
from linearizer.run.hub_job import HubJob, agreed_cap, open_job, read_hub_job
from linearizer.run.stopping import log_end
from linearizer.run.weight_digests import DIGESTS
from linearizer.workers.control import quote_last

Product = TypeVar("Product")
IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
INSTALL = """set -e
cd "$(mktemp -d)"
nvidia-smi > /dev/null 2>&1 || export UV_TORCH_BACKEND=cpu
uv venv --quiet env
uv pip install --quiet --python env {packages}
exec env/bin/python "$@"
"""  # without a GPU the build of PyTorch that has no CUDA, which is ten times as small
BEGIN = """import os, sys, tempfile, zipfile
from huggingface_hub import HfApi
os.chdir(tempfile.mkdtemp())
HfApi().download_bucket_files(sys.argv[1], [(sys.argv[2], "code.zip")])
zipfile.ZipFile("code.zip").extractall("code")
os.environ["PYTHONPATH"] = os.path.abspath("code")
os.execv(sys.executable, [sys.executable, "-m", "linearizer.workers.hub_work", sys.argv[1], *sys.argv[3:]])
"""
NOT_SENT = (  # of a run's folder; with the last of the first line, a job would begin jobs
    "lock", "stop", "use", "worker.log", "hub_job.json",
    "checkpoint/teacher-*", f"*{UNFINISHED}*",
)  # fmt: skip
ENDINGS = (EventName.DONE, EventName.STOPPED, EventName.FAILED)
LOOK_SECONDS = 0.2  # between two looks for requests
POLL_SECONDS = 5.0  # between two questions for the log and the stage of a job
STOP_SECONDS = 90.0  # that a job may take to stop and to save, before it is cancelled
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # between tries to read from the Hub


def bucket_folder(run_id: str) -> str:
    """Name the folder of a run in a bucket."""
    return f"runs/{run_id}/run"


def request_path(run_id: str, name: str) -> str:
    """Name the file by which a job is requested to `stop`, or to `use` its training as it is."""
    return f"runs/{run_id}/requests/{name}"


def retried(call: Callable[[], Product]) -> Product:
    """Call, and again after pauses where the Hub does not answer."""
    for pause in PAUSES:
        with suppress(*TROUBLE):
            return call()
        time.sleep(pause)
    return call()


def follow_job(run: Run, token: str | None) -> None:
    """Follow the job of a run to its end; begin one where none is open, if its cost was agreed to."""
    with log_end(run):
        hub_job = read_hub_job(run)
        assert hub_job is not None
        account = Account(token, hub_job.owner)
        kept = f"what was finished is kept in the bucket {account.bucket!r}, and a running job goes on: resume the run"
        with explain_job_errors("the job", kept):
            begun = open_job(run)
            if begun is not None:
                had_ended = Follower(run, account, hub_job, begun["id"]).follow(again=True)
                if run.done or not had_ended or not agreed_cap(run):
                    return
            Follower(run, account, hub_job, find_or_begin(run, account, hub_job)).follow()
        run.clear_request("stop")


def find_or_begin(run: Run, account: Account, hub_job: HubJob) -> str:
    """Begin a job, unless one of this run is at work already; return its id."""
    if run.has_request("stop"):
        raise Stopped("stopped before its job began")
    job = account.find_live_job(run.id)
    if job is None:
        if agreed_cap(run) < hub_job.cap:
            raise RequestError(f"the run needs another job, and {hub_job.in_words}: resume it and agree to that")
        account.make_bucket()
        job = account.begin_job(IMAGE, send_run(run, account, hub_job), hub_job.flavor, hub_job.minutes, run.id)
    run.log(EventName.HUB_JOB, id=job.id, url=job.url, flavor=hub_job.flavor, cap=hub_job.cap)
    return job.id


def send_run(run: Run, account: Account, hub_job: HubJob) -> list[str]:
    """Send the code and the folder of a run, and return the command of its job."""
    code = pack_code(demo=run.plan.model == "demo")
    name = f"code/{sha256(code).hexdigest()[:20]}.zip"
    place = bucket_folder(run.id)
    there = set(account.list_files(f"runs/{run.id}"))
    newer = any(path.startswith(f"{place}/state/") for path in there)  # than the state here
    skipped = (*NOT_SENT, "checkpoint/*", *["state/*"] * newer)
    names = {path.relative_to(run.folder).as_posix(): path for path in run.folder.rglob("*") if path.is_file()}
    files: dict[str, Path | bytes] = {
        f"{place}/{sent}": path for sent, path in names.items() if not any(fnmatch(sent, each) for each in skipped)
    }
    unused = ["*/requests/*"]
    if allocated_again(run):  # another student needs another training
        unused += [f"{place}/state/training/*"]
    obsolete = {path for path in there if any(fnmatch(path, each) for each in unused)}
    if not account.find_files([name]):
        files[name] = code
    account.send(files, obsolete - set(files))
    extra = ["peft"] * (run.plan.kept_lora > 0) + ["gguf"] * (run.inspection.gguf is not None)
    install = INSTALL.format(packages=" ".join(job_requirements(*extra)))
    return ["sh", "-c", install, "job", "-c", BEGIN, account.bucket, name, run.id, hub_job.push or ""]


def allocated_again(run: Run) -> bool:
    """Whether another budget was allocated since the newest job began."""
    for event in newest_events(run.log_file):
        if event["event"] == EventName.HUB_JOB or (event["event"] == EventName.ALLOCATED and event.get("changed")):
            return event["event"] == EventName.ALLOCATED
    return False


def pack_code(demo: bool) -> bytes:
    """Pack this package, with the demo model where that is linearized; the same files give the same bytes."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:  # stored: the Hub compresses, and knows parts that it has
        for name, content in package_files().items():
            if name.startswith("linearizer/") or (demo and name.startswith("assets/demo-model/")):
                archive.writestr(zipfile.ZipInfo(name), bytes_of(content))
    return packed.getvalue()


class Follower:
    """Follows one job."""

    def __init__(self, run: Run, account: Account, hub_job: HubJob, job_id: str) -> None:
        self.run, self.account, self.hub_job, self.id = run, account, hub_job, job_id
        self.seen = ""  # the hash of the job's log as it was read last
        self.held: list[str] = []  # lines from the end of the run on
        self.asked: set[str] = set()  # requests that were passed on
        self.cancel_at = float("inf")

    def follow(self, again: bool = False) -> bool:
        """Follow the job to its end; return whether it had ended before. `again`: another process began it."""
        job = retried(self.read_stage)
        had_ended = job.ended
        if again and job.stage == "RUNNING":
            self.run.log(EventName.STARTED)
        asked = time.monotonic()
        while not job.ended:
            self.pass_requests_on(job)
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > asked + POLL_SECONDS:
                with suppress(*TROUBLE):
                    job = self.read_stage()
                    self.take_events()
                asked = time.monotonic()
        self.finish(job)
        return had_ended

    def read_stage(self) -> Job:
        """Ask the Hub for the job; a job that it does not know was deleted."""
        try:
            return self.account.find_job(self.id)
        except TROUBLE as error:
            if status_of(error) != 404:
                raise
            return Job(self.id, "", "DELETED", "")

    def take_events(self) -> None:
        """Append the lines that are new in the job's log; hold those that end the run until the end."""
        path, arrived = f"{bucket_folder(self.run.id)}/events.jsonl", self.run.folder / f"events.jsonl{UNFINISHED}"
        file = self.account.find_files([path]).get(path)
        if file is None or file.xet_hash == self.seen:
            return
        self.account.fetch({arrived: file})
        lines = arrived.read_text(encoding="utf-8").splitlines()
        arrived.unlink()
        known = {*self.run.log_file.read_text(encoding="utf-8").splitlines(), *self.held}  # each line has its time
        for line in lines:
            event = parse_line(line.encode())
            if event is None or line in known or event["event"] == EventName.QUEUED:
                continue
            if self.held or event["event"] in ENDINGS:
                self.held.append(line)
            else:
                append_line(self.run.log_file, line.encode())
        self.seen = file.xet_hash

    def pass_requests_on(self, job: Job) -> None:
        """Pass on what the run is requested to do; cancel a job that has not begun, or that does not stop."""
        if not self.run.has_file("plan.json"):  # a run that was deleted by hand costs no more
            self.account.cancel_job(self.id)
            raise FaultError(f"{str(self.run.folder)!r} was deleted while its job was running: the job is cancelled")
        for name in [name for name in ("stop", "use") if name not in self.asked and self.run.has_request(name)]:
            with suppress(*TROUBLE):
                wait = 0.0
                if name == "use" or job.stage != "SCHEDULING":
                    reason = self.run.request_reason(name) or "\n"
                    self.account.send({request_path(self.run.id, name): reason.encode()})
                    wait = STOP_SECONDS
                if name == "stop":
                    self.cancel_at = time.monotonic() + wait
                self.asked.add(name)
        if time.monotonic() > self.cancel_at:
            with suppress(*TROUBLE):
                self.account.cancel_job(self.id)
                self.cancel_at = time.monotonic() + STOP_SECONDS

    def finish(self, job: Job) -> None:
        """Fetch the products of an ended job, then log how it ended."""
        try:
            retried(self.bring_products)
            retried(self.take_events)
        except TROUBLE as error:
            raise FaultError(
                f"the job has ended, and its results cannot be fetched ({redact(error)}): resume the run, which tries "
                "again and begins no other job"
            ) from error
        self.run.log(EventName.HUB_JOB, id=self.id, stage=job.stage)
        if "use" in self.asked:
            self.run.clear_request("use")
        made = any(event["event"] == EventName.DONE for event in parse_lines(map(str.encode, self.held)))
        if self.held and (not made or self.run.checkpoint.is_dir()):
            for line in self.held:
                append_line(self.run.log_file, line.encode())
        elif "stop" in self.asked or job.stage == "CANCELED":
            why = self.run.request_reason("stop") if "stop" in self.asked else "its job was cancelled on the Hub"
            self.run.log(EventName.STOPPED, **({"error": why} if why else {}))
        else:
            self.run.log(EventName.FAILED, error=self.describe_end(job))
        self.run.clear_request("stop")

    def describe_end(self, job: Job) -> str:
        """Describe how a job ended whose log has no end; quote its last line that is not an event."""
        if job.stage == "DELETED":
            how = "was deleted"
        elif "time" in job.message.lower():
            how = f"reached its limit of {self.hub_job.minutes} minutes"
        else:
            how = f"ended before its work ({job.stage}{': ' + job.message if job.message else ''})"
        last = ""
        with suppress(*TROUBLE):
            last = quote_last([line for line in self.account.read_log(self.id) if parse_line(line.encode()) is None])
        return f"the job {how}: resume the run, and another job goes on from what was saved{last}"

    def bring_products(self) -> None:
        """Fetch what the job left in the bucket, but for what only resuming needs; each whole or not at all."""
        arrived = self.run.folder / "state" / f"job{UNFINISHED}"
        remove(arrived)
        wanted = ["*.json", *["checkpoint/*"] * (not self.run.checkpoint.is_dir())]
        self.account.fetch_folder(bucket_folder(self.run.id), arrived, wanted)
        for path in (*arrived.glob("*.json"), *arrived.glob(DIGESTS)):
            path.replace(self.run.folder / path.relative_to(arrived))
        if (arrived / "checkpoint").is_dir() and not self.run.checkpoint.is_dir():
            (arrived / "checkpoint").rename(self.run.checkpoint)
        remove(arrived)
