"""Trains the student of a run by its plan; a training can be stopped and resumed at any step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from linearizer.errors import RequestError
from linearizer.hub.weight_files import digest
from linearizer.method.initialise import initialise
from linearizer.method.recorder import samples_of
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation
from linearizer.plan.options import differences
from linearizer.plan.plan import Plan
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.files import remove, writing
from linearizer.run.folder import Run
from linearizer.run.stopping import YIELD_SECONDS, log_progress, uninterrupted
from linearizer.run.training_end import Trained, ends_of_phases
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import featured
from linearizer.teacher.logits import check_logits
from linearizer.teacher.observing import attending_as_teacher
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.train.lora import add_adapters, remove_adapters
from linearizer.train.losses import EXCESS_NAMES
from linearizer.train.settings import TrainingResult, TrainingSettings, training_settings
from linearizer.train.trainer import Losses, Trainer
from linearizer.train.training_state import NEWEST, PREVIOUS, read_state, write_state

NEVER: Callable[[int], bool] = lambda step: False  # noqa: E731
TOGETHER_SECONDS = 600.0  # that a step of several ranks has before it is interrupted: then nothing is saved


def distill(
    student: LinearizedForCausalLM,
    texts: torch.Tensor,  # (texts, tokens)
    settings: TrainingSettings,
    *,
    folder: Path | None = None,
    resume: bool = False,
    enough: Callable[[int], bool] = NEVER,
    ranks: Ranks = ALONE,
    compared: torch.Tensor | None = None,
) -> Steps[TrainingResult]:
    """Train a student's feature maps; with a folder, a training that was stopped resumes where it stopped.

    With texts to be `compared` on, which it does not learn from, adapters stay only if the student is better with them.
    Before each step `enough` receives the number of finished steps; returning true ends the training early. Several
    ranks call this together; rank 0 decides when it is enough, and writes into the folder.
    """
    with attending_as_teacher(student):
        check_logits(student, texts)
    with trainable_features(student, settings):
        trainer, events, new_events = Trainer(student, texts, settings, ranks), list[str](), list[str]()
        facts = {**identity_of(student, texts, settings), "events": events}

        def save() -> None:
            with uninterrupted():
                trainer.gather_layers()
                if folder is not None and ranks.number == 0:
                    write_state(folder, trainer.state(facts))

        if folder is not None and not resume:
            for name in (NEWEST, PREVIOUS) if ranks.number == 0 else ():
                remove(folder / name)
        elif folder is not None and (state := read_state(folder)) is not None:
            check_identity(facts, state.facts, folder)
            trainer.restore(state)
            events += state.facts["events"]
            new_events += filter(None, [state.warning])
        try:
            yield from run_steps(trainer, events, new_events, enough, save)
            kl = None if compared is None else ranks.hear(trainer.kl_of_adapters(compared))
            trained = Trained(trainer.step, settings.steps, kl)
            if not trained.keeps_adapters:
                events.append(trained.gain_in_words)
                remove_adapters(student, merge=False)
        except (GeneratorExit, KeyboardInterrupt) as end:
            # between two steps, where a generator is closed, the other ranks wait to hear whether it is enough
            between = type(end) is GeneratorExit and trainer.step < settings.steps
            if trainer.is_whole and (ranks.count == 1 or between):
                ranks.hear(True)
                save()
            raise
    layers = {index: optimizer.status for index, optimizer in trainer.optimizers.items()}
    return TrainingResult(
        steps=trainer.step,
        start={index: status.start for index, status in layers.items() if status.start is not None},
        end={index: status.recent for index, status in layers.items() if status.recent is not None},
        events=tuple(events),
        kl=kl,
    )


def identity_of(student: LinearizedForCausalLM, texts: torch.Tensor, settings: TrainingSettings) -> dict[str, object]:
    """Identify a training, so that no other training resumes from its state."""
    parts = [student.config.linearized[name] for name in ("teacher", "layers", "sinks", "feature_map")]
    return {"settings": asdict(settings), "text": digest({"texts": texts}), "student": json.dumps(parts)}


def run_steps(
    trainer: Trainer, events: list[str], new_events: list[str], enough: Callable[[int], bool], save: Callable[[], None]
) -> Steps[None]:
    """Take the remaining steps, and save the state every few steps; add all `new_events` to `events`."""
    settings, first, begun = trainer.settings, trainer.step, time.monotonic()
    events += new_events
    while trainer.active() and trainer.step < settings.steps and not trainer.ranks.hear(enough(trainer.step)):
        losses, problems = trainer.take_step()
        events += problems
        if trainer.step % settings.save_every == 0 or trainer.step == settings.steps:
            save()
        seconds = (time.monotonic() - begun) / (trainer.step - first)
        details = {
            **step_details(losses, settings),
            "tokens_per_second": settings.batch * trainer.texts.shape[1] / seconds,
            "seconds_left": seconds * (settings.steps - trainer.step),
            "events": tuple(new_events + problems),
        }
        new_events = []
        yield Progress(EventName.DISTILL, trainer.step, settings.steps, "steps", details)
    if trainer.optimizers and trainer.step < settings.steps:
        save()


def step_details(losses: Losses, settings: TrainingSettings) -> dict[str, object]:
    """Report the mean loss of a step, its excess where that is a KL divergence, and the excess of every layer."""
    means = {name: sum(of_layers.values()) / len(of_layers) for name, of_layers in losses.items()}
    excess = {EXCESS_NAMES[settings.loss]: means["excess"]} if settings.loss in EXCESS_NAMES else {}
    return {"loss": means["loss"], **excess, "layers": losses["excess"]}


def check_identity(identity: Mapping[str, Any], facts: Mapping[str, Any], folder: Path) -> None:
    """Refuse the state of another training."""
    mismatches = differences(identity["settings"], facts["settings"])
    mismatches += [f"another {name}" for name in ("text", "student") if identity[name] != facts[name]]
    if mismatches:
        raise RequestError(
            f"the training in {str(folder)!r} began with other choices ({'; '.join(mismatches)}): ask for the same, or "
            "begin again in another folder"
        )


@contextmanager
def trainable_features(student: LinearizedForCausalLM, settings: TrainingSettings) -> Iterator[None]:
    """Make only the feature maps trainable while the context lasts; merge adapters if no error occurred."""
    flags = [(p, p.requires_grad) for p in student.parameters()]
    maps = [group.feature_map for layer in student.students() for group in featured(layer)]
    learnable = [p for feature_map in maps for p in feature_map.parameters() if p.requires_grad]
    modes = [(module, module.training) for module in student.modules()]
    student.eval().requires_grad_(False)
    for feature_map in maps:
        feature_map.train()
    if settings.lora:
        add_adapters(student, settings.lora, settings.seed)
    for p in learnable:
        p.requires_grad_(True)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if settings.lora:
            remove_adapters(student, merge=succeeded)
        for module, mode in modes:
            module.training = mode
        for p, flag in flags:
            p.requires_grad_(flag).grad = None


def train(
    run: Run, student: LinearizedForCausalLM, allocation: Allocation, texts: TextsOfRun, ranks: Ranks = ALONE
) -> Steps[None]:
    """Initialise the student from the profile's samples, and train it in the phases of the plan."""
    initialise(student, samples_of(run))
    for number, settings in phases(run.plan, allocation):
        yield from train_phase(run, student, settings, texts, number, ranks)
    run.clear_request("use")  # only now: the request also ends the phases of later losses


def phases(plan: Plan, allocation: Allocation) -> list[tuple[int, TrainingSettings]]:
    """List the phases of a training in which there is something to train."""
    features = any(head.features for row in allocation.heads for head in row)
    numbered = enumerate(training_settings(plan))
    return [(number, each) for number, each in numbered if each.steps and (each.lora or features)]


def train_phase(
    run: Run,
    student: LinearizedForCausalLM,
    settings: TrainingSettings,
    texts: TextsOfRun,
    number: int,
    ranks: Ranks = ALONE,
) -> Steps[None]:
    """Train with one loss, from its last saved step to its end, which may have been early."""
    folder = folder_of_phase(run, number)
    begun = folder.exists()
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    end = ends_of_phases(run).get(number, {"steps": settings.steps})["steps"] if begun else settings.steps

    def enough(step: int) -> bool:
        return step >= end or run.has_request("use")

    ranks.hear((EventName.DISTILL, number, begun))
    steps = train_share(run, student, texts, number, begun, ranks, enough)
    result = yield from log_progress(run, steps, YIELD_SECONDS if ranks.count == 1 else TOGETHER_SECONDS)
    run.log(EventName.DISTILLED, phase=number, asked=settings.steps, **asdict(result))


def train_share(
    run: Run,
    student: LinearizedForCausalLM,
    texts: TextsOfRun,
    number: int,
    begun: bool,
    ranks: Ranks,
    enough: Callable[[int], bool] = NEVER,
) -> Steps[TrainingResult]:
    """Train this rank's share in a phase, from the same step as rank 0, which decides when it is enough."""
    settings, compared = training_settings(run.plan)[number], texts.compared if run.plan.distils else None
    how: dict[str, Any] = {"folder": folder_of_phase(run, number), "resume": begun, "enough": enough, "ranks": ranks}
    return distill(student, texts.learnt, settings, compared=compared, **how)


def folder_of_phase(run: Run, number: int) -> Path:
    return run.folder / "state" / "training" / str(number)
