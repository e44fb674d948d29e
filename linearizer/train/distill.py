"""Trains the feature maps of a student on its own teacher; a training can be stopped and resumed at any step."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from linearizer.errors import RequestError, TextError
from linearizer.hub.weight_files import digest
from linearizer.plan.options import differences
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.student.attention_interface import attending
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import featured
from linearizer.teacher.logits import check_logits
from linearizer.train.lora import add_adapters, remove_adapters
from linearizer.train.losses import EXCESS_NAMES
from linearizer.train.settings import TrainingSettings
from linearizer.train.trainer import TEACHER, Losses, Trainer, read_state, remove_states, write_state

DEFAULTS = TrainingSettings()


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training, which changed the student itself."""

    steps: int
    start: Mapping[int, float]  # excess loss of each layer on the first batch
    end: Mapping[int, float]  # its running mean at the end
    given_up: tuple[int, ...]  # layers that returned to an earlier state and trained no more
    events: tuple[str, ...]  # sentences about what went wrong


def distill(
    student: LinearizedForCausalLM,
    texts: torch.Tensor,  # (texts, tokens)
    settings: TrainingSettings = DEFAULTS,
    *,
    folder: Path | None = None,
    resume: bool = False,
    enough: Callable[[int], bool] = lambda step: False,
) -> Steps[TrainingResult]:
    """Train a student's feature maps; with a folder, a training that was stopped resumes where it stopped.

    Before each step `enough` receives the number of finished steps; returning true ends the training early.
    """
    check_text(texts, settings)
    with attending(student.base, TEACHER):
        check_logits(student.base, texts)
    with trainable_features(student, settings):
        trainer, events, new_events = Trainer(student, texts, settings), list[str](), list[str]()
        facts = {**identity_of(student, texts, settings), "events": events}

        def save() -> None:
            if folder is not None:
                write_state(folder, trainer.state(facts))

        if folder is not None and not resume:
            remove_states(folder)
        elif folder is not None and (state := read_state(folder)) is not None:
            check_identity(facts, state.facts, folder)
            trainer.restore(state)
            events += state.facts["events"]
            new_events += filter(None, [state.warning])
        try:
            yield from run_steps(trainer, events, new_events, enough, save)
        except GeneratorExit:
            save()
            raise
    layers = {index: optimizer.status for index, optimizer in trainer.optimizers.items()}
    return TrainingResult(
        steps=trainer.step,
        start={index: status.start for index, status in layers.items() if status.start is not None},
        end={index: status.recent for index, status in layers.items() if status.recent is not None},
        given_up=tuple(index for index, status in layers.items() if status.given_up is not None),
        events=tuple(events),
    )


def identity_of(student: LinearizedForCausalLM, texts: torch.Tensor, settings: TrainingSettings) -> dict[str, object]:
    """Identify a training, so that no other training resumes from its state."""
    config = student.config
    parts = [config.teacher, config.layers, config.sinks, config.feature_map]
    return {"settings": asdict(settings), "text": digest({"texts": texts}), "student": json.dumps(parts)}


def run_steps(
    trainer: Trainer, events: list[str], new_events: list[str], enough: Callable[[int], bool], save: Callable[[], None]
) -> Steps[None]:
    """Take the remaining steps, and save the state every few steps; add all `new_events` to `events`."""
    settings, first, begun = trainer.settings, trainer.step, time.monotonic()
    events += new_events
    while trainer.active() and trainer.step < settings.steps and not enough(trainer.step):
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
    others = differences(identity["settings"], facts["settings"])
    others += [f"another {name}" for name in ("text", "student") if identity[name] != facts[name]]
    if others:
        raise RequestError(
            f"the training in {str(folder)!r} began with other choices ({'; '.join(others)}): ask for the same, or "
            "begin again in another folder"
        )


@contextmanager
def trainable_features(student: LinearizedForCausalLM, settings: TrainingSettings) -> Iterator[None]:
    """Make only the feature maps trainable, for as long as the context lasts; merge adapters if no error occurred."""
    maps = [group.feature_map for layer in student.students() for group in featured(layer)]
    learnable = [p for feature_map in maps for p in feature_map.parameters() if p.requires_grad]  # type: ignore[union-attr]
    modes = [(module, module.training) for module in student.modules()]
    student.eval().requires_grad_(False)
    for feature_map in maps:
        feature_map.train()  # type: ignore[union-attr]
    if settings.lora:
        add_adapters(student.base, settings.lora, settings.seed)
    for p in learnable:
        p.requires_grad_(True)
    succeeded = False
    try:
        yield
        succeeded = True
    finally:
        if settings.lora:
            remove_adapters(student.base, merge=succeeded)
        for module, mode in modes:
            module.training = mode
        for p in learnable:
            p.grad = None


def check_text(texts: torch.Tensor, settings: TrainingSettings) -> None:
    """Refuse text that does not fill one batch."""
    if len(texts) < settings.batch or texts.shape[1] < 2:
        raise TextError(
            f"the source gives {len(texts)} texts of {texts.shape[1]} tokens, and one batch takes "
            f"{settings.batch}: give more text, or ask for a smaller batch or shorter texts"
        )
