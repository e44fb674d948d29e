"""How much faster several processes price: python -m tests.benchmarks.processes [STEP …] [--processes N]

Runs the demo model in one process and in N, each with one thread, and prints the seconds of each step and whether the
products have the same bits. It needs as many free cores as processes; where others use them, too, what counts is by how
much less processor time the busiest process takes. Each step takes some 20 seconds in one process: what every process
does for itself would outweigh a much shorter one.
"""

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # before PyTorch is imported
    os.environ["OMP_NUM_THREADS"] = "1"

from linearizer import pipeline
from linearizer.plan.plan import Plan
from linearizer.run.events import EventName
from linearizer.workers import control
from linearizer.workers.helpers import PROCESSES

ROW = "{:16}  {:>11}  {:>11}  {:>13}  {:>12}  {:>8}"  # printed as soon as it is known
USUAL = {"model": "demo", "dtype": "float32", "device": "cpu", "samples": 128, "sinks": 2}
PLANS = {  # what is timed -> the plan, and the events between which it happens
    "prices-measured": (
        Plan(**USUAL, budget=32, texts=8, length=256, strategy="windows", steps=0),
        (EventName.PROFILED, EventName.PRICED),
    ),
    "prices-estimated": (
        Plan(**USUAL, budget=64, texts=8, length=512, strategy="gain", steps=0),
        (EventName.PROFILED, EventName.PRICED),
    ),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(PLANS)}; default: all")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(arguments)
    print(ROW.format("", "one process", f"{arguments.processes} processes", "times as fast", "by processor", "bits"))
    for name in arguments.steps or PLANS:
        plan, between = PLANS[name]
        alone, shared = measure(plan, 1, between), measure(plan, arguments.processes, between)
        seconds = [f"{each.seconds:.1f} s" for each in (alone, shared)]
        times = [f"{getattr(alone, of) / getattr(shared, of):.2f}" for of in ("seconds", "busiest")]
        same = "the same" if alone.hash == shared.hash else "OTHER"
        print(ROW.format(name, *seconds, *times, same), flush=True)


class Measured(NamedTuple):
    seconds: float
    busiest: float  # seconds of processor time of the process that took most
    hash: str  # of what decides the student


def measure(plan, processes, between):
    """Time what a run does between two of its events."""
    os.environ[PROCESSES] = str(processes)
    with tempfile.TemporaryDirectory() as folder:
        run = pipeline.begin(Path(folder) / "run", plan)
        with at_work(run), watched() as found:
            for _ in control.follow(run):
                pass
        if (state := control.status(run)).state != "done":
            raise SystemExit(f"the run is {state.state}: {state.error}")
        times = {event["event"]: event["time"] for event in run.events()}
        first, last = (times[name] for name in between)
        files = [run.folder / "allocation.json", *sorted(run.checkpoint.glob("student*.safetensors"))]
        if run.has_file("prices.json"):
            files.append(run.folder / "prices.json")
        took = [at(series, last) - at(series, first) for series in found.values()]
        return Measured(last - first, max(took), sha256(b"".join(path.read_bytes() for path in files)).hexdigest())


@contextmanager
def at_work(run):
    """Let a run work in the background while this lasts; what ends this process before ends the run, too."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    control.start(run)
    try:
        yield
    finally:
        while run.is_locked:  # it has not begun to look for requests, or has to end its step
            run.make_request("stop")
            time.sleep(0.1)
        signal.signal(signal.SIGTERM, before)


@contextmanager
def watched():
    """List for each process that comes from this one, while this lasts, when it had taken how many seconds."""
    found, over = {}, threading.Event()

    def watch():
        while not over.wait(0.1):
            stats = dict(filter(None, map(stat_of, Path("/proc").glob("[0-9]*/stat"))))
            for pid in stats:
                if comes_from(pid, os.getpid(), stats):
                    found.setdefault(pid, []).append((time.time(), stats[pid][1]))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield found
    finally:
        over.set()
        watcher.join()


def stat_of(path):
    """Give a process, its parent, and the seconds that it has taken."""
    with suppress(OSError):
        fields = path.read_text().rpartition(")")[2].split()
        return int(path.parent.name), (int(fields[1]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"))


def comes_from(pid, ancestor, stats):
    while pid in stats and pid != ancestor:
        pid = stats[pid][0]
    return pid == ancestor and bool(stats)


def at(series, moment):
    """Give the seconds that a process had taken at a moment."""
    before = [taken for when, taken in series if when <= moment]
    return before[-1] if before else series[0][1]


if __name__ == "__main__":
    main()
