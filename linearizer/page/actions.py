"""The actions of a visitor. Each is an endpoint of the API, for `gradio_client` and for agents.

On a Space, send a `secret` of your own (16 characters or more) with every call, or sign in: your runs are found by it.
On your own machine it may be empty.

Endpoints return dataclasses, which are sent as dictionaries. The words in braces in their descriptions are replaced by
the options of plans and requests.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from glob import escape, glob
from typing import Any, TypeVar

from linearizer.errors import LinearizerError, ModelNotAvailable, RequestError
from linearizer.hub.jobs_api import Hardware
from linearizer.hub.repository import Preview, Published
from linearizer.page import limits, plan_cards, sending, zerogpu
from linearizer.page.chat import answers, cards, chats
from linearizer.page.chat.chats import Settings
from linearizer.page.planning import ExaminedEncoder, examine_model, make_encoder_plan, make_plan
from linearizer.page.visitors import Visitor, check_name, on_space
from linearizer.plan.encoder_plan import EncoderInspection
from linearizer.plan.inspection import Inspection
from linearizer.plan.plan import ADJUSTABLE, Plan
from linearizer.report import markup
from linearizer.report.head_needs import needs_of
from linearizer.report.verdict import Verdict
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.results import Comparison, Request, StateSizes
from linearizer.workers import control, runs
from linearizer.workers.control import Status

Choice = str | int | float | bool | list[str] | list[int] | None
Options = dict[str, Choice] | None
Fact = str | int | float | bool | list | dict | None
Update = TypeVar("Update", Comparison, StateSizes)
MAX_MODELS_FOUND = 20
PROFILE, SAMPLES = "profile.json", "state/samples.safetensors"  # are measured together
MEASURED_FILES = (PROFILE, "prices.json", "gates.json", SAMPLES, "state/texts.safetensors")  # for every budget


@dataclass(frozen=True)
class RunStatus:
    """What a run or its evaluation is doing, and its results; times are seconds since 1970."""

    run: str
    state: str | None
    step: dict[str, Fact] | None = None
    begun: float | None = None
    changed: float | None = None
    disk_bytes: int | None = None
    saved: float | None = None
    error: str | None = None
    published: dict[str, Fact] | None = None
    evaluation: dict[str, dict] | None = None
    verdict: Verdict | None = None


def search_models(visitor: Visitor, query: str) -> list[str]:
    """Find models by a part of their name: on the Hub, and among local folders where the machine is yours."""
    from linearizer.hub import models

    local = [] if on_space() else list_local_models(query)
    demo = ["demo"] if "demo".startswith(query.strip().lower()) else []
    try:
        online = models.search_models(query.strip(), MAX_MODELS_FOUND, visitor.token)
    except ModelNotAvailable:
        if not local and not demo:
            raise
        online = []
    return [*local, *demo, *online][: MAX_MODELS_FOUND + len(local)]


def list_local_models(query: str) -> list[str]:
    """List the folders that hold a model and whose path begins with the query."""
    if not query or "\0" in query:
        return []
    configs = sorted(glob(f"{escape(os.path.expanduser(query))}*/config.json"))
    return [os.path.dirname(path) for path in configs][:MAX_MODELS_FOUND]


def inspect_model(visitor: Visitor, model: str) -> Inspection | EncoderInspection:
    """Describe a model and whether it can be linearized; no weight is downloaded."""
    return examine_model(visitor, model).inspection


def estimate_run(
    visitor: Visitor, model: str, budget: int = 256, effort: str = "Quick", options: Options = None
) -> dict[str, Fact]:
    """Forecast a run: seconds, bytes of memory, disk and download, its plan, and the command line that does the same.

    least and most: seconds by your last runs of this model, which correct the forecast; null: there are none.
    budget: {budget}. effort: {efforts}. options: {plan}.
    """
    plan = make_plan(model, budget, effort, options or {})
    examined = examine_model(visitor, plan.model)
    if isinstance(examined, ExaminedEncoder):
        raise RequestError(
            f"{plan.model!r} is an encoder: start its run with start_encoder_run, which has other options"
        )
    examined.inspection.require_support()
    examined.check(plan)
    return {**asdict(examined.with_runs(visitor).forecast(plan)), "command": plan.command(), "plan": asdict(plan)}


def start_run(visitor: Visitor, model: str, budget: int = 256, effort: str = "Quick", options: Options = None) -> str:
    """Start a run and return its name at once; the run goes on without a connection.

    budget: {budget}. effort: {efforts}. options: {plan}.
    """
    with new_run(visitor, make_plan(model, budget, effort, options or {}), adjustable(options)) as run:
        return run.folder.name


def start_encoder_run(visitor: Visitor, model: str, budget: int = 256, options: Options = None) -> str:
    """Start the run of an encoder of texts or pictures, and return its name at once, as start_run does.

    budget: how many tokens each token sees. options: {encoder}.
    """
    plan = make_encoder_plan(model, budget, options or {})
    with limits.turn(visitor), limits.naming():
        examined = examine_model(visitor, plan.model)
        if not isinstance(examined, ExaminedEncoder):
            raise RequestError(f"{plan.model!r} is not an encoder: start its run with start_run")
        limits.check_encoder_plan(plan, examined.inspection)
        run = examined.kind.begin(visitor.fresh_folder(plan), plan, visitor.token, False).run
        with deleted_on_refusal(run):
            choose_start(run)(run, visitor.token)
    return run.folder.name


def branch_run(visitor: Visitor, run: str, budget: int) -> str:
    """Start a run with another budget from what a run has measured, and return its name. budget: {budget}."""
    measured = visitor.find_run(run)
    plan_cards.require_profile(measured)
    plan, files = replace(measured.plan, budget=budget, features=None), [*filter(measured.has_file, MEASURED_FILES)]
    if SAMPLES not in files:  # as of the example: the profile is measured again, with its samples
        files.remove(PROFILE)
    with new_run(visitor, plan, ()) as branch, writing(branch.folder):
        for file in files:
            shutil.copyfile(measured.folder / file, branch.folder / file)
    return branch.folder.name


def adjustable(options: Options) -> list[str]:
    """Name the options that were not set, and so are adjusted where texts are few or short."""
    return [name for name in ADJUSTABLE if name not in (options or {})]


@contextmanager
def new_run(visitor: Visitor, plan: Plan, adjustable: Collection[str]) -> Iterator[Run]:
    """Begin a run within a visitor's limits, and start it after the `with` block; if that fails, delete its folder."""
    from linearizer import pipeline

    with limits.turn(visitor), limits.naming():
        folder = visitor.fresh_folder(plan)
        run = pipeline.begin(folder, plan, visitor.token, check_limits=limits.check_plan, adjustable=adjustable)
        with deleted_on_refusal(run):
            yield run
            choose_start(run)(run, visitor.token)


@contextmanager
def deleted_on_refusal(run: Run) -> Iterator[None]:
    """Delete the folder of a run that cannot start."""
    try:
        yield
    except LinearizerError:
        runs.delete_run(run)
        raise


def choose_start(run: Run) -> Callable[..., None]:
    """Return the function that starts a run: in a process, or on ZeroGPU in a call for each step."""
    return (zerogpu if zerogpu.on_zerogpu() and run.any_plan.device != "cpu" else control).start


def list_hardware(visitor: Visitor) -> list[Hardware]:
    """List the hardware that jobs of the Hub can run on, and the price of each per hour."""
    from linearizer.hub import jobs_api

    return list(jobs_api.list_hardware(visitor.token))


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

    It begins only if it costs at most most_usd; otherwise the error states its cost. flavor: a name that list_hardware
    returns. minutes: after which the Hub ends the job; 0: twice the forecast. push: the repository to which the job
    publishes the student, privately; empty: none. budget: {budget}. effort: {efforts}. options: {plan}.
    """
    from linearizer.workers import hub_jobs

    plan = make_plan(model, budget, effort, options or {})
    with limits.turn(visitor):
        run = hub_jobs.run_in_job(
            visitor.fresh_folder(plan),
            plan,
            flavor,
            minutes=minutes or None,
            push=push.strip() or None,
            most_usd=most_usd,
            token=visitor.token,
            adjustable=adjustable(options),
        )
    return run.folder.name


def run_status(visitor: Visitor, run: str) -> RunStatus:
    """Return a run's state, newest progress, error, disk, publication, evaluation, and the verdict on its student."""
    from linearizer.encoders.encoder_report import judge_any_run

    opened = visitor.find_run(run)
    evaluation = opened.evaluation_parts if opened.has_file("evaluation.json") else None
    return describe_status(control.status(opened), evaluation, judge_any_run(opened))


def list_runs(visitor: Visitor) -> list[RunStatus]:
    """List your runs, the newest first."""
    return [describe_status(status) for status in visitor.runs()]


def describe_status(status: Status, evaluation: Any = None, verdict: Verdict | None = None) -> RunStatus:
    """Describe a status in plain values, without paths of this machine."""
    facts = {field.name: getattr(status, field.name) for field in fields(RunStatus)[1:-2]}
    facts["error"] = status.error and markup.without_folders(status.error)
    return RunStatus(status.run.folder.name, **facts, evaluation=evaluation, verdict=verdict)


def stop_run(visitor: Visitor, run: str) -> str:
    """Ask a run to finish its step, save and stop; return its state."""
    control.stop(opened := visitor.find_own_run(run))
    return control.state_of(opened)


def end_training(visitor: Visitor, run: str) -> str:
    """End a run's training at this step, and judge and save the student as it is; return its state."""
    control.use_now(opened := visitor.find_own_run(run))
    return control.state_of(opened)


def resume_run(visitor: Visitor, run: str, *, pay: bool = False) -> str:
    """Resume a run that was stopped, lost or failed; return its state. pay: agree to the cost of another job."""
    opened = visitor.find_own_run(run)
    with limits.turn(visitor):
        runs.resume_run(opened, visitor.token, yes=pay, agree="agree", begin=choose_start(opened))
    return control.state_of(opened)


def rename_run(visitor: Visitor, run: str, name: str) -> str:
    """Rename a run that is not running; return the new name, of letters, digits and `._@+-`."""
    opened = visitor.find_own_run(run)
    check_name(name)
    sending.refuse_while_leaving(opened)
    renamed = control.rename(opened, name)
    chats.move_chats(opened, renamed)
    return renamed.folder.name


def delete_run(visitor: Visitor, run: str) -> str:
    """Delete a run that is not running; return its name."""
    opened = visitor.find_own_run(run)
    sending.refuse_while_leaving(opened)
    runs.delete_run(opened, visitor.token)
    chats.end_chats_of(opened)
    return run


def evaluate_run(visitor: Visitor, run: str, parts: list[str] | None = None, options: Options = None) -> str:
    """Start an evaluation of a finished run and return its state at once; it goes on without a connection.

    parts: some of {parts}; none: all but tasks. options: {request}.
    """
    opened, request = visitor.find_own_run(run), Request.of({**(options or {}), **({"parts": parts} if parts else {})})
    limits.check_request(request)
    with limits.turn(visitor):
        control.evaluate(opened, asdict(request), token=visitor.token, begin=choose_start(opened))
    return control.state_of(opened.evaluating)


def evaluation_status(visitor: Visitor, run: str) -> RunStatus:
    """Return the status of a run's evaluation, with the results so far; state is null if none was started."""
    opened = visitor.find_run(run)
    status, parts = control.status(opened).evaluation, opened.evaluation_parts
    return describe_status(status, parts) if status else RunStatus(run, None, evaluation=parts)


def stop_evaluation(visitor: Visitor, run: str) -> str:
    """Stop the evaluation of a run, keep its finished parts, and return its state."""
    control.stop(evaluation := visitor.find_own_run(run).evaluating)
    return control.state_of(evaluation)


def share_budget(visitor: Visitor, run: str, budget: int) -> dict[str, Fact]:
    """Divide another budget among the heads of a measured run; the model is not loaded. budget: {budget}."""
    plan, allocation = plan_cards.share_out(opened := visitor.find_run(run), budget)
    return allocation.summary(opened.layers, plan.target_tokens(opened.positions))


def head_needs(visitor: Visitor, run: str) -> dict[str, Fact]:
    """Return what each KV head of a measured run needs (degrees of freedom), costs (a price) and holds."""
    opened = visitor.find_run(run)
    return needs_of(opened, plan_cards.share_out(opened)[1]).to_plain()


def compare_models(
    visitor: Visitor,
    run: str,
    prompt: str,
    tokens: int = 64,
    seed: int = 0,
    sample: bool = False,
    *,
    as_chat: bool = True,
    system: str = "",
    window: bool = True,
    chat: str = "",
    pictures: list[str] | None = None,
) -> dict[str, Fact]:
    """Let teacher, student and a plain window answer a prompt; return their texts, tokens per second and bytes.

    prompt: {prompt}. tokens: {tokens}. seed: {seed}. as_chat: in the model's template, if it has one; else all
    continue the prompt. system: the system message of the template. window: whether the window takes part.
    chat: a name of your own; calls with the same name continue one chat, after a document as after a turn.
    pictures: {pictures}, which the models see before the prompt, if they read pictures.
    """
    talk = chats.look_up(chats.key_of(visitor, visitor.find_run(run), chat))
    cards.check_pictures(len(pictures or ()) + (talk.pictures if talk else 0))
    message = chats.Message(prompt, pictures=tuple(map(cards.take_address, pictures or ())))
    choices = message, tokens, seed, sample, Settings(as_chat, system, window), chat
    return asdict(last_of(answers.compare_models(visitor, run, *choices), Comparison))


def read_document(
    visitor: Visitor,
    run: str,
    text: str,
    *,
    as_chat: bool = True,
    system: str = "",
    window: bool = True,
    chat: str = "",
) -> StateSizes:
    """Let teacher, student and a plain window read a document, which begins a new chat; return the bytes of each.

    as_chat, system, window and chat: as for compare_models.
    """
    return last_of(answers.read_document(visitor, run, text, Settings(as_chat, system, window), chat), StateSizes)


def last_of(updates: answers.Answers, kind: type[Update]) -> Update:
    """Wait for the models, and return the last update."""
    *_, last = (None, *(update for _, update in updates))
    if not isinstance(last, kind):
        raise RequestError("the chat was ended or stopped before the models were done: send this again")
    return last


def end_chat(visitor: Visitor, run: str, chat: str) -> str:
    """Forget what was read and said in a chat, and return its name."""
    chats.end_chat(chats.key_of(visitor, visitor.find_run(run), chat))
    return chat


def download_student(visitor: Visitor, run: str) -> str:
    """Return an address, relative to the page's, from which the student can be downloaded as a zip for a minute."""
    return sending.offer_download(visitor.find_run(run))


def preview_publication(visitor: Visitor, run: str, repo_id: str, private: bool = True) -> Preview:
    """Show what publishing a run as OWNER/NAME would send: card, files, bytes, notes. Nothing is sent."""
    from linearizer.publish import push

    return push.preview(visitor.find_run(run), repo_id, private, visitor.token)


def publish_run(visitor: Visitor, run: str, repo_id: str, private: bool = True) -> Published:
    """Publish a run as OWNER/NAME, check the upload, and return repository, revision, link and snippet."""
    publication = sending.begin_publication(visitor.find_own_run(run), repo_id, private, visitor.token)
    while not publication.is_over:
        time.sleep(0.1)
    if publication.published is None:
        raise RequestError(publication.error or "publishing was interrupted: try again")
    return publication.published


ENDPOINTS = (
    search_models, inspect_model, estimate_run, start_run, start_encoder_run, list_hardware, start_job, run_status,
    list_runs, stop_run, end_training, resume_run, rename_run, delete_run, evaluate_run, evaluation_status,
    stop_evaluation, head_needs, share_budget, branch_run, compare_models, read_document, end_chat, download_student,
    preview_publication, publish_run,
)  # fmt: skip
WITHOUT_SECRET = (search_models, inspect_model, estimate_run, list_hardware)  # whose calls send no secret
ONE_AT_A_TIME = (compare_models, read_document)
