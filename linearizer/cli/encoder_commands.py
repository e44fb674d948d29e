"""What `inspect` and `run` do with an encoder: a model that reads texts or pictures in both directions."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING

from linearizer.cli.options import plan_changes
from linearizer.cli.text import print_product, show_progress
from linearizer.errors import RequestError, Stopped
from linearizer.plan.plan import DEFAULT_BUDGET, Plan
from linearizer.run.names import absolute_path, absolute_source, fresh_folder

if TYPE_CHECKING:
    from linearizer.encoders.encoder_quality import Quality
    from linearizer.encoders.inspect_encoder import EncoderInspection

LENGTHS = (512, 2048, 8192, 32768)  # tokens, at which the share of attention is told


def add_options(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("an encoder: --budget counts the tokens that each token sees")
    group.add_argument("--pictures", metavar="FOLDER", help="the pictures to learn from and to judge on")
    about = "let tokens outside of the window share slots (default: yes)"
    group.add_argument("--slots", action=argparse.BooleanOptionalAction, default=None, help=about)


def serve_inspect(arguments: argparse.Namespace) -> bool:
    """Describe an encoder; False: the model is none."""
    from linearizer.encoders import encoder_run

    if not encoder_run.is_encoder(arguments.model):
        return False
    inspection = encoder_run.inspect(arguments.model)
    print_product(arguments, asdict(inspection), describe_encoder(inspection))
    return True


def serve_run(arguments: argparse.Namespace) -> bool:
    """Linearize an encoder; False: the model is none."""
    from linearizer.encoders import encoder_run
    from linearizer.encoders.encoder_plan import EncoderPlan

    if arguments.plan is not None or (arguments.out is not None and (arguments.out / "plan.json").exists()):
        return False  # a plan, or a run to resume, of a causal model
    changes = plan_changes(arguments)
    causal = Plan.of(
        **{"budget": DEFAULT_BUDGET, **changes}
    )  # refuses values that are none before a model is asked for
    if not encoder_run.is_encoder(changes["model"]):
        if given := [name for name in ("pictures", "slots") if getattr(arguments, name) is not None]:
            raise RequestError(f"--{given[0]} is for encoders, and {changes['model']!r} is none: leave it out")
        return False
    known = {field.name for field in fields(EncoderPlan)}
    asked = [name for name, value in changes.items() if value is not None] + ["detach"] * arguments.detach
    if unknown := [name for name in asked if name not in known]:
        raise RequestError(f"--{unknown[0].replace('_', '-')} is for causal language models: leave it out")
    pictures = absolute_path(arguments.pictures) if arguments.pictures else None
    choices = {name: value for name, value in changes.items() if name in known}
    choices |= {"pictures": pictures, "slots": arguments.slots is not False}
    plan = EncoderPlan(**{**choices, "model": absolute_path(choices["model"])})
    if "text" in choices:
        plan = EncoderPlan(**{**asdict(plan), "text": absolute_source(plan.text)})
    if arguments.resume and arguments.out is None:
        raise RequestError("--resume needs --out: name the run's folder")
    folder = arguments.out or fresh_folder(causal)
    run = encoder_run.begin(folder, plan, resume=arguments.resume)
    try:
        quality = show_progress(encoder_run.linearize(run))
    except KeyboardInterrupt as stopped:
        raise Stopped(
            f"stopped; what was finished is kept: repeat the command with --resume --out {folder} to go on"
        ) from stopped
    share = run.inspection.share(run.tokens)
    product = {
        "run": str(folder),
        "checkpoint": str(run.checkpoint),
        "tokens": run.tokens,
        "attention": share,
        "both_ways": asdict(run.both_ways),
        "quality": {name: asdict(row) for name, row in quality.items()},
    }
    about = (
        f"{run.tokens} tokens, {run.both_ways.keys:g} keys each; attention is {share:.0%} of the teacher's operations"
    )
    print_product(arguments, product, "\n".join([about, "", *quality_lines(quality), "", describe_use(run.checkpoint)]))
    return True


def describe_encoder(inspection: EncoderInspection) -> str:
    """Describe an encoder, and what its attention costs."""
    longest = inspection.tokens
    lengths = LENGTHS if inspection.reads == "texts" else (longest, 4 * longest, 16 * longest)
    shares = ", ".join(f"{inspection.share(tokens):.0%} at {tokens:,}" for tokens in lengths)
    shape = f"{inspection.layers} layers of {inspection.heads} heads of size {inspection.head_dim}"
    lines = {
        "model": f"{inspection.name} ({inspection.architecture}), an encoder of {inspection.reads}",
        "parameters": f"{inspection.parameters:,}",
        "attention": f"in both directions, {shape}",
        "tokens": f"{longest:,} of " + ("a text at most" if inspection.reads == "texts" else "a picture"),
        "its share": f"of the model's operations: {shares} tokens",
        "licence": inspection.licence or "not stated",
        "supported": "yes, and tested" if inspection.tested else "yes",
    }
    return "\n".join(f"{name:12}{value}" for name, value in lines.items())


def quality_lines(quality: Mapping[str, Quality]) -> list[str]:
    """Return the rows of a table: the student and its controls beside the teacher."""
    lines = [f"{'':18}{'keys':>6}{'KL':>9}{'agreement':>11}{'cosine':>8}{'hidden':>8}"]
    for name, row in quality.items():
        numbers = f"{row.keys:>6g}{row.kl:>9.4f}{row.agreement:>11.1%}{row.cosine:>8.4f}{row.hidden:>8.4f}"
        lines.append(f"{name:18}{numbers}")
    return lines


def describe_use(checkpoint: Path) -> str:
    return f"AutoModel.from_pretrained({str(checkpoint)!r}, trust_remote_code=True)"
