"""Begins what the heads of a run's student hold, and trains it as its plan says."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice

import torch

from linearizer.model.initialise import initialise
from linearizer.model.samples import samples_of
from linearizer.model.teacher import Teacher, windows_of
from linearizer.progress import Steps
from linearizer.run import events
from linearizer.run.allocation import Allocation
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.stopping import logged
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.train.distill import distill
from linearizer.train.settings import Settings, settings_of

TRIED = 4  # steps, to see how long one takes


def begin_features(run: Run, student: LinearizedForCausalLM) -> None:
    """Begin slots and feature maps from the samples of a run's profile: all that training starts from."""
    initialise(student, samples_of(run), run.plan.seed)


def timed_plan(run: Run, teacher: Teacher, student: LinearizedForCausalLM, token: str | None) -> Plan:
    """Turn the minutes that a plan asks for into steps, once: resumed, the run keeps their number."""
    plan = run.plan
    if plan.minutes is None:
        return plan
    if not run.has("state/steps.json"):
        before = {name: value.clone() for name, value in student.state_dict().items() if ".student." in name}
        begin_features(run, student)
        texts = windows_of(plan, teacher, TRIED * plan.batch, token, least=plan.batch)
        seconds = [step_seconds(student, replace(settings, steps=TRIED), texts) for settings in settings_of(plan)]
        student.load_state_dict(before, strict=False)
        taken = sum(seconds) / len(seconds)
        steps = max(len(seconds), int(60 * plan.minutes / taken)) if taken else 0
        run.write("state/steps.json", str(steps))
        run.log("timed", steps=steps, seconds=seconds)
    return replace(plan, steps=run.parsed("state/steps.json", int), minutes=None)


def step_seconds(student: LinearizedForCausalLM, settings: Settings, texts: torch.Tensor) -> float:
    """Time the steps after the first, none where nothing learns.

    Closed before its end, a training leaves the weights of the teacher alone.
    """
    with closing(distill(student, texts, settings)) as steps:
        times = [time.perf_counter() for _ in islice(steps, TRIED - 1)]
    return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0


def train(
    run: Run, plan: Plan, student: LinearizedForCausalLM, allocation: Allocation, texts: torch.Tensor
) -> Steps[None]:
    """Begin what the heads hold from the profile's samples, and train it as long as the plan says."""
    begin_features(run, student)
    for number, settings in enumerate(settings_of(plan)):
        if settings.steps and (settings.lora or any(head.features for row in allocation.heads for head in row)):
            yield from train_phase(run, student, settings, texts, number)
    run.settle("use")  # not before: it is meant for the losses that are still to come, too


def train_phase(
    run: Run, student: LinearizedForCausalLM, settings: Settings, texts: torch.Tensor, number: int
) -> Steps[None]:
    """Train with one loss, from where it was stopped."""
    folder = run.folder / "state" / "training" / str(number)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    ends = {event.get("phase", 0): event["steps"] for event in events.of_student(run.events(), "distilled")}
    end = ends.get(number, settings.steps) if folder.exists() else settings.steps  # perhaps early

    def enough(step: int) -> bool:
        return step >= end or run.requested("use")

    steps = distill(student, texts, settings, folder=folder, resume=folder.exists(), enough=enough)
    done = yield from logged(run, steps)
    run.log("distilled", phase=number, asked=settings.steps, **asdict(done))
