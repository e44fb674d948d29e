"""The command line.  linearizer run MODEL --budget 256 --out RUN"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NoReturn, TypeVar

from linearizer.cli import runs
from linearizer.cli.options import (
    add_allocation_options,
    add_evaluate_options,
    add_run_options,
    plan_changes,
    read_plan,
)
from linearizer.errors import LinearizerError, RequestError, Stopped
from linearizer.jobs import control
from linearizer.run.evaluation_request import Request
from linearizer.run.files import write_whole
from linearizer.run.options import options_of
from linearizer.run.plan import DEFAULT_BUDGET, Plan

if TYPE_CHECKING:
    from linearizer.progress import Steps
    from linearizer.run.folder import Run

Product = TypeVar("Product")


class Parser(argparse.ArgumentParser):
    """Says what is wrong with a request as everything else here does: in a sentence."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve one request; return 0 done, 1 a fault, 2 it cannot be served, 130 stopped."""
    try:
        asked = parser().parse_args(arguments)
        asked.serve(asked)
    except LinearizerError as error:
        print(f"linearizer: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code
    except KeyboardInterrupt:
        print("linearizer: stopped", file=sys.stderr)  # noqa: T201
        return Stopped.exit_code
    return 0


def parser() -> Parser:
    root = Parser(prog="linearizer", description="Turn a causal language model into one with a state of fixed size.")
    commands = root.add_subparsers(required=True, metavar="COMMAND")
    model_help = "a Hub id, id@revision, a local folder, or demo"
    run_help = "a run's name as `linearizer runs` shows it, or its folder"

    command = commands.add_parser("inspect", help="what a model is, and whether it can be linearized")
    command.add_argument("model", metavar="MODEL", help=model_help)
    command.set_defaults(serve=serve_inspect)

    command = commands.add_parser("run", help="all the steps: profile, allocate, student, checkpoint")
    command.add_argument("model", metavar="MODEL", help=model_help)
    add_run_options(command)
    command.add_argument("--detach", action="store_true", help="work in the background: see `linearizer runs`")
    command.set_defaults(serve=serve_run)

    command = commands.add_parser("runs", help="see, attach to, stop, resume and delete runs")
    runs.add_options(command)
    command.set_defaults(serve=runs.serve)

    command = commands.add_parser("profile", help="measure how many degrees of freedom each head uses")
    command.add_argument("model", metavar="MODEL", help=model_help)
    add_run_options(command)
    command.set_defaults(serve=serve_profile)

    command = commands.add_parser("allocate", help="share out another budget, from what a run has measured")
    command.add_argument("run", metavar="RUN", help=run_help)
    add_allocation_options(command)
    command.set_defaults(serve=serve_allocate)

    command = commands.add_parser("evaluate", help="what the student kept, what it costs, where it breaks")
    command.add_argument("run", metavar="RUN", help=run_help)
    add_evaluate_options(command)
    command.set_defaults(serve=serve_evaluate)

    command = commands.add_parser("compare", help="teacher and student continue the same prompt")
    command.add_argument("run", metavar="RUN", help=run_help)
    command.add_argument("--prompt", default="The", help="what both continue (default: %(default)s)")
    command.add_argument("--tokens", type=int, default=64, help="how many tokens they write (default: %(default)s)")
    command.add_argument("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    command.add_argument("--seed", type=int, default=0, help="of the drawing (default: %(default)s)")
    command.set_defaults(serve=serve_compare)

    command = commands.add_parser("push", help="publish a run's student on the Hub, private unless --public")
    command.add_argument("run", metavar="RUN", nargs="?", help=run_help)
    command.add_argument("name", metavar="OWNER/NAME", nargs="?", help="the repository; NAME alone is your own")
    command.add_argument("--space", metavar="OWNER/NAME", help="instead of a run: publish this app as a Space")
    command.add_argument("--public", action="store_true", help="let everyone see it")
    command.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")
    command.set_defaults(serve=serve_push)

    command = commands.add_parser("app", help="the page: all of this in a browser")
    command.add_argument("--host", help="the address to listen at (default: this machine alone)")
    command.add_argument("--port", type=int, help="the port (default: the first free one from 7860 on)")
    command.set_defaults(serve=serve_app)

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the product, and nothing else")
    return root


def begin(asked: argparse.Namespace) -> Run:
    """Begin the run that was asked for, or open the run to resume."""
    from linearizer import pipeline
    from linearizer.run.find import fresh_folder

    given = plan_changes(asked)
    plan = (
        Plan.of(**{"budget": DEFAULT_BUDGET, **given}) if asked.plan is None else read_plan(asked.plan).changed(**given)
    )
    if asked.resume and asked.out is None:
        raise RequestError("--resume needs --out: name the run's folder")
    dial = f"{plan.budget}" if plan.features is None else f"c{plan.features}"
    return pipeline.begin(asked.out or fresh_folder(plan.model, dial), plan, resume=asked.resume)


def work(steps: Steps[Product], how: str) -> Product:
    """Do steps with their progress shown; stopped, say how to go on."""
    from linearizer.cli import text as terminal

    try:
        return terminal.watch(steps)
    except KeyboardInterrupt as stopped:
        raise Stopped(f"stopped; what was finished is kept: repeat {how} to go on") from stopped


def work_on(run: Run, steps: Steps[Product]) -> Product:
    """Work on a run in this process, when its device is free."""
    from linearizer.jobs.worker import foreground

    return work(foreground(run, steps), f"the command with --resume --out {run.folder}")


def show(asked: argparse.Namespace, product: object, text: str) -> None:
    """Print a product, for people or for programs."""
    print(json.dumps(product, indent=1) if asked.json else text)  # noqa: T201


def serve_inspect(asked: argparse.Namespace) -> None:
    from linearizer import pipeline
    from linearizer.cli import text as terminal

    found = pipeline.inspect(asked.model)
    show(asked, asdict(found), terminal.inspection_text(found))
    found.require_support()


def serve_profile(asked: argparse.Namespace) -> None:
    from linearizer import pipeline
    from linearizer.cli import text as terminal

    run = begin(asked)
    found = work_on(run, pipeline.measure_only(run, held=True))
    show(asked, asdict(found), terminal.profile_text(found) + f"\nin {run.folder}")


def serve_allocate(asked: argparse.Namespace) -> None:
    from linearizer import pipeline
    from linearizer.cli import text as terminal
    from linearizer.run.find import find_run

    run = find_run(asked.run)
    plan = replace(run.plan, **plan_changes(asked))
    found, length = pipeline.reallocate(run, plan), plan.target_tokens(run.positions)
    show(asked, found.summary(run.layers, length), terminal.allocation_text(found, run.layers, length))


def detach(asked: argparse.Namespace, run: Run, start: Callable[[], None]) -> None:
    """Let a process of its own work on a run, or evaluate it."""
    start()
    text = f"{run.folder} is queued: linearizer runs attach {run.folder}"
    show(asked, {"run": str(run.folder), "state": control.state_of(run)}, text)


def serve_run(asked: argparse.Namespace) -> None:
    if asked.detach:
        run = begin(asked)
        detach(asked, run, lambda: control.start(run))
        return
    from linearizer import pipeline
    from linearizer.cli import text as terminal
    from linearizer.progress import finish

    run = begin(asked)
    steps = pipeline.linearize(run, held=not run.done)
    made = finish(steps) if run.done else work_on(run, steps)
    product = {
        "run": str(run.folder),
        "checkpoint": str(run.checkpoint),
        **made.summary(run.layers, run.plan.target_tokens(run.positions)),
        "evaluation": run.evaluation_parts,
    }
    show(asked, product, terminal.run_text(run))


def serve_evaluate(asked: argparse.Namespace) -> None:
    from linearizer.jobs.worker import foreground
    from linearizer.pipeline import evaluate
    from linearizer.publish.parts import evaluation_report
    from linearizer.run.find import find_run

    run = find_run(asked.run)
    request = Request.of({name: value for name, value in vars(asked).items() if name in options_of(Request)})
    if asked.detach and asked.charts:
        raise RequestError("--charts is written when the evaluation ends: repeat the command without --detach then")
    if asked.detach:
        detach(asked, run.evaluating, lambda: control.evaluate(run, asdict(request), asked.again))
        return
    steps = evaluate(run, request, request.chosen if asked.again else (), held=True)
    how = {"request": asdict(request), "again": asked.again}
    work(foreground(run.evaluating, steps, **how), f"`linearizer evaluate {run.folder}`")
    found = run.evaluation_parts
    chosen = {part: found[part] for part in request.chosen if part in found}
    if asked.charts:
        from linearizer.publish.evaluation_page import page_of

        write_whole(asked.charts, page_of(run, chosen))
    show(asked, chosen, evaluation_report(chosen))


def serve_app(asked: argparse.Namespace) -> None:
    from linearizer.page import zerogpu

    if zerogpu.on_zerogpu():
        zerogpu.import_spaces()  # before anything else looks for a device
    from linearizer.page import site

    try:
        site.serve(asked.port, asked.host)
    except OSError as error:
        raise RequestError(f"the page cannot be shown ({error}): name another --port") from error


def serve_compare(asked: argparse.Namespace) -> None:
    from linearizer import pipeline
    from linearizer.cli import text as terminal
    from linearizer.run.find import find_run

    run = find_run(asked.run)
    found = terminal.watch(pipeline.compare_run(run, asked.prompt, asked.tokens, asked.seed, asked.sample))
    show(asked, asdict(found), terminal.comparison_text(found))


def serve_push(asked: argparse.Namespace) -> None:
    from linearizer.cli import text as terminal
    from linearizer.publish import push
    from linearizer.run.find import find_run

    if (asked.space is None) == (asked.name is None) or (asked.space is not None and asked.run is not None):
        raise RequestError("push needs RUN and OWNER/NAME, or --space OWNER/NAME alone; see `linearizer push --help`")
    private = not asked.public
    run = None if asked.run is None else find_run(asked.run)
    if asked.dry_run:
        found = push.preview(run, asked.name, private) if run else push.preview_space(asked.space, private)
        show(asked, asdict(found), terminal.preview_text(found))
        return
    try:
        if run:
            done = terminal.watch(push.publish(run, asked.name, private=private))
        else:
            done = terminal.watch(push.publish_space(asked.space, private=private))
    except KeyboardInterrupt as stopped:
        raise Stopped("stopped; what has arrived is not sent again: repeat the command to go on") from stopped
    show(asked, asdict(done), f"{done.url}\n\n{done.snippet}" if run else done.url)
