"""Records what short runs of the demo model make, and compares it with a record: refactoring must change nothing.

  python -m tests.benchmarks.golden FILE    write the record, or compare with the one that FILE holds

A record holds for one machine and its libraries: another one rounds differently.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path

import torch

from linearizer import pipeline
from linearizer.method.checkpoint import load
from linearizer.plan.plan import Plan
from linearizer.progress import finish, quiet

SMALL = {"model": "demo", "budget": 32, "texts": 2, "length": 128, "dtype": "float32", "device": "cpu"}
RUNS = {
    "best": {},
    "windows": {},
    "best --may-grow": {"may_grow": True},
    **{name: {"steps": 3} for name in ("features", "paper", "gdn", "lolcats")},
}
PRODUCTS = ("allocation.json", "prices.json", "candidates.json")
CONTEXT = 96  # tokens whose logits are recorded


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    file = parser.parse_args(arguments).file
    record = {name: record_run(name, options) for name, options in RUNS.items()}
    if not file.exists():
        file.write_text(json.dumps(record, indent=1))
        print(f"{len(record)} runs are recorded in {file}")
        return
    before = json.loads(file.read_text())
    changed = [f"{name}: {part}" for name, old in before.items() for part in old if record[name].get(part) != old[part]]
    print("\n".join(changed) if changed else f"nothing of {len(before)} runs has changed")
    sys.exit(bool(changed))


def record_run(name, options):
    """Hash the products of one run, its student's weights, and its logits of a text."""
    with tempfile.TemporaryDirectory() as folder, quiet():
        run = pipeline.begin(Path(folder) / "run", Plan.of(recipe=name.split()[0], **SMALL, **options))
        finish(pipeline.linearize(run))
        student = load(run.folder / "checkpoint")
        ids = torch.arange(CONTEXT)[None] * 37 % student.config.vocab_size
        with torch.inference_mode():
            logits = student(ids).logits
        weights = {key: hash_tensor(tensor) for key, tensor in sorted(student.state_dict().items())}
        files = [run.folder / product for product in PRODUCTS]
        products = {file.name: hash_text(file.read_text()) for file in files if file.exists()}
        return {**products, "weights": hash_text(json.dumps(weights)), "logits": hash_tensor(logits)}


def hash_tensor(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def hash_text(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    main()
