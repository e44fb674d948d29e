"""How fast `linearizer serve` writes, through HTTP:

  python -m tests.benchmarks.http_rate --run RUN                       some minutes
  python -m tests.benchmarks.http_rate --run RUN --vllm ENV/bin/python   vLLM serves both, too, where it is installed

A student and its teacher are served in turn, each by a process of its own. Clients ask for completions at the default
temperature, all at the same time, after a prompt that is theirs alone. Counted are the tokens that are written, over
the seconds until the last answer has arrived: the prompts are read once before, so that their states are kept.
"""

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import httpx

from linearizer.hub.models import find_model
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
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM and this package")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = sys.argv[1:] if arguments is None else arguments
    arguments = parser.parse_args(given)
    run = find_run(arguments.run)
    servers = {"": serving, **({"vLLM, ": serving_by_vllm} if arguments.vllm else {})}
    asked = [(begin, name) for name in ("teacher", "student") for begin in servers]
    rates = {begin + name: measure(servers[begin], run, name, arguments) for begin, name in asked}
    result = {
        "date": date.today().isoformat(),
        "command": shlex.join(["python", "-m", "tests.benchmarks.http_rate", *given]),
        "student": f"{Path(run.plan.model).name}, {run.plan.strategy}, budget {run.plan.budget}, {run.plan.dtype}",
        "processors, and load average at the end": [os.cpu_count(), round(os.getloadavg()[1], 1)],
        "tokens of a prompt, and of an answer": [arguments.read, arguments.write],
        "tokens/s by clients": rates,
        "student by teacher": {n: round(rates["student"][n] / rates["teacher"][n], 2) for n in rates["teacher"]},
    }
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=1))
    return result


def measure(served_by, run, name, arguments):
    """Serve a model, and measure with each number of clients."""
    with served_by(run, name, arguments) as served:
        return {str(count): round(rate(served, count, arguments), 2) for count in arguments.clients}


@contextmanager
def serving(run, name, arguments):
    """Serve by `linearizer serve`; give the address, and what a request has to name."""
    words = ["serve", str(run.folder), "--port", "0", "--json", *["--teacher"] * (name == "teacher")]
    command = [sys.executable, "-m", "linearizer", *words, "--max-state-bytes", str(2**33)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            text = ""
            while not text.endswith("}\n"):
                text += server.stdout.readline()
                assert server.poll() is None, "the server has ended"
            yield json.loads(text)["url"], {}
        finally:
            server.send_signal(signal.SIGINT)


@contextmanager
def serving_by_vllm(run, name, arguments):
    """Serve by vLLM's server with its defaults."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    folder = run.checkpoint if name == "student" else find_model(run.plan.model).folder
    options = ["--model", folder, "--served-model-name", "model", "--host", "127.0.0.1", "--port", port]
    options += ["--dtype", run.plan.dtype, "--enable-prefix-caching", "--hf-overrides"]
    options += [json.dumps({"max_position_embeddings": 2 * arguments.read + arguments.write})]
    options += ["--block-size", 256] * (name == "student")
    command = [arguments.vllm, "-m", "vllm.entrypoints.openai.api_server", *map(str, options)]
    quiet = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "2"}
    with subprocess.Popen(command, env=os.environ | quiet, stdout=sys.stderr) as server:
        try:
            while not answers(f"http://127.0.0.1:{port}/health"):
                assert server.poll() is None, "vLLM's server has ended"
                time.sleep(1)
            yield f"http://127.0.0.1:{port}/v1", {"model": "model"}
        finally:
            server.terminate()


def answers(url):
    """Whether a server is ready."""
    try:
        return httpx.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False


def rate(served, count, arguments):
    """Return the tokens that clients receive a second, after their prompts were read."""
    url, named = served

    def ask(place, tokens):
        prompt = f"{place} " + SENTENCE * (arguments.read * LETTERS_OF_TOKEN // len(SENTENCE))
        body = {**named, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        answer = httpx.post(f"{url}/completions", json=body, timeout=None).raise_for_status().json()
        return answer["usage"]["completion_tokens"]

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(lambda place: ask(place, 1), range(count)))
        begin = time.perf_counter()
        written = sum(pool.map(lambda place: ask(place, arguments.write), range(count)))
        return written / (time.perf_counter() - begin)


if __name__ == "__main__":
    main()
