"""The page as an API: every step is an endpoint, for `gradio_client` and for agents.

On a Space give a `secret` of your own (16 characters or more) with every call, or sign in: your runs
are found by it. On your own machine it may be empty.
"""

from __future__ import annotations

import inspect
import time
from dataclasses import asdict
from typing import Any

import gradio as gr

from linearizer.errors import RequestError
from linearizer.jobs import control
from linearizer.jobs.control import Status
from linearizer.page import actions, sending
from linearizer.page.calls import Profile, Token, identify_visitor, refusals_in_api
from linearizer.publish import html


def search_models(query: str, profile: Profile = None, token: Token = None) -> list[str]:
    """Find models by a part of their name: on the Hub, and among local folders where the machine is yours."""
    return actions.search_models(identify_visitor("", profile, token), str(query))


def inspect_model(model: str, profile: Profile = None, token: Token = None) -> dict:
    """Say what a model is and whether it can be linearized; no weight is downloaded."""
    return asdict(actions.inspect_model(identify_visitor("", profile, token), str(model)))


def estimate_run(
    model: str, budget: int = 256, effort: str = "Quick", profile: Profile = None, token: Token = None
) -> dict:
    """Forecast a run: seconds, bytes of memory, disk and download; with the command line that does the same.

    budget: tokens of cache whose bytes the state may take. effort: "Try it", "Quick" or "Thorough".
    """
    visitor = identify_visitor("", profile, token)
    plan = actions.make_plan(str(model), read_whole_number(budget), effort, {})
    inspection = actions.inspect_model(visitor, plan.model)
    inspection.require_support()
    return {
        **asdict(actions.forecast_run(plan, inspection, actions.download_bytes(visitor, plan.model))),
        "command": plan.command(),
        "plan": asdict(plan),
    }


def start_run(
    model: str,
    budget: int = 256,
    effort: str = "Quick",
    options: dict | None = None,
    secret: str = "",
    profile: Profile = None,
    token: Token = None,
) -> str:
    """Start a run and return its name at once; the run goes on without a connection.

    options: other choices of a plan by their names, as `linearizer run --help` lists them, such as {"steps": 20}.
    """
    visitor = identify_visitor(secret, profile, token)
    return actions.start_run(
        visitor, actions.make_plan(str(model), read_whole_number(budget), effort, check_options(options))
    )


def run_status(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> dict:
    """Say what a run is doing: state, place in the queue, newest progress, error, disk, where it was published, how it
    was judged, and the verdict on its student.
    """
    from linearizer.publish.verdict import judge_run

    opened = identify_visitor(secret, profile, token).find_run(run)
    evaluation = opened.evaluation_parts if opened.has_file("evaluation.json") else None
    verdict = judge_run(opened) if evaluation else None
    verdict_json = None if verdict is None else asdict(verdict)
    return {**status_to_json(control.status(opened)), "verdict": verdict_json, "evaluation": evaluation}


def list_runs(secret: str = "", profile: Profile = None, token: Token = None) -> list[dict]:
    """List your runs, the newest first."""
    return [status_to_json(status) for status in control.runs_in(identify_visitor(secret, profile, token).home)]


def stop_run(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """Ask a run to finish its step, save and stop; return its state."""
    return actions.ask_run(identify_visitor(secret, profile, token), run, "stop")


def use_run(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """End a run's training at this step, and judge and save the student as it is; return its state."""
    return actions.ask_run(identify_visitor(secret, profile, token), run, "use")


def resume_run(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """Go on with a run that was stopped, lost or failed; return its state."""
    return actions.ask_run(identify_visitor(secret, profile, token), run, "resume")


def delete_run(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """Delete a run that is not at work; return its name."""
    actions.delete_run(identify_visitor(secret, profile, token), run)
    return run


def share_budget(run: str, budget: int, secret: str = "", profile: Profile = None, token: Token = None) -> dict:
    """Share another budget out among the heads of a measured run; the model is not touched."""
    shares = actions.share_budget(identify_visitor(secret, profile, token).find_run(run), read_whole_number(budget))
    return shares.allocation.summary(shares.layers, shares.length)


def branch_run(run: str, budget: int, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """Start a run with another budget from what a run has measured, and return its name."""
    return actions.branch_run(identify_visitor(secret, profile, token), run, read_whole_number(budget))


def compare_models(
    run: str,
    prompt: str,
    tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
    secret: str = "",
    profile: Profile = None,
    token: Token = None,
) -> dict:
    """Let teacher and student continue a prompt: what each wrote, tokens a second, seconds to the first, bytes held."""
    visitor = identify_visitor(secret, profile, token)
    for both in actions.compare_models(
        visitor, run, str(prompt), read_whole_number(tokens), read_whole_number(seed), bool(sample)
    ):
        last = both
    return {"teacher": asdict(last.teacher), "student": asdict(last.student)}


def preview_publication(
    run: str, repo_id: str, private: bool = True, secret: str = "", profile: Profile = None, token: Token = None
) -> dict:
    """Show what publishing a run as OWNER/NAME would send: card, files, bytes, notes. Nothing is sent."""
    from linearizer.publish import push

    visitor = identify_visitor(secret, profile, token)
    return asdict(push.preview(visitor.find_run(run), str(repo_id), bool(private), visitor.token))


def publish_run(
    run: str, repo_id: str, private: bool = True, secret: str = "", profile: Profile = None, token: Token = None
) -> dict:
    """Publish a run as OWNER/NAME, and return once what is there was checked: repository, revision, link, snippet."""
    visitor = identify_visitor(secret, profile, token)
    publication = sending.begin_publication(visitor.find_run(run), str(repo_id), bool(private), visitor.token)
    while not publication.over:
        time.sleep(0.1)
    if publication.published is None:
        raise RequestError(publication.error or "publishing broke off: try again")
    return asdict(publication.published)


def evaluate_run(
    run: str,
    parts: list[str] | None = None,
    options: dict | None = None,
    secret: str = "",
    profile: Profile = None,
    token: Token = None,
) -> str:
    """Start an evaluation of a finished run and return its state at once; it goes on without a connection.

    parts: some of language, recall, needle, generation, approximation, speed, tasks; none: all but tasks.
    options: other choices by their names, as `linearizer evaluate --help` lists them, such as {"texts": 4}.
    """
    visitor = identify_visitor(secret, profile, token)
    return actions.start_evaluation(visitor, run, {**check_options(options), **({"parts": parts} if parts else {})})


def evaluation_status(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> dict:
    """Say how the evaluation of a run goes, with the results so far; state is null if none was started."""
    opened = identify_visitor(secret, profile, token).find_run(run)
    status = control.status(opened).evaluation
    state = {"run": run, "state": None} if status is None else status_to_json(status)
    return {**state, "found": opened.evaluation_parts}


def stop_evaluation(run: str, secret: str = "", profile: Profile = None, token: Token = None) -> str:
    """Stop the evaluation of a run, which keeps the parts that are finished; return its state."""
    return actions.stop_evaluation(identify_visitor(secret, profile, token), run)


ENDPOINTS = (
    search_models, inspect_model, estimate_run, start_run, run_status, list_runs, stop_run, use_run, resume_run,
    delete_run, evaluate_run, evaluation_status, stop_evaluation, share_budget, branch_run, compare_models,
    preview_publication, publish_run,
)  # fmt: skip


def add_endpoints() -> None:
    """Make every step an endpoint under its own name."""
    for function in ENDPOINTS:
        limit = 1 if function is compare_models else 4
        gr.api(
            refusals_in_api()(function),
            api_name=function.__name__,
            api_description=inspect.getdoc(function),
            concurrency_limit=limit,
        )


def status_to_json(status: Status) -> dict[str, Any]:
    """Describe a status in plain numbers and words, without paths of this machine."""
    facts = {key: getattr(status, key) for key in ("state", "place", "step", "begun", "changed", "disk_bytes", "saved")}
    error = status.error and html.without_folders(status.error)
    return {"run": status.run.folder.name, **facts, "error": error, "published": status.published}


def read_whole_number(number: object) -> int:
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number or abs(number) > 2**53:
        raise RequestError(f"{str(number)[:40]!r} is no whole number: give one")
    return int(number)


def check_options(options: object) -> dict[str, Any]:
    """Check that options are a dictionary, and take None as an empty one."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise RequestError("options are a dictionary of a plan's choices, such as {'steps': 20}")
    return options
