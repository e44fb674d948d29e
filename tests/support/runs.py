"""Runs of the demo model for tests, and how to wait for them and to find their processes."""

import time
from pathlib import Path

from linearizer.jobs import control
from linearizer.run.folder import Run
from linearizer.run.plan import Plan

FP32 = {"dtype": "float32"}  # the demo model's own is bf16, which most CPUs compute slowly
QUICK = dict(recipe="features", strategy="common-lambda", budget=64, texts=2, length=64, samples=128, **FP32)
PLAN = Plan("demo", steps=60, **QUICK)  # the state of training is written at 25 and 50
LONG = Plan("demo", steps=100_000, **QUICK)
ENDED = ("stopped", "failed", "done", "lost")


def beginning(root):
    """Give a way to begin runs; when it is closed, none of them is at work any more."""
    begun = []

    def run(name="run", plan=PLAN):
        begun.append(Run.begin(root / name, plan))
        return begun[-1]

    yield run
    for run in begun:
        if run.folder.is_dir() and run.worked_on:
            run.request("stop")
            wait_for(run, *ENDED)


def wait_for(run, *states, seconds=180):
    """Wait until a run is in one of some states, and give its status."""
    last = time.monotonic() + seconds
    while (found := control.status(run)).state not in states:
        assert time.monotonic() < last and found.state not in ENDED, (found, log_of(run))
        time.sleep(0.02)
    return found


def wait_until(condition, seconds=180):
    last = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < last
        time.sleep(0.02)


def wait_for_event(run, name, done=0):
    """Follow a run until an event of a step is there."""
    for events in control.follow(run):
        if any(event["event"] == name and event.get("done", 0) >= done for event in events):
            return
    raise AssertionError((control.status(run), log_of(run)))


def log_of(run):
    return (run.folder / "worker.log").read_text() if run.has("worker.log") else ""


def process_of(run):
    """Find the process of a run as anybody may who looks at the list of processes."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"linearizer.jobs.worker" in words and str(run.folder).encode() in words:
            return entry
    raise FileNotFoundError(f"no process of {run.folder}")
