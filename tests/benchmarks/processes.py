"""How much faster several processes measure prices and train: python -m tests.benchmarks.processes [--processes N]

Runs the demo model in one process and in N, each with one thread, and prints the seconds of both steps and whether the
products have the same bits. It needs as many free cores as processes.
"""

import argparse
import os
import tempfile
from hashlib import sha256
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from linearizer import pipeline
from linearizer.amounts import columns
from linearizer.jobs.children import PROCESSES, Children
from linearizer.progress import finish
from linearizer.run.events import EventName
from linearizer.run.plan import Plan

USUAL = {"model": "demo", "dtype": "float32", "device": "cpu", "texts": 4, "samples": 128, "exchanges": 0, "sinks": 2}
PLANS = {  # what is timed -> the plan, and the events between which it happens
    "prices": (
        Plan(**USUAL, budget=32, length=128, strategy="windows", prices="measured", steps=0),
        (EventName.PROFILED, EventName.PRICED),
    ),
    "training": (
        Plan(**USUAL, budget=64, length=256, recipe="features", strategy="common-lambda", steps=200),
        (EventName.ALLOCATED, EventName.DISTILLED),
    ),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    count = parser.parse_args(arguments).processes
    rows = [("", "one process", f"{count} processes", "times as fast", "bits")]
    for name, (plan, between) in PLANS.items():
        alone, shared = measure(plan, 1, between), measure(plan, count, between)
        same = "the same" if alone[1] == shared[1] else "OTHER"
        rows.append((name, f"{alone[0]:.1f} s", f"{shared[0]:.1f} s", f"{alone[0] / shared[0]:.2f}", same))
    print(columns(rows))


def measure(plan, processes, between):
    """Give the seconds between two events of a run, and a hash of what decides its student."""
    os.environ[PROCESSES] = str(processes)
    with tempfile.TemporaryDirectory() as folder:
        run = pipeline.begin(Path(folder) / "run", plan)
        finish(pipeline.linearize(run, helpers=Children(run)))
        times = {event["event"]: event["time"] for event in run.events()}
        first, last = (times[name] for name in between)
        files = [run.folder / "allocation.json", *sorted(run.checkpoint.glob("student*.safetensors"))]
        if run.has_file("prices.json"):
            files.append(run.folder / "prices.json")
        return last - first, sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


if __name__ == "__main__":
    main()
