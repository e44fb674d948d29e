"""What a visitor examines and chooses before a run: the model, the plan, and the forecast of the plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from linearizer.errors import LinearizerError, RequestError
from linearizer.page import limits, zerogpu
from linearizer.page.visitors import Visitor, example_folder
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.options import options_of
from linearizer.plan.plan import ADJUSTABLE, Plan
from linearizer.run.folder import UNBOUNDED, Run
from linearizer.run.measured import CANDIDATES
from linearizer.run.names import runs_root

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from linearizer.encoders.kinds import Kind
    from linearizer.hub.models import Source
    from linearizer.plan.encoder_plan import EncoderInspection
    from linearizer.plan.inspection import Inspection
    from linearizer.workers.forecast import Machine, RunForecast, Speeds
    from linearizer.workers.past_runs import PastRuns

EFFORTS = {  # sizes of the measurement that replace the plan's, and the share of its training steps
    "Try it": ({"texts": 2, "length": 256}, 1 / 6),
    "Quick": ({}, 1),
    "Thorough": ({"texts": 32}, 5),
}


@dataclass(frozen=True, eq=False)  # Gradio hashes what it keeps for a visitor: by identity, as configs have no hash
class Examined:
    """A model before a run: its inspection, its config, and the bytes that must still be downloaded."""

    inspection: Inspection
    config: PreTrainedConfig
    download: int
    priced: Run | None = None  # a run of the same model whose heads have prices
    tower: Inspection | None = None  # of its text tower, if the whole model reads pictures
    past: PastRuns | None = None  # of the same model

    @property
    def positions(self) -> int:
        return self.inspection.max_positions or UNBOUNDED

    def plan(self, model: str, budget: int, effort: str, options: Mapping[str, Any]) -> Plan:
        """Make a plan of a visitor's choices, and refuse it if a run would refuse it before it works."""
        plan = make_plan(model, budget, effort, options)
        self.check(plan)
        return plan

    def check(self, plan: Plan) -> None:
        """Refuse a plan that a run here would refuse before it works."""
        from linearizer import checks

        checks.check_plan(plan, inspection := self.part_for(plan))
        limits.check_plan(plan, inspection)

    def part_for(self, plan: Plan) -> Inspection:
        """Return the inspection of what a plan takes of the model: its text tower, if it leaves pictures out."""
        return self.tower if plan.text_only and self.tower is not None else self.inspection

    def forecast(self, plan: Plan) -> RunForecast:
        """Forecast seconds, memory and disk of a plan on this machine; what runs of the model took corrects it."""
        from linearizer.workers import forecast

        result = forecast.forecast_run(plan, self.part_for(plan), speeds_of(plan), self.download)
        return self.past.correct(result) if self.past else result

    def with_runs(self, visitor: Visitor) -> Examined:
        """Return the same with what a visitor's runs of this model tell: their prices, and how long they took."""
        from linearizer.workers.past_runs import PastRuns

        past = None
        with suppress(LinearizerError):  # the visitor may be unknown
            past = None if zerogpu.on_zerogpu() else PastRuns.of(visitor.home, self.inspection, speeds_of)
        return replace(self, priced=find_priced(visitor, self.inspection), past=past)


@dataclass(frozen=True, eq=False)
class ExaminedEncoder:
    """An encoder before a run."""

    inspection: EncoderInspection
    kind: Kind
    download: int

    def plan(self, model: str, budget: int, effort: str, options: Mapping[str, Any]) -> EncoderPlan:
        """Make a plan of a visitor's choices, except the effort, and refuse it if a run would."""
        from linearizer.encoders.encoder_folder import check_budget
        from linearizer.encoders.encoder_run import check_pictures, decide_length

        plan = make_encoder_plan(model, budget, options)
        check_budget(replace(plan, length=decide_length(plan, self.inspection)), self.inspection)
        if self.inspection.reads == "pictures":
            check_pictures(plan)
        limits.check_encoder_plan(plan, self.inspection)
        return plan

    def forecast(self, plan: EncoderPlan) -> RunForecast:
        from linearizer.workers import forecast

        return forecast.forecast_encoder(plan, self.inspection, speeds_of(plan), self.download)


def speeds_of(plan: Plan | EncoderPlan) -> Speeds:
    """Measure the device that a plan runs on here; on ZeroGPU, which has no device yet, the CPU."""
    from linearizer.teacher import devices
    from linearizer.workers import forecast

    return forecast.measure_speeds("cpu" if zerogpu.on_zerogpu() else devices.choose_device(plan.device))


def machine_of(plan: Plan | EncoderPlan) -> Machine | None:
    """Describe the machine that a plan would run on; None: a GPU that is lent only during the work."""
    from linearizer.workers import forecast

    return None if zerogpu.on_zerogpu() else forecast.describe_machine(plan, runs_root())


def examine_model(visitor: Visitor, model: str) -> Examined | ExaminedEncoder:
    """Describe a model and whether it can be linearized; no weight is downloaded."""
    from linearizer.encoders.kinds import find_kind
    from linearizer.hub import models
    from linearizer.teacher.inspect_model import inspect_model
    from linearizer.teacher.load import load_config

    model = (model or "").strip()
    if not model:
        raise RequestError("no model was named: type `org/name`, or take the demo")
    limits.check_model(model)
    if (kind := find_kind(model, visitor.token)) is not None:
        encoder = kind.inspect(model, visitor.token)
        download = models.download_bytes(models.find_model(model, visitor.token)) if encoder.repo_id else 0
        return ExaminedEncoder(encoder, kind, download)
    source = models.find_model(model, visitor.token)
    config = load_config(source, visitor.token)
    inspection = inspect_model(source, config)
    reads = inspection.reads_pictures
    tower = inspect_model(source, load_config(source, visitor.token, text_only=True)) if reads else None
    download = models.download_bytes(source) if inspection.supported else 0
    return Examined(inspection, config, download, tower=tower)


@dataclass(frozen=True)
class Known:
    """What is known of a model without a network: the kind and the numbers of its config, and the size of its file."""

    kind: str
    parameters: int
    bytes: int
    numbers: Mapping[str, int]

    def examine(self, name: str) -> Examined:
        """Describe the model as examine_model would."""
        from transformers import AutoConfig

        from linearizer.hub.models import download_bytes
        from linearizer.teacher.inspect_model import inspect_model

        source = known_source(name, self.parameters, self.bytes)
        config = AutoConfig.for_model(self.kind, **self.numbers, tie_word_embeddings=True)
        return Examined(inspect_model(source, config), config, download_bytes(source))


def known_source(name: str, parameters: int, size: int) -> Source:
    """Describe a model of the Hub, whose weights are one file, without a network."""
    from linearizer.hub.models import Source
    from linearizer.hub.weight_files import SINGLE, Weights

    return Source(name, None, name, None, False, Weights((SINGLE,), parameters, size))


def find_priced(visitor: Visitor, inspection: Inspection) -> Run | None:
    """Find the run of a model with a measured student whose prices read most, the newest of these, or the example.

    The example says no revision of its model: any will do.
    """
    files, best, most = list[Path](), None, 0
    with suppress(LinearizerError, OSError):  # the visitor may be unknown
        files = sorted(visitor.home.glob(f"*/{CANDIDATES}"), key=lambda file: -file.stat().st_mtime)
    for run in map(Run, (*(file.parent for file in files), example_folder())):
        with suppress(LinearizerError, OSError):  # it may be damaged or deleted
            same = run.inspection.revision in (None, inspection.revision)
            if same and run.inspection.name == inspection.name:
                read = run.plan.texts_priced * run.plan.resolved_length(run.positions)
                best, most = (run, read) if read > most else (best, most)
    return best


def make_plan(model: str, budget: int, effort: str, options: Mapping[str, Any]) -> Plan:
    """Make a plan of a visitor's choices; the effort, or the default, decides what is None or empty."""
    if not isinstance(effort, str) or effort not in EFFORTS:
        raise RequestError(f"effort {effort!r} is none of {', '.join(EFFORTS)}")
    chosen = chosen_options(Plan, options)
    chosen.setdefault("budget", None if "features" in chosen else budget)
    sizes, share = EFFORTS[effort]
    plan = Plan.of(**{"model": model.strip(), **sizes, **chosen})
    for name in (name for name in ADJUSTABLE if name not in chosen):  # the usual number is left out
        without: dict[str, Any] = {name: None}
        plan = shorter if (shorter := replace(plan, **without)).sizes == plan.sizes else plan
    if plan.steps and "steps" not in chosen:
        plan = replace(plan, steps=max(1, round(plan.steps * share)))
    limits.check_model(plan.model, plan.text)
    return plan if "length" in chosen else limits.shortened(plan)


def make_encoder_plan(model: str, budget: int, options: Mapping[str, Any]) -> EncoderPlan:
    """Make the plan of an encoder's run of a visitor's choices; what is None or empty has its default."""
    from linearizer.checks import with_absolute_paths

    plan = EncoderPlan(model.strip(), budget, **chosen_options(EncoderPlan, options))
    limits.check_model(plan.model, plan.text, plan.pictures)
    return with_absolute_paths(plan)


def chosen_options(kind: type, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are neither None nor empty; refuse those that a plan does not have."""
    chosen = {name: value for name, value in options.items() if value is not None and value != ""}
    names = options_of(kind).keys() - {"model", "budget"}
    if unknown := sorted(chosen.keys() - names):
        raise RequestError(f"{', '.join(unknown)} is not an option: there are {', '.join(sorted(names))}")
    return chosen
