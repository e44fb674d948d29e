"""Trains the feature maps of a student on its own teacher, and is stopped and resumed at will."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from linearizer.errors import RequestError, TextError
from linearizer.model.layers import featured
from linearizer.model.logits import check_logits
from linearizer.progress import Progress, Steps
from linearizer.runtime.attention_interface import attending
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.train.lora import add_adapters, remove_adapters
from linearizer.train.settings import Settings
from linearizer.train.state_file import TrainingState, digest, read_state, remove_states, write_state
from linearizer.train.trainer import TEACHER, Losses, Training

USUAL = Settings()


@dataclass(frozen=True)
class Distilled:
    """How a training went; the student itself was changed."""

    steps: int
    start: Mapping[int, float]  # loss of each layer on the first batch, above its least
    end: Mapping[int, float]  # the same, a running mean at the end
    given_up: tuple[int, ...]  # layers that fell back to an earlier state and learnt no more
    events: tuple[str, ...]  # what went wrong, in sentences


def distill(
    student: LinearizedForCausalLM,
    windows: torch.Tensor,  # (texts, tokens)
    settings: Settings = USUAL,
    *,
    folder: Path | None = None,
    resume: bool = False,
    enough: Callable[[int], bool] = lambda step: False,
) -> Steps[Distilled]:
    """Train a student's feature maps; with a folder, a training that was stopped goes on where it was.

    `enough` is asked before each step, with the number of those that are done, and ends the training early.
    """
    check_text(windows, settings)
    with attending(student.base, TEACHER):
        check_logits(student.base, windows)
    with learning(student, settings):
        training = Training(student, windows, settings)
        identity = identify(student, windows, settings)
        state = take_up(training, folder, identity) if folder is not None and resume else None
        if folder is not None and not resume:
            remove_states(folder)
        events = [] if state is None else list(state.facts["events"])
        new = [] if state is None or state.warning is None else [state.warning]
        try:
            yield from train(training, events, new, folder, identity, enough)
        except GeneratorExit:
            if folder is not None:
                write_state(folder, training.state({**identity, "events": events}))
            raise
    courses = {index: learner.course for index, learner in training.learners.items()}
    return Distilled(
        steps=training.step,
        start={index: course.start for index, course in courses.items() if course.start is not None},
        end={index: course.recent for index, course in courses.items() if course.recent is not None},
        given_up=tuple(index for index, course in courses.items() if course.given_up is not None),
        events=tuple(events),
    )


def identify(student: LinearizedForCausalLM, windows: torch.Tensor, settings: Settings) -> dict[str, object]:
    """Say what a training is of, so that no other one goes on from its state."""
    config = student.config
    known = [config.teacher, config.layers, config.sinks, config.feature_map]
    return {"settings": asdict(settings), "text": digest({"windows": windows}), "student": json.dumps(known)}


def train(
    training: Training,
    events: list[str],
    new: list[str],
    folder: Path | None,
    identity: Mapping[str, object],
    enough: Callable[[int], bool],
) -> Steps[None]:
    """Do the steps that are left, and keep the state of every few; `new` events are added to those before."""
    settings, first, begun = training.settings, training.step, time.monotonic()
    events += new
    while training.learners and training.step < settings.steps and not enough(training.step):
        losses, wrong = training.advance()
        events += wrong
        if folder is not None and (training.step % settings.save_every == 0 or training.step == settings.steps):
            write_state(folder, training.state({**identity, "events": events}))
        seconds = (time.monotonic() - begun) / (training.step - first)
        details = {
            **described(losses, settings),
            "tokens_per_second": settings.batch * training.windows.shape[1] / seconds,
            "seconds_left": seconds * (settings.steps - training.step),
            "events": tuple(new + wrong),
        }
        new = []
        yield Progress("distill", training.step, settings.steps, "steps", details)
    if folder is not None and training.learners and training.step < settings.steps:
        write_state(folder, training.state({**identity, "events": events}))


def described(losses: Losses, settings: Settings) -> dict[str, object]:
    """Say what the losses of a step were, the KL divergence where it is known."""
    found: dict[str, object] = {name: sum(of.values()) / len(of) for name, of in losses.items()}
    if settings.loss in ("softmax", "logits"):
        found["kl"] = found["excess"]
    del found["excess"]
    return {**found, "layers": losses["excess"]}


def take_up(training: Training, folder: Path, identity: Mapping[str, object]) -> TrainingState | None:
    """Go on from the state in a folder, if there is one."""
    state = read_state(folder)
    if state is None:
        return None
    differences = training.settings.differences(state.facts["settings"])
    differences += [f"another {name}" for name in ("text", "student") if identity[name] != state.facts[name]]
    if differences:
        raise RequestError(
            f"the training in {str(folder)!r} was begun otherwise ({'; '.join(differences)}): ask for the same, or "
            "begin again in another folder"
        )
    training.restore(state)
    return state


@contextmanager
def learning(student: LinearizedForCausalLM, settings: Settings) -> Iterator[None]:
    """While this lasts, let the feature maps learn and nothing else; adapters are merged if all went well."""
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
    done = False
    try:
        yield
        done = True
    finally:
        if settings.lora:
            remove_adapters(student.base, merge=done)
        for module, mode in modes:
            module.training = mode
        for p in learnable:
            p.grad = None


def check_text(windows: torch.Tensor, settings: Settings) -> None:
    """Refuse text that does not fill one batch."""
    if len(windows) < settings.batch or windows.shape[1] < 2:
        raise TextError(
            f"the text gives {len(windows)} windows of {windows.shape[1]} tokens, and one batch takes "
            f"{settings.batch}: give more text, or ask for a smaller batch or shorter windows"
        )
