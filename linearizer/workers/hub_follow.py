"""Follows the job of a run, and begins one if there is none: its log and its products become the run's.

A bucket holds the folder of the run while the job works. The lines of its log are appended unchanged to the local log,
so that readers of a run need not know about jobs. The lines that end a run are appended once its products are here.
After a crash, lines that are already in the local log are skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from linearizer.errors import FaultError, RequestError, Stopped
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import TROUBLE, Account, Job, explain_job_errors, status_of
from linearizer.publish.space import CARRIED_FOLDERS, job_requirements
from linearizer.run.events import EventName, append_line, parse_line, parse_lines, read_lines
from linearizer.run.files import PACKAGE, UNFINISHED, find_carried, remove
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE, HubJob, agreed_cap, open_job, read_hub_job
from linearizer.run.stopping import log_end
from linearizer.workers.control import quote_last

Product = TypeVar("Product")
IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
INSTALL = """set -e
cd "$(mktemp -d)"
nvidia-smi > /dev/null 2>&1 || export UV_TORCH_BACKEND=cpu
uv venv --quiet env
uv pip install --quiet --python env {packages}
exec env/bin/python "$@"
"""  # without a GPU, the build of PyTorch without CUDA, which is a tenth of the size
BEGIN = """import os, sys
from huggingface_hub import HfApi
HfApi().sync_bucket(f"hf://buckets/{sys.argv[1]}/runs/{sys.argv[2]}/code", "code", quiet=True)
os.environ["PYTHONPATH"] = os.path.abspath("code")
os.execv(sys.executable, [sys.executable, "-m", "linearizer.workers.hub_work", *sys.argv[1:]])
"""
NO_CODE = ("*__pycache__*", ".*", "*/.*", "*.egg-info*", *(f"{name}/*" for name in CARRIED_FOLDERS))
REQUESTS = ("stop", "use")
NOT_SENT = ("lock", "worker.log", FILE, "checkpoint/teacher-*", f"*{UNFINISHED}*")  # with FILE a job would begin jobs
ENDINGS = (EventName.DONE, EventName.STOPPED, EventName.FAILED)
LOOK_SECONDS = 0.2  # between two checks for requests
POLL_SECONDS = 5.0  # between two requests for the log and the stage of a job
STOP_SECONDS = 90.0  # that a job may take to stop and to save, before it is cancelled
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0)  # between tries to read from the Hub


def bucket_folder(run_id: str) -> str:
    """Name the folder of a run in a bucket."""
    return f"runs/{run_id}/run"


def retried(call: Callable[[], Product]) -> Product:
    """Call, and repeat the call after pauses while the Hub does not answer."""
    for pause in PAUSES:
        with suppress(*TROUBLE):
            return call()
        time.sleep(pause)
    return call()


def follow_job(run: Run, token: str | None) -> None:
    """Follow the job of a run to its end; begin one if none is open and its cost was agreed to."""
    with log_end(run):
        hub_job = read_hub_job(run)
        assert hub_job is not None
        account = Account(token, hub_job.owner)
        note = f"finished steps are in the bucket {account.bucket!r}, and a running job continues: resume the run"
        with explain_job_errors("the job", note):
            begun = open_job(run)
            if begun is not None:
                had_ended = Follower(run, account, hub_job, begun["id"]).follow(again=True)
                if run.done or not had_ended or not agreed_cap(run):
                    return
            Follower(run, account, hub_job, find_or_begin(run, account, hub_job)).follow()


def find_or_begin(run: Run, account: Account, hub_job: HubJob) -> str:
    """Begin a job, unless one of this run is already running; return its id."""
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
    code = f"runs/{run.id}/code"
    if stale := account.list_files(code):  # times of files do not distinguish versions of the code
        account.send({}, stale)
    account.send_folder(run.folder, bucket_folder(run.id), NOT_SENT)
    account.send_folder(PACKAGE, f"{code}/linearizer", NO_CODE)
    if run.plan.model == "demo":
        account.send_folder(find_carried("assets/demo-model"), f"{code}/assets/demo-model", NO_CODE)
    extra = ["peft"] * (run.plan.resolved_lora > 0) + ["gguf"] * (run.inspection.gguf is not None)
    install = INSTALL.format(packages=" ".join(job_requirements(*extra)))
    return ["sh", "-c", install, "job", "-c", BEGIN, account.bucket, run.id, hub_job.push or ""]


class Follower:
    """Follows one job."""

    def __init__(self, run: Run, account: Account, hub_job: HubJob, job_id: str) -> None:
        self.run, self.account, self.hub_job, self.id = run, account, hub_job, job_id
        self.arrived = run.folder / f"state{UNFINISHED}"  # files are fetched to here first
        self.passed_on: set[str] = set()  # requests
        self.cancel_at = float("inf")

    def follow(self, again: bool = False) -> bool:
        """Follow the job to its end; return whether it had already ended. `again`: another process began it."""
        job = retried(self.read_stage)
        had_ended = job.ended
        if again and job.stage == "RUNNING":
            self.run.log(EventName.STARTED)
        polled = time.monotonic()
        while not job.ended:
            self.pass_requests_on(job)
            time.sleep(LOOK_SECONDS)
            if time.monotonic() > polled + POLL_SECONDS:
                with suppress(*TROUBLE):
                    job = self.read_stage()
                    self.take_events()
                polled = time.monotonic()
        self.finish(job)
        return had_ended

    def read_stage(self) -> Job:
        """Ask the Hub for the job; an unknown job was deleted."""
        try:
            return self.account.find_job(self.id)
        except TROUBLE as error:
            if status_of(error) != 404:
                raise
            return Job(self.id, "", "DELETED", "")

    def take_events(self) -> list[bytes]:
        """Append the new lines of the job's log, up to those that end the run; return the latter."""
        self.account.fetch_folder(bucket_folder(self.run.id), self.arrived, include=["events.jsonl"])
        local = {*read_lines(self.run.log_file).split(b"\n")}  # each line has its time
        lines = read_lines(self.arrived / "events.jsonl").split(b"\n")
        pairs = [(line, event) for line in lines if line not in local and (event := parse_line(line)) is not None]
        pairs = [(line, event) for line, event in pairs if event["event"] != EventName.QUEUED]
        end = next((place for place, (_, event) in enumerate(pairs) if event["event"] in ENDINGS), len(pairs))
        for line, _ in pairs[:end]:
            append_line(self.run.log_file, line)
        return [line for line, _ in pairs[end:]]

    def pass_requests_on(self, job: Job) -> None:
        """Pass on the requests of the run; cancel a job that has not begun, or that does not stop."""
        if not self.run.has_file("plan.json"):  # a run that was deleted by hand must not cost more
            self.account.cancel_job(self.id)
            raise FaultError(f"{str(self.run.folder)!r} was deleted while its job was running: the job is cancelled")
        for name in [name for name in REQUESTS if name not in self.passed_on and self.run.has_request(name)]:
            with suppress(*TROUBLE):
                wait = 0.0
                if name == "use" or job.stage != "SCHEDULING":
                    reason = self.run.request_reason(name) or "\n"
                    self.account.send({f"{bucket_folder(self.run.id)}/{name}": reason.encode()})
                    wait = STOP_SECONDS
                if name == "stop":
                    self.cancel_at = time.monotonic() + wait
                self.passed_on.add(name)
        if time.monotonic() > self.cancel_at:
            with suppress(*TROUBLE):
                self.account.cancel_job(self.id)
                self.cancel_at = time.monotonic() + STOP_SECONDS

    def finish(self, job: Job) -> None:
        """Fetch the products of an ended job, then log how it ended."""
        try:
            retried(self.bring_products)
            end = retried(self.take_events)
        except TROUBLE as error:
            raise FaultError(
                f"the job has ended, and its results cannot be fetched ({redact(error)}): resume the run, which tries "
                "again and does not begin another job"
            ) from error
        self.run.log(EventName.HUB_JOB, id=self.id, stage=job.stage)
        if "use" in self.passed_on:
            self.run.clear_request("use")
        is_done = any(event["event"] == EventName.DONE for event in parse_lines(end))
        if end and (not is_done or self.run.checkpoint.is_dir()):
            for line in end:
                append_line(self.run.log_file, line)
        elif "stop" in self.passed_on or job.stage == "CANCELED":
            reason = self.run.request_reason("stop") if "stop" in self.passed_on else "its job was cancelled on the Hub"
            self.run.log(EventName.STOPPED, **({"error": reason} if reason else {}))
        else:
            self.run.log(EventName.FAILED, error=self.describe_end(job))
        self.run.clear_request("stop")
        remove(self.arrived)

    def describe_end(self, job: Job) -> str:
        """Describe the end of a job without an end in its log; quote its last line."""
        if job.stage == "DELETED":
            ending = "was deleted"
        elif "time" in job.message.lower():
            ending = f"reached its limit of {self.hub_job.minutes} minutes"
        else:
            ending = f"ended before its work ({job.stage}{': ' + job.message if job.message else ''})"
        quotation = ""
        with suppress(*TROUBLE):
            quotation = quote_last([*self.account.read_log(self.id)])
        return f"the job {ending}: resume the run, and another job continues from its last save{quotation}"

    def bring_products(self) -> None:
        """Fetch the job's files from the bucket; each file or folder replaces ours completely, or not at all."""
        remove(self.arrived)
        self.arrived.mkdir()
        excluded = ["events.jsonl", *REQUESTS, *["checkpoint/*"] * self.run.checkpoint.is_dir()]
        self.account.fetch_folder(bucket_folder(self.run.id), self.arrived, exclude=excluded)
        for path in self.arrived.iterdir():
            if path.is_dir():
                remove(self.run.folder / path.name)
            path.replace(self.run.folder / path.name)
