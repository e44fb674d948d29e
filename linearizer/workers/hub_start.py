"""Begins a run in a job of the Hub: checks the plan, computes its maximum cost, and requires consent to it."""

from __future__ import annotations

import math
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from linearizer import pipeline
from linearizer.errors import NotAgreed, RequestError
from linearizer.hub.jobs_api import NOTHING_BEGUN, TROUBLE, Account, Hardware, explain_job_errors, list_hardware
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.publish.push import find_target
from linearizer.run.folder import Run
from linearizer.run.hub_job import FILE, HubJob, open_job, read_hub_job
from linearizer.teacher.streaming import FILLED
from linearizer.workers import control
from linearizer.workers.forecast import READ_RATE, Speeds, forecast_seconds

MIN_MINUTES, MAX_MINUTES = 15, 7 * 60  # limits of a job: the token of a sign-in lasts for eight hours
MACHINE_SECONDS = 300.0  # until a machine is ready and has installed the packages
MARGIN = 2.0  # factor for errors of a forecast
# The speeds of the slowest hardware on offer: a CPU with two cores, and a GPU, on which students and spectra are
# assumed not to be faster.
CPU_SPEEDS = Speeds(products=3e10, small_products=1e10, students=2e5, spectra=8e8, reads=READ_RATE)
GPU_SPEEDS = replace(CPU_SPEEDS, products=8e12, small_products=3e13)
DOWNLOAD_RATE = 1e8  # bytes in a second, inside the Hub
INSTALLED_BYTES = 1.2e10  # of PyTorch and its dependencies


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
    yielding: Collection[str] = (),
) -> Run:
    """Begin a run in a job of the Hub, which a process in the background follows.

    Nothing begins unless `yes` agrees to the maximum cost, which the error states, or `most_usd` covers it. `push`: the
    repository in which the job publishes the student. `owner`: the organisation that pays instead of the account.
    """
    check_elsewhere(plan)
    fresh = not Run.is_begun(folder, resume)
    run = pipeline.begin(folder, plan, token, resume, yielding=yielding, here=False)
    try:
        job = offer_job(plan, run.inspection, flavor, minutes=minutes, push=push, owner=owner, token=token)
        if not yes and most_usd < job.cap:
            raise NotAgreed(f"{job.in_words}: add --yes to begin it; {NOTHING_BEGUN}")
        run.write_product(FILE, job.to_json())
        control.start(run, token, cap=job.cap)
    except BaseException:
        if fresh:
            run.remove(started=False)
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


def guess_minutes(plan: Plan, inspection: Inspection, hardware: Hardware) -> int:
    """Return twice the forecast time of a run on the slowest GPU, or the slowest CPU, on offer."""
    room = FILLED * hardware.memory_bytes or math.inf
    speeds = replace(GPU_SPEEDS if hardware.gpu else CPU_SPEEDS, room=room)
    dtype = "float32" if plan.dtype == "auto" and not hardware.gpu else plan.dtype
    placed = replace(plan, device="cuda" if hardware.gpu else "cpu", dtype=dtype)
    seconds = MACHINE_SECONDS + inspection.weight_bytes / DOWNLOAD_RATE + forecast_seconds(placed, inspection, speeds)
    return min(MAX_MINUTES, max(MIN_MINUTES, round(MARGIN * seconds / 60)))


def resume_in_job(run: Run, token: str | None = None, yes: bool = False, agree: str = "add --yes") -> None:
    """Continue a run in its job, if that is running or its results are not here yet, or else in another job."""
    job = read_hub_job(run)
    assert job is not None
    job = replace(job, usd_per_hour=choose_hardware(job.flavor, token).usd_per_hour)
    if yes:
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
