"""Continues the training of a small teacher so that it reads longer texts, and what it does there can be judged.

  python -m tests.benchmarks.teacher --text file:TRAIN.jsonl --held file:HELD.jsonl --out FOLDER --hours 2
  python -m tests.benchmarks.teacher --held file:HELD.jsonl --out FOLDER --report      only judge what was reached

Rotations that are slow beside --trained tokens turn slower, fast ones as ever (YaRN, 2309.00071), so that no distance
has an angle that the model has not seen; scores are a little larger, since there are more tokens. Most steps take texts
of --trained tokens, the second part of which stands far behind the first (PoSE, 2309.10400) and repeats passages of it;
the last steps take texts that double up to --length. A second call with the same folder goes on to the same bits;
FOLDER/model is a teacher that any command reads. Nothing is adopted: the report says whether the loss of the same
tokens falls with what stands before them, and whether a passage is copied over the longest gap.

Before a step of training (results/teacher-4096-0.json) the demo copies over every gap, a little over the longest, and
its loss falls as far as 2,048 tokens, but not to 4,096. After 400
steps (results/teacher-4096-400.json) it is lower at every place, but falls no more with longer text, and passages are
copied better over 128 and 512 tokens, worse over longer gaps.
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
from linearizer.evaluate.recall import RepeatReader
from linearizer.evaluate.subjects import Subject, read_losses
from linearizer.model import teacher as teacher_module
from linearizer.model.devices import choose_device
from linearizer.model.logits import losses_of
from linearizer.model.text import pack_texts, read_documents
from linearizer.run.plan import Plan
from linearizer.train.state_file import TrainingState, read_state, write_state

RESULTS = Path(__file__).parent / "results"
TOKENS = 4096  # of one step, in as many texts as hold them
FAR = 0.8  # of the steps take texts of the length that the model was trained on, in two parts
APART = 0.7  # of these texts: their parts stand far from each other
REPEATING = 0.4  # of the other texts
PASSAGE = 64
RATE, WARMUP, COOLING = 2e-4, 20, 0.2  # the learning rate falls to nothing over the last fifth
SAVED_SECONDS = 240
REPORTED = 4  # texts
SAME = 256  # tokens whose loss is compared after more and more text


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", help="the source to train on")
    parser.add_argument("--held", required=True, help="the source to judge by")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--trained", type=int, default=512, help="tokens of the texts that the model was trained on")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--hours", type=float, default=1.0, help="when this call ends at the latest")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", action="store_true")
    parser.add_argument("--record", action="store_true", help="keep what is reported among the results")
    asked = parser.parse_args(arguments)
    asked.out.mkdir(parents=True, exist_ok=True)
    state = read_state(asked.out)
    model, tokenizer = begun(asked, state)
    if not asked.report:
        train(asked, model, tokenizer, state)
        save_model(asked.out / "model", model, tokenizer)
    steps = 0 if (reached := read_state(asked.out)) is None else reached.facts["step"]
    text = json.dumps({"steps": steps, **report(model, tokenizer, asked.held, asked.length)}, indent=1)
    if asked.record:
        (RESULTS / f"teacher-{asked.length}-{steps}.json").write_text(text + "\n")
    print(text)


def begun(asked, state):
    """Load the teacher with positions for longer texts, and the weights that were reached."""
    teacher = teacher_module.load_teacher_of(Plan.of("swa", model=asked.model, budget=64, dtype="float32"))
    model = teacher.model
    model.config.rope_parameters = {
        "rope_type": "yarn",
        "rope_theta": model.config.rope_parameters["rope_theta"],
        "factor": asked.length / asked.trained,
        "original_max_position_embeddings": asked.trained,
    }
    model.config.max_position_embeddings = asked.length
    longer = AutoModelForCausalLM.from_config(
        model.config, dtype=torch.float32
    )  # its rotations are those of the config
    longer.load_state_dict(model.state_dict())
    if state is not None:
        weights = {name.partition(".")[2]: x for name, x in state.tensors.items() if name.startswith("model.")}
        longer.load_state_dict(weights, strict=False)  # tied weights stand once
    return longer.to(choose_device("auto")), teacher.tokenizer


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

    tokens = torch.cat(list(pack_texts(read_documents(asked.text), tokenizer, asked.trained)))
    saved, faster = time.monotonic(), autocast(model.device)
    model.train()
    while step < asked.steps and time.monotonic() - began < asked.hours * 3600:
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step, asked.steps)
        drawn = batch_of(tokens, length_at(step, asked.steps, asked.trained, asked.length), asked, step)
        ids, places = (x.to(model.device) for x in drawn)
        with faster:  # a mask, or else places that do not count on are taken for several texts
            given = {"input_ids": ids, "position_ids": places, "attention_mask": torch.ones_like(ids)}
            logits = model(**given, use_cache=False).logits[:, :-1]
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


def length_at(step, steps, least, most):
    """Give the length of a step's texts: the least, then doubling up to the most, each for as many steps."""
    lengths = [least << place for place in range(1, 30) if least << place < most] + [most]
    late = step / steps - FAR
    return least if late < 0 else lengths[min(int(late / (1 - FAR) * len(lengths)), len(lengths) - 1)]


def batch_of(tokens, length, asked, step):
    """Draw the texts of a step and their places, the same for the same seed; passages come again in some."""
    generator = torch.Generator().manual_seed(asked.seed * 1_000_003 + step)
    begins = torch.randint(len(tokens) - length, (max(1, TOKENS // length),), generator=generator)
    texts = torch.stack([tokens[begin : begin + length] for begin in begins])
    places = torch.arange(length).repeat(len(texts), 1)
    for text, place in zip(texts, places, strict=True):
        if length == asked.trained and torch.rand((), generator=generator) < APART:
            take_apart(text, place, asked.length, generator)
        elif torch.rand((), generator=generator) < REPEATING:
            repeat(text, generator)
    return texts, places


def take_apart(text, place, most, generator):
    """Let the second part of a text stand far behind the first, over a gap that is short as often as long, in place.

    Passages of the first part come again in the second.
    """
    tokens = len(text)
    cut = int(torch.randint(tokens // 4, 3 * tokens // 4, (), generator=generator))
    place[cut:] += int(max(most - tokens, 1) ** torch.rand((), generator=generator))
    end = cut
    while end + (size := int(torch.randint(8, max(9, cut // 2), (), generator=generator))) < tokens:
        first = int(torch.randint(cut - size + 1, (), generator=generator))
        text[end : end + size] = text[first : first + size].clone()
        end += size + int(torch.randint(8, 33, (), generator=generator))


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
    """Give the loss by position, after more and more text, and on a passage the first time and the second."""
    texts = torch.stack(list(itertools.islice(pack_texts(read_documents(held), tokenizer, length), REPORTED)))
    subject, edges = Subject("teacher", model.eval()), doubling_edges(length - 1)
    gaps = [gap for gap in (128, 512, 1024, 2048, 3500) if gap + 2 * PASSAGE <= length]
    reader = RepeatReader.of([subject], length, PASSAGE, gaps)
    whole = torch.cat([read_whole(reader, subject, text) for text in texts.split(1)])
    (recall,) = reader.result().subjects
    same = {
        tokens: read_losses([subject], texts[:, -tokens:])[0][:, -SAME:].mean().item()
        for tokens in (length >> place for place in range(1, 30))
        if tokens >= 2 * SAME
    }
    return {
        "texts": len(texts),
        "loss": whole.mean().item(),
        "loss from": {edge: whole[:, edge:end].mean().item() for edge, end in itertools.pairwise((*edges, length - 1))},
        "loss of the same tokens, in all": {length: whole[:, -SAME:].mean().item(), **same},
        "passage, first time": dict(zip(gaps, recall.first, strict=True)),
        "passage, second time": dict(zip(gaps, recall.second, strict=True)),
        "copied": {
            gap: math.exp(again - first) for gap, first, again in zip(gaps, recall.first, recall.second, strict=True)
        },
    }


def read_whole(reader, subject, ids):
    """Let a reader of repeats read some texts; give the losses on their tokens."""
    parts = []
    for begin, (logits,) in reader.read([subject], ids):
        following = ids[:, begin + 1 : begin + 1 + logits.shape[1]]
        parts.append(losses_of(logits[:, : following.shape[1]], following))
    return torch.cat(parts, 1)


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
