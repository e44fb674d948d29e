"""Runs of the demo model for tests, and how to wait for them and to find their processes."""

import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from linearizer import pipeline
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.workers import control

FP32 = {"dtype": "float32"}  # the demo model's own is bf16, which most CPUs compute slowly
QUICK = dict(recipe="features", strategy="common-lambda", budget=64, texts=2, length=64, **FP32)
PLAN = Plan("demo", steps=48, **QUICK)  # the state of training is written at 25, long before the end
LONG = Plan("demo", steps=100_000, **QUICK)
ENDED = ("stopped", "failed", "done", "lost")


def beginning(root):
    """Yield a way to begin runs; when it is closed, none of them works any more."""
    yield lambda name="run", plan=PLAN, token=None: pipeline.begin(root / name, plan, token)
    end_runs(root)


def end_runs(root):
    """Stop what is still at work under a folder, and wait until it has stopped."""
    for run in [Run(log.parent) for log in root.rglob("events.jsonl")]:
        if run.is_locked:
            run.make_request("stop")
            wait_until(lambda run=run: not run.is_locked)


def begin_for(visitor, plan):
    """Begin a run of a visitor of the page."""
    return pipeline.begin(visitor.fresh_folder(plan), plan, visitor.token)


def inspection_of(layers, **facts):
    """What is known of a model with these layers, of which nothing else matters."""
    usual = dict(
        name="demo", revision=None, architecture="A", model_type="a", supported=True, reason=None, remedy=None,
        tested=True, layers=tuple(layers), scalings=(1.0,) * len(layers), positions="rotary", max_positions=1024,
        parameters=1000, weight_bytes=2000, licence=None, gated=False, cache_bytes_per_token=64, budgets=(),
    )  # fmt: skip
    return Inspection(**{**usual, **facts})


def start_command(*arguments):
    """Start a command in a session of its own, as another terminal has it."""
    command, both = [sys.executable, "-m", "linearizer", *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, stdout=both, stderr=both, text=True, start_new_session=True)


def wait_for(run, *states, seconds=180):
    """Wait until a run is in one of some states, and give its status; where it ended, its process is gone, too."""
    last = time.monotonic() + seconds
    while (result := control.status(run)).state not in states:
        assert time.monotonic() < last and result.state not in ENDED, (result, log_of(run))
        time.sleep(0.02)
    if result.state in ENDED:
        wait_until(lambda: not run.is_locked)  # the log says the end before the ticket is removed
    return result


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


def weights_of(checkpoint):
    """Return all weight files of a checkpoint by name."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def log_of(run):
    return (run.folder / "worker.log").read_text() if run.has_file("worker.log") else ""


def process_of(run):
    """Find the process that works on a run, or is about to."""
    while run.is_locked:
        if process := find_process(run):
            return process
        time.sleep(0.05)
    raise FileNotFoundError(f"no process of {run.folder}")


def find_process(run):
    """Find the process of a run as anybody may who looks at the list of processes: its command, and its open files."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile, or closed a file
            if b"linearizer.workers.worker" in (process / "cmdline").read_bytes():
                if run.folder / "lock" in [file.readlink() for file in (process / "fd").iterdir()]:
                    return process
    return None
