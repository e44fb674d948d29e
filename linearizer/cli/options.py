"""What the commands take: their options, and the plan that is made of them."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from linearizer.errors import RequestError
from linearizer.run.evaluation_request import PARTS
from linearizer.run.plan import Plan
from linearizer.run.recipes import CHOSEN, RECIPES

BUDGET = 256


def add_budget_options(command: argparse.ArgumentParser) -> None:
    """Options that decide an allocation; what is not given is None, and the plan's."""
    dial = command.add_mutually_exclusive_group()
    dial.add_argument(
        "--budget", type=int, help=f"the state may cost what the KV cache costs at this many tokens (default: {BUDGET})"
    )
    dial.add_argument("--features", type=int, help="instead: mean features per KV head, the paper's C")
    command.add_argument(
        "--strategy",
        help="gain (the default), gain-features or windows: by what each head costs the model; window: all alike; "
        "duo: by learned gates; fix, dof, dof-clip, dof-mean or common-lambda: features",
    )
    command.add_argument(
        "--target-length",
        type=int,
        help="tokens at which heads left softmax are paid for (default: the model's positions)",
    )
    command.add_argument(
        "--constant", action="store_true", default=None, help="leave no head softmax: the state never grows"
    )
    command.add_argument(
        "--window",
        type=int,
        help="exact tokens before each token, where features are bought (default: half of the budget)",
    )
    command.add_argument(
        "--bits", type=int, help="of a number in what is kept, 8 or 16 (default: 8 with gain and gain-features)"
    )
    command.add_argument(
        "--sinks",
        type=int,
        help="exact tokens at the start (default: measured where heads are priced, else 4; none with --features)",
    )


def add_run_options(command: argparse.ArgumentParser) -> None:
    command.add_argument("--recipe", help=f"{', '.join(RECIPES)} (default: best); options below take precedence")
    add_budget_options(command)
    texts = {
        "feature-map": "clusters, codebook, mlp, prf, performer, dijiang or hedgehog",
        "text": "builtin, self, file:PATH or dataset:ID[:config][:split][:column]",
        "normalise": "the Gram matrix: trace, J or none",
        "gauge": "keys: centred or raw",
        "per": "degrees of freedom per KV head, or per query head as in the paper: kv or query",
        "loss": "of training: softmax, l2 or output by layer; direct or logits end to end; a+b: one after the other",
        "prices": "of heads: measured, estimated from gradients, or auto: what there is time for",
        "device": "auto, cpu, cuda, cuda:1, …",
        "dtype": "auto, float32, bfloat16 or float16",
    }
    for name, text in texts.items():
        command.add_argument(f"--{name}", help=f"{text} ({default_of(name)})")
    numbers = {
        "texts": "windows of text to measure",
        "length": "tokens of each",
        "samples": "queries and keys per head",
        "steps": "of training; 0: none",
        "lora": "rank of adapters that a loss end to end trains too",
        "exchanges": "allocations near the one chosen by gain that are measured, too",
        "batch": "texts of a step",
        "seed": "of everything that is drawn",
    }
    for name, text in numbers.items():
        command.add_argument(f"--{name}", type=int, help=f"{text} ({default_of(name)})")
    command.add_argument("--minutes", type=float, help="of training, instead of steps")
    command.add_argument(
        "--plan",
        type=Path,
        help="a plan.json, of a run or from the page; other options change it, and --recipe all that recipes decide",
    )
    command.add_argument("--out", type=Path, help="the run's folder (default: a new one under runs/)")
    command.add_argument("--resume", action="store_true", help="go on with the run in the folder")


def default_of(option: str) -> str:
    """Say what an option is if it is not given."""
    name = option.replace("-", "_")
    if name in CHOSEN:
        return "default: the recipe's"
    return f"default: {next(field.default for field in fields(Plan) if field.name == name)}"


def add_evaluate_options(command: argparse.ArgumentParser) -> None:
    """Options of a request to evaluate; what is not given is the request's default."""
    command.add_argument(
        "--parts", type=names, help=f"some of {', '.join(PARTS)} (default: all; tasks where some are named)"
    )
    command.add_argument("--text", help="as of `run` (default: the run's own, where its training did not reach)")
    command.add_argument("--length", type=int, help="tokens of a text (default: as the run's own)")
    command.add_argument("--texts", type=int, help="how many (default: 8)")
    command.add_argument("--seed", type=int, help="of everything that is drawn (default: 0)")
    command.add_argument("--lengths", type=counts, help="where lengths are compared: 1024,4096,…")
    command.add_argument("--curve-steps", type=int, help="train the features of the curve of errors, too (default: 0)")
    command.add_argument("--seconds", type=float, help="that one measurement of speed may take (default: 15)")
    command.add_argument(
        "--tasks", type=names, help="of lm_eval: piqa,arc_easy,… (needs pip install 'linearizer[tasks]')"
    )
    command.add_argument("--limit", type=int, help="samples of a task (default: all)")
    command.add_argument("--few-shot", type=int, help="examples before each sample (default: as the task says)")
    command.add_argument(
        "--task-folder", help="tasks of your own, as YAML files, which may run code that you put there"
    )
    command.add_argument("--charts", type=Path, metavar="FILE.html", help="write tables and charts as a page, too")
    command.add_argument("--again", action="store_true", help="measure again what was measured")
    command.add_argument("--detach", action="store_true", help="work in the background: see `linearizer runs`")


def names(text: str) -> tuple[str, ...]:
    """Read a list of names with commas between them."""
    return tuple(name for part in text.split(",") if (name := part.strip()))


def counts(text: str) -> tuple[int, ...]:
    """Read a list of whole numbers with commas between them."""
    return tuple(int(part) for part in text.split(",") if part.strip())


def plan_changes(asked: argparse.Namespace) -> dict[str, Any]:
    """What was given of a plan; a budget takes the place of features, and the other way round."""
    names = {field.name for field in fields(Plan)}
    given = {name: value for name, value in vars(asked).items() if name in names and value is not None}
    if "features" in given:
        given["budget"] = None
    elif "budget" in given:
        given["features"] = None
    return given


def read_plan(path: Path) -> Plan:
    """Read a plan that a run, or the page, wrote to a file."""
    try:
        return Plan.from_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, RequestError) as error:
        raise RequestError(f"{str(path)!r} cannot be read ({error.__cause__ or error}): name a plan.json") from error
