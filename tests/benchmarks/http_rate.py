"""How fast `linearizer serve` writes, through HTTP: python -m tests.benchmarks.http_rate --run RUN (some minutes).

A student and its teacher are served in turn, each by a process of its own. Clients ask for completions at the default
temperature, all at the same time, after a prompt that is theirs alone. Counted are the tokens that are written, over
the seconds until the last answer has arrived: the prompts are read once before, so that their states are kept.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import date
from pathlib import Path

import httpx

from linearizer.run.names import find_run

RESULTS = Path(__file__).parent / "results" / "http-rate-cpu.json"
SENTENCE = "The import statement finds a module, and then it binds what it has found to a name. "
LETTERS_OF_TOKEN = 4


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", required=True, help="a run with a student")
    parser.add_argument("--clients", type=int, nargs="*", default=[1, 8, 32])
    parser.add_argument("--read", type=int, default=1024, help="about how many tokens each prompt has")
    parser.add_argument("--write", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    run = find_run(arguments.run)
    rates = {name: measure(run, name, arguments) for name in ("teacher", "student")}
    result = {
        "date": date.today().isoformat(),
        "command": "python -m tests.benchmarks.http_rate",
        "student": f"{Path(run.plan.model).name}, {run.plan.strategy}, budget {run.plan.budget}, {run.plan.dtype}",
        "processors, and load average at the end": [os.cpu_count(), round(os.getloadavg()[1], 1)],
        "tokens of a prompt, and of an answer": [arguments.read, arguments.write],
        "tokens/s by clients": rates,
        "student by teacher": {n: round(rates["student"][n] / rates["teacher"][n], 2) for n in rates["teacher"]},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return result


def measure(run, name, arguments):
    """Serve a model, and measure with each number of clients."""
    words = ["serve", str(run.folder), "--port", "0", "--json", *["--teacher"] * (name == "teacher")]
    command = [sys.executable, "-m", "linearizer", *words, "--max-state-bytes", str(2**33)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            text = ""
            while not text.endswith("}\n"):
                text += server.stdout.readline()
                assert server.poll() is None, "the server has ended"
            served = json.loads(text)
            return {str(count): round(rate(served, count, arguments), 2) for count in arguments.clients}
        finally:
            server.send_signal(signal.SIGINT)


def rate(served, count, arguments):
    """Return the tokens that clients receive a second, after their prompts were read."""

    def ask(place, tokens):
        prompt = f"{place} " + SENTENCE * (arguments.read * LETTERS_OF_TOKEN // len(SENTENCE))
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "seed": place}
        answer = httpx.post(f"{served['url']}/completions", json=body, timeout=None).raise_for_status().json()
        return answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda place: ask(place, 1), range(count)))
        begin = time.perf_counter()
        written = sum(pool.map(lambda place: ask(place, arguments.write), range(count)))
        return written / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
