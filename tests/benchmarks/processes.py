"""How much faster several processes price and train: python -m tests.benchmarks.processes [STEP …] [--processes N]

Runs the demo model in one process and in N, each with one thread, and prints the seconds of each step and whether the
products have the same bits. It needs as many free cores as processes. The plans take some 20 seconds in one process:
what each process does for itself, as running the teacher once, would outweigh much shorter steps.
"""

import argparse
import os
import tempfile
from hashlib import sha256
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from linearizer import pipeline
from linearizer.jobs import control
from linearizer.jobs.children import PROCESSES
from linearizer.run.events import EventName
from linearizer.run.plan import Plan

ROW = "{:16}  {:>11}  {:>11}  {:>13}  {:>8}"  # printed as soon as it is known
USUAL = {"model": "demo", "dtype": "float32", "device": "cpu", "samples": 128, "exchanges": 0, "sinks": 2}
PLANS = {  # what is timed -> the plan, and the events between which it happens
    "prices-measured": (
        Plan(**USUAL, budget=32, texts=8, length=256, strategy="windows", prices="measured", steps=0),
        (EventName.PROFILED, EventName.PRICED),
    ),
    "prices-estimated": (
        Plan(**USUAL, budget=64, texts=8, length=512, strategy="gain", steps=0),
        (EventName.PROFILED, EventName.PRICED),
    ),
    "training": (
        Plan(**USUAL, budget=64, texts=4, length=256, recipe="features", strategy="common-lambda", steps=100),
        (EventName.ALLOCATED, EventName.DISTILLED),
    ),
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", help=f"of {', '.join(PLANS)}; default: all")
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args(arguments)
    print(ROW.format("", "one process", f"{arguments.processes} processes", "times as fast", "bits"))
    for name in arguments.steps or PLANS:
        plan, between = PLANS[name]
        alone, shared = measure(plan, 1, between), measure(plan, arguments.processes, between)
        same = "the same" if alone[1] == shared[1] else "OTHER"
        row = (name, f"{alone[0]:.1f} s", f"{shared[0]:.1f} s", f"{alone[0] / shared[0]:.2f}", same)
        print(ROW.format(*row), flush=True)


def measure(plan, processes, between):
    """Give the seconds between two events of a run, and a hash of what decides its student."""
    os.environ[PROCESSES] = str(processes)
    with tempfile.TemporaryDirectory() as folder:
        run = pipeline.begin(Path(folder) / "run", plan)
        control.start(run)
        for _ in control.follow(run):
            pass
        if (state := control.status(run)).state != "done":
            raise SystemExit(f"the run is {state.state}: {state.error}")
        times = {event["event"]: event["time"] for event in run.events()}
        first, last = (times[name] for name in between)
        files = [run.folder / "allocation.json", *sorted(run.checkpoint.glob("student*.safetensors"))]
        if run.has_file("prices.json"):
            files.append(run.folder / "prices.json")
        return last - first, sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


if __name__ == "__main__":
    main()
