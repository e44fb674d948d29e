"""Initialises the student of a run, and trains it as the plan says."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import torch

from linearizer.errors import FaultError
from linearizer.model.initialise import initialise
from linearizer.model.kept_texts import texts_of_run
from linearizer.model.samples import samples_of
from linearizer.model.streaming import is_streamed
from linearizer.model.teacher import Teacher
from linearizer.progress import Steps
from linearizer.run import events
from linearizer.run.allocation import Allocation
from linearizer.run.events import EventName
from linearizer.run.files import parse_json, remove, writing
from linearizer.run.folder import Run
from linearizer.run.plan import FITTED, Plan
from linearizer.run.sharing import ALL, ALONE, Helpers, Share
from linearizer.run.stopping import log_progress
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.train.distill import TrainingResult, distill
from linearizer.train.relay import HIDDEN
from linearizer.train.settings import LAYERWISE, TrainingSettings, training_settings
from linearizer.train.squares import fit_maps
from linearizer.train.trainer import may_be_together

OF = "-of-"  # between number and count of a share, in the name of its folder
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
    return replace(plan, steps=run.parse_file("state/steps.json", read_steps), minutes=None)


def read_steps(text: str) -> int:
    """Parse the number of steps that a plan's minutes came to."""
    return int(parse_json(text)["steps"])


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
    run: Run,
    plan: Plan,
    student: LinearizedForCausalLM,
    allocation: Allocation,
    texts: torch.Tensor,
    helpers: Helpers = ALONE,
) -> Steps[None]:
    """Initialise the student from the profile's samples, and train it in the phases of the plan."""
    initialise_student(run, student)
    for number, settings in phases(plan, allocation):
        yield from train_phase(run, student, settings, texts, number, helpers)
    run.clear_request("use")  # not before: it is meant for the losses that are still to come, too


def phases(plan: Plan, allocation: Allocation) -> list[tuple[int, TrainingSettings]]:
    """List the phases of a training in which there is something to train."""
    features = any(head.features for row in allocation.heads for head in row)
    numbered = enumerate(training_settings(plan))
    return [
        (number, each) for number, each in numbered if each.steps and (each.lora or features or each.loss == FITTED)
    ]


def train_phase(
    run: Run,
    student: LinearizedForCausalLM,
    settings: TrainingSettings,
    texts: torch.Tensor,
    number: int,
    helpers: Helpers = ALONE,
) -> Steps[None]:
    """Train with one loss, resuming where an earlier training stopped.

    Where every layer learns by itself, helpers train some. Their shares stay as they are until the phase ends, also
    where it is resumed by fewer processes.
    """
    folder = folder_of(run, number)
    tokens = settings.batch * texts.shape[1]
    shares = shares_in(folder) or shares_for(student, settings, folder, helpers.count, tokens)
    results = []
    for share in shares:
        steps = train_share(run, student, settings, texts, number, share)
        if share.number == 0 and share.count > 1:
            beside = helpers.beside(f"training {number}", steps)  # so that the shares of the others are done below
            result, _ = yield from log_progress(run, beside)
        else:
            result = yield from log_progress(run, steps)
        results.append(result)
    for path in folder.glob(f"{HIDDEN}-*"):
        remove(path)
    result = joined(results)
    if len(shares) > 1 and set(result.given_up) == set(result.start):
        raise FaultError(f"no layer is left to train with the loss {settings.loss!r}: use a smaller learning rate")
    ends = {"shares": [each.steps for each in results]} if len(shares) > 1 else {}
    run.log(EventName.DISTILLED, phase=number, asked=settings.steps, **asdict(result), **ends)


def folder_of(run: Run, number: int) -> Path:
    """Name the folder of a phase's state, whose parent is made."""
    folder = run.folder / "state" / "training" / str(number)
    with writing(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
    return folder


def shares_in(folder: Path) -> list[Share]:
    """List the shares of a phase that was begun."""
    if not folder.exists():
        return []
    counts = [int(path.name.partition(OF)[2]) for path in folder.glob(f"*{OF}*")]
    return [Share(number, counts[0]) for number in range(counts[0])] if counts else [ALL]


def shares_for(
    student: LinearizedForCausalLM, settings: TrainingSettings, folder: Path, processes: int, tokens: int
) -> list[Share]:
    """Share out the layers of a phase that begins, where each learns by itself and none reads weights for all."""
    alone = processes == 1 or not can_be_shared(settings) or is_streamed(student)
    if alone or may_be_together(student, settings, tokens):  # what is computed together has bits of its own
        return [ALL]
    shares = [Share(number, processes) for number in range(processes)]
    with writing(folder):
        for share in shares:
            (folder / name_of(share)).mkdir(parents=True, exist_ok=True)
    return shares


def can_be_shared(settings: TrainingSettings) -> bool:
    """Tell whether each layer learns by itself."""
    return settings.loss in LAYERWISE and not settings.lora


def name_of(share: Share) -> str:
    return f"{share.number}{OF}{share.count}"


def train_share(
    run: Run, student: LinearizedForCausalLM, settings: TrainingSettings, texts: torch.Tensor, number: int, share: Share
) -> Steps[TrainingResult]:
    """Train a share of the layers in a phase, from where it stands to the steps at which it ended, perhaps early."""
    folder = folder_of(run, number)
    trained = events.events_of_student(run.events(), EventName.DISTILLED) if folder.exists() else []
    ends = {event.get("phase", 0): event.get("shares", [event["steps"]]) for event in trained}
    end = ends[number][share.number] if number in ends else settings.steps

    def enough(step: int) -> bool:
        return step >= end or run.has_request("use")

    place = folder if share == ALL else folder / name_of(share)
    if settings.loss == FITTED:
        return fit_maps(student, texts, settings, folder=place, resume=place.exists(), enough=enough)
    return distill(student, texts, settings, folder=place, resume=place.exists(), enough=enough, share=share)


def joined(results: Sequence[TrainingResult]) -> TrainingResult:
    """Put the results of shares together."""
    return TrainingResult(
        steps=max(each.steps for each in results),
        start={index: loss for each in results for index, loss in each.start.items()},
        end={index: loss for each in results for index, loss in each.end.items()},
        given_up=tuple(sorted(index for each in results for index in each.given_up)),
        events=tuple(event for each in results for event in each.events),
    )


def help_training(
    run: Run,
    plan: Plan,
    student: LinearizedForCausalLM,
    allocation: Allocation,
    texts: torch.Tensor,
    number: int,
    helper: Share,
) -> Steps[None]:
    """Train the shares of a phase that fall to a helper, after the phases before, which are finished.

    The student was initialised.
    """
    for phase, settings in phases(plan, allocation):
        for share in shares_in(folder_of(run, phase)):
            if phase < number or (phase == number and helper.has(share.number)):
                yield from train_share(run, student, settings, texts, phase, share)
