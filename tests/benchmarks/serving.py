"""Requests a second of student and teacher behind the same endpoint: python -m tests.benchmarks.serving.

Requests come at once, each with a text of its own, and each has some tokens written. Then
each goes on: its text, the answer and some new words are sent, of which all but the words was read before. Clients and
server are one process on one thread, whose processor time counts, so that the ratios hold on a machine that does other
work: until the last answer, and, as the mean over requests, until the first token of each.

Writes results/serving-cpu.json. Rows of it that are not asked for stay, so that each may be measured by itself:
--context 8192 --at-once 32 --subject student.
"""

import argparse
import asyncio
import json
import tempfile
import time
from datetime import date
from itertools import product
from pathlib import Path

import httpx
import torch

from linearizer import pipeline
from linearizer.amounts import columns
from linearizer.evaluate.setup import environment
from linearizer.method.checkpoint import load_of_run
from linearizer.plan.plan import Plan
from linearizer.progress import finish
from linearizer.run.names import find_run
from linearizer.serve.endpoint import Served
from linearizer.serve.engine import Engine
from linearizer.teacher.load import load_teacher_of
from linearizer.teacher.text import read_texts
from tests.support.serving import listening

RESULTS = Path(__file__).parent / "results" / "serving-cpu.json"
AT_ONCE, CONTEXT, WRITTEN, WORDS = (1, 8, 32), 512, 32, 16
KEPT_BYTES = 2**32  # enough for what 32 texts of 8192 tokens leave of the teacher
SUBJECTS = ("teacher", "student")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run with a student (default: one of the demo model is made)")
    parser.add_argument("--budget", type=int, default=64, help="of that run (default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[CONTEXT], help="tokens of a prompt: 512 8192")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="requests (default: 1 8 32)")
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="(default: both)")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = find_run(arguments.run) if arguments.run else demo_run(Path(folder) / "demo", arguments.budget)
        for result in measure_all(run, arguments):
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    rows = result["rows"]
    print(columns([tuple(rows[-1]), *(tuple(row.get(name, "–") for name in rows[-1]) for row in rows)]))


def demo_run(folder, budget):
    run = pipeline.begin(folder, Plan.of("best", model="demo", budget=budget))
    finish(pipeline.linearize(run))
    return run


def measure_all(run, arguments):
    """Measure the subjects at every length, by every number of requests; yield the result after each."""
    student, tokenizer = load_of_run(run)
    facts = {
        "student": f"{run.plan.model}, {run.allocation.strategy}, budget {run.plan.budget}",
        "tokens_written": arguments.written,
    }
    rows = {place(row): row for row in rows_before(arguments.out, facts)}
    for context in arguments.context:
        texts = draw_texts(tokenizer, context, max(arguments.at_once))
        for count, name in product(arguments.at_once, arguments.subject):
            model = student if name == "student" else load_teacher_of(run.plan, None, run.inspection).model
            row = {"context": context, "at once": count, "subject": name}
            row |= measure(name, model, tokenizer, texts[:count].tolist(), arguments.written)
            rows[place(row)] = row
            yield {
                "date": date.today().isoformat(),
                "command": command(arguments, rows),
                "made_with": environment(student),
                **facts,
                "rows": [rows[key] for key in sorted(rows)],
            }


def draw_texts(tokenizer, length, count):
    """Cut texts from the built-in one; where there is too little of it they overlap, and none begins as another."""
    whole = read_texts("builtin", tokenizer, length, count, least=1).flatten()
    return whole.unfold(0, length, max(1, (len(whole) - length) // max(1, count - 1)))[:count]


def rows_before(path, facts):
    """Return the rows that were measured before of the same student."""
    if not path.exists():
        return []
    before = json.loads(path.read_text(encoding="utf-8"))
    return before["rows"] if before.items() >= facts.items() else []


def place(row):
    return row["context"], row["at once"], SUBJECTS.index(row["subject"])


def command(arguments, rows):
    """Return the command that measures all rows."""
    lengths, counts = ({str(key[i]): None for key in sorted(rows)} for i in (0, 1))
    return (
        f"python -m tests.benchmarks.serving --budget {arguments.budget} --context {' '.join(lengths)} "
        f"--at-once {' '.join(counts)} --written {arguments.written}"
    )


def measure(name, model, tokenizer, prompts, written):
    """Return requests a second and seconds to the first token, the first time and the second, and the bytes of a state.

    The bytes are those that the longest text's last state takes.
    """
    positions = 2 * (len(prompts[0]) + written + WORDS)
    with (
        Engine(model, KEPT_BYTES) as engine,
        listening(Served(name, model, tokenizer, positions, engine, 3600.0)) as url,
    ):
        asyncio.run(send(url, name, [prompts[0][:16]], 2))  # what is done once is not timed
        seconds, first, answers = asyncio.run(send(url, name, prompts, written))
        again = [
            [*prompt, *tokenizer(text, add_special_tokens=False)["input_ids"], *prompt[-WORDS:]]
            for prompt, text in zip(prompts, answers, strict=True)
        ]
        newest = max((kept for kept in engine.kept.states.values()), key=lambda kept: kept.tokens)
        later, first_later, _ = asyncio.run(send(url, name, again, written))
    return {
        "requests/s": round(len(prompts) / seconds, 3),
        "first token s": round(first, 3),
        "next turns/s": round(len(prompts) / later, 3),
        "its first token s": round(first_later, 3),
        "bytes kept a text": newest.bytes,
    }


async def send(url, name, prompts, written):
    """Send all requests at once; return the seconds to the last answer and, on average, to a first; and all answers."""

    async def ask(client, prompt):
        asked = {"model": name, "prompt": prompt, "max_tokens": written, "temperature": 0, "ignore_eos": True}
        pieces, first = [], None
        async with client.stream("POST", f"{url}/completions", json={**asked, "stream": True}) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(json.loads(line.removeprefix("data: "))["choices"][0]["text"])
                    first = first or time.process_time() - start
        return first, "".join(pieces)

    async with httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=len(prompts))) as client:
        start = time.process_time()
        firsts, answers = zip(*await asyncio.gather(*(ask(client, prompt) for prompt in prompts)), strict=True)
        return time.process_time() - start, sum(firsts) / len(firsts), answers


if __name__ == "__main__":
    main()
