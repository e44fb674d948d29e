"""Time student beside teacher on a CPU, reading and writing, by length and batch: python -m tests.benchmarks.speed.

Makes the demo's student at the bytes of a budget for every far field, or takes that of a run. Both take turns in one
process on one thread, and the processor's time counts, so that the ratios hold on a machine that does other work.
Memory is measured in a turn of its own, in which what is freed goes back at once: what the heap keeps would count, too.
Writes results/speed-cpu.json after every row; rows of other fields, lengths and batches stay (speed_chart.py draws it).

With --layers: the time of a softmax layer and of a recurrent one in small random models, plain and hybrid, alone.
"""

import argparse
import json
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from datetime import date
from multiprocessing import get_context
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.amounts import size
from linearizer.evaluate.speed import Meter
from linearizer.evaluate.subjects import assembled, environment
from linearizer.pipeline import linearize
from linearizer.plan.head_bytes import Head
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.folder import Run
from linearizer.student.attention_interface import attention_modules
from linearizer.student.cache import CACHE
from linearizer.teacher.ram import MAPPED, ON_TOP, change_heap, return_freed_memory
from tests.support.hybrids import HYBRIDS, student_of, teacher_of
from tests.support.models import tokens

RESULTS = Path(__file__).parent / "results" / "speed-cpu.json"
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
BATCHES = (1, 8)
FIELDS = {  # what a plan asks for; the first is the default
    "slots": {}, "slots, 8 bits": {"bits": 8}, "slots, 16 bits": {"bits": 16},
    "features": {"strategy": "fix", "feature_map": "prf"}, "windows": {"strategy": "windows"},
}  # fmt: skip
SUBJECTS = ("teacher", "student")
HEADINGS = (
    f"{'':15}batch  tokens   reads, teacher  student  time ÷   writes, teacher  student  speed ÷   peak, teacher  "
    "student"
)
KINDS = {  # by name: the family, and what its layers are; a plain model has softmax layers alone
    "lfm2, plain": ("lfm2", dict(layer_types=["full_attention"] * 8)),
    "lfm2": ("lfm2", dict(layer_types=[*["conv"] * 3, "full_attention"] * 2)),
    "qwen3_5, plain": ("qwen3_5_text", dict(layer_types=["full_attention"] * 8)),
    "qwen3_5": ("qwen3_5_text", dict(layer_types=[*["linear_attention"] * 3, "full_attention"] * 2)),
    "falcon_h1": ("falcon_h1", dict(mamba_d_ssm=512, mamba_d_head=64, mamba_d_state=64, mamba_chunk_size=64)),
}  # fmt: skip
LARGER = dict(hidden_size=512, num_hidden_layers=8, num_attention_heads=8, head_dim=64, intermediate_size=1024)
LARGER |= dict(max_position_embeddings=2048)
DELTA_SIZES = dict(linear_key_head_dim=64, linear_value_head_dim=64, linear_num_key_heads=4, linear_num_value_heads=8)
RECURRENT = ("GatedDeltaNet", "Mixer", "ShortConv")  # end the names of their classes
READ, WRITTEN = 1024, 64  # tokens
ENOUGH = 8  # seconds, after which no further turn begins
QUICK = dict(dtype="float32", device="cpu")  # of what heads hold, speed needs no more


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="the folder of a finished run, in place of new ones of the demo")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--fields", nargs="+", choices=FIELDS, default=["slots"], help="what the students hold")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--turns", type=int, default=3, help="of each subject, the fastest of which counts")
    parser.add_argument("--layers", action="store_true", help="time the layers of plain and hybrid models instead")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    if arguments.layers:
        return time_layers(arguments.turns)
    print(HEADINGS)
    for field in arguments.fields:
        with tempfile.TemporaryDirectory() as folder:
            run = made(Path(folder) / "run", arguments.budget, field) if arguments.run is None else Run(arguments.run)
            with assembled(run) as setup:
                made_with = environment(setup.student) | {"instructions": torch.backends.cpu.get_cpu_capability()}
                for row in measured(setup, arguments):
                    keep(arguments, {"field": field, **row}, made_with)
                    print(line(field, row), flush=True)


def keep(arguments, row, made_with):
    """Write a row in the place of the one of the same field, length and batch; machines do not mix."""
    known = json.loads(arguments.out.read_text(encoding="utf-8")) if arguments.out.exists() else {}
    rows = known.get("rows", []) if known.get("made_with") == made_with else []
    rows = [other for other in rows if key_of(other) != key_of(row)]
    row |= {"date": date.today().isoformat(), "command": command(arguments, row)}
    content = {"made_with": made_with, "rows": sorted([*rows, row], key=key_of)}
    arguments.out.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def key_of(row):
    return [*FIELDS].index(row["field"]), row["batch"], row["length"]


def made(folder, budget, field):
    """Make the student of the demo model, in a process of its own: what its heap keeps would count as memory here."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        pool.submit(make, folder, budget, field).result()
    return Run(folder)


def make(folder, budget, field):
    torch.set_num_threads(1)
    finish(linearize(pipeline.begin(folder, Plan("demo", budget=budget, **QUICK, **FIELDS[field]))))


def measured(setup, arguments):
    """Measure both subjects, and print a line for every length and batch."""
    subjects = {subject.name: subject for subject in setup.subjects(max(arguments.lengths)) if subject.name in SUBJECTS}
    meters = {
        name: Meter(subjects[name], setup.layers, 0.0, 0, lambda device: time.process_time()) for name in SUBJECTS
    }
    for meter in meters.values():
        meter.time_texts(min(arguments.lengths), 1)  # what is done once is not timed
    for batch in arguments.batches:
        for length in arguments.lengths:
            return_freed_memory()
            peaks = {name: meter.time_texts(length, batch).peak_bytes for name, meter in meters.items()}
            change_heap({MAPPED: 2**25, ON_TOP: 2**30})  # what is freed is kept for what is taken next
            paces, begin = {name: [] for name in SUBJECTS}, time.process_time()
            for turn in range(arguments.turns):
                if turn and time.process_time() - begin > ENOUGH:
                    break
                for name, meter in meters.items():
                    paces[name].append(meter.time_texts(length, batch))
            row = {"length": length, "batch": batch} | {
                name: best(result, peaks[name]) for name, result in paces.items()
            }
            yield row | ratios(row)


def best(paces, peak):
    """The fastest reading and writing: what else the machine does only adds to their time."""
    pace = asdict(paces[0]) | {"peak_bytes": peak}
    pace["read_rate"], pace["write_rate"] = max(p.read_rate for p in paces), max(p.write_rate for p in paces)
    return {name: pace[name] for name in ("read_rate", "write_rate", "peak_bytes", "state_bytes")}


def ratios(row):
    """How long the student reads for, and how many tokens it writes, beside its teacher."""
    teacher, student = (row[name] for name in SUBJECTS)
    return {
        "reading_time_ratio": teacher["read_rate"] / student["read_rate"],
        "writing_speed_ratio": student["write_rate"] / teacher["write_rate"],
    }


def line(field, row):
    teacher, student, ratio = *(row[name] for name in SUBJECTS), ratios(row)
    peaks = ["–" if subject["peak_bytes"] is None else size(subject["peak_bytes"]) for subject in (teacher, student)]
    return (
        f"{field:15}{row['batch']:5}  {row['length']:6}  {teacher['read_rate']:15,.0f} {student['read_rate']:8,.0f} "
        f"{ratio['reading_time_ratio']:7.2f}  {teacher['write_rate']:16,.0f} {student['write_rate']:8,.0f} "
        f"{ratio['writing_speed_ratio']:8.2f}  {peaks[0]:>14} {peaks[1]:>8}"
    )


def command(arguments, row):
    """The command that measures a row, without the names of folders."""
    student = f"--budget {arguments.budget}" if arguments.run is None else "--run RUN"
    sizes = f"--lengths {row['length']} --batches {row['batch']} --turns {arguments.turns}"
    return f"python -m tests.benchmarks.speed {student} --fields {row['field']!r} {sizes}"


def time_layers(turns):
    """Print how long a layer of each kind takes, in a teacher and in its student, which take turns."""
    print(f"{'milliseconds a layer':22}{'reads, teacher':>16} student  ratio   {'token, teacher':>14} student  ratio")
    for name, (family, kinds) in KINDS.items():
        sizes = {**LARGER, **(DELTA_SIZES if "linear_key_head_dim" in HYBRIDS[family] else {}), **kinds}
        held = [Head(window=64, slots=64)]
        models = {"teacher": teacher_of(family, **sizes), "student": student_of(family, held, **sizes)}
        times = {subject: watched_times(model) for subject, model in models.items()}
        for _ in range(turns):
            for subject in SUBJECTS:
                read_and_write(models[subject])
        for layer in ("softmax", "recurrent"):
            pairs = [[1e3 * best_time(times[s][layer, part]) for s in SUBJECTS] for part in ("read", "token")]
            if all(map(all, pairs)):
                (reads, read), (writes, write) = pairs
                print(
                    f"{name + ', ' + layer:22}{reads:16.2f} {read:7.2f} {read / reads:6.2f}   {writes:14.3f} "
                    f"{write:7.3f} {write / writes:6.2f}",
                    flush=True,
                )


def watched_times(model):
    """Keep the times of the calls of a model's softmax and recurrent layers, by the layer and what it reads."""
    times, begun = defaultdict(list), {}

    def begin(module, args, kwargs):
        begun[module] = time.process_time()

    def end(module, args, kwargs, output):
        inputs = next(x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor))
        part = "token" if inputs.shape[1] == 1 else "read"
        times[kind_of[module], part].append(time.process_time() - begun[module])

    kind_of = dict.fromkeys(attention_modules(model), "softmax")
    kind_of |= {m: "recurrent" for m in model.modules() if type(m).__name__.endswith(RECURRENT)}
    for module in kind_of:  # before and after all that our own hooks do
        module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        module.register_forward_hook(end, with_kwargs=True)
    return times


@torch.inference_mode()
def read_and_write(model):
    ids = tokens(1, READ + WRITTEN)
    cache = getattr(model(ids[:, :READ], use_cache=True, logits_to_keep=1), CACHE)
    for place in range(READ, READ + WRITTEN):
        model(ids[:, place : place + 1], **{CACHE: cache})


def best_time(times):
    """The time that a quarter of the calls stay below: what else the machine does only adds to it."""
    return sorted(times)[len(times) // 4] if times else 0.0


if __name__ == "__main__":
    main()
