"""How long torch.compile takes for a student beside its teacher: python -m tests.benchmarks.compile.

Both have two layers, and are compiled by inductor, which needs a C compiler, with nothing taken from its caches: first
for a text, then for a token after it. Processor time, which other work on the machine hardly changes. Writes
results/compile-cpu.json.
"""

import argparse
import json
import time
from datetime import date
from pathlib import Path

import torch

from linearizer.evaluate.setup import environment
from linearizer.plan.head_bytes import Head
from linearizer.student.cache import CACHE
from tests.support.models import student_of, teacher_of, tokens

RESULTS = Path(__file__).parent / "results" / "compile-cpu.json"
SUBJECTS = {
    "teacher": None,
    "features": [Head(window=5, features=16), Head(window=3)],
    "slots": [Head(window=4, slots=6, bits=8), Head(window=5, bits=8)],
}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args(arguments)
    torch.set_num_threads(1)
    torch._inductor.config.compile_threads = 1
    torch._inductor.config.force_disable_caches = True
    rows = []
    print(f"{'':10}{'text':>8}{'token':>8}{'÷ teacher':>11}")
    for name, heads in SUBJECTS.items():
        sizes = {"num_hidden_layers": 2}
        text, token = measure(teacher_of("llama", **sizes) if heads is None else student_of("llama", heads, **sizes))
        ratio = (text + token) / (rows[0]["text"] + rows[0]["token"]) if rows else 1.0
        rows.append({"subject": name, "text": round(text, 2), "token": round(token, 2), "÷ teacher": round(ratio, 2)})
        print(f"{name:10}{text:8.1f}{token:8.1f}{ratio:11.2f}", flush=True)
    made = environment(teacher_of("llama", num_hidden_layers=2))
    result = {"date": date.today().isoformat(), "command": "python -m tests.benchmarks.compile", "made_with": made}
    arguments.out.write_text(json.dumps({**result, "seconds": rows}, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def measure(model):
    """Give the seconds of the first calls for a text, and of the first calls for a token."""
    torch.compiler.reset()
    compiled, ids = torch.compile(model), tokens(2, 64)
    start = time.process_time()
    for _ in range(2):
        compiled(ids, use_cache=False)
    middle, cache = time.process_time(), model(ids)[CACHE]
    for _ in range(4):
        compiled(ids[:, :1], **{CACHE: cache})
    return middle - start, time.process_time() - middle


if __name__ == "__main__":
    main()
