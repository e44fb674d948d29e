"""What real sizes take, without their weights: python -m tests.benchmarks.sizes [SHAPE …] [--layers N] [--limit GB]

Makes a model of a real config with random weights, shard by shard, and prints time, peak of memory and of disk of every
step of a run beside the forecast for the same plan. Of the large shapes one and two layers are run, with few entries in
their vocabulary: what a layer takes more, times the layers, is held against the forecast for the whole. `--limit` holds
the process to so much memory beyond what it takes to start, so that larger weights are read block by block. `--record`
writes the table of each shape into results/sizes-cpu.md.

Random attention is flat, so nothing is learnt here of prices, only of time, memory and disk.
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
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from linearizer import pipeline
from linearizer.amounts import columns, duration, size
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.quiet import quiet
from linearizer.run.weight_digests import DIGESTS
from linearizer.teacher import streaming
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.linked_weights import write_index
from linearizer.teacher.load import load_config, load_tokenizer
from linearizer.workers.forecast import forecast_run, measure_speeds
from linearizer.workers.helpers import HelperProcesses

FEW_WORDS = 4096  # entries of the vocabulary, where layers alone are run: those of the demo model's tokenizer
LLAMA = {"max_position_embeddings": 8192}
SHAPES = {  # name -> config, whether it is run whole
    "SmolLM2-135M": (
        LlamaConfig(
            **LLAMA, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
            num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
        ), True,
    ),
    "Qwen3-0.6B": (
        Qwen3Config(
            max_position_embeddings=40960, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
            num_attention_heads=16, num_key_value_heads=8, head_dim=128, vocab_size=151936, tie_word_embeddings=True,
        ), True,
    ),
    "deep": (  # of no real model: nearly all of its weights are in its blocks, as in a large one
        LlamaConfig(
            **LLAMA, hidden_size=1024, intermediate_size=3072, num_hidden_layers=32, num_attention_heads=16,
            num_key_value_heads=2, vocab_size=FEW_WORDS, tie_word_embeddings=True,
        ), True,
    ),
    "Llama-3.1-8B": (
        LlamaConfig(
            **LLAMA, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
            num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        ), False,
    ),
    "Llama-3.1-70B": (
        LlamaConfig(
            **LLAMA, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
            num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
        ), False,
    ),
}  # fmt: skip
RESULTS = Path(__file__).parent / "results" / "sizes-cpu.md"
PLAN = {"texts": 2, "samples": 256, "sinks": 2, "budget": 64}
OPTIONS = ("strategy", "steps", "dtype", "length")
HEADINGS = ("", "time", "forecast", "peak memory", "forecast", "peak disk", "forecast")
PEAK, OWN = "VmHWM", "RssAnon"  # of a process: the most that it had in memory, and its memory without files


def main(arguments=None):
    arguments = parse(arguments)
    if arguments.run:
        print(json.dumps(run_here(arguments)))
        return
    for name in arguments.shapes or ["SmolLM2-135M"]:
        config, whole = SHAPES[name]
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            counts = [arguments.layers or config.num_hidden_layers] if whole else [1, 2]
            measured = [measure(arguments, name, layers, Path(folder)) for layers in counts]
        said = table(name, config, counts, measured)
        print(said, flush=True)
        if arguments.record:
            RESULTS.write_text(recorded(RESULTS.read_text(), command_of(arguments, name), said))


def command_of(arguments, name):
    """Write the command that measures one shape again."""
    options = {option: getattr(arguments, option) for option in (*OPTIONS, "layers", "limit")}
    usual = parse([])
    words = [f"--{option} {value}" for option, value in options.items() if value != getattr(usual, option)]
    return " ".join(["python -m tests.benchmarks.sizes", name, *words])


def recorded(text, command, said):
    """Put what a command said in the place of what it said before, or at the end."""
    block = f"`{command}`:\n\n```\n{said.strip()}\n```\n"
    blocks = re.compile(rf"^`{re.escape(command)}`:\n\n```\n.*?^```\n", re.DOTALL | re.MULTILINE)
    return blocks.sub(lambda _: block, text) if blocks.search(text) else f"{text.rstrip()}\n\n{block}"


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help=f"of {', '.join(SHAPES)}; default: SmolLM2-135M")
    parser.add_argument("--layers", type=int, help="run so many layers of a shape that is run whole")
    parser.add_argument("--strategy", default="gain-features")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--length", type=int, default=128, help="tokens of a text")
    parser.add_argument("--limit", type=float, help="GB of memory beyond what a process takes to start")
    parser.add_argument("--record", action="store_true", help=f"into {RESULTS.name}")
    parser.add_argument("--folder", type=Path, help="where the model and its run lie meanwhile")
    parser.add_argument("--run", nargs=2, type=Path, metavar=("MODEL", "RUN"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(arguments, name, layers, folder):
    """Make a model and its run, the run in a process of its own."""
    config, whole = SHAPES[name]
    config = type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "dtype": "bfloat16"})
    if not whole:
        config.vocab_size = FEW_WORDS
    model = folder / f"{name}-{layers}"
    begin = time.perf_counter()
    make_model(model, config)
    made = time.perf_counter() - begin
    options = [f"--{option}={getattr(arguments, option)}" for option in OPTIONS]
    options += [f"--limit={arguments.limit}"] if arguments.limit else []
    command = [sys.executable, "-m", "tests.benchmarks.sizes", *options, "--run", model, folder / f"run-{layers}"]
    answer = subprocess.run(command, capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(answer.stderr)
    return {"made": made, **json.loads(answer.stdout.splitlines()[-1])}


def make_model(folder, config):
    """Write a model with random weights, a file for each layer: no more than one is in memory."""
    folder.mkdir(parents=True)
    with torch.device("meta"):
        shapes = dict(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).named_parameters())
    generator, files = torch.Generator().manual_seed(0), {}
    for name in shapes:
        parts = name.split(".")
        number = next((int(part) for part in parts if part.isdecimal()), -1)
        files.setdefault(f"part-{number + 1:05}.safetensors", []).append(name)
    for file, names in files.items():
        save_file({name: drawn(shapes[name].shape, generator) for name in names}, folder / file, {"format": "pt"})
    write_index(folder, [folder / file for file in files], {})
    config.architectures = ["LlamaForCausalLM" if isinstance(config, LlamaConfig) else "Qwen3ForCausalLM"]
    config.save_pretrained(folder)
    load_tokenizer(find_model("demo")).save_pretrained(folder)
    fill_vocabulary(folder / "tokenizer.json", config.vocab_size)


def fill_vocabulary(path, count):
    """Give a tokenizer as many entries as its model knows; no text has the new ones."""
    content = json.loads(path.read_text())
    entries = content["model"]["vocab"]
    entries |= {f"<unused token {number}>": number for number in range(len(entries), count)}
    path.write_text(json.dumps(content, indent=2))


def drawn(shape, generator):
    """Draw a matrix whose products are about as large as what they are of; a norm is ones."""
    if len(shape) == 1:
        return torch.ones(shape, dtype=torch.bfloat16)
    return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16)


def run_here(arguments):
    """Run all steps; give of each its seconds, and of all the peak of memory, the disk, and a hash of the student."""
    model, folder = arguments.run
    trained = {"recipe": "features"} if arguments.strategy == "gain-features" else {}
    asked = {**PLAN, "strategy": arguments.strategy, "steps": arguments.steps}
    drawn_from = PLAN["texts"] * (arguments.length - PLAN["sinks"])
    asked |= {"length": arguments.length, "samples": min(PLAN["samples"], 2 * drawn_from)}
    plan = Plan.of(**{**trained, **asked}, model=str(model), dtype=arguments.dtype, device="cpu")
    source = find_model(str(model))
    inspection, speeds = inspect_model(source, load_config(source)), measure_speeds("cpu")
    if arguments.limit:
        hold_to(int(arguments.limit * 1e9))
    forecast = forecast_run(plan, inspection, speeds, 0)
    steps = []
    with quiet(), watched_disk(folder) as disk:
        begin = time.perf_counter()
        run = pipeline.begin(folder, plan)
        for progress in pipeline.linearize(run, helpers=HelperProcesses(run)):
            if not steps or steps[-1][0] != progress.step:
                steps.append([progress.step, begin, 0.0])
            steps[-1][1:] = [steps[-1][1], time.perf_counter()]
            begin = time.perf_counter()
    spent = [(name, end - start) for name, start, end in steps] + [("checkpoint", time.perf_counter() - begin)]
    hashes = json.loads((run.folder / DIGESTS).read_text())
    return {
        "steps": spent,
        "seconds": sum(seconds for _, seconds in spent),
        "memory": peak_bytes(),
        "disk": max(disk),
        "weights": inspection.weight_bytes,
        "streamed": streaming.streams(inspection, plan.dtype, plan.device),
        "hashes": hashes,
        "forecast": [forecast.seconds, forecast.memory_bytes, forecast.disk_bytes],
        "whole": whole_forecast(plan, inspection, speeds),
    }


@contextmanager
def watched_disk(folder):
    """List the bytes of a folder's files, but those that others have, too, while this lasts."""
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
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # it was renamed meanwhile
                stat = os.stat(os.path.join(place, name))
                count += stat.st_size if stat.st_nlink == 1 else 0
    return count


def hold_to(count):
    """End this process if it takes so many bytes more than now; say as much where free memory is asked for.

    What it takes is looked at 500 times a second. Pages of files do not count, which the system takes back: a limit of
    the system's own counts files that are mapped.
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


def peak_bytes():
    return status_bytes(PEAK)


def whole_forecast(plan, inspection, speeds):
    """Forecast the plan for all layers of the shape that a model with fewer of them was cut from.

    Give its parameters, and the forecasts with the few words where memory holds it, and with all words as it is here.
    """
    name = next(name for name in SHAPES if Path(inspection.name).name.startswith(name))
    config = SHAPES[name][0]
    layer = inspection.layers[0]
    inner = 3 * config.hidden_size * config.intermediate_size
    attention = config.hidden_size * layer.key_dim * (2 * layer.query_heads + 2 * layer.kv_heads)
    free, found = streaming.free_bytes, []
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


def student_of(result):
    """Give the beginning of the hash of what the student adds to its teacher."""
    return next((digest[:16] for name, digest in result["hashes"].items() if not name.startswith("teacher")), "none")


def table(name, config, counts, measured):
    """Lay a shape's steps out; of a shape whose layers alone were run also what the whole would take."""
    lines = []
    for layers, result in zip(counts, measured, strict=True):
        streamed = ", read block by block" if result["streamed"] else ""
        lines.append(f"{name}, {layers} of {config.num_hidden_layers} layers, {size(result['weights'])}{streamed}")
        rows = [HEADINGS, ("model made", duration(result["made"]), "", "", "", "", "")]
        rows += [(step, f"{seconds:.1f} s", "", "", "", "", "") for step, seconds in result["steps"]]
        seconds, memory, disk = result["forecast"]
        amounts = (size(result["memory"]), size(memory), size(result["disk"]), size(disk))
        rows.append(("all", f"{result['seconds']:.1f} s", f"{seconds:.1f} s", *amounts))
        lines += [columns(rows), f"weights of the student: {student_of(result)}", ""]
    if len(measured) > 1:
        more_layers = config.num_hidden_layers - counts[-1]
        seconds, disk = (
            measured[-1][part] + more_layers * (measured[-1][part] - measured[0][part]) for part in ("seconds", "disk")
        )
        (_, few, _, _), (parameters, here, memory, room) = measured[-1]["whole"]
        lines.append(
            f"all {config.num_hidden_layers} layers ({parameters / 1e9:.1f} B parameters), by arithmetic from what a "
            f"layer took: {duration(seconds)}, and {duration(few)} by the forecast with as few words, where memory "
            f"holds them; {size(disk)} of disk, and {size(room)} by the forecast\n"
            f"with all its words on this machine by the forecast: {duration(here)}, {size(memory)} of memory"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
