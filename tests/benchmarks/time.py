"""Where the time of a run goes, step by step, in teacher passes: python -m tests.benchmarks.time [demo] [SHAPE …]

A teacher pass: the teacher reads all the texts that a run measures, 8 × 512 tokens by default, and gives its logits.
What is counted is processor time, on one thread unless --threads says otherwise: other work on the machine hardly
counts. Shapes of real models have random weights, and as few layers and texts as fit here, which the table says; the
forecast beside is what the page shows for the same plan.
"""

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from linearizer import pipeline
from linearizer.hub.models import find_model
from linearizer.plan.plan import Plan
from linearizer.quiet import quiet
from linearizer.run.files import write_whole
from linearizer.teacher import load as teacher_module
from linearizer.teacher.load import load_tokenizer
from linearizer.teacher.logits import logits_of, texts_at_once
from linearizer.workers.forecast import forecast_run, measure_speeds

LLAMA = {"head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 8192}
SHAPES = {  # name -> config, layers of the real model, layers here
    "SmolLM2-135M": (
        LlamaConfig(
            **LLAMA, hidden_size=576, intermediate_size=1536, num_attention_heads=9, num_key_value_heads=3,
            vocab_size=49152,
        ), 30, 6,
    ),
    "Qwen3-0.6B": (
        Qwen3Config(
            head_dim=128, tie_word_embeddings=True, max_position_embeddings=40960, hidden_size=1024,
            intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, vocab_size=151936,
        ), 28, 2,
    ),
    "Llama-3.2-1B": (
        LlamaConfig(
            **LLAMA, hidden_size=2048, intermediate_size=8192, num_attention_heads=32, num_key_value_heads=8,
            vocab_size=128256,
        ), 16, 1,
    ),
}  # fmt: skip
FEW = {"texts": 2, "length": 256}  # of the shapes of real models
PASSES = 3  # of which the fastest counts
STARTED = time.process_time()  # what a process takes until everything is imported
HEADINGS = ("", "processor s", "passes")


def main(arguments=None):
    arguments = parse(arguments)
    torch.set_num_threads(arguments.threads)
    result = {}
    for name in arguments.models or ["demo"]:
        with tempfile.TemporaryDirectory() as folder, quiet():
            result[name] = measured(arguments, name, Path(folder))
        print(table(name, result[name]), flush=True)
    if arguments.out:
        write_whole(arguments.out, json.dumps(result, indent=1))


def parse(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"demo, {', '.join(SHAPES)}; default: demo")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, help="instead of the default, or of a shape's few")
    parser.add_argument("--length", type=int)
    parser.add_argument("--layers", type=int, help="of a shape")
    parser.add_argument("--out", type=Path, help="write what is printed as JSON, too")
    parser.add_argument("--device", default="cpu", help="of a GPU time as it passes is counted")
    return parser.parse_args(arguments)


def clock(device):
    """Tell the processor time of this process; of a GPU the time when it has done all that it was given."""
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def measured(arguments, name, folder):
    """Make a student, and count what every step takes."""
    how = dict(FEW) if name in SHAPES else {}
    how |= {key: value for key in ("texts", "length") if (value := getattr(arguments, key))}
    model, note = ("demo", "") if name == "demo" else shape(name, arguments.layers, folder / "model")
    plan = Plan.of(model=model, budget=arguments.budget, dtype=arguments.dtype, device=arguments.device, **how)
    run = pipeline.begin(folder / "run", plan)
    forecast = forecast_run(
        run.plan, run.inspection, measure_speeds(run.plan.device, partial(clock, arguments.device)), 0
    )
    begun = clock(arguments.device)
    teacher = teacher_module.load_teacher_of(run.plan)
    loading = clock(arguments.device) - begun
    pass_time = pass_seconds(arguments, run.plan, teacher)
    dtype = str(teacher.model.dtype).removeprefix("torch.")
    del teacher
    seconds = step_seconds(arguments, run)
    seconds = {"start": STARTED, "load": loading, **seconds, "profile": seconds["profile"] - loading}
    return {
        "note": f"{note}{run.plan.texts} texts of {run.plan.length} tokens, {dtype}, {arguments.threads} threads",
        "pass": pass_time,
        "steps": seconds,
        "forecast": forecast.seconds,
    }


def shape(name, layers, folder):
    """Save a model of a real one's shape, with random weights; say how many of its layers it has."""
    config, whole, few = SHAPES[name]
    random_model(config, num_hidden_layers=layers or few).save_pretrained(folder)
    load_tokenizer(find_model("demo")).save_pretrained(folder)
    return str(folder), f"random weights, {layers or few} of {whole} layers, "


def random_model(config, **changes):
    """Make a model of a config, or one with changes, with random weights."""
    torch.manual_seed(0)
    changed = type(config).from_dict({**config.to_dict(), **changes, "layer_types": None})
    return AutoModelForCausalLM.from_config(changed, dtype=torch.bfloat16)


def pass_seconds(arguments, plan, teacher):
    """Processor time of a teacher pass."""
    texts = teacher_module.texts_of(plan, teacher, plan.kept_texts, None)
    times = []
    for _ in range(PASSES):
        begun = clock(arguments.device)
        for ids in texts.split(texts_at_once(teacher.model, texts.shape[1])):
            logits_of(teacher.model, ids)
        times.append(clock(arguments.device) - begun)
    return min(times)


def step_seconds(arguments, run):
    """Processor time of every step of a run: what passes until its last progress belongs to it."""
    seconds, last = {}, clock(arguments.device)
    for progress in pipeline.linearize(run):
        now = clock(arguments.device)
        seconds[progress.step] = seconds.get(progress.step, 0.0) + now - last
        last = now
    return {**seconds, "save": clock(arguments.device) - last}


def table(name, result):
    """Lay one run out."""
    total = sum(result["steps"].values())
    rows = [*result["steps"].items(), ("all", total), ("forecast", result["forecast"])]
    lines = [f"{name}: {result['note']}; a pass takes {result['pass']:.2f} s", "{:10}{:>12}{:>10}".format(*HEADINGS)]
    lines += [f"{step:10}{seconds:12.1f}{seconds / result['pass']:10.1f}" for step, seconds in rows]
    return "\n".join([*lines, f"forecast ÷ measured: {result['forecast'] / total:.2f}", ""])


if __name__ == "__main__":
    main()
