"""Continues the training of a small teacher so that it reads longer texts, and what it does there can be judged.

  python -m tests.benchmarks.teacher --text file:TRAIN.jsonl --held file:HELD.jsonl --out FOLDER --hours 2
  python -m tests.benchmarks.teacher --held file:HELD.jsonl --out FOLDER --report      only judge what was reached

Rotations that are slow beside --trained tokens turn slower, fast ones as ever (YaRN, 2309.00071), so that no distance
has an angle that the model has not seen; scores are a little larger, since there are more tokens. A step takes a text
of --length tokens out of one document, so that what stands far before helps. Passages come again over all gaps: a few
in half of the texts, and many in most of the last texts. A second call with the same folder goes on to the same bits;
FOLDER/model is a teacher that any command reads. The report says whether the loss of the same tokens falls with what
stands before them, and whether a passage is copied over the longest gap. demo-4096/ is what 700 steps gave.
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
from linearizer.plan.plan import Plan
from linearizer.teacher import load as teacher_module
from linearizer.teacher.devices import choose_device
from linearizer.teacher.logits import losses_of
from linearizer.teacher.text import read_documents
from linearizer.train.training_state import TrainingState, read_state, write_state

RESULTS = Path(__file__).parent / "results"
REPEATING = (0.5, 512), (0.8, 192)  # in the first steps and the last: of the texts, and tokens to a passage
FIRST = 0.57  # of the steps
PASSAGE = 64
RATE, WARMUP = 2e-4, 20  # then the learning rate falls to nothing
SAVED_SECONDS = 240
REPORTED = 24  # texts
SAME = 256  # tokens whose loss is compared after more and more text


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--text", help="the source to train on")
    parser.add_argument("--held", required=True, help="the source to judge by")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--trained", type=int, default=512, help="tokens of the texts that the model was trained on")
    parser.add_argument("--steps", type=int, default=400)
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

    documents = documents_of(asked.text, tokenizer, asked.length)
    saved, faster = time.monotonic(), autocast(model.device)
    model.train()
    while step < asked.steps and time.monotonic() - began < asked.hours * 3600:
        for group in optimizer.param_groups:
            group["lr"] = RATE * rate_at(step, asked.steps)
        ids = draw_text(documents, asked, step).to(model.device)
        with faster:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 10 == 0:
            print(f"step {step} of {asked.steps}: loss {loss.item():.3f}", flush=True)
        if time.monotonic() - saved > SAVED_SECONDS:
            save()
            saved = time.monotonic()
    save()


def rate_at(step, steps):
    """Rise, and fall to nothing."""
    return min(1.0, (step + 1) / WARMUP, (steps - step) / max(1, steps - WARMUP))


def documents_of(source, tokenizer, length):
    """List the tokens of the documents that have `length` of them."""
    found = (tokenizer(document, verbose=False)["input_ids"] for document in read_documents(source))
    documents = [torch.tensor(tokens) for tokens in found if len(tokens) >= length]
    if not documents:
        raise SystemExit(f"no document of {source} has {length} tokens: name a source of longer ones, or give --length")
    return documents


def draw_text(documents, asked, step):
    """Draw the text of a step, the same for the same seed; passages come again in some."""
    generator = torch.Generator().manual_seed(asked.seed * 1_000_003 + step)
    room = torch.tensor([len(document) - asked.length + 1 for document in documents])
    place = int(torch.randint(int(room.sum()), (), generator=generator))
    number = int((room.cumsum(0) <= place).sum())
    begin = place - int(room[:number].sum())
    text = documents[number][begin : begin + asked.length].clone()
    share, tokens = REPEATING[step >= FIRST * asked.steps]
    if torch.rand((), generator=generator) < share:
        repeat(text, max(2, asked.length // tokens), generator)
    return text[None]


def repeat(text, passages, generator):
    """Let some passages of 16 to 256 tokens come again in a text, in place, over gaps of any size, often short ones."""
    for _ in range(passages):
        size = min(int(16 * 16 ** torch.rand((), generator=generator)), len(text) // 4)
        most, share = len(text) - size, torch.rand(2, generator=generator)
        gap = int(size * (most / size) ** share[0]) if share[1] < 0.5 else int(size + (most - size) * share[0])
        first = int(torch.randint(max(1, most - gap), (), generator=generator))
        text[first + gap : first + gap + size] = text[first : first + size].clone()[: len(text) - first - gap]


def autocast(device):
    return nullcontext() if device.type == "cpu" else torch.autocast(device.type, torch.bfloat16)


@torch.inference_mode()
def report(model, tokenizer, held, length):
    """Give the loss by position, after more and more text, and on a passage the first time and the second."""
    documents = documents_of(held, tokenizer, length)[:REPORTED]
    texts = torch.stack([document[:length] for document in documents])
    subject, edges = Subject("teacher", model.eval()), doubling_edges(length - 1)
    gaps = [gap for gap in (128, 512, 1024, 2048, 3500) if gap + 2 * PASSAGE <= length]
    reader = RepeatReader([subject], length, PASSAGE, gaps)
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
