"""Make the finished example anew that comes with the package:  python -m tests.benchmarks.example  (five minutes).

It is a run of the demo model that was evaluated in every part: its JSON products and its log, without weights.
"""

import shutil
import sys
import tempfile
from pathlib import Path

from tests import conftest  # noqa: F401  (the stand-in Hub, before huggingface_hub is imported)

FOLDER = Path(__file__).parents[2] / "assets" / "example-run"
RUN = "run demo --budget 64 --seed 0".split()
EVALUATE = "--texts 8 --seconds 5".split()
PRODUCTS = (
    "begun.json", "plan.json", "inspection.json", "profile.json", "prices.json", "allocation.json", "evaluation.json",
    "events.jsonl",
)  # fmt: skip


def main():
    from linearizer.cli.main import main as linearizer

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        for words in ([*RUN, "--out", str(run)], ["evaluate", str(run), *EVALUATE]):
            if code := linearizer(words):
                sys.exit(code)
        FOLDER.mkdir(exist_ok=True)
        for name in PRODUCTS:
            shutil.copyfile(run / name, FOLDER / name)
    print(f"{sum(path.stat().st_size for path in FOLDER.iterdir()):,} bytes in {FOLDER}")


if __name__ == "__main__":
    main()
