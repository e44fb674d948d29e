"""Requests a second of student and teacher behind the same endpoint: python -m tests.benchmarks.serving.

So many requests come at once, each with a text of its own of so many tokens, and each has some tokens written. Then
each goes on: its text, the answer and some new words are sent, of which all but the words was read before.
"""

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

import httpx
import torch

from linearizer import pipeline
from linearizer.amounts import columns, size
from linearizer.evaluate.environment import environment
from linearizer.model.checkpoint import load_of_run
from linearizer.model.teacher import load
from linearizer.model.text import read_texts
from linearizer.progress import finish
from linearizer.run.find import find_run
from linearizer.run.plan import Plan
from linearizer.serve.endpoint import Served
from linearizer.serve.engine import Engine
from tests.support.serving import listening

AT_ONCE, CONTEXT, WRITTEN, WORDS = (1, 8, 32), 512, 32, 16
KEPT_BYTES = 2**33


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run with a student (default: one of the demo model is made)")
    parser.add_argument("--budget", type=int, default=64, help="of that run (default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[CONTEXT], help="tokens of a prompt: 512 8192")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="requests (default: 1 8 32)")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of an answer (default: %(default)s)")
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = find_run(arguments.run) if arguments.run else demo_run(Path(folder) / "demo", arguments.budget)
        print(measured(run, arguments))


def demo_run(folder, budget):
    run = pipeline.begin(folder, Plan.of("best", model="demo", budget=budget))
    finish(pipeline.linearize(run))
    return run


def measured(run, arguments):
    """Measure all, and lay the table out."""
    student, tokenizer = load_of_run(run)
    subjects = {"teacher": load(run.plan, None, run.inspection).model, "student": student}
    rows = [("", "context", "at once", "requests/s", "next turns/s", "bytes kept a text")]
    for context in arguments.context:
        texts = read_texts("builtin", tokenizer, context, max(arguments.at_once))
        for count in arguments.at_once:
            for name, model in subjects.items():
                rows.append(
                    (name, context, count, *measure(name, model, tokenizer, texts[:count].tolist(), arguments.written))
                )
    made = environment(student)
    about = f"{arguments.written} tokens written; {run.plan.model}, {run.allocation.strategy}, budget {run.plan.budget}"
    return columns(rows) + f"\n{about}; {made['dtype']} on {made['device']}"


def measure(name, model, tokenizer, prompts, written):
    """Give requests a second the first time and the second, and the bytes that a text's last state takes."""
    positions = 2 * (len(prompts[0]) + written + WORDS)
    with Engine(model, KEPT_BYTES) as engine, listening(Served(name, model, tokenizer, positions, engine)) as url:
        asyncio.run(send(url, name, [prompts[0][:16]], 2))  # what is done once is not timed
        seconds, answers = asyncio.run(send(url, name, prompts, written))
        again = [
            [*prompt, *tokenizer(text, add_special_tokens=False)["input_ids"], *prompt[-WORDS:]]
            for prompt, text in zip(prompts, answers, strict=True)
        ]
        newest = max((kept for kept in engine.kept.states.values()), key=lambda kept: kept.tokens)
        later, _ = asyncio.run(send(url, name, again, written))
    return f"{len(prompts) / seconds:.2f}", f"{len(prompts) / later:.2f}", size(newest.bytes)


async def send(url, name, prompts, written):
    """Send all requests at once; give the seconds until the last answer, and all answers."""

    async def ask(client, prompt):
        arguments = {"model": name, "prompt": prompt, "max_tokens": written, "temperature": 0, "ignore_eos": True}
        answer = await client.post(f"{url}/completions", json=arguments)
        return answer.raise_for_status().json()["choices"][0]["text"]

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=len(prompts))) as client:
        start = time.perf_counter()
        answers = await asyncio.gather(*(ask(client, prompt) for prompt in prompts))
        return time.perf_counter() - start, answers


if __name__ == "__main__":
    main()
