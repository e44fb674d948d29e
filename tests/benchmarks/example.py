"""Make the finished example that comes with the package:  python -m tests.benchmarks.example  (five minutes).

It is a run of the demo model that was evaluated in every part: its JSON products and its log, without weights. With
`--run FOLDER` the run is kept there, and can be resumed. `--rewrite` measures nothing: it reads the example and writes
it as the current code does, for a field that a product gained.
"""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)

FOLDER = Path(__file__).parents[2] / "assets" / "example-run"
RUN = "run demo --budget 64 --seed 0".split()
EVALUATE = "--seconds 2".split()
PRODUCTS = (
    "begun.json", "plan.json", "inspection.json", "profile.json", "prices.json", "candidates.json", "allocation.json",
    "evaluation.json", "events.jsonl",
)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--rewrite", action="store_true")
    arguments = parser.parse_args()
    if arguments.rewrite:
        return rewrite()
    with tempfile.TemporaryDirectory() as folder:
        return make(arguments.run or Path(folder) / "run")


def rewrite():
    """Write the example as the current code does."""
    from linearizer.run.folder import Run

    example = Run(FOLDER)
    for name in ("begun", "plan", "inspection", "profile", "prices", "allocation"):
        example.write_product(f"{name}.json", getattr(example, name).to_json())
    example.write_evaluation(parts={name: part.to_plain() for name, part in example.results.items()})


def make(run):
    """Make or resume the run, and copy its products."""
    from linearizer.cli.main import main as linearizer

    begun = ["--resume"] if (run / "plan.json").exists() else []
    for words in ([*RUN, "--out", str(run), *begun], ["evaluate", str(run), *EVALUATE]):
        if code := linearizer(words):
            sys.exit(code)
    FOLDER.mkdir(exist_ok=True)
    for name in PRODUCTS:
        shutil.copyfile(run / name, FOLDER / name)
    print(f"{sum(path.stat().st_size for path in FOLDER.iterdir()):,} bytes in {FOLDER}")


if __name__ == "__main__":
    main()
