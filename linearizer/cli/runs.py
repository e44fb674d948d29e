"""The command `linearizer runs`: list, attach to, stop, resume and delete runs, which have processes of their own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

from linearizer.amounts import columns, duration, size
from linearizer.cli.options import AddCommand
from linearizer.cli.text import ProgressBar, describe_publication, describe_run, print_product, printable
from linearizer.errors import FaultError, RequestError, Stopped
from linearizer.progress import Progress
from linearizer.report.parts import evaluation_report
from linearizer.run.folder import Run, newest_request
from linearizer.run.names import find_run, runs_root
from linearizer.workers import control
from linearizer.workers.control import Status
from linearizer.workers.runs import delete_run, resume_run

ACTIONS = {
    "list": "all runs under the root (the default)",
    "attach": "follow a run to its end; ctrl-C leaves it running",
    "stop": "let it finish its step, save and stop",
    "resume": "continue it, in the background",
    "use": "end its training at this step, judge and save the student",
    "delete": "remove its folder",
}


def add_command(add: AddCommand) -> None:
    command = add("runs", serve_runs, "see, attach to, stop, resume and delete runs")
    about = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    command.add_argument("action", metavar="ACTION", nargs="?", default="list", choices=list(ACTIONS), help=about)
    command.add_argument("run", metavar="RUN", nargs="?", help="a run's folder, or its name under the root")
    command.add_argument("--yes", action="store_true", help="resume: agree to the maximum cost of another job")
    command.add_argument("--root", type=Path, help="where the runs are (default: LINEARIZER_RUNS, or runs)")


def serve_runs(arguments: argparse.Namespace) -> None:
    """Serve one action on a run, or list all runs."""
    root = arguments.root or runs_root()
    if arguments.action == "list":
        if arguments.run is not None:
            raise RequestError(f"list shows all runs, not {arguments.run!r}: leave that out, or name an action")
        statuses = control.runs_in(root)
        text = describe_runs(statuses) if statuses else f"no runs in {root}"
        print_product(arguments, [status_values(status) for status in statuses], text)
        return
    if arguments.run is None:
        raise RequestError("name the run: its folder, or its name as `linearizer runs` shows it")
    run = find_run(arguments.run, root, encoders=True)
    if arguments.action == "attach":
        attach(run, arguments.json)
        return
    if arguments.action == "delete":
        delete_run(run)
        print_product(arguments, {"deleted": str(run.folder)}, f"{run.folder} is deleted")
        return
    acts: dict[str, tuple[Callable[[Run], None], str]] = {
        "stop": (control.stop, "will stop after its step"),
        "resume": (partial(resume_run, yes=arguments.yes), "is queued"),
        "use": (control.use_now, "will end its training after this step"),
    }
    act, done = acts[arguments.action]
    act(run)
    text = f"{run.folder} {done}: linearizer runs attach {run.folder}"
    print_product(arguments, status_values(control.status(run)), text)


def attach(run: Run, as_lines: bool = False) -> None:
    """Show the progress of a run, or of its evaluation, until it ends, and then its result."""
    evaluation = control.status(run).evaluation
    if evaluation is not None and evaluation.live:
        run = run.evaluating
    bar = ProgressBar(sys.stderr)
    if bar.is_terminal:
        sys.stderr.write("ctrl-C leaves this display; the run goes on\n")
    try:
        if control.state_of(run) == "queued":
            bar.print(f"{'queue':>10}  waiting for its turn")
        for event in (event for events in control.follow(run) for event in events):
            if as_lines:
                print(json.dumps(event), flush=True)  # noqa: T201
            elif "total" in event and "done" in event:
                progress = Progress(event["event"], event["done"], event["total"], event.get("unit", ""))
                bar.show(progress, event["time"])
    except KeyboardInterrupt as left:
        raise Stopped(f"left {run.folder}, which goes on: linearizer runs attach {run.folder}") from left
    finally:
        bar.clear()
    status = control.status(run)
    if status.state == "stopped":
        reason = f" ({status.error})" if status.error else ""
        raise Stopped(f"{run.folder} is stopped{reason}: linearizer runs resume {run.folder}")
    if status.state != "done":
        raise FaultError(f"{run.folder} {'failed' if status.state == 'failed' else 'is lost'}: {status.error}")
    if not as_lines:
        of_run = run.task is None or run.is_encoder_run
        print(describe_run(run) if of_run else describe_newest_evaluation(run), *filter(None, [status.error]), sep="\n")  # noqa: T201


def describe_newest_evaluation(run: Run) -> str:
    results, chosen = run.results, newest_request(run)[0].chosen
    return evaluation_report({part: results[part] for part in chosen if part in results})


def status_values(status: Status) -> dict[str, Any]:
    """Return the status of a run as plain values."""
    plain = {field.name: getattr(status, field.name) for field in fields(status) if field.name != "plan"}
    names = {"name": status.run.folder.name, "run": str(status.run.folder)}
    evaluation = status.evaluation and {name: getattr(status.evaluation, name) for name in ("state", "step", "error")}
    return {**plain, **names, **dial_of(status), "evaluation": evaluation}


def dial_of(status: Status) -> dict[str, Any]:
    """Return the model and the budget or features of a run's plan; None if the plan is damaged."""
    return {name: getattr(status.plan, name, None) for name in ("model", "budget", "features")}


def describe_runs(statuses: Sequence[Status]) -> str:
    """Describe the status of runs, each on a line, and below why some failed and where some were published."""
    rows: list[Sequence[object]] = [("run", "model", "budget", "state", "progress", "disk", "age")]
    errors, places = [], []
    for status in statuses:
        dial, name = dial_of(status), printable(status.run.folder.name)
        budget = f"C = {dial['features']}" if dial["features"] else dial["budget"] or "?"
        work = status.evaluation if status.evaluation is not None and status.state == "done" else status
        state = work.state if work is status else f"done, evaluation {work.state}"
        step = "" if work.step is None else f"{work.step['event']} {work.step['done']}/{work.step['total']}"
        age = duration(time.time() - status.begun)
        rows.append((name, printable(dial["model"] or "?"), budget, state, step, size(status.disk_bytes), age))
        failures = status.error, status.evaluation and status.evaluation.error
        errors += [f"{name}: {printable(error)}" for error in failures if error]
        if status.published:
            places.append(f"{name}: {printable(describe_publication(status.published))}")
    return "\n".join([columns(rows), *errors, *places])
