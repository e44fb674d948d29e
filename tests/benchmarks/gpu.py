"""All that waits for a GPU, in one command and 25 minutes: python -m tests.benchmarks.gpu

  tests     the tests of the kernels, at the GPU itself
  kernels   the rows that have a target, beside SDPA, fla and LoLCATs' form
  runs      `linearizer run` of the demo model and of a model of Llama-3.2-1B's shape, with its forecast
  steps     a layerwise training step beside the teacher's forward pass
  students  reading and writing of whole students and their teacher, by length and number of texts

Writes results/gpu-DEVICE.json after every row. Each part is a process of its own with its own time limit: a part that
fails or hangs leaves the others, and says how it ended. A second call measures the parts again that are named, or all.
At the end stands which targets were met, and which kernels were not faster than the same in PyTorch. Without a GPU it
says so, and --tiny tries every part at sizes that mean nothing.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from linearizer.evaluate.speed import Meter
from linearizer.evaluate.subjects import Subject
from linearizer.method.checkpoint import put_student_into
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.quiet import quiet
from linearizer.run.files import write_whole
from linearizer.teacher.ram import run_if_it_fits
from tests.benchmarks import time as time_of_runs
from tests.benchmarks.attention_rows import prefill_row
from tests.benchmarks.loss_rows import loss_row
from tests.benchmarks.slot_rows import slots_row
from tests.benchmarks.step_rows import layerwise_steps
from tests.benchmarks.timing import DEVICE, GPU, ceilings
from tests.benchmarks.token_rows import decode_rows

RESULTS = Path(__file__).parent / "results"
ALL_SECONDS = 25 * 60
LIMITS = {"tests": 240, "kernels": 420, "runs": 420, "steps": 120, "students": 300}  # seconds
TESTED = (
    "tests/student/test_kernel_text_features.py", "tests/student/test_kernel_text_slots.py",
    "tests/student/test_kernel_token_windows.py", "tests/student/test_kernel_token_layer.py",
    "tests/train/test_attention_loss_kernels.py", "tests/student/test_kernel_trial.py",
)  # fmt: skip
READ = {2048: 1.0, 8192: 4.0, 32768: 16.0}  # tokens of a text -> times as fast as SDPA that reading should be
TOKEN_SECONDS = 6e-6  # that a token of a layer should take in a graph, of one text
STEP = 1.4  # times the teacher's forward pass that a training step should take at most
HELD = (Head(window=64, slots=64, bits=8), Head(window=256, bits=8), Head(window=128, bits=8), Head(window=64, bits=8))


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help=f"{', '.join(PARTS)}; default: all")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that every part runs")
    parser.add_argument("--out", type=Path, help="where results go (default: results/gpu-DEVICE.json)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)  # the process of a part
    arguments = parser.parse_args(arguments)
    name = torch.cuda.get_device_name() if GPU else "cpu"
    out = arguments.out or RESULTS / f"gpu-{name.lower().replace(' ', '-')}.json"
    if arguments.part:
        for row in PARTS[arguments.part](arguments.tiny):
            print(json.dumps(row), flush=True)
            add_row(out, arguments.part, row)
        return
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not GPU and not arguments.tiny:
        parser.error("there is no GPU here: --tiny tries the parts at sizes that mean nothing")
    end = time.monotonic() + ALL_SECONDS
    result = read(out)
    change(out, {"machine": {"device": name, "torch": torch.__version__, "tiny": arguments.tiny}})
    for part in arguments.parts or PARTS:
        change(out, {"parts": {**read(out).get("parts", {}), part: {"rows": []}}})
        run_part(part, arguments.tiny, out, min(LIMITS[part], end - time.monotonic()))
    result = read(out)
    change(out, {"summary": summary(result["parts"])})
    print("\n".join(summary(result["parts"])), out, sep="\n")


def run_part(part, tiny, out, seconds):
    """Measure a part in a process of its own, which is killed with its children when its time is over."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--part", part, "--out", str(out), *["--tiny"] * tiny]
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stderr=said, start_new_session=True)
        try:
            ended = f"exit {process.wait(max(seconds, 1))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"its time of {seconds:.0f} s was over"
        said.seek(0)
        last = said.read()[-2000:] if ended != "exit 0" else ""
    parts = read(out)["parts"]
    own = {**parts[part], "ended": ended, "seconds": time.monotonic() - begun, "said": last}
    change(out, {"parts": {**parts, part: own}})
    print(f"{part}: {ended}, {own['seconds']:.0f} s\n{last}", flush=True)


def read(out):
    return json.loads(out.read_text()) if out.exists() else {}


def change(out, values):
    out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(out, json.dumps({**read(out), **values}, indent=1) + "\n")


def add_row(out, part, row):
    parts = read(out)["parts"]
    parts[part]["rows"].append(row)
    change(out, {"parts": parts})


def attempted(name, make):
    """Make a row, or say why there is none."""
    try:
        return make()
    except Exception as error:  # compilers' errors are of many kinds, and a row is worth no table
        return {"op": name, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
    finally:
        if GPU:
            torch.cuda.empty_cache()


def tested(tiny):
    """Run the tests of the kernels, a file at a time."""
    for path in TESTED[:1] if tiny else TESTED:
        chosen = ["-k", "constants"] if tiny else []
        begun = time.monotonic()
        command = [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", "--tb=line", path, *chosen]
        done = subprocess.run(command, capture_output=True, text=True)
        lines = done.stdout.strip().splitlines()
        failed = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
        seconds = time.monotonic() - begun
        row = {"op": "tests", "file": path, "said": lines[-1:], "failed_tests": failed, "seconds": seconds}
        said = f"exit {done.returncode}: {done.stderr[-300:]}"  # 5: no test was found
        yield {**row, "failed": said} if done.returncode else row


def kernels(tiny):
    """Time what has a target, the most telling sizes first."""
    limits = ceilings()
    yield {"op": "machine", **limits}
    heads, group, dim = (2, 2, 32) if tiny else (8, 4, 128)
    for tokens in (64,) if tiny else (8192, 2048, 32768, 131072):
        features = 16 if tiny else 128
        row = attempted("prefill", lambda: prefill_row(limits, 1, tokens, heads, group, dim, features))  # noqa: B023
        yield {**row, "wanted": READ.get(tokens)}
        if tokens in READ or tiny:
            row = attempted("slots", lambda: slots_row(heads, group, dim, tokens))  # noqa: B023
            yield {**row, "wanted": READ.get(tokens)}
    for batch in (1,) if tiny else (1, 8, 64):
        for row in decode_rows(limits, batch, heads, group, dim):
            yield {**row, "wanted": TOKEN_SECONDS if batch == 1 else None}
            if tiny:
                break
    size = (1, 64, heads, group, dim) if tiny else (8, 2048, 8, 4, 128)
    yield attempted("loss", lambda: loss_row(size, 16 if tiny else 128))


def runs(tiny):
    """Make students from beginning to end."""
    for name in ("demo",) if tiny else ("demo", "Llama-3.2-1B"):
        how = ["--texts", "2", "--length", "64"] if tiny else ["--layers", "16", "--texts", "8", "--length", "512"]
        arguments = time_of_runs.parse([name, "--device", DEVICE, *how])
        with tempfile.TemporaryDirectory() as folder, quiet():
            yield {"op": "run", "model": name, **time_of_runs.measured(arguments, name, Path(folder))}


def steps(tiny):
    for row in layerwise_steps(tiny):
        yield {**row, "wanted": STEP}


def students(tiny):
    """Let a teacher of Llama-3.2-1B's shape and its student read and write, until memory or time do not do."""
    config, whole, _ = time_of_runs.SHAPES["Llama-3.2-1B"]
    changes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256} if tiny else {}
    teacher = time_of_runs.random_model(config, **{"num_hidden_layers": whole, **changes}).to(DEVICE)
    own = teacher.config
    layer = Layer(own.num_attention_heads, own.num_key_value_heads, own.head_dim, own.head_dim)
    layers = (layer,) * own.num_hidden_layers
    row = tuple(HELD[head % len(HELD)] for head in range(layer.kv_heads))
    student = put_student_into(teacher.eval(), layers, allocation := Allocation("by hand", 4, (row,) * len(layers)))
    subjects = (Subject("teacher", student.base, softmax=True), Subject("student", student, allocation))
    for batch in (1,) if tiny else (1, 8, 64):
        for length in (64,) if tiny else (2048, 8192, 32768, 131072):
            for subject in subjects:
                meter = Meter(subject, layers, 60.0, 0)
                if batch == 1:  # what is done once for a length, as building kernels is, is not timed
                    run_if_it_fits(lambda: meter.time_texts(length, batch))  # noqa: B023
                pace = run_if_it_fits(lambda: meter.time_texts(length, batch))  # noqa: B023
                held = {} if pace is None else {name: getattr(pace, name) for name in ("read_rate", "write_rate")}
                memory = {} if pace is None else {"peak_bytes": pace.peak_bytes, "state_bytes": pace.state_bytes}
                size = {"length": length, "batch": batch}
                yield {"op": "student", "subject": subject.name, **size, **held, **memory, "fits": pace is not None}


PARTS = {"tests": tested, "kernels": kernels, "runs": runs, "steps": steps, "students": students}


def summary(parts):
    """Say which targets were met, and where a kernel was not faster than the same in PyTorch."""
    lines = []
    for own in parts.values():
        for row in own["rows"]:
            ours, wanted, rivals = row.get("ours"), row.get("wanted"), row.get("rivals", {})
            name = " ".join(str(row[key]) for key in ("op", "file", "kind", "batch", "tokens", "loss") if key in row)
            own_seconds = ours.get("seconds") if isinstance(ours, dict) else ours
            if "failed" in row or (ours is not None and own_seconds is None):
                lines.append(f"{name}: failed")
                continue
            if ours is None:
                continue
            ours = own_seconds
            times = {rival: x["seconds"] for rival, x in rivals.items() if "seconds" in x}
            softmax = [seconds for rival, seconds in times.items() if rival.startswith("sdpa")]
            if wanted and row["op"] == "layerwise step" and times:
                ratio = ours / min(times.values())
                lines.append(f"{name}: {ratio:.2f} of the forward pass, wanted {wanted}: {verdict(ratio <= wanted)}")
            elif wanted and row["op"] == "decode":
                seconds = row.get("ours in a graph", {}).get("seconds", ours)
                lines.append(f"{name}: {seconds * 1e6:.1f} µs, wanted {wanted * 1e6:g}: {verdict(seconds <= wanted)}")
            elif wanted and softmax:
                ratio = min(softmax) / ours
                lines.append(f"{name}: {ratio:.2f} × SDPA, wanted {wanted}: {verdict(ratio >= wanted)}")
            for rival in ("chunked pytorch", "chunked pytorch, compiled", "slots in pytorch"):
                if rival in times and times[rival] < ours:
                    lines.append(f"{name}: no faster than {rival}: {times[rival] / ours:.2f} of its time")
    ends = [f"{part}: {own.get('ended')}" for part, own in parts.items() if own.get("ended") != "exit 0"]
    return [*lines, *ends]


def verdict(met):
    return "met" if met else "not met"


if __name__ == "__main__":
    main()
