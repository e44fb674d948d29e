"""What the endpoint survives: python -m tests.benchmarks.load (some eleven minutes).

For ten minutes 200 clients ask `linearizer serve`, half of whom leave in the middle, or send garbage or bodies of
100 MB; some read a byte a second; 30 in 100 hold a thousand conversations, whose states the server keeps within
--max-state-bytes. Another process asks for /health all the time. Each complete answer of a fixed set of prompts is
compared with the answer that the same server gave before, to that prompt alone; each turn of a conversation with the
answer that this turn had before. The student computes in float32, as in bf16 a batch changes the last bits of its rows.

Writes results/load-cpu.json: answers by role and status, seconds of /health, and the server's memory (RssAnon) above
that of the idle server, in time, beside what it counts.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from multiprocessing import get_context
from pathlib import Path
from random import Random

import httpx

from linearizer.run.names import find_run

RESULTS = Path(__file__).parent / "results" / "load-cpu.json"
ROLES = (  # of twenty clients
    *["answer", "stream"] * 2, *["talk"] * 5, "slow",
    *["leave"] * 4, *["hang up"] * 2, *["garbage"] * 3, "huge",
)  # fmt: skip
OPENINGS = "A module,The,def,x,Once,import,In,for".split(",")
WRITTEN, PAUSE = 24, 1.0  # tokens of an answer; seconds between the requests of a client, at most
PIECE, HUGE_BYTES = b"word " * 2**13, 100 * 10**6
PAUSES = {"huge": 60.0, "garbage": 10.0, "hang up": 10.0}  # of clients whose requests take no time
GARBAGE = (
    b"", b"{", b"[" * 10**5, b"\xff\xfe", b'{"model": 1}', b'{"prompt": [1, true]}', b'{"seed": ' + b"9" * 10**4 + b"}",
)  # fmt: skip
JSON = {"Content-Type": "application/json"}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run with a student in float32 (default: one of the demo model is made)")
    parser.add_argument("--minutes", type=float, default=10, help="of load (default: %(default)g)")
    parser.add_argument("--clients", type=int, default=200, help="(default: %(default)s)")
    parser.add_argument("--conversations", type=int, default=1000, help="a quarter of the clients or more: 1000")
    parser.add_argument("--max-state-bytes", type=int, default=2**29, help="of the server (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        run = find_run(arguments.run) if arguments.run else demo_run(Path(folder) / "demo")
        result = bear_load(run, arguments)
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for name, value in result.items():
        print(f"{name}: {value}")
    return result


def demo_run(folder):
    from linearizer import pipeline  # here: the process of the clients needs none of it
    from linearizer.plan.plan import Plan
    from linearizer.progress import finish

    run = pipeline.begin(folder, Plan.of("best", model="demo", budget=64, dtype="float32"))
    finish(pipeline.linearize(run))
    return run


def bear_load(run, arguments):
    """Serve the student of a run in a process of its own, let clients in another ask it, and measure in this."""
    words = ["serve", str(run.folder), "--port", "0", "--json", "--max-state-bytes", str(arguments.max_state_bytes)]
    server = subprocess.Popen([sys.executable, "-m", "linearizer", *words], stdout=subprocess.PIPE, text=True)
    with server, ProcessPoolExecutor(1, get_context("spawn")) as pool, httpx.Client(timeout=60) as client:
        said, seconds, memory, busy = "", [], [], 60 * arguments.minutes
        while not said.endswith("}\n"):
            assert (line := server.stdout.readline()), "the server has ended"
            said += line
        served, late = json.loads(said), []
        known = answers_alone(client, served)
        pool.submit(os.getpid).result()  # it has begun
        health, before, begin = {"rows": 1}, anonymous_bytes(server), time.monotonic()
        load = pool.submit(send_load, served, known, arguments.clients, arguments.conversations, busy)
        while not load.done() or health["rows"] or health["waiting"]:
            asked = time.perf_counter()
            health = client.get(served["url"].replace("v1", "health")).json()
            seconds.append(time.perf_counter() - asked)
            if time.monotonic() - begin >= len(memory) * busy / 10:
                memory.append([(anonymous_bytes(server) - before) >> 20, health["kept_state_bytes"] >> 20])
            slept = time.perf_counter()
            time.sleep(0.1)
            late.append(time.perf_counter() - slept - 0.1)
        above = anonymous_bytes(server) - before
        server.send_signal(signal.SIGINT)
        asked = time.perf_counter()
        server.wait(60)
    return {
        "date": date.today().isoformat(),
        "command": f"python -m tests.benchmarks.load --minutes {arguments.minutes:g} --clients {arguments.clients}",
        "student": f"{run.plan.model}, {run.plan.strategy}, budget {run.plan.budget}, {run.plan.dtype}",
        "processors, and load average at the end": [os.cpu_count(), round(os.getloadavg()[1], 1)],
        "answers": load.result(),
        "/health s": quantiles(seconds),
        "seconds by which the machine woke the process that asked too late": quantiles(late),
        "/health asked": len(seconds),
        "states kept": health["kept_states"],
        "MB counted of them": health["kept_state_bytes"] >> 20,
        "MB above the idle server": above >> 20,
        "memory by what is counted": round(above / health["kept_state_bytes"], 2),
        "MB above, and counted, in time": memory,
        "seconds to stop": round(time.perf_counter() - asked, 1),
    }


def quantiles(seconds):
    ordered, shares = sorted(seconds), {"p50": 0.5, "p99": 0.99, "p99.9": 0.999, "max": 1}
    return {name: round(ordered[int(share * (len(ordered) - 1))], 4) for name, share in shares.items()}


def answers_alone(client, served):
    """Return requests of different lengths, each with its answer, given to it alone."""
    known = []
    for place, word in enumerate(OPENINGS):
        request = request_of(served, f"{word} is " * (1 + 9 * place))
        answer = client.post(f"{served['url']}/completions", json=request).raise_for_status()
        known.append((request, answer.json()["choices"][0]["text"]))
    return known


def request_of(served, prompt, **more):
    ask = {"model": served["model"], "max_tokens": WRITTEN, "temperature": 0, "ignore_eos": True}
    return {**ask, "prompt": prompt, **more}


def anonymous_bytes(process):
    """Return the bytes of memory of a process that are no file's."""
    return 1024 * int(Path(f"/proc/{process.pid}/status").read_text().partition("RssAnon:")[2].split()[0])


def send_load(served, known, clients, conversations, busy):
    """Let clients ask until the time is over; count what became of their requests."""
    counts, end, turns = Counter(), time.monotonic() + busy, {}
    url = httpx.URL(served["url"] + "/completions")

    async def send_all():
        limits = httpx.Limits(max_connections=clients)
        async with httpx.AsyncClient(timeout=None, limits=limits) as client:
            roles = [ROLES[place % len(ROLES)] for place in range(clients)]
            talking = [place for place, role in enumerate(roles) if role == "talk"]
            shares = {place: range(first, conversations, len(talking)) for first, place in enumerate(talking)}
            await asyncio.gather(
                *(be_client(client, Random(i), role, shares.get(i, ())) for i, role in enumerate(roles))
            )

    async def be_client(client, draw, role, talks):
        count = 0
        while not count or time.monotonic() < end:
            try:
                if role == "talk":
                    await talk(client, talks[count % len(talks)])
                elif role == "slow":
                    await read_slowly(draw.choice(known)[0])
                elif role == "hang up":
                    await hang_up(draw)
                else:
                    await ask_once(client, draw, role, *draw.choice(known))
            except httpx.HTTPError as error:
                counts[f"{role}: {type(error).__name__}"] += 1
            count += 1
            await asyncio.sleep(draw.random() * PAUSES.get(role, PAUSE))

    async def ask_once(client, draw, role, asked, alone):
        if role == "leave":  # a text of its own, which is left after its first token
            asked = {**asked, "prompt": f"{draw.random()} {asked['prompt']}", "max_tokens": 200}
        body = {"content": pieces() if role == "huge" else draw.choice(GARBAGE), "headers": JSON}
        if role not in ("huge", "garbage"):
            body = {"json": {**asked, "stream": role != "answer"}}
        text = ""
        async with client.stream("POST", url, **body) as answer:
            counts[f"{role}: {answer.status_code}"] += 1
            if role in ("huge", "garbage") or answer.status_code != 200:
                return
            if role == "answer":
                text = json.loads(await answer.aread())["choices"][0]["text"]
            async for line in answer.aiter_lines() if role != "answer" else nothing():
                if role == "leave":
                    return
                text += json.loads(line[6:])["choices"][0]["text"] if line.startswith("data: {") else ""
        counts["equal to the answer alone" if text == alone else "other than the answer alone"] += 1

    async def talk(client, number):
        """Hold a conversation of two turns; when it was held before, it must go as it went then."""
        said = f"{number} {OPENINGS[number % len(OPENINGS)]} " * 8
        for turn in range(2):
            answer = await client.post(url, json=request_of(served, said))
            counts[f"talk: {answer.status_code}"] += 1
            if answer.status_code != 200:
                return
            text = answer.json()["choices"][0]["text"]
            if (before := turns.setdefault((number, turn), text)) is not text:
                counts["equal to the turn before" if text == before else "other than the turn before"] += 1
            said += text + " and"

    async def read_slowly(asked):
        """Read a stream a byte a second, with the least room for what is sent."""
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect((url.host, url.port))
        reader, writer = await asyncio.open_connection(sock=connection, limit=1)
        content = json.dumps({**asked, "stream": True, "max_tokens": 400}).encode()
        writer.write(head_of(url, len(content)) + content)
        counts["slow: connected"] += 1
        while time.monotonic() < end and await reader.read(1):
            await asyncio.sleep(1)
        writer.close()

    async def hang_up(draw):
        """Send bytes that are no request, or a part of one, and leave."""
        _, writer = await asyncio.open_connection(url.host, url.port)
        writer.write(draw.choice([draw.randbytes(300), head_of(url, 1000) + b"{", b"GET /" + b"a" * 10**5]))
        await asyncio.sleep(draw.random() * PAUSE)
        writer.close()
        counts["hang up"] += 1

    asyncio.run(send_all())
    counts["conversations"] = len({number for number, _ in turns})
    return dict(sorted(counts.items()))


def head_of(url, length):
    lines = [f"POST {url.path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


async def pieces():
    for _ in range(HUGE_BYTES // len(PIECE)):
        yield PIECE


async def nothing():
    return
    yield


if __name__ == "__main__":
    main()
