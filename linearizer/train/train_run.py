"""Initialises the student of a run, and trains it as the plan says."""

from __future__ import annotations

from dataclasses import asdict

import torch

from linearizer.method.initialise import initialise
from linearizer.method.recorder import samples_of
from linearizer.plan.allocation import Allocation
from linearizer.plan.plan import FITTED, Plan
from linearizer.progress import Steps
from linearizer.run import events
from linearizer.run.events import EventName
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.stopping import log_progress
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.train.distill import distill
from linearizer.train.fit_outputs import fit_maps
from linearizer.train.settings import TrainingSettings, training_settings


def train(run: Run, student: LinearizedForCausalLM, allocation: Allocation, texts: torch.Tensor) -> Steps[None]:
    """Initialise the student from the profile's samples, and train it in the phases of the plan."""
    initialise(student, samples_of(run), run.plan.seed)
    for number, settings in phases(run.plan, allocation):
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
