"""Begins a run in a job of the Hub and follows it: its log and its products become the run's.

Before, the plan is checked, its maximum cost computed, and consent to it required. A bucket holds the folder of the run
while the job works. The lines of its log are appended unchanged to the local log, so that readers of a run need not
know about jobs. The lines that end a run are appended once its products are here. After a crash, lines that are already
in the local log are skipped.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from linearizer.errors import FaultError, NotAgreed, RequestError, Stopped
from linearizer.hub.errors import redact
from linearizer.hub.jobs_api import (
    NOTHING_BEGUN,
    TROUBLE,
    Account,
    Hardware,
    Job,
    explain_job_errors,
    list_hardware,
    status_of,
)
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.publish.packages import CARRIED_FOLDERS, job_requirements
from linearizer.run.events import EventName, append_line, parse_line, parse_lines, read_lines
from linearizer.run.files import PACKAGE, UNFINISHED, find_carried, remove
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE, HubJob, agreed_cap, open_job, read_hub_job
from linearizer.run.stopping import log_end
from linearizer.workers import control
from linearizer.workers.control import quote_last

INSTALLED_BYTES = 1.2e10  # of PyTorch and its dependencies
Product = TypeVar("Product")
IMAGE = "ghcr.io/astral-sh/uv:python3.12-bookworm"
INSTALL = """set -e
cd "$(mktemp -d)"
nvidia-smi > /dev/null 2>&1 || export UV_TORCH_BACKEND=cpu
uv venv --quiet env
uv pip install --quiet --python env {packages}
exec env/bin/python "$@"
"""  # without a GPU, the build of PyTorch without CUDA, which is a tenth of the size
BEGIN = """import os, sys, time
from huggingface_hub import HfApi
for pause in (1, 5, 20, 0):
    try:
        HfApi().sync_bucket(f"hf://buckets/{sys.argv[1]}/runs/{sys.argv[2]}/code", "code", quiet=True)
        break
    except Exception as error:
        if not pause:
            raise
        print("the code cannot be fetched now:", type(error).__name__, flush=True)
        time.sleep(pause)
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


def run_in_job(
    folder: Path,
    plan: Plan,
    flavor: str,
    *,
    minutes: int | None = None,
    push: str | None = None,
    owner: str | None = None,
    yes: bool = False,
    most_usd: float = 0.0,
    token: str | None = None,
    resume: bool = False,
    adjustable: Collection[str] = (),
) -> Run:
    """Begin a run in a job of the Hub, which a process in the background follows.

    Nothing begins unless `yes` agrees to the maximum cost, which the error states, or `most_usd` covers it. `push`: the
    repository in which the job publishes the student. `owner`: the organisation that pays instead of the account.
    """
    from linearizer import pipeline

    check_elsewhere(plan)
    fresh = not Run.is_begun(folder, resume)
    run = pipeline.begin(folder, plan, token, resume, adjustable=adjustable, here=False)
    try:
        job = offer_job(plan, run.inspection, flavor, minutes=minutes, push=push, owner=owner, token=token)
        if not yes and most_usd < job.cap:
            raise NotAgreed(f"{job.in_words}: add --yes to begin it; {NOTHING_BEGUN}")
        run.write_product(FILE, job.to_json())
        control.start(run, token, cap=job.cap)
    except BaseException:
        if fresh:
            run.remove()
        raise
    return run


def check_elsewhere(plan: Plan) -> None:
    """Refuse files of this machine, which a job cannot read."""
    kind, _, name = plan.text.partition(":")
    refused = [f"the model {plan.model!r}"] if plan.model != "demo" and is_path(plan.model) else []
    if kind == "file" or (kind == "dataset" and is_path(name.partition(":")[0])):
        refused.append(f"the text {plan.text!r}")
    if refused:
        raise RequestError(
            f"{' and '.join(refused)} is on this machine, which a job cannot read: name one on the Hub; {NOTHING_BEGUN}"
        )


def is_path(name: str) -> bool:
    """Whether a name is that of a file or folder of this machine."""
    path = os.path.expanduser(name)
    return os.path.exists(path) or path.startswith(("/", "."))


def choose_hardware(flavor: str, token: str | None = None) -> Hardware:
    """Find a kind of hardware by its name."""
    offered = {hardware.name: hardware for hardware in list_hardware(token)}
    if flavor not in offered:
        names = ", ".join(f"{name} (${hardware.usd_per_hour:.2f} an hour)" for name, hardware in offered.items())
        raise RequestError(f"jobs have no hardware {flavor!r}: choose from {names or 'nothing now'}; {NOTHING_BEGUN}")
    return offered[flavor]


def offer_job(
    plan: Plan,
    inspection: Inspection,
    flavor: str,
    *,
    minutes: int | None = None,
    push: str | None = None,
    owner: str | None = None,
    token: str | None = None,
) -> HubJob:
    """Return the terms of a job for a plan; refuse hardware that cannot do it."""
    from linearizer.publish.push import find_target
    from linearizer.workers.job_minutes import MAX_MINUTES, guess_minutes

    check_elsewhere(plan)
    account = Account(token, owner)
    hardware = choose_hardware(flavor, account.token)
    needed = inspection.weight_bytes + INSTALLED_BYTES
    if 0 < hardware.disk_bytes < needed:
        raise RequestError(
            f"{hardware.name} has a disk of {hardware.disk}, and {needed / 1e9:.0f} GB are needed: choose hardware "
            f"with a larger one; {NOTHING_BEGUN}"
        )
    if plan.device not in hardware.devices:
        raise RequestError(
            f"{hardware.name} has no device {plan.device!r} ({hardware.gpu or 'no GPU'}): leave --device out, or "
            f"choose other hardware; {NOTHING_BEGUN}"
        )
    if push is not None:
        push = find_target(push, True, account.token).repo_id
    minutes = guess_minutes(plan, inspection, hardware) if minutes is None else minutes
    if not 1 <= minutes <= MAX_MINUTES:
        raise RequestError(f"a job of {minutes} minutes is not allowed: ask for 1 to {MAX_MINUTES}; {NOTHING_BEGUN}")
    return HubJob(account.name, hardware.name, minutes, hardware.usd_per_hour, push)


def resume_in_job(run: Run, token: str | None = None, yes: bool = False, agree: str = "add --yes") -> None:
    """Continue a run in its job, if that is running or its results are not here yet, or else in another job."""
    job = read_hub_job(run)
    assert job is not None
    job = replace(job, usd_per_hour=choose_hardware(job.flavor, token).usd_per_hour)
    if yes:
        with run.take_lock():  # whoever follows a job keeps to the terms that it began with
            run.write_product(FILE, job.to_json())
    elif open_job(run) is None:
        account = Account(token, job.owner)
        with explain_job_errors("the jobs of this run"):
            live = account.find_live_job(run.id)
        if live is None:
            raise NotAgreed(f"the run needs another job, and {job.in_words}: {agree} to begin it; {NOTHING_BEGUN}")
    control.start(run, token, cap=job.cap if yes else 0.0)


def forget_in_bucket(run: Run, token: str | None = None) -> None:
    """Remove the files of a run's jobs from the bucket, if the Hub can be reached."""
    with suppress(RequestError, *TROUBLE):
        if (job := read_hub_job(run)) is not None:
            account = Account(token, job.owner)
            account.send({}, account.list_files(f"runs/{run.id}"))


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
    extra = ["gguf"] * (run.inspection.gguf is not None)
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
