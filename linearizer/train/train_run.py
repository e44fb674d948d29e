"""Initialises the student of a run, and trains it as the plan says."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice

import torch

from linearizer.method.initialise import initialise
from linearizer.method.recorder import samples_of
from linearizer.plan.allocation import Allocation
from linearizer.plan.json_products import parse_json
from linearizer.plan.plan import FITTED, Plan
from linearizer.progress import Steps
from linearizer.run import events
from linearizer.run.events import EventName
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.stopping import log_progress
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.kept_texts import texts_of_run
from linearizer.teacher.load import Teacher
from linearizer.train.distill import distill
from linearizer.train.fit_outputs import fit_maps
from linearizer.train.settings import TrainingSettings, training_settings

TIMED_STEPS = 4  # from which the seconds of a step are known


def initialise_student(run: Run, student: LinearizedForCausalLM) -> None:
    """Initialise slots and feature maps from the samples of a run's profile."""
    initialise(student, samples_of(run), run.plan.seed)


def plan_with_steps(run: Run, teacher: Teacher, student: LinearizedForCausalLM, token: str | None) -> Plan:
    """Turn the minutes of a plan into steps; a resumed run keeps their number."""
    plan = run.plan
    if plan.minutes is None:
        return plan
    if not run.has_file("state/steps.json"):
        before = {name: value.clone() for name, value in student.state_dict().items() if ".student." in name}
        initialise_student(run, student)
        texts = texts_of_run(run, teacher, TIMED_STEPS * plan.batch, token, least=plan.batch)
        seconds = [
            seconds_per_step(student, replace(settings, steps=TIMED_STEPS), texts)
            for settings in training_settings(plan)
        ]
        student.load_state_dict(before, strict=False)
        mean = sum(seconds) / len(seconds)
        steps = max(len(seconds), int(60 * plan.minutes / mean)) if mean else 0
        run.write_product("state/steps.json", json.dumps({"steps": steps}))
        run.log(EventName.TIMED, steps=steps, seconds=seconds)
    steps = run.parse_file("state/steps.json", lambda text: int(parse_json(text)["steps"]))
    return replace(plan, steps=steps, minutes=None)


def seconds_per_step(student: LinearizedForCausalLM, settings: TrainingSettings, texts: torch.Tensor) -> float:
    """Time the steps after the first; return 0 where nothing can be trained.

    Closing the training before its end leaves the teacher's weights as they were.
    """
    if settings.loss == FITTED:
        begun = time.perf_counter()
        with closing(fit_maps(student, texts, settings)) as fitting:
            for progress in fitting:
                if progress.done == progress.total:
                    break
        return (time.perf_counter() - begun) / settings.steps
    with closing(distill(student, texts, settings)) as steps:
        times = [time.perf_counter() for _ in islice(steps, TIMED_STEPS - 1)]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def train(
    run: Run, plan: Plan, student: LinearizedForCausalLM, allocation: Allocation, texts: torch.Tensor
) -> Steps[None]:
    """Initialise the student from the profile's samples, and train it in the phases of the plan."""
    initialise_student(run, student)
    for number, settings in phases(plan, allocation):
        yield from train_phase(run, student, settings, texts, number)
    run.clear_request("use")  # not before: it is meant for the losses that are still to come, too


def phases(plan: Plan, allocation: Allocation) -> list[tuple[int, TrainingSettings]]:
    """List the phases of a training in which there is something to train."""
    features = any(head.features for row in allocation.heads for head in row)
    numbered = enumerate(training_settings(plan))
    return [
        (number, each) for number, each in numbered if each.steps and (each.lora or features or each.loss == FITTED)
    ]


def train_phase(
    run: Run, student: LinearizedForCausalLM, settings: TrainingSettings, texts: torch.Tensor, number: int
) -> Steps[None]:
    """Train with one loss, from where it stands to the steps at which it ended, perhaps early."""
    folder = run.folder / "state" / "training" / str(number)
    begun = folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    trained = events.events_of_student(run.events(), EventName.DISTILLED) if begun else []
    ends = {event.get("phase", 0): event["steps"] for event in trained}
    end = ends.get(number, settings.steps)

    def enough(step: int) -> bool:
        return step >= end or run.has_request("use")

    if settings.loss == FITTED:
        steps = fit_maps(student, texts, settings, enough)
    else:
        steps = distill(student, texts, settings, folder=folder, resume=begun, enough=enough)
    result = yield from log_progress(run, steps)
    run.log(EventName.DISTILLED, phase=number, asked=settings.steps, **asdict(result))
