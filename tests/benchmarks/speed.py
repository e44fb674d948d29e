"""Time student beside teacher on a CPU, reading and writing, by length and batch: python -m tests.benchmarks.speed.

Makes the demo's student at the bytes of a budget, or takes that of a run. Both take turns in one process on one thread,
and the processor's time counts, so that the ratios hold on a machine that does other work. Writes
results/speed-cpu.json.
"""

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.amounts import size
from linearizer.evaluate.environment import environment
from linearizer.evaluate.setup import assembled
from linearizer.evaluate.speed import Meter
from linearizer.pipeline import linearize
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.run.plan import Plan

RESULTS = Path(__file__).parent / "results" / "speed-cpu.json"
LENGTHS = (256, 512, 1024, 4096, 8192)
BATCHES = (1, 8)
SUBJECTS = ("teacher", "student")
ENOUGH = 8  # seconds, after which no further turn begins
QUICK = dict(prices="estimated", exchanges=0, dtype="float32", device="cpu")  # of what heads hold, speed needs no more


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a finished run, in place of a new one of the demo")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--turns", type=int, default=3, help="of each subject, the fastest of which counts")
    parser.add_argument("--out", type=Path, default=RESULTS)
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = made(Path(folder) / "run", asked.budget) if asked.run is None else Run(asked.run)
        with assembled(run) as setup:
            made_with = environment(setup.student) | {"instructions": torch.backends.cpu.get_cpu_capability()}
            found = {
                "date": date.today().isoformat(),
                "command": command(asked),
                "made_with": made_with,
                "rows": [],
            }
            for row in measured(setup, asked):
                found["rows"].append(row)
                asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def made(folder, budget):
    """Make the student of the demo model."""
    run = pipeline.begin(folder, Plan("demo", budget=budget, **QUICK))
    finish(linearize(run))
    return run


def measured(setup, asked):
    """Measure both subjects, and print a line for every length and batch."""
    subjects = {subject.name: subject for subject in setup.subjects(max(asked.lengths)) if subject.name in SUBJECTS}
    meters = {
        name: Meter(subjects[name], setup.layers, 0.0, 0, lambda device: time.process_time()) for name in SUBJECTS
    }
    for meter in meters.values():
        meter.time_texts(min(asked.lengths), 1)  # what is done once is not timed
    print(
        "batch  tokens   reads, teacher  student  time ÷   writes, teacher  student  speed ÷   peak, teacher  student"
    )
    for batch in asked.batches:
        for length in asked.lengths:
            paces, begin = {name: [] for name in SUBJECTS}, time.process_time()
            for turn in range(asked.turns):
                if turn and time.process_time() - begin > ENOUGH:
                    break
                for name, meter in meters.items():
                    paces[name].append(meter.time_texts(length, batch))
            row = {"length": length, "batch": batch} | {name: best(found) for name, found in paces.items()}
            yield row | ratios(row)
            print(line(row), flush=True)


def best(paces):
    """The fastest reading and writing, and the smallest peak: what else the machine does only adds to them."""
    one = asdict(paces[0])
    one["read_rate"], one["write_rate"] = max(p.read_rate for p in paces), max(p.write_rate for p in paces)
    one["peak_bytes"] = None if one["peak_bytes"] is None else min(p.peak_bytes for p in paces)
    return {name: one[name] for name in ("read_rate", "write_rate", "peak_bytes", "state_bytes")}


def ratios(row):
    """How long the student reads for, and how many tokens it writes, beside its teacher."""
    teacher, student = (row[name] for name in SUBJECTS)
    return {
        "reading_time_ratio": teacher["read_rate"] / student["read_rate"],
        "writing_speed_ratio": student["write_rate"] / teacher["write_rate"],
    }


def line(row):
    teacher, student, ratio = *(row[name] for name in SUBJECTS), ratios(row)
    peaks = ["–" if one["peak_bytes"] is None else size(one["peak_bytes"]) for one in (teacher, student)]
    return (
        f"{row['batch']:5}  {row['length']:6}  {teacher['read_rate']:15,.0f} {student['read_rate']:8,.0f} "
        f"{ratio['reading_time_ratio']:7.2f}  {teacher['write_rate']:16,.0f} {student['write_rate']:8,.0f} "
        f"{ratio['writing_speed_ratio']:8.2f}  {peaks[0]:>14} {peaks[1]:>8}"
    )


def command(asked):
    """The command by which this was measured, without the names of folders."""
    sizes = f"--lengths {' '.join(map(str, asked.lengths))} --batches {' '.join(map(str, asked.batches))}"
    student = f"--budget {asked.budget}" if asked.run is None else "--run RUN"
    return f"python -m tests.benchmarks.speed {student} {sizes} --turns {asked.turns}"


if __name__ == "__main__":
    main()
