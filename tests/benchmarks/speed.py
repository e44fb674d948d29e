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
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = made(Path(folder) / "run", arguments.budget) if arguments.run is None else Run(arguments.run)
        with assembled(run) as setup:
            made_with = environment(setup.student) | {"instructions": torch.backends.cpu.get_cpu_capability()}
            result = {
                "date": date.today().isoformat(),
                "command": command(arguments),
                "made_with": made_with,
                "rows": [],
            }
            for row in measured(setup, arguments):
                result["rows"].append(row)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def made(folder, budget):
    """Make the student of the demo model."""
    run = pipeline.begin(folder, Plan("demo", budget=budget, **QUICK))
    finish(linearize(run))
    return run


def measured(setup, arguments):
    """Measure both subjects, and print a line for every length and batch."""
    subjects = {subject.name: subject for subject in setup.subjects(max(arguments.lengths)) if subject.name in SUBJECTS}
    meters = {
        name: Meter(subjects[name], setup.layers, 0.0, 0, lambda device: time.process_time()) for name in SUBJECTS
    }
    for meter in meters.values():
        meter.time_texts(min(arguments.lengths), 1)  # what is done once is not timed
    print(
        "batch  tokens   reads, teacher  student  time ÷   writes, teacher  student  speed ÷   peak, teacher  student"
    )
    for batch in arguments.batches:
        for length in arguments.lengths:
            paces, begin = {name: [] for name in SUBJECTS}, time.process_time()
            for turn in range(arguments.turns):
                if turn and time.process_time() - begin > ENOUGH:
                    break
                for name, meter in meters.items():
                    paces[name].append(meter.time_texts(length, batch))
            row = {"length": length, "batch": batch} | {name: best(result) for name, result in paces.items()}
            yield row | ratios(row)
            print(line(row), flush=True)


def best(paces):
    """The fastest reading and writing, and the smallest peak: what else the machine does only adds to them."""
    pace = asdict(paces[0])
    pace["read_rate"], pace["write_rate"] = max(p.read_rate for p in paces), max(p.write_rate for p in paces)
    pace["peak_bytes"] = None if pace["peak_bytes"] is None else min(p.peak_bytes for p in paces)
    return {name: pace[name] for name in ("read_rate", "write_rate", "peak_bytes", "state_bytes")}


def ratios(row):
    """How long the student reads for, and how many tokens it writes, beside its teacher."""
    teacher, student = (row[name] for name in SUBJECTS)
    return {
        "reading_time_ratio": teacher["read_rate"] / student["read_rate"],
        "writing_speed_ratio": student["write_rate"] / teacher["write_rate"],
    }


def line(row):
    teacher, student, ratio = *(row[name] for name in SUBJECTS), ratios(row)
    peaks = ["–" if subject["peak_bytes"] is None else size(subject["peak_bytes"]) for subject in (teacher, student)]
    return (
        f"{row['batch']:5}  {row['length']:6}  {teacher['read_rate']:15,.0f} {student['read_rate']:8,.0f} "
        f"{ratio['reading_time_ratio']:7.2f}  {teacher['write_rate']:16,.0f} {student['write_rate']:8,.0f} "
        f"{ratio['writing_speed_ratio']:8.2f}  {peaks[0]:>14} {peaks[1]:>8}"
    )


def command(arguments):
    """The command by which this was measured, without the names of folders."""
    sizes = f"--lengths {' '.join(map(str, arguments.lengths))} --batches {' '.join(map(str, arguments.batches))}"
    student = f"--budget {arguments.budget}" if arguments.run is None else "--run RUN"
    return f"python -m tests.benchmarks.speed {student} {sizes} --turns {arguments.turns}"


if __name__ == "__main__":
    main()
