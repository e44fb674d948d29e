"""The page as an API: every step is an endpoint, for `gradio_client` and for agents.

On a Space give a `secret` of your own (16 characters or more) with every call, or sign in: your runs
are found by it. On your own machine it may be empty.

Endpoints return dataclasses, which are sent as dictionaries; their types, and the words in braces in what describes
them, come from the options of plans and requests.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import gradio as gr

from linearizer.errors import RequestError
from linearizer.hub.jobs_api import Hardware
from linearizer.hub.repository import Preview, Published
from linearizer.page import actions, chat, sending
from linearizer.page.calls import Profile, Token, identify_visitor, refusals_in_api
from linearizer.page.limits import MAX_COMPARED_TOKENS, MAX_PROMPT_CHARACTERS
from linearizer.page.visitors import Visitor
from linearizer.plan.inspection import Inspection
from linearizer.plan.options import options_of
from linearizer.plan.plan import Plan
from linearizer.plan.state_size import Reading
from linearizer.report import markup
from linearizer.report.verdict import Verdict
from linearizer.run.evaluation_request import PARTS, Request
from linearizer.run.results import Difference, Side
from linearizer.workers import control
from linearizer.workers.control import Status

Choice = str | int | float | bool | list[str] | list[int] | None
Options = dict[str, Choice] | None
Fact = str | int | float | bool | list | dict | None


@dataclass(frozen=True)
class RunEstimate:
    """What a run will take, and how to do the same elsewhere."""

    seconds: float
    memory_bytes: float
    disk_bytes: float
    download_bytes: float
    command: str
    plan: Plan


@dataclass(frozen=True)
class RunStatus:
    """What a run or its evaluation is doing; times are seconds since 1970."""

    run: str
    state: str | None
    place: int | None = None  # in the queue
    step: dict[str, Fact] | None = None
    begun: float | None = None
    changed: float | None = None
    disk_bytes: int | None = None
    saved: float | None = None
    error: str | None = None
    published: dict[str, Fact] | None = None


@dataclass(frozen=True)
class JudgedStatus(RunStatus):
    """What a run is doing, and what its student is worth."""

    verdict: Verdict | None = None
    evaluation: dict[str, dict] | None = None


@dataclass(frozen=True)
class EvaluationStatus(RunStatus):
    """How an evaluation goes, and what was measured so far."""

    evaluation: dict[str, dict] | None = None


@dataclass(frozen=True)
class Sides:
    """What both models wrote, and the first token that differs."""

    teacher: Side
    student: Side
    difference: Difference | None
    why_slower: str


def search_models(visitor: Visitor, query: str) -> list[str]:
    """Find models by a part of their name: on the Hub, and among local folders where the machine is yours."""
    return actions.search_models(visitor, query)


def inspect_model(visitor: Visitor, model: str) -> Inspection:
    """Say what a model is and whether it can be linearized; no weight is downloaded."""
    return actions.examine_model(visitor, model).inspection


def estimate_run(
    visitor: Visitor, model: str, budget: int = 256, effort: str = "Quick", options: Options = None
) -> RunEstimate:
    """Forecast a run: seconds, bytes of memory, disk and download; with the command line that does the same.

    budget: {budget}. effort: {efforts}. options: {plan}.
    """
    plan = actions.make_plan(model, budget, effort, options or {})
    examined = actions.examine_model(visitor, plan.model)
    examined.inspection.require_support()
    forecast = actions.forecast_run(plan, examined)
    return RunEstimate(**asdict(forecast), command=plan.command(), plan=plan)


def start_run(visitor: Visitor, model: str, budget: int = 256, effort: str = "Quick", options: Options = None) -> str:
    """Start a run and return its name at once; the run goes on without a connection.

    budget: {budget}. effort: {efforts}. options: {plan}.
    """
    asked = options or {}
    return actions.start_run(visitor, actions.make_plan(model, budget, effort, asked), asked)


def list_hardware(visitor: Visitor) -> list[Hardware]:
    """List what jobs of the Hub can run on, and what each costs in an hour now."""
    return list(actions.list_hardware(visitor))


def start_job(
    visitor: Visitor,
    model: str,
    flavor: str,
    most_usd: float,
    budget: int = 256,
    effort: str = "Quick",
    options: Options = None,
    minutes: int = 0,
    push: str = "",
) -> str:
    """Start a run in a job of the Hub on your account, and return its name at once.

    It begins only if it costs at most most_usd, else the error says what it costs. flavor: a name that list_hardware
    gives. minutes: after which the Hub ends the job; 0: twice the forecast. push: the repository that the job publishes
    the student in, privately; empty: none. budget: {budget}. effort: {efforts}. options: {plan}.
    """
    asked = options or {}
    plan = actions.make_plan(model, budget, effort, asked)
    job = flavor, minutes or None, push.strip() or None
    return actions.start_job(visitor, plan, asked, *job, most_usd)


def run_status(visitor: Visitor, run: str) -> JudgedStatus:
    """Say what a run is doing: state, place in the queue, newest progress, error, disk, where it was published, how it
    was judged, and the verdict on its student.
    """
    from linearizer.report.verdict import judge_run

    opened = visitor.find_run(run)
    evaluation = opened.evaluation_parts if opened.has_file("evaluation.json") else None
    verdict = judge_run(opened) if evaluation else None
    return JudgedStatus(**describe_status(control.status(opened)), verdict=verdict, evaluation=evaluation)


def list_runs(visitor: Visitor) -> list[RunStatus]:
    """List your runs, the newest first."""
    return [RunStatus(**describe_status(status)) for status in control.runs_in(visitor.home)]


def stop_run(visitor: Visitor, run: str) -> str:
    """Ask a run to finish its step, save and stop; return its state."""
    return actions.ask_run(visitor, run, "stop")


def use_run(visitor: Visitor, run: str) -> str:
    """End a run's training at this step, and judge and save the student as it is; return its state."""
    return actions.ask_run(visitor, run, "use")


def resume_run(visitor: Visitor, run: str, *, pay: bool = False) -> str:
    """Go on with a run that was stopped, lost or failed; return its state. pay: agree to what another job costs."""
    return actions.ask_run(visitor, run, "pay" if pay else "resume")


def delete_run(visitor: Visitor, run: str) -> str:
    """Delete a run that is not at work; return its name."""
    actions.delete_run(visitor, run)
    return run


def share_budget(visitor: Visitor, run: str, budget: int) -> dict[str, Fact]:
    """Share another budget out among the heads of a measured run; the model is not touched. budget: {budget}."""
    shares = actions.share_budget(visitor.find_run(run), budget)
    return shares.allocation.summary(shares.layers, shares.length)


def branch_run(visitor: Visitor, run: str, budget: int) -> str:
    """Start a run with another budget from what a run has measured, and return its name. budget: {budget}."""
    return actions.branch_run(visitor, run, budget)


def compare_models(
    visitor: Visitor, run: str, prompt: str, tokens: int = 64, seed: int = 0, sample: bool = False
) -> Sides:
    """Let teacher and student continue a prompt: what each wrote, tokens a second, seconds to the first, bytes held.

    prompt: {prompt}. tokens: {tokens}. seed: {seed}.
    """
    for both in chat.compare_models(visitor, run, prompt, tokens, seed, sample):
        last = both
    why = chat.explain_speed(visitor.find_run(run), last.teacher, last.student)
    return Sides(last.teacher, last.student, last.difference, why)


def read_document(visitor: Visitor, run: str, text: str) -> Reading:
    """Let the student of a run read a document once; its state is kept with the run, for `ask_document`."""
    for step in chat.read_document(visitor, run, text):
        last = step
    assert isinstance(last, Reading), "the last value is what was read"
    return last


def ask_document(
    visitor: Visitor, run: str, prompt: str, tokens: int = 64, seed: int = 0, sample: bool = False, keep: bool = False
) -> str:
    """Let the student continue a prompt after the document that it read, as often as you like; return what it wrote.

    prompt: {prompt}. tokens: {tokens}. seed: {seed}. keep: the state remembers prompt and answer, too.
    """
    text = ""
    for text in chat.ask_document(visitor, run, prompt, tokens, seed, sample, keep):  # noqa: B007
        pass
    return text


def take_back_answer(visitor: Visitor, run: str) -> Reading:
    """Let the state of a document forget the prompt and the answer that it kept last."""
    return chat.take_back_answer(visitor, run)


def preview_publication(visitor: Visitor, run: str, repo_id: str, private: bool = True) -> Preview:
    """Show what publishing a run as OWNER/NAME would send: card, files, bytes, notes. Nothing is sent."""
    from linearizer.publish import push

    return push.preview(visitor.find_run(run), repo_id, private, visitor.token)


def publish_run(visitor: Visitor, run: str, repo_id: str, private: bool = True) -> Published:
    """Publish a run as OWNER/NAME, and return once what is there was checked: repository, revision, link, snippet."""
    publication = sending.begin_publication(visitor.find_own_run(run), repo_id, private, visitor.token)
    while not publication.over:
        time.sleep(0.1)
    if publication.published is None:
        raise RequestError(publication.error or "publishing broke off: try again")
    return publication.published


def evaluate_run(visitor: Visitor, run: str, parts: list[str] | None = None, options: Options = None) -> str:
    """Start an evaluation of a finished run and return its state at once; it goes on without a connection.

    parts: some of {parts}; none: all but tasks. options: {request}.
    """
    return actions.start_evaluation(visitor, run, {**(options or {}), **({"parts": parts} if parts else {})})


def evaluation_status(visitor: Visitor, run: str) -> EvaluationStatus:
    """Say how the evaluation of a run goes, with the results so far; state is null if none was started."""
    opened = visitor.find_run(run)
    status = control.status(opened).evaluation
    state = {"run": run, "state": None} if status is None else describe_status(status)
    return EvaluationStatus(**state, evaluation=opened.evaluation_parts)


def stop_evaluation(visitor: Visitor, run: str) -> str:
    """Stop the evaluation of a run, which keeps the parts that are finished; return its state."""
    return actions.stop_evaluation(visitor, run)


ENDPOINTS = (
    search_models, inspect_model, estimate_run, start_run, list_hardware, start_job, run_status, list_runs, stop_run,
    use_run, resume_run, delete_run, evaluate_run, evaluation_status, stop_evaluation, share_budget, branch_run,
    compare_models, read_document, ask_document, take_back_answer, preview_publication, publish_run,
)  # fmt: skip
SECRET = inspect.Parameter("secret", inspect.Parameter.POSITIONAL_OR_KEYWORD, default="", annotation=str)
ACCOUNT = (
    SECRET.replace(name="profile", default=None, annotation=Profile),
    SECRET.replace(name="token", default=None, annotation=Token),
)  # Gradio gives both where a visitor signed in
OF_NO_RUN = (search_models, inspect_model, estimate_run, list_hardware)  # whose calls send no secret
ONE_AT_A_TIME = (compare_models, read_document, ask_document, take_back_answer)


def add_endpoints() -> None:
    """Make every step an endpoint under its own name."""
    for function in ENDPOINTS:
        gr.api(
            refusals_in_api()(as_endpoint(function)),
            api_name=function.__name__,
            api_description=(inspect.getdoc(function) or "").format_map(described_options()),
            concurrency_limit=1 if function in ONE_AT_A_TIME else 4,
        )


def as_endpoint(function: Callable[..., Any]) -> Callable[..., Any]:
    """Find the visitor of an endpoint by what a call says of them, and send dataclasses as dictionaries."""
    types, own = get_type_hints(function), list(inspect.signature(function).parameters.values())[1:]
    by_name = [each for each in own if each.kind is each.KEYWORD_ONLY]  # the secret stands before these
    readers = {each.name: READERS[types[each.name]] for each in own if types[each.name] in READERS}
    secret = [] if function in OF_NO_RUN else [SECRET]
    ordered = [*(each for each in own if each not in by_name), *secret, *by_name, *ACCOUNT]
    parameters = [each.replace(kind=SECRET.kind, annotation=types.get(each.name, each.annotation)) for each in ordered]
    signature = inspect.Signature(parameters, return_annotation=types["return"])

    def plain(value: Any) -> Any:
        return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value

    @wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        bound = signature.bind(*arguments, **named)
        bound.apply_defaults()
        visitor = identify_visitor(*(bound.arguments.pop(each.name, each.default) for each in (SECRET, *ACCOUNT)))
        sent = {name: readers[name](value) if name in readers else value for name, value in bound.arguments.items()}
        result = function(visitor, **sent)
        return [plain(each) for each in result] if isinstance(result, list) else plain(result)

    call.__signature__ = signature  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in parameters} | {"return": types["return"]}
    return call


def described_options() -> dict[str, str]:
    """Give the words in braces in the descriptions of endpoints: what options may be, as plans and requests have it."""
    plan, request = options_of(Plan), options_of(Request)
    return {
        "budget": f"{plan['budget'].limits.about}; {plan['budget'].allowed}",
        "seed": plan["seed"].allowed,
        "efforts": ", ".join(actions.EFFORTS),
        "parts": ", ".join(PARTS),
        "prompt": f"at most {MAX_PROMPT_CHARACTERS} characters",
        "tokens": f"1 to {MAX_COMPARED_TOKENS}",
        "plan": list_options({name: plan[name] for name in plan if name not in ("model", "budget")}),
        "request": list_options({name: request[name] for name in request if name != "parts"}),
    }


def list_options(options: dict[str, Any]) -> str:
    """List options with the values that each may have."""
    named = (
        f"{name} ({', '.join(map(str, option.limits.choices)) or option.allowed})" for name, option in options.items()
    )
    return f"a dictionary of {'; '.join(named)}"


def describe_status(status: Status) -> dict[str, Any]:
    """Describe a status in plain numbers and words, without paths of this machine."""
    same = ("state", "place", "step", "begun", "changed", "disk_bytes", "saved", "published")
    facts = {name: getattr(status, name) for name in same}
    return {"run": status.run.folder.name, **facts, "error": status.error and markup.without_folders(status.error)}


def read_whole_number(number: object) -> int:
    return int(read_number(number, "whole number"))


def read_number(number: object, kind: str = "number") -> float:
    if isinstance(number, bool) or not isinstance(number, int | float) or number != number or abs(number) > 2**53:
        raise RequestError(f"{str(number)[:40]!r} is no {kind}: give a {kind}")
    return number


def read_options(options: object) -> Options:
    if options is None or isinstance(options, dict):
        return options
    raise RequestError("options are a dictionary of a plan's choices, such as {'steps': 20}")


READERS: dict[Any, Callable[[Any], Any]] = {
    str: str, bool: bool, int: read_whole_number, float: read_number, Options: read_options,
}  # fmt: skip
