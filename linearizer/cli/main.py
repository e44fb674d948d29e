"""The command line: its parser, and a function that serves each command. `linearizer run MODEL --budget 256`"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from linearizer.cli import runs
from linearizer.cli.options import (
    ListRecipes,
    add_allocation_options,
    add_evaluate_options,
    add_job_options,
    add_run_options,
    add_writing_options,
    plan_changes,
    read_port,
)
from linearizer.cli.text import (
    describe_allocation,
    describe_comparison,
    describe_inspection,
    describe_preview,
    describe_profile,
    describe_reading,
    describe_run,
    print_product,
    print_stream,
    show_progress,
    verdict_lines,
)
from linearizer.errors import LinearizerError, RequestError, Stopped
from linearizer.jobs import control
from linearizer.run.evaluation_request import Request
from linearizer.run.files import write_whole
from linearizer.run.names import find_run, fresh_folder
from linearizer.run.options import options_of
from linearizer.run.plan import DEFAULT_BUDGET, Plan
from linearizer.run.plan_file import read_plan
from linearizer.serve.address import listen
from linearizer.serve.defaults import HOST, MAX_STATE_BYTES, PORT

if TYPE_CHECKING:
    from linearizer.progress import Steps
    from linearizer.run.folder import Run

Product = TypeVar("Product")
Serve = Callable[[argparse.Namespace], None]
OPERANDS = {
    "model": "a Hub id, id@revision, a local folder, or demo",
    "run": "a run's name as `linearizer runs` shows it, or its folder",
}


class Parser(argparse.ArgumentParser):
    """A parser that raises its errors, which `main` prints in a sentence as all others."""

    def error(self, message: str) -> NoReturn:
        raise RequestError(f"{message}; see `{self.prog} --help`")


def main(words: Sequence[str] | None = None) -> int:
    """Serve one command; return 0 for done, 1 for a fault, 2 for a refused request, 130 for stopped."""
    try:
        arguments = parser().parse_args(words)
        arguments.serve(arguments)
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

    def add(name: str, serve: Serve, about: str, operand: str = "", description: str | None = None) -> Any:
        """Add a command, whose first operand may be a model or a run."""
        command = commands.add_parser(name, help=about, description=description or f"{about[0].upper()}{about[1:]}.")
        command.set_defaults(serve=serve)
        if operand:
            command.add_argument(operand, metavar=operand.upper(), help=OPERANDS[operand])
        return command

    add("inspect", serve_inspect, "what a model is, and whether it can be linearized", "model")

    about = "all the steps: measure, allocate, train if the recipe does, judge, save"
    command = add("run", serve_run, about, "model")
    add_run_options(command)
    command.add_argument("--detach", action="store_true", help="work in the background: see `linearizer runs`")
    add_job_options(command)

    runs.add_options(add("runs", runs.serve_runs, "see, attach to, stop, resume and delete runs"))

    add_run_options(add("profile", serve_profile, "measure how many degrees of freedom each head uses", "model"))

    about = "share out another budget, from what a run has measured"
    description = "Share out another budget, from what a run has measured; other options stay as in its plan."
    add_allocation_options(add("allocate", serve_allocate, about, "run", description))

    add_evaluate_options(
        add("evaluate", serve_evaluate, "what the student kept, what it costs, where it breaks", "run")
    )

    command = add("compare", serve_compare, "teacher and student continue the same prompt", "run")
    command.add_argument("--prompt", default="The", help="what both continue (default: %(default)s)")
    add_writing_options(command, "how many tokens they write", 64)

    about = "the student reads a text once, and its state is written to a file"
    description = "Let a run's student read a text once, and write its state to a file for `linearizer ask`."
    command = add("read", serve_read, about, "run", description)
    command.add_argument("file", metavar="FILE", help="the text: a file, or - for standard input")
    command.add_argument("--state", type=Path, required=True, help="the file of the state")
    command.add_argument("--more", action="store_true", help="read on after what the state has read")

    about = "the student writes on after a prompt, and after the text of a state"
    description = "Let a run's student write on after a prompt, and with --state after the text of that state."
    command = add("ask", serve_ask, about, "run", description)
    wanted = command.add_mutually_exclusive_group(required=True)
    wanted.add_argument("--prompt", help="what it continues")
    wanted.add_argument(
        "--take-back", action="store_true", help="return the state to before the last --keep, or `read --more`"
    )
    command.add_argument("--state", type=Path, help="a file that `linearizer read` wrote")
    command.add_argument("--keep", action="store_true", help="let the state have read prompt and answer, too")
    add_writing_options(command, "how many tokens it writes", 256)

    command = add(
        "serve",
        serve_serve,
        "an endpoint like OpenAI's: chat and completions, streamed or not, for any number of clients",
        "run",
        description="Serve a run's student behind an endpoint like OpenAI's. Requests are computed together, and the "
        "states of conversations are kept, so that a next turn reads only what is new. vLLM serves a student "
        "that never grows, too: pip install 'linearizer[vllm]', then vllm serve RUN/checkpoint --enforce-eager. "
        "`transformers serve` serves none: it loads no code of a checkpoint.",
    )
    command.add_argument("--port", type=int, default=PORT, help="the port; 0: any free port (default: %(default)s)")
    command.add_argument("--host", default=HOST, help="the address to listen at (default: this machine alone)")
    command.add_argument(
        "--max-state-bytes",
        type=int,
        default=MAX_STATE_BYTES,
        help="for states kept between requests (default: %(default)s)",
    )
    command.add_argument("--teacher", action="store_true", help="serve the teacher instead, to compare with")

    command = add("push", serve_push, "publish a run's student on the Hub, private unless --public")
    command.add_argument("run", metavar="RUN", nargs="?", help=OPERANDS["run"])
    command.add_argument("name", metavar="OWNER/NAME", nargs="?", help="the repository; NAME alone is your own")
    command.add_argument("--space", metavar="OWNER/NAME", help="instead of a run: publish this app as a Space")
    command.add_argument("--public", action="store_true", help="let everyone see it")
    command.add_argument("--dry-run", action="store_true", help="show what would be sent, and send nothing")

    command = add("app", serve_app, "the page: all of this in a browser")
    command.add_argument("--host", help="the address to listen at (default: this machine alone)")
    command.add_argument("--port", type=read_port, help="the port (default: the first free port from 7860 on)")

    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print the product, and nothing else")
    return root


def begin_run(arguments: argparse.Namespace) -> Run:
    """Begin the run that the arguments describe, or open the run to resume."""
    from linearizer import pipeline

    folder, plan = plan_of(arguments)
    return pipeline.begin(folder, plan, resume=arguments.resume)


def plan_of(arguments: argparse.Namespace) -> tuple[Path, Plan]:
    """Give the folder and the plan of the run that the arguments describe."""
    changes = plan_changes(arguments)
    if arguments.plan is None:
        plan = Plan.of(**{"budget": DEFAULT_BUDGET, **changes})
    else:
        plan = read_plan(arguments.plan).changed(**changes)
    if arguments.resume and arguments.out is None:
        raise RequestError("--resume needs --out: name the run's folder")
    return arguments.out or fresh_folder(plan), plan


def work_until_stopped(steps: Steps[Product], how: str) -> Product:
    """Run steps with their progress shown; where the user stops them, say how to go on."""
    try:
        return show_progress(steps)
    except KeyboardInterrupt as stopped:
        raise Stopped(f"stopped; what was finished is kept: repeat {how} to go on") from stopped


def work_in_turn(run: Run, steps: Steps[Product]) -> Product:
    """Work on a run in this process, when its device is free."""
    from linearizer.jobs.worker import work_in_foreground

    return work_until_stopped(work_in_foreground(run, steps), f"the command with --resume --out {run.folder}")


def serve_inspect(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    inspection = pipeline.inspect(arguments.model)
    print_product(arguments, asdict(inspection), describe_inspection(inspection))
    inspection.require_support()


def serve_profile(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = begin_run(arguments)
    profile = work_in_turn(run, pipeline.profile(run, held=True))
    print_product(arguments, asdict(profile), describe_profile(profile) + f"\nin {run.folder}")


def serve_allocate(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = find_run(arguments.run)
    plan = replace(run.plan, **plan_changes(arguments))
    allocation, length = pipeline.reallocate(run, plan), plan.target_tokens(run.positions)
    print_product(arguments, allocation.summary(run.layers, length), describe_allocation(allocation, run.layers))


def start_in_background(arguments: argparse.Namespace, run: Run, start: Callable[[], None]) -> None:
    """Start a process of its own for a run or an evaluation, and say how to attach to it."""
    start()
    text = f"{run.folder} is queued: linearizer runs attach {run.folder}"
    print_product(arguments, {"run": str(run.folder), "state": control.state_of(run)}, text)


def serve_job(arguments: argparse.Namespace) -> None:
    """Begin a run in a job of the Hub, or list what jobs can run on."""
    from linearizer.jobs.hub_api import list_hardware
    from linearizer.jobs.hub_start import run_in_job

    if arguments.job == ListRecipes.WORD:
        offered = list_hardware()
        text = "\n".join(f"{each.name:16}{each.in_words}" for each in offered)
        print_product(arguments, [asdict(each) for each in offered], text)
        return
    folder, plan = plan_of(arguments)
    run = run_in_job(
        folder,
        plan,
        arguments.job,
        minutes=arguments.job_minutes,
        push=arguments.push,
        owner=arguments.job_owner,
        yes=arguments.yes,
        resume=arguments.resume,
    )
    if arguments.detach:
        start_in_background(arguments, run, lambda: None)
    else:
        runs.attach(run, arguments.json)


def serve_run(arguments: argparse.Namespace) -> None:
    if arguments.job is not None:
        serve_job(arguments)
        return
    if given := [name for name in ("job_minutes", "job_owner", "push", "yes") if getattr(arguments, name)]:
        raise RequestError(f"--{given[0].replace('_', '-')} is for a job of the Hub: add --job, or leave it out")
    if arguments.detach:
        run = begin_run(arguments)
        start_in_background(arguments, run, lambda: control.start(run))
        return
    from linearizer import pipeline
    from linearizer.jobs.children import Children
    from linearizer.progress import finish
    from linearizer.publish.verdict import judge_run

    run = begin_run(arguments)
    steps = pipeline.linearize(run, held=not run.done, helpers=Children(run))
    allocation = finish(steps) if run.done else work_in_turn(run, steps)
    product = {
        "run": str(run.folder),
        "checkpoint": str(run.checkpoint),
        "verdict": None if (verdict := judge_run(run)) is None else asdict(verdict),
        **allocation.summary(run.layers, run.plan.target_tokens(run.positions)),
        "evaluation": run.evaluation_parts,
    }
    print_product(arguments, product, describe_run(run))


def serve_evaluate(arguments: argparse.Namespace) -> None:
    from linearizer.jobs.worker import work_in_foreground
    from linearizer.pipeline import evaluate
    from linearizer.publish.parts import evaluation_report

    run = find_run(arguments.run)
    request = Request.of({name: value for name, value in vars(arguments).items() if name in options_of(Request)})
    if arguments.detach and arguments.charts:
        raise RequestError("--charts is written when the evaluation ends: repeat the command without --detach then")
    if arguments.detach:
        start_in_background(arguments, run.evaluating, lambda: control.evaluate(run, asdict(request), arguments.again))
        return
    steps = evaluate(run, request, request.chosen if arguments.again else (), held=True)
    how = {"request": asdict(request), "again": arguments.again}
    work_until_stopped(work_in_foreground(run.evaluating, steps, **how), f"`linearizer evaluate {run.folder}`")
    results = run.results
    parts = {name: results[name] for name in request.chosen if name in results}
    if arguments.charts:
        from linearizer.publish.evaluation_page import write_page

        write_whole(arguments.charts, write_page(run, parts))
    report = "\n\n".join([*verdict_lines(run), evaluation_report(parts)])
    print_product(arguments, {name: part.to_plain() for name, part in parts.items()}, report)


def serve_app(arguments: argparse.Namespace) -> None:
    from linearizer.page import zerogpu

    if zerogpu.on_zerogpu():
        zerogpu.import_spaces()  # before anything else looks for a device
    if arguments.port or arguments.host:  # Gradio's own sentence names its parameters
        listen(arguments.host or HOST, arguments.port or 0).close()
    from linearizer.page import site

    try:
        site.serve(arguments.port, arguments.host)
    except OSError as error:
        raise RequestError(f"the page cannot be shown ({error}): name another --port") from error


def serve_compare(arguments: argparse.Namespace) -> None:
    from linearizer import pipeline

    run = find_run(arguments.run)
    comparison = show_progress(
        pipeline.compare_run(run, arguments.prompt, arguments.tokens, arguments.seed, arguments.sample)
    )
    print_product(arguments, asdict(comparison), describe_comparison(comparison))


def serve_read(arguments: argparse.Namespace) -> None:
    from linearizer.model import kept_state
    from linearizer.model.text import decode_text, read_whole

    run = find_run(arguments.run)
    if arguments.file == "-":
        text = decode_text("standard input", sys.stdin.buffer.read())
    else:
        text = read_whole(Path(arguments.file))
    reading = show_progress(kept_state.read(run, text, arguments.state, arguments.more))
    print_product(arguments, asdict(reading), describe_reading(reading, arguments.run, arguments.state))


def serve_ask(arguments: argparse.Namespace) -> None:
    from linearizer.model import kept_state

    run = find_run(arguments.run)
    if arguments.take_back:
        if arguments.state is None:
            raise RequestError("there is no state to take back: name its file with --state")
        reading = kept_state.take_back(run, arguments.state)
        print_product(arguments, asdict(reading), describe_reading(reading, arguments.run, arguments.state))
        return
    how = arguments.keep, arguments.tokens, arguments.seed, arguments.sample
    answer = print_stream(kept_state.ask(run, arguments.prompt, arguments.state, *how), arguments.json)
    if arguments.json:
        print_product(arguments, asdict(answer), "")


def serve_serve(arguments: argparse.Namespace) -> None:
    from linearizer.serve.server import serve

    def say(url: str, model: str) -> None:
        print_product(arguments, {"url": url, "model": model}, f"{model} is served at {url}: ctrl-C ends it")
        sys.stdout.flush()

    run = find_run(arguments.run)
    serve(run, arguments.port, arguments.host, arguments.max_state_bytes, arguments.teacher, say)


def serve_push(arguments: argparse.Namespace) -> None:
    from linearizer.publish import push

    if (arguments.space is None) == (arguments.name is None) or (
        arguments.space is not None and arguments.run is not None
    ):
        raise RequestError("push needs RUN and OWNER/NAME, or --space OWNER/NAME alone; see `linearizer push --help`")
    private = not arguments.public
    run = None if arguments.run is None else find_run(arguments.run)
    if arguments.dry_run:
        preview = push.preview(run, arguments.name, private) if run else push.preview_space(arguments.space, private)
        print_product(arguments, asdict(preview), describe_preview(preview))
        return
    for warning in push.list_warnings(run) if run else ():
        print(f"linearizer: warning: {warning}", file=sys.stderr)  # noqa: T201
    try:
        if run:
            published = show_progress(push.publish(run, arguments.name, private=private))
        else:
            published = show_progress(push.publish_space(arguments.space, private=private))
    except KeyboardInterrupt as stopped:
        raise Stopped("stopped; what has arrived is not sent again: repeat the command to go on") from stopped
    print_product(arguments, asdict(published), f"{published.url}\n\n{published.snippet}" if run else published.url)
