"""The commands that make and judge a student: inspect, run, allocate, evaluate."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from linearizer.cli import runs
from linearizer.cli.options import (
    OF_ENCODERS,
    OPERANDS,
    AddCommand,
    ListRecipes,
    add_evaluate_options,
    add_job_options,
    add_plan_options,
    add_run_options,
    plan_changes,
)
from linearizer.cli.text import (
    describe_allocation,
    describe_encoder,
    describe_inspection,
    describe_run,
    print_product,
    show_progress,
    verdict_lines,
)
from linearizer.errors import RequestError, Stopped
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.options import options_of
from linearizer.plan.plan import ALLOCATION, DEFAULT_BUDGET, Plan
from linearizer.progress import Steps
from linearizer.report.head_needs import needs_of, needs_table
from linearizer.report.parts import evaluation_report
from linearizer.report.tables import write_tables
from linearizer.report.verdict import predict_kl
from linearizer.run.folder import PLAN, Run, read_plan
from linearizer.run.names import find_run, fresh_folder
from linearizer.run.results import Request
from linearizer.workers import control
from linearizer.workers.launch import follow_launched, launched, ranks_for

if TYPE_CHECKING:
    from linearizer.encoders.encoder_quality import Judgement

Product = TypeVar("Product")


def add_commands(add: AddCommand) -> None:
    about = "describe a model, and whether it can be linearized; or the heads of a run, by its folder"
    inspect = add("inspect", serve_inspect, about, "model")
    inspect.add_argument("--text-only", action="store_true", help="as a model of text, if it reads pictures")
    run = add("run", serve_run, "all steps: measure, allocate, train if the recipe does, judge, save")
    run.add_argument("model", metavar="MODEL", nargs="?", help=OPERANDS["model"])  # `--job list` needs none
    add_run_options(run)
    run.add_argument("--detach", action="store_true", help="run in the background: see `linearizer runs`")
    add_job_options(run)
    about = "allocate another budget from the measurements of a run; other options stay as in its plan"
    add_plan_options(add("allocate", serve_allocate, about, "run"), ALLOCATION)
    about = "what the student kept, what it costs, where it breaks"
    add_evaluate_options(add("evaluate", serve_evaluate, about, "run"))


def begin_run(arguments: argparse.Namespace) -> Run:
    """Begin the run that the arguments describe, or open the run to resume."""
    from linearizer import checks, pipeline
    from linearizer.encoders.kinds import find_kind

    plan = plan_of(arguments)  # refuses wrong values before the model is looked up
    is_causal = arguments.plan is not None or (arguments.out is not None and os.path.exists(arguments.out / PLAN))
    kind = None if is_causal else find_kind(arguments.model)
    if kind is not None:
        encoder_plan = checks.with_absolute_paths(encoder_plan_of(arguments))
        return kind.begin(folder_of(arguments, encoder_plan), encoder_plan, resume=arguments.resume).run
    refuse_encoder_options(arguments, f"and {plan.model!r} is not an encoder: leave it out")
    return pipeline.begin(folder_of(arguments, plan), plan, resume=arguments.resume)


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan of the run that the arguments describe."""
    changes = plan_changes(arguments)
    if arguments.plan is None:
        return Plan.of(**{"budget": DEFAULT_BUDGET, **changes})
    return read_plan(arguments.plan).changed(**changes)


def encoder_plan_of(arguments: argparse.Namespace) -> EncoderPlan:
    """Return the plan of an encoder's run; refuse options that it does not have."""
    keys = options_of(EncoderPlan).keys()
    if unknown := [name for name, value in plan_changes(arguments).items() if value is not None and name not in keys]:
        raise RequestError(f"--{unknown[0].replace('_', '-')} is for causal language models: leave it out")
    return EncoderPlan(**{name: value for name, value in vars(arguments).items() if name in keys and value is not None})


def refuse_encoder_options(arguments: argparse.Namespace, reason: str) -> None:
    """Refuse options that only the run of an encoder has."""
    if named := [name for name in OF_ENCODERS if getattr(arguments, name) is not None]:
        raise RequestError(f"--{named[0]} is for encoders, {reason}")


def folder_of(arguments: argparse.Namespace, plan: Plan | EncoderPlan) -> Path:
    """Return the folder of a run: a new one, or the one that was named."""
    if arguments.resume and arguments.out is None:
        raise RequestError("--resume needs --out: name the run's folder")
    return arguments.out or fresh_folder(plan)


def work_here(run: Run, steps: Steps[Product], repeat: str = "", **details: Any) -> Product:
    """Work on a run in this process when its device is free; `repeat`: the command that goes on after ctrl-C."""
    from linearizer.workers.worker import work_in_foreground

    try:
        return show_progress(work_in_foreground(run, steps, **details))
    except KeyboardInterrupt as stopped:
        repeat = repeat or f"the command with --resume --out {run.folder}"
        raise Stopped(f"stopped; what was finished is kept: repeat {repeat} to go on") from stopped


def serve_inspect(arguments: argparse.Namespace) -> None:
    """Describe a model, or what was measured of the heads of a run."""
    from linearizer import pipeline
    from linearizer.encoders.kinds import find_kind

    if os.path.isfile(os.path.join(arguments.model, PLAN)):
        run = find_run(arguments.model)
        needs = needs_of(run, run.allocation)
        print_product(arguments, needs.to_plain(), write_tables([needs_table(needs)]))
        return
    if (kind := find_kind(arguments.model)) is not None:
        encoder = kind.inspect(arguments.model, None)
        print_product(arguments, asdict(encoder), describe_encoder(encoder, kind.title))
        return
    inspection = pipeline.inspect(arguments.model, text_only=arguments.text_only)
    print_product(arguments, asdict(inspection), describe_inspection(inspection))
    inspection.require_support()


def serve_run(arguments: argparse.Namespace) -> None:
    if launched("WORLD_SIZE") and (arguments.detach or arguments.job is not None):
        raise RequestError("--detach and --job start processes of their own: leave them out, or the launcher")
    if arguments.model is None and arguments.job != ListRecipes.WORD:
        raise RequestError("there is no model to linearize: name MODEL; see `linearizer run --help`")
    if arguments.job is not None:
        serve_job(arguments)
        return
    if options := [name for name in ("job_minutes", "job_owner", "push", "yes") if getattr(arguments, name)]:
        raise RequestError(f"--{options[0].replace('_', '-')} is for a job of the Hub: add --job, or leave it out")
    if launched():
        sys.exit(follow_launched())
    run = begin_run(arguments)
    if arguments.detach:
        control.start(run)
        say_queued(arguments, run)
        return
    from linearizer.workers.worker import work_on

    if run.done:
        with ranks_for(run):  # nothing is left for the others of a launcher
            pass
    else:
        work_here(run, work_on(run))
    print_run(arguments, run)


def print_run(arguments: argparse.Namespace, run: Run, judged: Collection[Judgement] = ()) -> None:
    """Print the student of a run and its quality; of an encoder's student, only what was `judged` now."""
    from linearizer.encoders.encoder_report import judge_any_run

    verdict = judge_any_run(run)
    product = {
        "run": str(run.folder),
        "checkpoint": str(run.checkpoint),
        "verdict": None if verdict is None else asdict(verdict),
        **(values_of_encoder(run, judged) if run.is_encoder_run else values_of_causal(run)),
    }
    print_product(arguments, product, describe_run(run, judged))


def values_of_causal(run: Run) -> dict[str, Any]:
    summary = run.require_allocation().summary(run.layers, run.plan.target_tokens(run.positions))
    return {**summary, "evaluation": run.evaluation_parts}


def values_of_encoder(run: Run, judged: Collection[Judgement]) -> dict[str, Any]:
    from linearizer.encoders.encoder_folder import EncoderRun

    encoder = EncoderRun(run)
    return {
        "tokens": encoder.tokens,
        "attention": encoder.inspection.share(encoder.tokens),
        "ways": asdict(encoder.ways),
        "quality": [asdict(entry) for entry in judged or encoder.judgements.values()],
        "times": [asdict(entry) for entry in encoder.times],
    }


def serve_job(arguments: argparse.Namespace) -> None:
    """Begin a run in a job of the Hub, or list the hardware for jobs."""
    from linearizer.hub.jobs_api import list_hardware
    from linearizer.workers.hub_jobs import run_in_job

    if arguments.job == ListRecipes.WORD:
        offered = list_hardware()
        text = "\n".join(f"{hardware.name:16}{hardware.in_words}" for hardware in offered)
        print_product(arguments, [asdict(hardware) for hardware in offered], text)
        return
    refuse_encoder_options(arguments, "which no job runs: leave out --job for an encoder, else leave this out")
    plan = plan_of(arguments)
    options = {"minutes": arguments.job_minutes, "push": arguments.push, "owner": arguments.job_owner}
    folder = folder_of(arguments, plan)
    run = run_in_job(folder, plan, arguments.job, **options, yes=arguments.yes, resume=arguments.resume)
    if arguments.detach:
        say_queued(arguments, run)
    else:
        runs.attach(run, arguments.json)


def say_queued(arguments: argparse.Namespace, run: Run) -> None:
    """Print how to attach to a run or an evaluation in the background."""
    text = f"{run.folder} is queued: linearizer runs attach {run.folder}"
    print_product(arguments, {"run": str(run.folder), "state": control.state_of(run)}, text)


def serve_allocate(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = find_run(arguments.run)
    plan = replace(run.plan, **plan_changes(arguments))
    allocation, length = pipeline.reallocate(run, plan), plan.target_tokens(run.positions)
    kl = predict_kl(run, plan, allocation)
    text = describe_allocation(allocation, run.layers) + (f"\nkl, nats: {kl}" if kl else "")
    print_product(arguments, allocation.summary(run.layers, length), text)


def serve_evaluate(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = find_run(arguments.run, encoders=True)
    values = {name: value for name, value in vars(arguments).items() if name in options_of(Request)}
    if run.is_encoder_run and arguments.texts is None:
        values["texts"] = run.encoder_plan.texts
    request = Request.of(values)
    if arguments.detach:
        control.evaluate(run, asdict(request), arguments.again)
        say_queued(arguments, run.evaluating)
        return
    details = {"request": asdict(request), "again": arguments.again}
    repeat = f"`linearizer evaluate {run.folder}`"
    steps = pipeline.evaluate_run(run, request, request.chosen if arguments.again else (), locked=True)
    measured = work_here(run.evaluating, steps, repeat, **details)
    if run.is_encoder_run:
        print_run(arguments, run, measured.values())
        return
    parts = {name: measured[name] for name in request.chosen if name in measured}
    report = "\n\n".join([*verdict_lines(run), evaluation_report(parts)])
    print_product(arguments, {name: part.to_plain() for name, part in parts.items()}, report)
