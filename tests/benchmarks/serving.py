"""Requests a second of student and teacher behind the same endpoint: python -m tests.benchmarks.serving.

Requests come at once, each with a text of its own, and each has some tokens written. Then
each goes on: its text, the answer and some new words are sent, of which all but the words was read before. Clients and
server are one process on one thread, whose processor time counts, so that the ratios hold on a machine that does other
work: until the last answer, and, as the mean over requests, until the first token of each.

Writes results/serving-cpu.json. Rows of it that are not asked for stay, so that each may be measured by itself:
--context 8192 --at-once 32 --subject student.

With --seconds nothing is compared: many clients ask `linearizer serve` for that time, half of whom leave or send
garbage or huge bodies, and some read slowly. Printed are the times of /health, which another process asks for, answers
by status, how many equal the answer alone, and the server's memory above that at its start, by what it counts.
"""

import argparse
import asyncio
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from random import Random

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
LOAD_BYTES = 2**28  # of states, which the load fills
HUGE = b'{"prompt": "' + b"word " * 2**20 + b'"}'
GARBAGE = (
    b"",
    b"{",
    b"[" * 10**5,
    b"\xff\xfe",
    b'{"model": 1}',
    b'{"prompt": [1, true]}',
    b'{"seed": ' + b"9" * 10**4 + b"}",
)
ROLES = ("answer", "answer", "slow", "stream", "stream", "leave", "leave", "leave", "garbage", "huge")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run with a student (default: one of the demo model is made)")
    parser.add_argument("--budget", type=int, default=64, help="of that run (default: %(default)s)")
    parser.add_argument("--context", type=int, nargs="+", default=[CONTEXT], help="tokens of a prompt: 512 8192")
    parser.add_argument("--at-once", type=int, nargs="+", default=AT_ONCE, help="requests (default: 1 8 32)")
    parser.add_argument("--subject", nargs="+", choices=SUBJECTS, default=SUBJECTS, help="(default: both)")
    parser.add_argument("--written", type=int, default=WRITTEN, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="of load, instead of all else")
    parser.add_argument("--clients", type=int, default=200, help="of the load (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = find_run(arguments.run) if arguments.run else demo_run(Path(folder) / "demo", arguments.budget)
        if arguments.seconds:
            return print(columns([*bear_load(run, arguments.clients, arguments.seconds).items()]))
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


def bear_load(run, clients, seconds):
    """Serve the student of a run in a process of its own, and let many clients ask it; return what was measured."""
    command = [sys.executable, "-m", "linearizer", "serve", str(run.folder), "--port", "0", "--json"]
    server = subprocess.Popen([*command, "--max-state-bytes", str(LOAD_BYTES)], stdout=subprocess.PIPE, text=True)
    with server, ProcessPoolExecutor(1, get_context("spawn")) as pool, httpx.Client(timeout=60) as client:
        said, times, peak = "", [], 0
        while not said.endswith("}\n"):
            said += server.stdout.readline()
        served = json.loads(said)
        ask = {"model": served["model"], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
        asked = [
            {**ask, "prompt": f"{word} is " * (1 + 20 * i)} for i, word in enumerate("A module,The,def,x".split(","))
        ]
        alone = [client.post(f"{served['url']}/completions", json=each).json()["choices"][0]["text"] for each in asked]
        before, health = memory_of(server), {"rows": 1}
        load = pool.submit(send_load, served["url"], list(zip(asked, alone, strict=True)), clients, seconds)
        while not load.done() or health["rows"] or health["waiting"]:
            begin = time.perf_counter()
            health = client.get(served["url"].replace("v1", "health")).json()
            times.append(time.perf_counter() - begin)
            peak = max(peak, memory_of(server) - before)
            time.sleep(0.1)
        above = memory_of(server) - before
        server.send_signal(signal.SIGINT)
    counted, times = health["kept_state_bytes"], sorted(times)
    return {
        "/health s, p50, p99, max": " ".join(f"{times[int(share * (len(times) - 1))]:.3f}" for share in (0.5, 0.99, 1)),
        "MB of states, counted": counted >> 20,
        "MB above the start, peak": f"{above >> 20} {peak >> 20}, {above / counted:.2f} of what is counted",
        **load.result(),
    }


def memory_of(process):
    """Return the resident bytes of a process."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition("VmRSS:")[2].split()[0])


def send_load(url, known, clients, seconds):
    """Let clients ask until the time is over; count their answers."""
    counts, end = Counter(), time.monotonic() + seconds

    async def send_all():
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
            await asyncio.gather(*(be_client(client, Random(i), ROLES[i % len(ROLES)], known) for i in range(clients)))

    async def be_client(client, draw, role, known):
        while time.monotonic() < end:
            try:
                await ask_once(client, draw, role, *draw.choice(known))
            except httpx.HTTPError as error:
                counts[f"{role}: {type(error).__name__}"] += 1
            await asyncio.sleep(draw.random())

    async def ask_once(client, draw, role, asked, alone):
        if role == "leave":  # a text of its own, which is left after its first token
            asked = {**asked, "prompt": f"{draw.random()} {asked['prompt']}", "max_tokens": 200}
        body = {
            "content": HUGE if role == "huge" else draw.choice(GARBAGE),
            "headers": {"Content-Type": "application/json"},
        }
        if role not in ("huge", "garbage"):
            body = {"json": {**asked, "stream": role != "answer"}}
        text = ""
        async with client.stream("POST", "completions", **body) as answer:
            counts[f"{role}: {answer.status_code}"] += 1
            if role == "answer" and answer.status_code == 200:
                text = json.loads(await answer.aread())["choices"][0]["text"]
            async for line in answer.aiter_lines():
                if role == "leave":
                    return
                text += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""
                await asyncio.sleep(0.1 if role == "slow" else 0)
        if role in ("answer", "slow", "stream") and answer.status_code == 200:
            counts["equal to the answer alone" if text == alone else "other than the answer alone"] += 1

    asyncio.run(send_all())
    return dict(sorted(counts.items()))


if __name__ == "__main__":
    main()
