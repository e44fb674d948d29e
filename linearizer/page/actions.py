"""What a visitor can do: page and API call the same functions, and none of them knows of Gradio."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearizer.errors import BudgetError, LinearizerError, ModelNotAvailable, RequestError
from linearizer.page import limits, zerogpu, zerogpu_runs
from linearizer.page.visitors import Visitor, on_space
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer
from linearizer.plan.options import options_of
from linearizer.plan.plan import YIELDING, Plan
from linearizer.run.evaluation_request import Request
from linearizer.run.files import writing
from linearizer.run.folder import UNBOUNDED, Run
from linearizer.run.hub_job import HubJob
from linearizer.run.names import runs_root
from linearizer.workers import control, runs

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from linearizer.hub.jobs_api import Hardware
    from linearizer.plan.inspection import Inspection
    from linearizer.plan.profile import Profile
    from linearizer.workers.forecast import EvaluationForecast, Machine, RunForecast

EFFORTS = {  # sizes of the measuring that are not the plan's own, and the share of its training steps
    "Try it": ({"texts": 2, "length": 256, "samples": 512}, 1 / 6),
    "Quick": ({}, 1),
    "Thorough": ({"texts": 32, "samples": 2048}, 5),
}
MAX_MODELS_FOUND = 20
MEASURED_FILES = (
    "profile.json",
    "prices.json",
    "gates.json",
    "state/samples.safetensors",
    "state/texts.safetensors",
)  # of a run, and the same for every budget


def search_models(visitor: Visitor, query: str) -> list[str]:
    """Find models: the demo, models of the Hub, and local folders where this is no Space."""
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
    start = Path(os.path.expanduser(query))
    parent, prefix = (start, "") if query.endswith("/") else (start.parent, start.name)
    if not parent.is_dir():
        return []
    try:
        paths = sorted(path for path in parent.iterdir() if path.name.startswith(prefix))
    except OSError:  # a folder of someone else's
        return []
    return [str(path) for path in paths if (path / "config.json").is_file()][:MAX_MODELS_FOUND]


@dataclass(frozen=True, eq=False)  # Gradio hashes what it keeps for a visitor: by identity, as configs have no hash
class Examined:
    """A model before a run: what it is, its config, and the bytes that are still to be downloaded."""

    inspection: Inspection
    config: PreTrainedConfig
    download: int

    @property
    def positions(self) -> int:
        return self.inspection.max_positions or UNBOUNDED

    @cached_property
    def is_chain(self) -> bool:
        from linearizer.method.blockwise_pass import is_chain

        return is_chain(self.config)


def examine_model(visitor: Visitor, model: str) -> Examined:
    """Say what a model is and whether it can be linearized; no weight is downloaded."""
    from linearizer.hub import models
    from linearizer.teacher.inspect_model import inspect_model
    from linearizer.teacher.load import load_config

    model = (model or "").strip()
    if not model:
        raise RequestError("no model was named: write `org/name`, or take the demo")
    limits.check_model(model)
    source = models.find_model(model, visitor.token)
    config = load_config(source, visitor.token)
    inspection = inspect_model(source, config)
    return Examined(inspection, config, models.download_bytes(source) if inspection.supported else 0)


def make_plan(model: str, budget: int, effort: str, options: Mapping[str, Any]) -> Plan:
    """Make a plan of a visitor's choices; the effort, or the default, stands for what is None or empty."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError(f"effort {effort!r} is none of {', '.join(EFFORTS)}")
    given = {name: value for name, value in options.items() if value is not None and value != ""}
    known = options_of(Plan).keys() - {"model", "budget"}
    if unknown := sorted(given.keys() - known):
        raise RequestError(f"{', '.join(unknown)} is no option: there are {', '.join(sorted(known))}")
    given.setdefault("budget", None if "features" in given else budget)
    sizes, share = EFFORTS[effort]
    plan = Plan.of(**{"model": model.strip(), **sizes, **given})
    if "samples" in sizes and "samples" not in given:  # the effort's number yields to texts that are few or short
        plan = replace(plan, samples=min(sizes["samples"], plan.most_samples()))
    for name in (name for name in YIELDING if name not in given):  # the usual number is left out
        without: dict[str, Any] = {name: None}
        plan = shorter if (shorter := replace(plan, **without)).sizes == plan.sizes else plan
    if plan.steps and "steps" not in given:
        plan = replace(plan, steps=max(1, round(plan.steps * share)))
    limits.check_model(plan.model, plan.text)
    return plan


def check_plan(plan: Plan, model: Examined) -> None:
    """Refuse what the door would refuse of a plan, while its visitor still chooses."""
    from linearizer import checks

    checks.check_plan(plan, model.inspection, lambda: model.is_chain)


def forecast_run(plan: Plan, model: Examined) -> RunForecast:
    """Forecast seconds, memory and disk of a plan on this machine, whose speed is measured once."""
    from linearizer.teacher import devices
    from linearizer.workers import forecast

    # ZeroGPU's device is not there to be measured
    device = "cpu" if zerogpu.on_zerogpu() else devices.choose_device(plan.device)
    return forecast.forecast_run(plan, model.inspection, forecast.measure_speeds(device), model.download)


def describe_machine(plan: Plan, model: Examined) -> Machine:
    """Describe what a plan would run on here."""
    from linearizer.teacher.load import stored_dtype
    from linearizer.workers import forecast

    return forecast.describe_machine(plan, stored_dtype(model.config), runs_root())


def start_run(visitor: Visitor, plan: Plan, asked: Collection[str] = ()) -> str:
    """Start a run, and return its name; the run goes on without the page. What was not `asked` for yields to texts."""
    with limits.turn(visitor, runs_root()):
        return start_work(visitor, begin_run(visitor, plan, [name for name in YIELDING if name not in asked]))


def branch_run(visitor: Visitor, name: str, budget: int) -> str:
    """Start a run with another budget from the measurements of a run, and return its name."""
    old = visitor.find_run(name)
    require_profile(old)
    plan = replace(old.plan, budget=budget, features=None)
    with limits.turn(visitor, runs_root()):
        run = begin_run(visitor, plan, ["samples"])  # they are drawn: a budget with more sinks refuses none of them
        with removed_if_it_fails(run), writing(run.folder):
            for file in MEASURED_FILES:
                if old.has_file(file):
                    shutil.copyfile(old.folder / file, run.folder / file)
        return start_work(visitor, run)


def begin_run(visitor: Visitor, plan: Plan, yielding: Collection[str] = ()) -> Run:
    """Make the folder of a new run, once its plan can be served within what a visitor may use."""
    from linearizer import pipeline

    limits.check_model(plan.model, plan.text)
    folder = visitor.fresh_folder(plan)
    return pipeline.begin(folder, plan, visitor.token, check_limits=limits.check_plan, yielding=yielding)


def start_work(visitor: Visitor, run: Run) -> str:
    """Start the process of a new run, and name the run."""
    with removed_if_it_fails(run):
        choose_start(run)(run, visitor.token)
    return run.folder.name


@contextmanager
def removed_if_it_fails(run: Run) -> Iterator[None]:
    """Leave no folder behind where a new run cannot be prepared or started."""
    try:
        yield
    except LinearizerError:
        control.delete(run)
        raise


def list_hardware(visitor: Visitor) -> tuple[Hardware, ...]:
    """List what jobs of the Hub can run on, and what each costs now."""
    from linearizer.hub import jobs_api

    return jobs_api.list_hardware(visitor.token)


def offer_job(
    visitor: Visitor, plan: Plan, inspection: Inspection, flavor: str, minutes: int | None, push: str | None
) -> HubJob:
    """Say what a job for a plan costs a visitor at most."""
    from linearizer.workers import hub_start

    return hub_start.offer_job(plan, inspection, flavor, minutes=minutes, push=push, token=visitor.token)


def start_job(
    visitor: Visitor,
    plan: Plan,
    asked: Collection[str],
    flavor: str,
    minutes: int | None,
    push: str | None,
    most_usd: float,
) -> str:
    """Start a run in a job that costs its visitor at most what was agreed to, and return its name."""
    from linearizer.workers import hub_start

    limits.check_model(plan.model, plan.text)
    with limits.turn(visitor, runs_root()):
        run = hub_start.run_in_job(
            visitor.fresh_folder(plan),
            plan,
            flavor,
            minutes=minutes,
            push=push,
            most_usd=most_usd,
            token=visitor.token,
            yielding=[name for name in YIELDING if name not in asked],
        )
    return run.folder.name


def ask_run(visitor: Visitor, name: str, wish: str) -> str:
    """Stop a run, `use` its training as it is, resume it, or `pay` for a job to resume it in; return its state."""
    run = visitor.find_own_run(name)
    if wish in ("resume", "pay"):
        with limits.turn(visitor, runs_root()):
            runs.resume_run(run, visitor.token, yes=wish == "pay", agree="agree", begin=choose_start(run))
    else:
        {"stop": control.stop, "use": control.use_now}[wish](run)
    return control.state_of(run)


def delete_run(visitor: Visitor, name: str) -> None:
    """Delete a run that is not at work, for good, and what its jobs left on the Hub."""
    runs.delete_run(visitor.find_own_run(name), visitor.token)


def choose_start(run: Run) -> Callable[..., None]:
    """Choose what works on a run: a process of its own, or a call for each step where ZeroGPU lends the device."""
    return (zerogpu_runs if zerogpu.on_zerogpu() and run.plan.device != "cpu" else control).start


def start_evaluation(visitor: Visitor, name: str, choices: Mapping[str, Any]) -> str:
    """Start an evaluation of a run's student, and return its state; parts that are there as asked are kept."""
    run, request = visitor.find_own_run(name), Request.of(choices)
    limits.check_request(request)
    with limits.turn(visitor, runs_root()):
        control.evaluate(run, asdict(request), token=visitor.token, begin=choose_start(run))
    return control.state_of(run.evaluating)


def stop_evaluation(visitor: Visitor, name: str) -> str:
    """Stop an evaluation, whose finished parts are kept, and return its state."""
    run = visitor.find_own_run(name).evaluating
    control.stop(run)
    return control.state_of(run)


def forecast_evaluation(visitor: Visitor, name: str, choices: Mapping[str, Any]) -> EvaluationForecast:
    """Forecast the seconds of each part of an evaluation."""
    from linearizer.workers import forecast

    return forecast.forecast_evaluation(visitor.find_run(name), Request.of(choices))


@dataclass(frozen=True)
class Shares:
    """A budget shared out among the heads, and what it is compared with."""

    plan: Plan  # of the run, with that budget
    allocation: Allocation
    fix: Allocation | None
    layers: tuple[Layer, ...]
    length: int  # tokens of text at which the bytes of heads that may grow count
    decided: bool  # by the run itself, after measuring whole students; else predicted


def share_budget(run: Run, budget: int | None = None) -> Shares:
    """Share a budget out among the heads as the run's plan does, and as Fix does; no model is loaded.

    For the run's own budget, or none, it is what the run itself decided, once it has.
    """
    from linearizer.method.by_freedoms import allocate_by_freedoms
    from linearizer.method.decide import decide

    profile = require_profile(run)
    own = budget in (None, run.plan.budget)
    plan, layers = run.plan if own else replace(run.plan, budget=budget, features=None), run.layers
    decided = run.allocation if own else None
    allocation = decided or decide(run, plan, layers)
    try:
        fix = allocate_by_freedoms(
            profile,
            layers,
            budget=plan.budget,
            features=plan.features,
            strategy="fix",
            window=plan.kept_window,
            sinks=plan.kept_sinks,
        )
    except BudgetError:  # windows come in smaller pieces than features
        fix = None
    return Shares(plan, allocation, fix, layers, plan.target_tokens(run.positions), decided is not None)


def require_profile(run: Run) -> Profile:
    """Return the profile of a run, once all is measured that sharing out a budget needs."""
    from linearizer.method.decide import decidable

    if (profile := run.profile) is None or not decidable(run):
        raise RequestError("this run has not measured its heads yet: wait for it, or resume it")
    return profile
