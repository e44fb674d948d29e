"""All that waits for a GPU, in one command and 25 minutes: python -m tests.benchmarks.gpu [PART …]

  tests     the tests of the kernels, on the GPU itself
  kernels   a token, a text and the loss of one layer, beside SDPA, FlexAttention, fla and LoLCATs' form
  runs      a whole run of the demo model and of a model of Llama-3.2-1B's shape, with its forecast
  steps     a layerwise training step beside the teacher's forward pass
  students  reading and writing of whole students and their teacher, by length and number of texts
  serve     tokens a second of `linearizer serve`, student and teacher, by number of texts

Writes results/gpu-DEVICE.json after every row. Each part is a process with a time limit: a part that fails or hangs
leaves the others, and the file says how it ended. At the end stands which targets were met, and which kernels were not
faster than the same in PyTorch. --tiny tries every part at sizes that mean nothing, also without a GPU.
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
from transformers import AutoModelForCausalLM

from linearizer.evaluate.speed import Meter, finish_and_read_clock
from linearizer.evaluate.subjects import Subject
from linearizer.hub.models import find_model
from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.method.checkpoint import put_student_into
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.run.files import write_whole
from linearizer.serve.engine import Engine
from linearizer.serve.row import Row
from linearizer.teacher.load import load_tokenizer
from linearizer.teacher.ram import run_if_it_fits
from tests.benchmarks import sizes
from tests.benchmarks.kernel_rows import DEVICE, GPU, KINDS, decode_rows, loss_row, prefill_row, slots_row, step_rows

RESULTS = Path(__file__).parent / "results"
ALL_SECONDS = 25 * 60
LIMITS = {"tests": 240, "kernels": 420, "runs": 420, "steps": 120, "students": 300, "serve": 120}  # seconds
TESTED = (
    "tests/kernels/test_text_features.py",
    "tests/kernels/test_slots_in_triton.py", "tests/train/test_attention_loss_kernels.py",
    "tests/kernels/test_trial.py", "tests/kernels/test_text_parts.py",
    "tests/kernels/test_text_graphs.py", "tests/kernels/test_token_graph.py", "tests/serve/test_token_graphs.py",
)  # fmt: skip
READ = {2048: 1.0, 8192: 4.0, 32768: 16.0}  # tokens of a text -> times as fast as SDPA that reading should be
TOKEN_SECONDS = 6e-6  # that a token of a layer should take in a graph, of one text
STEP = 1.4  # times the teacher's forward pass that a training step should take at most
HELD = [Head(window, slots=slots, bits=bits) for window, _, slots, _, bits in KINDS["slots and windows in few bits"]]
PROMPT, WRITTEN = 1024, 64  # tokens of a text in `serve`


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
            rows = read_parts(out)[arguments.part]["rows"]
            change_part(out, arguments.part, rows=[*rows, row])
        return
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if not GPU and not arguments.tiny:
        parser.error("there is no GPU here: --tiny tries the parts at sizes that mean nothing")
    end = time.monotonic() + ALL_SECONDS
    for part in arguments.parts or PARTS:
        change_part(out, part, device=name, torch=torch.__version__, tiny=arguments.tiny, rows=[])
        run_part(part, arguments.tiny, out, min(LIMITS[part], end - time.monotonic()))
    print("\n".join(summary(read_parts(out))), out, sep="\n")


def run_part(part, tiny, out, seconds):
    """Measure a part in a process of its own, which is killed with its children when its time is over."""
    begun = time.monotonic()
    command = [sys.executable, "-m", "tests.benchmarks.gpu", "--part", part, "--out", str(out), *["--tiny"] * tiny]
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stderr=errors, start_new_session=True)
        try:
            ended = f"exit {process.wait(max(seconds, 1))}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            ended = f"its time of {seconds:.0f} s was over"
        errors.seek(0)
        last = errors.read()[-2000:] if ended != "exit 0" else ""
    change_part(out, part, ended=ended, seconds=time.monotonic() - begun, said=last)
    print(f"{part}: {ended}, {time.monotonic() - begun:.0f} s\n{last}", flush=True)


def read_parts(out):
    return json.loads(out.read_text()) if out.exists() else {}


def change_part(out, part, **values):
    out.parent.mkdir(parents=True, exist_ok=True)
    parts = read_parts(out)
    write_whole(out, json.dumps({**parts, part: {**parts.get(part, {}), **values}}, indent=1) + "\n")


def attempted(op, rows, wanted=None):
    """Yield rows with their target; where they cannot go on, why."""
    try:
        yield from ({**row, "wanted": wanted} for row in rows())
    except Exception as error:  # compilers' errors are of many kinds, and one row must not end the table
        yield {"op": op, "failed": f"{type(error).__name__}: {str(error)[:300]}"}
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
        row = {"op": "tests", "file": path, "said": lines[-1:], "seconds": time.monotonic() - begun}
        row["failed_tests"] = [line[:300] for line in lines if line.startswith(("FAILED", "ERROR"))]
        failed = f"exit {done.returncode}: {done.stderr[-300:]}"  # 5: no test was found
        yield {**row, "failed": failed} if done.returncode else row


def kernels(tiny):
    """Time what has a target, the most telling sizes first."""
    layer, features = ((2, 2, 32), 16) if tiny else ((8, 4, 128), 128)
    kinds = ["slots"] if tiny else [*KINDS][::-1]  # fewest bits first
    for batch in (1,) if tiny else (1, 8, 64):
        rows = lambda batch=batch: decode_rows(batch, *layer, kinds)  # noqa: E731
        yield from attempted("decode", rows, TOKEN_SECONDS if batch == 1 else None)
        for tokens in (64,) if tiny else {1: (2048, 8192), 8: (32768,)}.get(batch, ()):
            rows = lambda n=tokens: (slots_row(n, *layer, kind) for kind in kinds if "slots" in kind)  # noqa: E731
            yield from attempted("slots", rows, READ.get(tokens))
    yield from attempted("loss", lambda: [loss_row(*((1, 64) if tiny else (8, 2048)), *layer, features)])
    for tokens in (64,) if tiny else (8192, 32768, 131072, 2048):
        yield from attempted("prefill", lambda n=tokens: [prefill_row(n, *layer, features)], READ.get(tokens))


def runs(tiny):
    """Make students from beginning to end."""
    for name in ("demo",) if tiny else ("demo", "Llama-3.2-1B"):
        size = ["--texts", "2", "--length", "64"] if tiny else ["--texts", "8", "--length", "512"]
        arguments = sizes.parse(["--strategy", "gain", "--steps", "0", "--device", DEVICE, *size])
        with tempfile.TemporaryDirectory() as folder:
            yield {"op": "run", "model": name, **sizes.measure(arguments, name, Path(folder))}


def steps(tiny):
    yield from attempted("layerwise step", lambda: step_rows(tiny), STEP)


def subjects_of(tiny):
    """Make a teacher of Llama-3.2-1B's shape and a student of it."""
    tiny_sizes = {"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 256}
    config = sizes.config_of("Llama-3.2-1B", **(tiny_sizes if tiny else {}))
    with torch.device(DEVICE):  # a CPU takes a minute to draw its weights
        teacher = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    layer = Layer(config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.head_dim)
    layers = (layer,) * config.num_hidden_layers
    row = tuple(HELD[head % len(HELD)] for head in range(layer.kv_heads))
    student = put_student_into(teacher, layers, allocation := Allocation("by hand", 4, (row,) * len(layers)))
    return layers, (Subject("teacher", student, softmax=True), Subject("student", student, allocation))


def students(tiny):
    """Let teacher and student read and write, until memory or time do not suffice."""
    layers, subjects = subjects_of(tiny)
    for batch in (1,) if tiny else (1, 8, 64):
        lengths = (64,) if tiny else (1024, 2048, 4096, 8192, 32768, 131072) if batch == 1 else (2048, 8192)
        for length in lengths:
            for subject in subjects:
                meter = Meter(subject, layers, 60.0, 0)
                if batch == 1 and length == lengths[0]:  # what is done once, as building kernels is, is not timed
                    meter.prepare(lengths)
                elif batch == 1:
                    run_if_it_fits(lambda: meter.time_texts(length, batch))  # noqa: B023
                pace = run_if_it_fits(lambda: meter.time_texts(length, batch))  # noqa: B023
                names = ("read_rate", "write_rate", "peak_bytes", "state_bytes")
                measured = {} if pace is None else {name: getattr(pace, name) for name in names}
                size = {"subject": subject.name, "length": length, "batch": batch}
                if subject.allocation is not None and pace is not None:
                    measured |= time_by_calls(meter, length, batch)
                yield {"op": "student", **size, **measured, "fits": pace is not None}


def time_by_calls(meter, length, batch):
    """Return the tokens a second of a student that reads a text at once, and every token by a call of Python."""
    model = meter.subject.model
    reader = reader_of(model)
    before = reader.reads_parts, reader.repeats_texts, reader.repeats_tokens
    reader.reads_parts = reader.repeats_texts = reader.repeats_tokens = False
    pace = meter.time_texts(length, batch)
    reader.reads_parts, reader.repeats_texts, reader.repeats_tokens = before
    return {"read_rate_in_turn": pace.read_rate, "write_rate_by_calls": pace.write_rate}


@torch.inference_mode()
def serve(tiny):
    """Let the running batch of `linearizer serve` write, once it has read its prompts."""
    _, subjects = subjects_of(tiny)
    tokenizer = load_tokenizer(find_model("demo"))
    for texts in (2,) if tiny else (1, 8, 32):
        for subject in subjects:
            with subject.prepared() as model:
                drawn = torch.randint(256, (2, texts, 8 if tiny else PROMPT)).tolist()
                engine = Engine(model, 0)
                for prompts in drawn:  # the first time kernels are built, and graphs captured
                    rows = [Row(prompt, lambda delta: None, tokenizer, 4 if tiny else WRITTEN) for prompt in prompts]
                    engine.submit(*rows)
                    begin = finish_and_read_clock(model.device)
                    while engine.unread:
                        engine.step()
                    read, written = finish_and_read_clock(model.device), sum(row.written for row in rows)
                    while engine.rows:
                        engine.step()
                    end = finish_and_read_clock(model.device)
                rate = (sum(row.written for row in rows) - written) / (end - read)
            yield {"op": "serve", "subject": subject.name, "texts": texts, "prompts": read - begin, "write_rate": rate}


PARTS = {"tests": tested, "kernels": kernels, "runs": runs, "steps": steps, "students": students, "serve": serve}


def summary(parts):
    """List which targets were met, and where a kernel was not faster than the same in PyTorch."""
    rows = [row for part in parts.values() for row in part["rows"]]
    ends = [f"{name}: {part.get('ended')}" for name, part in parts.items() if part.get("ended") != "exit 0"]
    return [line for row in rows for line in judged(row)] + ends


def judged(row):
    """List for a row whether its target was met, and which PyTorch was faster."""
    name = " ".join(str(row[key]) for key in ("op", "file", "kind", "batch", "tokens", "loss") if key in row)
    ours, wanted = row.get("ours", {}), row.get("wanted")
    if "failed" in row or "failed" in ours:
        return [f"{name}: failed"]
    if not ours:
        return []
    own = row.get("ours in a graph", ours).get("seconds", ours["seconds"])
    times = {rival: x["seconds"] for rival, x in row["rivals"].items() if "seconds" in x}
    softmax = min((seconds for rival, seconds in times.items() if rival.startswith("sdpa")), default=None)
    said = []
    if wanted and row["op"] == "layerwise step" and times:
        ratio = own / min(times.values())
        said = [f"{ratio:.2f} of the forward pass, wanted {wanted}: {verdict(ratio <= wanted)}"]
    elif wanted and row["op"] == "decode":
        said = [f"{own * 1e6:.1f} µs, wanted {wanted * 1e6:g}: {verdict(own <= wanted)}"]
    elif wanted and softmax:
        ratio = softmax / ours["seconds"]
        said = [f"{ratio:.2f} × SDPA, wanted {wanted}: {verdict(ratio >= wanted)}"]
    slower = {rival: x / ours["seconds"] for rival, x in times.items() if "pytorch" in rival and x < ours["seconds"]}
    return [
        f"{name}: {line}" for line in [*said, *(f"no faster than {r}: {x:.2f} of its time" for r, x in slower.items())]
    ]


def verdict(met):
    return "met" if met else "not met"


if __name__ == "__main__":
    main()
