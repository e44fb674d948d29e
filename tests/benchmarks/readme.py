"""Measures the table of the README anew, between its markers: python -m tests.benchmarks.readme.

A run of the demo model for each recipe, all at the bytes of the same budget and on the same text; then the teacher and
a plain window through the same code.
"""

import argparse
import json
import tempfile
import textwrap
from contextlib import nullcontext
from pathlib import Path

from linearizer import pipeline
from linearizer.amounts import size
from linearizer.model.text import read_documents
from linearizer.pipeline import evaluate, linearize
from linearizer.progress import finish
from linearizer.run.evaluation_request import Request
from linearizer.run.plan import Plan

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- measured: python -m tests.benchmarks.readme -->", "<!-- measured: end -->"
BUDGET, TEXTS, LENGTH, GAPS = 64, 16, 1024, (32, 128, 448)
READ = 512  # tokens of a text that are judged: the demo teacher predicts later ones worse than a window does
DOCUMENTS = 20  # of the built-in text, its last, which are read
RECIPES = ("paper", "features", "best")
ROWS = ("teacher", "window", *RECIPES)
COLUMNS = (
    "",
    "state",
    "same next token",
    "KL to the teacher",
    "loss",
    *(f"loss after {gap}" for gap in GAPS),
)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--readme", type=Path, default=README)
    parser.add_argument("--texts", type=int, default=TEXTS)
    parser.add_argument("--work", type=Path, help="a folder that keeps the runs: a second call goes on (default: none)")
    arguments = parser.parse_args(arguments)
    content = arguments.readme.read_text(encoding="utf-8")
    before, _, rest = content.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        parser.error(f"{arguments.readme} lacks the markers {BEGIN} and {END}")
    arguments.readme.write_text(f"{before}{BEGIN}\n{measured(arguments)}\n{end}{after}", encoding="utf-8")


def measured(arguments):
    """Run every recipe, and lay the table out."""
    rows, made = {}, None
    with tempfile.TemporaryDirectory() if arguments.work is None else nullcontext(arguments.work) as folder:
        text = Path(folder) / "text.jsonl"
        text.parent.mkdir(parents=True, exist_ok=True)
        last = list(read_documents("builtin"))[-DOCUMENTS:]  # no recipe's measuring or training reaches there
        text.write_text("\n".join(json.dumps({"text": document}) for document in last), encoding="utf-8")
        for name in RECIPES:
            run = pipeline.begin(
                Path(folder) / name, Plan.of(name, model="demo", budget=BUDGET, dtype="bfloat16"), resume=True
            )
            finish(linearize(run))
            parts = ("language", "recall", "speed")
            results = finish(
                evaluate(run, Request(parts, text=f"file:{text}", texts=arguments.texts, lengths=(LENGTH,)))
            )
            rows |= {each: row_of(results, each) for each in ("teacher", "window")}  # of the last, whose bits it has
            rows[name], made = row_of(results, "student"), results["language"]
    lines = [COLUMNS, ("---",) * len(COLUMNS), *((name, *rows[name]) for name in ROWS)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + f"\n\n{note(made)}"


def row_of(parts, name):
    """Take one subject's numbers out of all parts."""
    results = parts["language"].result.at(READ), parts["recall"].result, parts["speed"].result
    language, recall, speed = (
        next(subject for subject in result.subjects if subject.name == name) for result in results
    )
    pace, kl = speed.paces[0], language.kl
    seconds = dict(zip(parts["recall"].result.gaps, recall.second, strict=True))
    return (
        size(pace.state_bytes),
        f"{100 * language.agreement.mean:.1f}%",
        f"{kl.mean:.3f} ± {(kl.interval[1] - kl.interval[0]) / 2:.3f}",
        f"{language.loss.mean:.3f}",
        *(f"{seconds[gap]:.2f}" for gap in GAPS),
    )


def note(language):
    """Say what was measured, and with what."""
    made, read = language.made_with, language.read
    versions = ", ".join(f"{name} {made.versions[name]}" for name in ("torch", "transformers"))
    text = (
        f"The demo model at the bytes of {BUDGET} tokens of cache; the first {READ} tokens of {read.texts} "
        f"texts that were held out from training, seed {read.seed}; ± half the width of a 95% interval "
        f"over {language.result.drawn}. State: after {LENGTH} tokens. {made.dtype} on "
        f"{made.device}, {versions}."
    )
    return textwrap.fill(text, 120)


if __name__ == "__main__":
    main()
