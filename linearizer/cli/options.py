"""The options of the commands, derived from the fields of Plan and Request."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.options import Option, options_of
from linearizer.plan.plan import ALLOCATION, MACHINE, MEASURING, TRAINING, Plan
from linearizer.plan.recipes import RECIPES, by_score, measured_quality, score_in_words
from linearizer.plan.rule_papers import beginning
from linearizer.run.results import Request

Add = Callable[..., Any]  # argparse's add_argument, of a command or of a group
AddCommand = Callable[..., Any]  # adds a command: its name, its function, its help, its operand, its description
OF_ENCODERS = ("pictures", "slots")  # options that only runs of encoders have
OPERANDS = {
    "model": "a Hub id, id@revision, id:FILE.gguf, a local folder or GGUF file, or demo",
    "run": "a run's name as `linearizer runs` shows it, or its folder",
}


def add_plan_options(command: argparse.ArgumentParser, *titles: str) -> None:
    """Add the plan's options of some groups; an option that is not set is None, and the plan decides it."""
    for title in titles:
        group = command.add_argument_group(title)
        dial = group.add_mutually_exclusive_group() if title == ALLOCATION else group
        for option in options_of(Plan).values():
            if option.limits.group == title:
                add_option((dial if option.name in ("budget", "features") else group).add_argument, option)


def add_run_options(command: argparse.ArgumentParser) -> None:
    recipe = options_of(Plan)["recipe"]
    command.add_argument(
        recipe.flag,
        action=ListRecipes,
        type=lambda text: text if text == ListRecipes.WORD else recipe.parse(text),
        help=f"{recipe.help}; {ListRecipes.WORD}: describe each, with its results on the demo model",
    )
    command.add_argument(
        "--plan",
        type=Path,
        help="a plan.json, of a run or from the page; other options change it, and --recipe changes all it decides",
    )
    command.add_argument("--out", type=read_folder, help="the run's folder (default: a new one under runs/)")
    command.add_argument("--resume", action="store_true", help="resume the run in the folder")
    add_lines(command, "recipes", {name: recipe.origin for name, recipe in RECIPES.items()})
    add_plan_options(command, ALLOCATION, MEASURING, TRAINING, MACHINE)
    of_encoders = command.add_argument_group("an encoder: --budget counts the tokens that each token sees")
    for name in OF_ENCODERS:
        add_option(of_encoders.add_argument, options_of(EncoderPlan)[name])


def add_job_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a run in a job of the Hub."""
    group = command.add_argument_group("a job of the Hub, on your account, instead of this machine")
    group.add_argument("--job", metavar="FLAVOR", help="the hardware; list: show all hardware and its current price")
    group.add_argument(
        "--job-minutes", type=int, metavar="N", help="after which the Hub ends the job (default: twice the forecast)"
    )
    group.add_argument("--job-owner", metavar="NAME", help="the organisation that pays (default: your own account)")
    group.add_argument("--push", metavar="OWNER/NAME", help="let the job publish the student, privately")
    group.add_argument("--yes", action="store_true", help="agree to the job's maximum cost, and begin it")


class ListRecipes(argparse.Action):
    """Stores the name of a recipe, or lists all recipes and exits."""

    WORD = "list"

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, value: Any, *_: Any) -> None:
        if value == self.WORD:
            print(describe_recipes())  # noqa: T201
            parser.exit()
        setattr(namespace, self.dest, value)


def describe_recipes() -> str:
    """List the recipes with their references and results."""
    lines = ["recipes, the best first, with their references and their results on the demo model:", ""]
    for name in by_score(RECIPES):
        facts = filter(None, (score_in_words(name), *measured_lines(name)))
        lines += [f"  {name:12}{RECIPES[name].origin}", *(f"{'':14}{line}" for line in facts)]
    return "\n".join(lines)


def measured_lines(name: str) -> list[str]:
    """List the results of a recipe in the quality table, and the memory that it starts from."""
    origin, rows = [beginning(name)] * bool(beginning(name)), measured_quality().get(name)
    if not rows:
        return [*origin, "not measured here yet"]
    cells = (
        f"{row.budget} tokens {row.kl:.3g} (recall {row.recall:.0%}{', untrained' * row.untrained})" for row in rows
    )
    return [*origin, f"KL at the bytes of {', '.join(cells)}"]


def add_evaluate_options(command: argparse.ArgumentParser) -> None:
    """Add the options of a request to evaluate; an option that is not set has the request's default."""
    for option in options_of(Request).values():
        add_option(command.add_argument, option)
    command.add_argument("--again", action="store_true", help="measure again what was measured before")
    command.add_argument("--detach", action="store_true", help="run in the background: see `linearizer runs`")


def read_folder(text: str) -> Path:
    """Read the name of a folder that exists or can be created."""
    try:
        if not text.strip():
            raise ValueError("it is empty")
        text.encode()
        os.stat(text)
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:  # too long, a loop of links, a parent that is no folder, surrogates
        reason = getattr(error, "strerror", None) or error
        raise argparse.ArgumentTypeError(f"{text!r} cannot be a folder ({reason}): name another") from error
    return Path(text)


def add_writing_options(command: argparse.ArgumentParser, about: str, tokens: int) -> None:
    """Add the number of tokens to write, and how they are chosen."""
    command.add_argument("--tokens", type=int, default=tokens, help=f"{about} (default: %(default)s)")
    command.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    command.add_argument("--seed", type=int, default=0, help="the seed of --sample (default: %(default)s)")
    add_raw_option(command)


def add_raw_option(command: argparse.ArgumentParser) -> None:
    command.add_argument("--raw", action="store_true", help="continue the text, without the model's chat template")


def add_option(add_argument: Add, option: Option) -> None:
    """Add one option as its field describes it."""
    text = argparse.SUPPRESS if option.limits.hidden else option.help.replace("%", "%%")
    if option.value_kind is bool:
        add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
    else:
        add_argument(option.flag, type=option.parse, help=text)


def add_lines(command: argparse.ArgumentParser, title: str, lines: dict[str, str]) -> None:
    """Explain names below the options of a command, each on a line."""
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    table = "\n".join(f"  {name:15}{about}" for name, about in lines.items())
    command.epilog = "\n\n".join(filter(None, (command.epilog, f"{title}:\n{table}")))


def plan_changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of a plan that were set; a budget replaces features, and features a budget."""
    changes = {name: value for name, value in vars(arguments).items() if name in options_of(Plan) and value is not None}
    if "features" in changes:
        changes["budget"] = None
    elif "budget" in changes:
        changes["features"] = None
    return changes
