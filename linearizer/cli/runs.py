"""The command `linearizer runs`: see, follow, stop, resume and delete runs that work in processes of their own."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from linearizer.amounts import columns, size
from linearizer.cli import text as terminal
from linearizer.errors import FaultError, RequestError, Stopped
from linearizer.jobs import control
from linearizer.jobs.control import Status
from linearizer.progress import Progress
from linearizer.run import folder
from linearizer.run.find import find_run, runs_root
from linearizer.run.folder import Run

ACTIONS = {
    "list": "all runs under the root (the default)",
    "attach": "follow a run to its end; ctrl-C leaves it, and it goes on",
    "stop": "let it finish its step, save and stop",
    "resume": "go on, in the background",
    "use": "end its training at this step, judge and save what there is",
    "delete": "remove its folder",
}


def add_options(command: argparse.ArgumentParser) -> None:
    said = "; ".join(f"{name}: {text}" for name, text in ACTIONS.items())
    command.add_argument("action", metavar="ACTION", nargs="?", default="list", choices=list(ACTIONS), help=said)
    command.add_argument("run", metavar="RUN", nargs="?", help="a run's folder, or its name under the root")
    command.add_argument("--root", type=Path, help="where the runs are (default: LINEARIZER_RUNS, or runs)")


def serve(asked: argparse.Namespace) -> None:
    """Do what was asked of one run, or list all."""
    root = asked.root or runs_root()
    if asked.action == "list":
        if asked.run is not None:
            raise RequestError(
                f"list shows all runs, not {asked.run!r}: leave it out, or name an action such as attach"
            )
        found = control.runs_in(root)
        say(asked, [as_json(one) for one in found], table(found) if found else f"no runs in {root}")
        return
    if asked.run is None:
        raise RequestError("name the run: its folder, or its name as `linearizer runs` shows it")
    run = find_run(asked.run, root)
    if asked.action == "attach":
        attach(run, asked.json)
        return
    if asked.action == "delete":
        control.delete(run)
        say(asked, {"deleted": str(run.folder)}, f"{run.folder} is deleted")
        return
    {"stop": control.stop, "resume": resume, "use": control.use_now}[asked.action](run)
    done = {"stop": "will stop after its step", "resume": "is queued", "use": "will end its training after this step"}
    text = f"{run.folder} {done[asked.action]}: linearizer runs attach {run.folder}"
    say(asked, as_json(control.status(run)), text)


def resume(run: Run) -> None:
    """Go on with a run; or, where that is done, with the evaluation of its student."""
    if run.done and (there := control.status(run).evaluation) is not None and there.state != "done":
        control.evaluate(run)
    else:
        control.start(run)


def attach(run: Run, as_lines: bool = False) -> None:
    """Show the progress of a run, or of its evaluation, until it ends, and then what came of it."""
    evaluation = control.status(run).evaluation
    if evaluation is not None and evaluation.live:
        run = run.evaluating
    bar = terminal.Bar(sys.stderr)
    if bar.shown:
        sys.stderr.write("ctrl-C leaves this display; the run goes on\n")
    try:
        wait_in_line(run, bar)
        for event in (event for events in control.follow(run) for event in events):
            if as_lines:
                print(json.dumps(event), flush=True)  # noqa: T201
            elif "total" in event and "done" in event:
                shown = Progress(event["event"], event["done"], event["total"], event.get("unit", ""))
                bar.show(shown, event["time"])
    except KeyboardInterrupt as left:
        raise Stopped(f"left {run.folder}, which goes on: linearizer runs attach {run.folder}") from left
    finally:
        bar.clear()
    found = control.status(run)
    if found.state == "stopped":
        why = f" ({found.error})" if found.error else ""
        raise Stopped(f"{run.folder} is stopped{why}: linearizer runs resume {run.folder}")
    if found.state != "done":
        raise FaultError(f"{run.folder} {'failed' if found.state == 'failed' else 'is lost'}: {found.error}")
    if not as_lines:
        print(terminal.run_text(run) if run.job is None else evaluation_text(run))  # noqa: T201


def evaluation_text(run: Run) -> str:
    """Say what the parts that were last asked for have found."""
    from linearizer.publish.parts import evaluation_report
    from linearizer.run.evaluation_request import Request

    found, chosen = run.evaluation_parts, Request.of(folder.newest_request(run)[0]).chosen
    return evaluation_report({part: found[part] for part in chosen if part in found})


def wait_in_line(run: Run, bar: terminal.Bar) -> None:
    """Show the place of a run that waits for its device."""
    while (found := control.status(run)).state == "queued":
        bar.print(f"{'queue':>10}  place {found.place}")
        time.sleep(control.OFTEN)


def as_json(found: Status) -> dict[str, Any]:
    """Say what a run is doing as plain values."""
    plain = {field.name: getattr(found, field.name) for field in fields(found) if field.name != "evaluation"}
    evaluation = found.evaluation and {
        name: getattr(found.evaluation, name) for name in ("state", "place", "step", "error")
    }
    names = {"name": found.run.folder.name, "run": str(found.run.folder)}
    return {**plain, **names, **asked_of(found.run), "evaluation": evaluation}


def asked_of(run: Run) -> dict[str, Any]:
    """Say what a run was asked for; nothing if its plan is damaged."""
    try:
        plan = run.plan
    except RequestError:
        return {"model": None, "budget": None, "features": None}
    return {"model": plan.model, "budget": plan.budget, "features": plan.features}


def table(found: Sequence[Status]) -> str:
    """Lay out what runs are doing, a line for each, and below why some failed."""
    rows: list[Sequence[object]] = [("run", "model", "budget", "state", "progress", "disk", "age")]
    for one in found:
        asked = asked_of(one.run)
        dial = f"C = {asked['features']}" if asked["features"] else asked["budget"] or "?"
        shown = one.evaluation if one.evaluation is not None and one.state == "done" else one
        state = shown.state if shown.place is None else f"queued, place {shown.place}"
        state = state if shown is one else f"done, evaluation {state}"
        step = "" if shown.step is None else f"{shown.step['event']} {shown.step['done']}/{shown.step['total']}"
        model = printable(asked["model"] or "?")
        age = since(time.time() - one.begun)
        rows.append((printable(one.run.folder.name), model, dial, state, step, size(one.disk_bytes), age))
    told = [
        (one.run.folder.name, said) for one in found for said in (one.error, one.evaluation and one.evaluation.error)
    ]
    errors = [f"{printable(name)}: {printable(error)}" for name, error in told if error]
    places = [
        f"{printable(one.run.folder.name)}: {printable(terminal.published_text(one.published))}"
        for one in found
        if one.published
    ]
    return "\n".join([columns(rows), *errors, *places])


def printable(text: str) -> str:
    """Keep what a name holds from commanding the terminal."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def since(seconds: float) -> str:
    """Say a time in one unit."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def say(asked: argparse.Namespace, product: object, text: str) -> None:
    """Print what came of it, for people or for programs."""
    print(json.dumps(product, indent=1) if asked.json else text)  # noqa: T201
