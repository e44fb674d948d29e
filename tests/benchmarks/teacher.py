"""Continues the training of a small teacher on longer texts, so that what it does at 4,096 tokens can be judged.

  python -m tests.benchmarks.teacher --text file:TRAIN.jsonl --held file:HELD.jsonl --out FOLDER --hours 2
  python -m tests.benchmarks.teacher --held file:HELD.jsonl --out FOLDER --report      only judge what was reached

Texts grow to --length by doubling; in two of five, passages come again at all distances. The base of the rotary
positions is raised at the start. A second call with the same folder goes on to the same bits; FOLDER/model is a
teacher that any command reads. Nothing is adopted: the report says whether the loss falls to the end, and whether a
passage is copied over the longest gap.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from linearizer.evaluate.language import doubling_edges
from linearizer.model import teacher as teacher_module
from linearizer.model.devices import choose_device
from linearizer.model.logits import losses_of
from linearizer.model.text import pack_texts, read_documents, repeated_passages
from linearizer.run.plan import Plan
from linearizer.train.state_file import TrainingState, read_state, write_state

TOKENS = 4096  # of one step, in as many texts as hold them
SHORTEST = 1024
SHARES = 0.25  # of the steps at every length but the last
REPEATING = 0.4  # of the texts
PASSAGE = 64
RATE, WARMUP, COOLING = 4e-4, 40, 0.2  # the learning rate falls to nothing over the last fifth
SAVED_SECONDS = 240
REPORTED = 8  # texts


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", help="the source to train on")
    parser.add_argument("--held", required=True, help="the source to judge by")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--base", type=float, default=100_000.0, help="of the rotary positions")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=1.0, help="when this call ends at the latest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    state = read_state(asked.out)
    model, tokenizer = begun(asked, state)
    if not asked.report:
        train(asked, model, tokenizer, state)
        save_model(asked.out / "model", model, tokenizer)
    print(json.dumps(report(model, tokenizer, asked.held, asked.length), indent=1))


def begun(asked, state):
    """Load the teacher with the raised base, and the weights that were reached."""
    teacher = teacher_module.load(Plan.of("swa", model=asked.model, budget=64, dtype="float32"))
    model = teacher.model
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": asked.base}
    model.config.max_position_embeddings = asked.length
    raised = AutoModelForCausalLM.from_config(
        model.config, dtype=torch.float32
    )  # its frequencies are those of the base
    raised.load_state_dict(model.state_dict())
    if state is not None:
        weights = {name.partition(".")[2]: x for name, x in state.tensors.items() if name.startswith("model.")}
        raised.load_state_dict(weights, strict=False)  # tied weights stand once
    return raised.to(choose_device("auto")), teacher.tokenizer


def train(asked, model, tokenizer, state):
    """Go on until the steps or the hours end."""
    parameters = dict(model.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    step, began = 0, time.monotonic()
    if state is not None:
        step = int(state.facts["step"])
        for name, parameter in parameters.items():
            moments = {key: state.tensors[f"{key}.{name}"].to(parameter.device) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}

    def save():
        tensors = {f"model.{name}": x.detach() for name, x in parameters.items()}
        for name, parameter in parameters.items():
            tensors |= {f"{key}.{name}": optimizer.state[parameter][key] for key in ("exp_avg", "exp_avg_sq")}
        write_state(asked.out, TrainingState(tensors, {"step": step, "seed": asked.seed}))

    tokens = torch.cat(list(pack_texts(read_documents(asked.text), tokenizer, SHORTEST)))
    saved, faster = time.monotonic(), autocast(model.device)
    while step < asked.steps and time.monotonic() - began < asked.hours * 3600:
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step, asked.steps)
        ids = batch_of(tokens, length_at(step, asked.steps, asked.length), asked.seed, step).to(model.device)
        with faster:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step} of {asked.steps}: {ids.shape[1]} tokens, loss {loss.item():.3f}", flush=True)
        if time.monotonic() - saved > SAVED_SECONDS:
            save()
            saved = time.monotonic()
    save()


def rate_at(step, steps):
    """Rise, stay, and fall to nothing."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / max(1.0, COOLING * steps))


def length_at(step, steps, most):
    """Give the length of a step's texts: doubling up to the most, at which all steps are that are left."""
    lengths = [SHORTEST << place for place in range(30) if SHORTEST << place < most] + [most]
    return lengths[min(int(step / (SHARES * steps)), len(lengths) - 1)]


def batch_of(tokens, length, seed, step):
    """Draw the texts of a step, the same for the same seed: stretches of the text, passages coming again in some."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    begins = torch.randint(len(tokens) - length, (max(1, TOKENS // length),), generator=generator)
    texts = torch.stack([tokens[begin : begin + length] for begin in begins])
    for text in texts:
        if torch.rand((), generator=generator) < REPEATING:
            repeat(text, generator)
    return texts


def repeat(text, generator):
    """Let passages of 16 to 256 tokens come again in a text, in place, over gaps that are short as often as long."""
    for _ in range(max(2, len(text) // 512)):
        size = min(int(16 * 16 ** torch.rand((), generator=generator)), len(text) // 4)
        most = len(text) - size
        gap = int(size * (most / size) ** torch.rand((), generator=generator))
        first = int(torch.randint(max(1, most - gap), (), generator=generator))
        text[first + gap : first + gap + size] = text[first : first + size].clone()[: len(text) - first - gap]


def autocast(device):
    return nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


@torch.inference_mode()
def report(model, tokenizer, held, length):
    """Give the loss by position, and on a passage the first time and after gaps up to the longest."""
    texts = list(itertools.islice(pack_texts(read_documents(held), tokenizer, length), REPORTED))
    gaps = [gap for gap in (128, 512, 1024, 2048, 3500) if gap + 2 * PASSAGE <= length]

    def losses(ids):
        return torch.cat(
            [losses_of(model(input_ids=t[None].to(model.device)).logits[:, :-1], t[None, 1:]) for t in ids]
        )

    whole = losses(texts)
    edges = doubling_edges(length - 1)
    first = {gap: whole[:, length - 2 * PASSAGE - gap : length - PASSAGE - gap - 1].mean().item() for gap in gaps}
    again = {
        gap: losses(repeated_passages(torch.stack(texts), PASSAGE, gap))[:, -PASSAGE + 1 :].mean().item()
        for gap in gaps
    }
    return {
        "texts": len(texts),
        "loss": whole.mean().item(),
        "loss from": {edge: whole[:, edge:end].mean().item() for edge, end in itertools.pairwise((*edges, length - 1))},
        "passage, first time": first,
        "passage, second time": again,
        "copied": {gap: math.exp(again[gap] - first[gap]) for gap in gaps},
    }


def save_model(folder, model, tokenizer):
    """Write a teacher that others load, in bf16, whole or not at all; no file has more than 8 MB."""
    unfinished = folder.with_name("model.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    kept = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16)
    kept.load_state_dict({name: x.to("cpu", torch.bfloat16) for name, x in model.state_dict().items()})
    kept.save_pretrained(unfinished, max_shard_size="8MB")
    tokenizer.save_pretrained(unfinished)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(unfinished, folder)


if __name__ == "__main__":
    main()
