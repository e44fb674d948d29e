"""What the commands do with an encoder: a model that reads texts or pictures in both directions."""

from __future__ import annotations

import argparse
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from linearizer.cli.options import plan_changes
from linearizer.cli.text import print_product
from linearizer.errors import RequestError
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.plan import DEFAULT_BUDGET, Plan
from linearizer.run.names import fresh_folder

if TYPE_CHECKING:
    from linearizer.plan.encoder_inspection import EncoderInspection
    from linearizer.run.folder import Run


def add_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("an encoder: --budget counts the tokens that each token sees")
    group.add_argument(
        "--pictures", metavar="SOURCE", help="the pictures to learn from and to judge on: a folder or dataset:ID"
    )
    about = "let tokens outside of the window share slots (default: yes)"
    group.add_argument("--slots", action=argparse.BooleanOptionalAction, default=None, help=about)


def serve_inspect(arguments: argparse.Namespace) -> bool:
    """Describe an encoder; False: the model is none."""
    from linearizer.encoders.kinds import find_kind

    if (kind := find_kind(arguments.model)) is None:
        return False
    inspection = kind.inspect(arguments.model, None)
    print_product(arguments, asdict(inspection), describe_encoder(inspection))
    return True


def begin_run(arguments: argparse.Namespace) -> Run | None:
    """Begin the run of an encoder, or open the run to resume; None: the model is none."""
    from linearizer.checks import with_absolute_paths
    from linearizer.encoders.kinds import find_kind

    if arguments.plan is not None or (arguments.out is not None and (arguments.out / "plan.json").exists()):
        return None  # a plan, or a run to resume, of a causal model
    changes = plan_changes(arguments)
    whole = {"budget": DEFAULT_BUDGET, **changes}
    Plan.of(**whole)  # refuses values that are none before a model is asked for
    if (kind := find_kind(changes["model"])) is None:
        if given := [name for name in ("pictures", "slots") if getattr(arguments, name) is not None]:
            raise RequestError(f"--{given[0]} is for encoders, and {changes['model']!r} is none: leave it out")
        return None
    known = {field.name for field in fields(EncoderPlan)}
    if unknown := [name for name, value in changes.items() if value is not None and name not in known]:
        raise RequestError(f"--{unknown[0].replace('_', '-')} is for causal language models: leave it out")
    if arguments.resume and arguments.out is None:
        raise RequestError("--resume needs --out: name the run's folder")
    choices: dict[str, Any] = {name: value for name, value in changes.items() if name in known}
    plan = EncoderPlan(**choices, pictures=arguments.pictures or None, slots=arguments.slots is not False)
    return kind.begin(arguments.out or fresh_folder(plan), with_absolute_paths(plan), None, arguments.resume).run


def describe_encoder(inspection: EncoderInspection) -> str:
    """Describe an encoder, and what its attention costs."""
    from linearizer.encoders.kinds import kind_of

    title = kind_of(inspection).title.format(reads=inspection.reads)
    lines = [("model", f"{inspection.name} ({inspection.architecture}), {title}"), *inspection.describe_shape()]
    return "\n".join(f"{name:12}{value}" for name, value in lines)
