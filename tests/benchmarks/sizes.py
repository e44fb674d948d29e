"""What runs of real sizes take, without their weights: python -m tests.benchmarks.sizes [SHAPE …] [--layers N]

Makes a model of a real config with random weights, and prints time, peak memory and peak disk of every step of a run,
beside the forecast for the same plan. Of the large shapes one and two layers are run, with few entries in their
vocabulary; the whole is extrapolated from what the second layer adds, and compared with the forecast for the whole.
`--limit` ends the process if it takes more memory than that, so that larger weights are read block by block.
`--record` writes the table of each shape into results/sizes-cpu.md.

Random attention is flat, so this measures time, memory and disk, not prices.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from linearizer import pipeline
from linearizer.amounts import columns, duration, size
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.progress import quiet
from linearizer.run.weight_digests import DIGESTS
from linearizer.teacher import streaming
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.load import load_config, load_tokenizer
from linearizer.workers.forecast import forecast_run, measure_speeds
from linearizer.workers.worker import linearize_together

FEW_WORDS = 4096  # entries of the vocabulary where only some layers are run: those of the demo model's tokenizer


def shape_of(kind, hidden, inner, layers, heads, kv_heads, words, tied=True, positions=8192, **others):
    """Return a config."""
    return kind(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, tie_word_embeddings=tied, max_position_embeddings=positions,
        **others,
    )  # fmt: skip


SHAPES = {  # name -> config (hidden, inner, layers, heads, KV heads, words), whether it is run whole
    "SmolLM2-135M": (shape_of(LlamaConfig, 576, 1536, 30, 9, 3, 49152), True),
    "Qwen3-0.6B": (shape_of(Qwen3Config, 1024, 3072, 28, 16, 8, 151936, positions=40960, head_dim=128), True),
    # not a real model: nearly all of its weights are in its blocks, as in a large one
    "deep": (shape_of(LlamaConfig, 1024, 3072, 32, 16, 2, FEW_WORDS), True),
    "Llama-3.2-1B": (shape_of(LlamaConfig, 2048, 8192, 16, 32, 8, 128256), True),
    "Llama-3.1-8B": (shape_of(LlamaConfig, 4096, 14336, 32, 32, 8, 128256, tied=False), False),
    "Llama-3.1-70B": (shape_of(LlamaConfig, 8192, 28672, 80, 64, 8, 128256, tied=False), False),
}
RESULTS = Path(__file__).parent / "results" / "sizes-cpu.md"
PLAN = {"sinks": 2, "budget": 64}
OPTIONS = ("strategy", "steps", "dtype", "device", "texts", "length")
HEADINGS = ("", "time", "forecast", "peak memory", "forecast", "peak disk", "forecast")
PEAK, OWN = "VmHWM", "RssAnon"  # of a process: its largest memory, and its memory without mapped files


def main(arguments=None):
    arguments = parse(arguments)
    if arguments.run:
        print(json.dumps(run_here(arguments)))
        return
    for name in arguments.shapes or ["SmolLM2-135M"]:
        config, whole = SHAPES[name]
        with tempfile.TemporaryDirectory() as folder:
            counts = [arguments.layers or config.num_hidden_layers] if whole else [1, 2]
            measured = [measure(arguments, name, Path(folder), layers) for layers in counts]
        text = table(name, config, counts, measured)
        print(text, flush=True)
        if arguments.record:
            RESULTS.write_text(recorded(RESULTS.read_text(), command_of(arguments, name), text))


def command_of(arguments, name):
    """Return the command that measures one shape again."""
    options = {option: getattr(arguments, option) for option in (*OPTIONS, "layers", "limit")}
    usual = parse([])
    words = [f"--{option} {value}" for option, value in options.items() if value != getattr(usual, option)]
    return " ".join(["python -m tests.benchmarks.sizes", name, *words])


def recorded(text, command, table):
    """Put a table in the place of the one that its command wrote before, or at the end."""
    block = f"`{command}`:\n\n```\n{table.strip()}\n```\n"
    blocks = re.compile(rf"^`{re.escape(command)}`:\n\n```\n.*?^```\n", re.DOTALL | re.MULTILINE)
    return blocks.sub(lambda _: block, text) if blocks.search(text) else f"{text.rstrip()}\n\n{block}"


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: SmolLM2-135M")
    parser.add_argument("--layers", type=int, help="layers to run of a shape that is run whole")
    parser.add_argument("--strategy", default="common-lambda")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--limit", type=float, help="GB of memory in addition to what a process takes to start")
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--run", nargs=2, type=Path, metavar=("MODEL", "RUN"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def config_of(name, **changes):
    """Return the config of a shape, or one with changes."""
    config = SHAPES[name][0]
    return type(config)(**{**config.to_dict(), "layer_types": None, **changes})


def measure(arguments, name, folder, layers=None):
    """Make a model and its run, the run in a process of its own."""
    begin, model = time.perf_counter(), "demo"
    if name != "demo":
        config, whole = SHAPES[name]
        words = config.vocab_size if whole else FEW_WORDS
        model = folder / f"{name}-{layers}"
        make_model(model, config_of(name, num_hidden_layers=layers or config.num_hidden_layers, vocab_size=words))
    made = time.perf_counter() - begin
    options = [f"--{option}={getattr(arguments, option)}" for option in OPTIONS]
    options += [f"--limit={arguments.limit}"] if arguments.limit else []
    command = [sys.executable, "-m", "tests.benchmarks.sizes", *options, "--run", model, folder / f"run-{layers}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(answer.stderr)
    return {"made": made, **json.loads(answer.stdout.splitlines()[-1])}


def make_model(folder, config, dtype=torch.bfloat16):
    """Write a model with random weights, and a tokenizer that has as many entries; no text has the new ones."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder, max_shard_size="500MB")
    load_tokenizer(find_model("demo")).save_pretrained(folder)
    content = json.loads((path := folder / "tokenizer.json").read_text())
    entries = content["model"]["vocab"]
    entries |= {f"<unused token {number}>": number for number in range(len(entries), config.vocab_size)}
    path.write_text(json.dumps(content))


def run_here(arguments):
    """Run all steps; return the seconds of each, the peak of memory and disk, and a hash of the student."""
    model, folder = arguments.run
    plan = plan_of(arguments, str(model))
    source = find_model(str(model))
    inspection, speeds = inspect_model(source, load_config(source)), measure_speeds(plan.device)
    if arguments.limit:
        limit_memory(int(arguments.limit * 1e9))
    forecast = forecast_run(plan, inspection, speeds, 0)
    spent = {}
    with quiet(), watched_disk(folder) as disk:
        last = time.perf_counter()
        run = pipeline.begin(folder, plan)
        for progress in linearize_together(run):
            now = time.perf_counter()
            spent[progress.step] = spent.get(progress.step, 0.0) + now - last
            last = now
        spent["checkpoint"] = time.perf_counter() - last
    return {
        "steps": spent,
        "seconds": sum(spent.values()),
        "memory": status_bytes(PEAK),
        "disk": max(disk),
        "weights": inspection.weight_bytes,
        "streamed": streaming.streams(inspection, plan.dtype, plan.device),
        "hashes": json.loads((run.folder / DIGESTS).read_text()),
        "forecast": [forecast.seconds, forecast.memory_bytes, forecast.disk_bytes],
        "whole": whole_forecast(plan, inspection, speeds),
    }


def plan_of(arguments, model):
    recipe = {"recipe": "features"} if arguments.strategy == "common-lambda" else {}
    options = {option: getattr(arguments, option) for option in OPTIONS}
    return Plan.of(**{**recipe, **PLAN, **options}, model=model)


@contextmanager
def watched_disk(folder):
    """List how many bytes a folder holds while this lasts, without files that are linked from elsewhere."""
    found, over = [0], threading.Event()

    def watch():
        while not over.wait(0.02):
            found.append(bytes_of(folder))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    yield found
    over.set()
    watcher.join()
    found.append(bytes_of(folder))


def bytes_of(folder):
    count = 0
    for place, _, names in os.walk(folder):  # which leaves out a folder that was renamed meanwhile
        for name in names:
            with suppress(FileNotFoundError):
                stat = os.stat(os.path.join(place, name))
                count += stat.st_size if stat.st_nlink == 1 else 0
    return count


def limit_memory(count):
    """End this process once it takes this many bytes more than now; free memory counts up to there.

    Mapped files do not count, which the system can take back: the system's own limits count them.
    """
    most = status_bytes(OWN) + count

    def watch():
        while (taken := status_bytes(OWN)) <= most:
            time.sleep(0.002)
        print(f"{taken - most} bytes more than the limit were taken", file=sys.stderr, flush=True)
        os._exit(3)

    threading.Thread(target=watch, daemon=True).start()
    streaming.free_bytes = lambda device: max(0, most - status_bytes(OWN))


def status_bytes(name):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) * 1024


def whole_forecast(plan, inspection, speeds):
    """Forecast the plan for all layers of a shape of which only some are run; None for other models.

    Return its parameters, and two forecasts: with the few words where memory holds it, and with all words here.
    """
    name = Path(inspection.name).name.rpartition("-")[0]
    if name not in SHAPES or SHAPES[name][1]:
        return None
    config, layer, free, found = SHAPES[name][0], inspection.layers[0], streaming.free_bytes, []
    inner = 3 * config.hidden_size * config.intermediate_size
    attention = config.hidden_size * layer.key_dim * (2 * layer.query_heads + 2 * layer.kv_heads)
    for words, place in ((FEW_WORDS, lambda device: 2**60), (config.vocab_size, free)):
        embedded = config.hidden_size * words * (1 if config.tie_word_embeddings else 2)
        parameters = config.num_hidden_layers * (inner + attention) + embedded
        layers = (layer,) * config.num_hidden_layers
        whole = replace(inspection, parameters=parameters, weight_bytes=2 * parameters, layers=layers)
        streaming.free_bytes = place
        forecast = forecast_run(plan, whole, speeds, 0)
        found.append([parameters, forecast.seconds, forecast.memory_bytes, forecast.disk_bytes])
    streaming.free_bytes = free
    return found


def table(name, config, counts, measured):
    """Lay out the steps of a shape; where only some layers were run, also what the whole would take."""
    lines = []
    for layers, result in zip(counts, measured, strict=True):
        streamed = ", read block by block" if result["streamed"] else ""
        lines.append(f"{name}, {layers} of {config.num_hidden_layers} layers, {size(result['weights'])}{streamed}")
        rows = [HEADINGS, ("model made", duration(result["made"]), *[""] * 5)]
        rows += [(step, f"{seconds:.1f} s", *[""] * 5) for step, seconds in result["steps"].items()]
        seconds, memory, disk = result["forecast"]
        amounts = (size(result["memory"]), size(memory), size(result["disk"]), size(disk))
        rows.append(("all", f"{result['seconds']:.1f} s", f"{seconds:.1f} s", *amounts))
        student = next(
            (digest[:16] for file, digest in result["hashes"].items() if not file.startswith("teacher")), "none"
        )
        lines += [columns(rows), f"weights of the student: {student}", ""]
    if len(measured) > 1:
        more_layers = config.num_hidden_layers - counts[-1]
        seconds, disk = (
            measured[-1][part] + more_layers * (measured[-1][part] - measured[0][part]) for part in ("seconds", "disk")
        )
        (_, few, _, _), (parameters, here, memory, room) = measured[-1]["whole"]
        lines.append(
            f"all {config.num_hidden_layers} layers ({parameters / 1e9:.1f} B parameters), extrapolated from the "
            f"second layer: {duration(seconds)}, and {duration(few)} by the forecast with as few words, where memory "
            f"holds them; {size(disk)} of disk, and {size(room)} by the forecast\n"
            f"with all its words on this machine by the forecast: {duration(here)}, {size(memory)} of memory"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
