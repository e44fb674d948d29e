"""One training: a student, its layers' learners, and what one step does.

A layerwise step is one forward pass of the teacher. Each layer's loss is taken and differentiated while the layer
attends, on its own queries, keys and values; nothing of it is kept when the next layer begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from linearizer.errors import FaultError
from linearizer.model.layers import featured, number, output_projections
from linearizer.model.logits import PROBE
from linearizer.model.memory import is_out_of_memory
from linearizer.runtime.attention_interface import attending, attention_modules, observing
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM
from linearizer.train.layer_optimizer import Learner
from linearizer.train.lora import without_adapters
from linearizer.train.losses import (
    Attended,
    Found,
    LogitHead,
    direct_loss,
    hidden_states,
    layer_loss,
    logits_loss,
    measure_of,
)
from linearizer.train.settings import LAYERWISE, Settings, batch_of, rate_share, window_share
from linearizer.train.state_file import TrainingState

Losses = dict[str, dict[int, float]]  # "loss" and "excess" of every layer
TEACHER = "sdpa"


class Training:
    """A training under way; `step` steps are done."""

    def __init__(self, student: LinearizedForCausalLM, windows: torch.Tensor, settings: Settings) -> None:
        self.student, self.windows, self.settings = student, windows, settings
        self.base, self.device = student.base, next(student.parameters()).device
        self.learners = learners_of(student, settings)
        self.step, self.rows = 0, settings.batch  # rows: texts that go through the model at once
        self.layerwise = settings.loss in LAYERWISE
        probe = windows[:1, :PROBE].to(self.device)
        self.projections: Mapping[int, nn.Module] = {}
        if settings.loss == "output":
            self.projections = output_projections(self.base, probe)
        self.head = None if self.layerwise else LogitHead(self.base, probe)

    def advance(self) -> tuple[Losses, list[str]]:
        """Do one step; also say what went wrong on the way."""
        keep = window_share(self.settings, self.step)
        losses, events = self.attempt(batch_of(self.windows, self.settings, self.step).to(self.device), keep)
        rate = rate_share(self.settings, self.step)
        wrong: dict[str, list[int]] = {}
        for index, learner in self.active().items():
            if message := learner.learn(losses["excess"][index], self.step, rate, keep == 1.0):
                wrong.setdefault(message, []).append(index)
            learner.forget_gradients()
        self.step += 1
        events += [f"step {self.step}: {layers_named(layers)}: {message}" for message, layers in wrong.items()]
        if not self.active():
            reasons = {learner.course.given_up for learner in self.learners.values()}
            raise FaultError(
                f"no layer is left to train at step {self.step} ({'; '.join(sorted(map(str, reasons)))}): use a "
                f"smaller learning rate than rate={self.settings.rate:g}, or another loss than {self.settings.loss!r}"
            )
        return losses, events

    def active(self) -> dict[int, Learner]:
        """List the layers that still learn."""
        return {index: learner for index, learner in self.learners.items() if learner.course.given_up is None}

    def attempt(self, ids: torch.Tensor, keep: float) -> tuple[Losses, list[str]]:
        """Make the gradients of a batch, in as many parts as memory asks for."""
        events: list[str] = []
        while True:
            try:
                with without_denormals():
                    return self.gradients(ids, keep), events
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.free()
            if self.rows == 1:
                raise FaultError(self.too_long(ids[:1], keep))
            self.rows = -(-self.rows // 2)
            events.append(
                f"step {self.step + 1}: out of memory; from now on {self.rows} of the batch's {len(ids)} texts at once"
            )

    def gradients(self, ids: torch.Tensor, keep: float) -> Losses:
        """Add up the gradients of the parts of a batch; give the losses, averaged over it."""
        losses: Losses = {"loss": {}, "excess": {}}
        parts = ids.split(self.rows)
        measures = self.measures(parts) if len(parts) > 1 and self.settings.loss in ("l2", "output") else {}
        for part in parts:
            share = len(part) / len(ids)
            if self.layerwise:
                found = self.layer_losses(part, keep, share, measures)
            else:
                found = self.model_losses(part, keep, share)
            for index, one in found.items():
                losses["loss"][index] = losses["loss"].get(index, 0.0) + share * float(one.loss)
                losses["excess"][index] = losses["excess"].get(index, 0.0) + share * float(one.excess)
        return losses

    @torch.no_grad()
    def measures(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Take of a whole batch, part by part, what the losses of its parts are held against."""
        found: dict[int, torch.Tensor] = {}
        kind, active, share = self.settings.loss, self.active(), 0.0

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            if (index := number(module)) in active:
                seen = Attended(query, key, value, scale)
                new = measure_of(kind, module.student, seen, self.projections.get(index))  # type: ignore[arg-type]
                before = found.get(index, torch.zeros_like(new) if kind == "output" else new)
                found[index] = before + share * new if kind == "output" else torch.maximum(before, new)

        for part in parts:
            share = len(part) / sum(map(len, parts))
            with observing(self.base, observe):
                hidden_states(self.base, part)
        return found

    def layer_losses(
        self, ids: torch.Tensor, keep: float, share: float, measures: Mapping[int, torch.Tensor]
    ) -> dict[int, Found]:
        """Differentiate the loss of every layer while the teacher reads."""
        active, found = self.active(), {}

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            index = number(module)
            if index not in active:
                return
            seen = Attended(query, key, value, scale)
            with torch.enable_grad():
                given = module.student, seen, self.projections.get(index), keep, measures.get(index)
                one = layer_loss(self.settings.loss, *given)  # type: ignore[arg-type]
                (one.loss * share).backward()
            if not one.loss.isfinite() and not seen.finite():
                raise FaultError(f"layer {index}: the teacher's own queries, keys or values are not finite")
            found[index] = Found(one.loss.detach(), one.excess)

        with torch.no_grad(), observing(self.base, observe):
            hidden_states(self.base, ids)
        return found

    def model_losses(self, ids: torch.Tensor, keep: float, share: float) -> dict[int, Found]:
        """Differentiate the loss of the whole student, which every layer shares."""
        assert self.head is not None
        teacher = None
        if self.settings.loss == "logits":
            with torch.no_grad(), attending(self.base, TEACHER), without_adapters(self.base):
                teacher = hidden_states(self.base, ids)
            if not teacher.isfinite().all():
                raise FaultError(
                    "the teacher's hidden states are not finite: load it in float32, or repair its weights"
                )
        with narrowed(self.student, keep):
            hidden = hidden_states(self.base, ids)
        loss = direct_loss(self.head, hidden, ids) if teacher is None else logits_loss(self.head, hidden, teacher)
        (loss * share).backward()
        return dict.fromkeys(self.active(), Found(loss.detach(), loss.detach()))

    def free(self) -> None:
        """Let go of what a step that ran out of memory had begun."""
        for learner in self.learners.values():
            learner.forget_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def too_long(self, ids: torch.Tensor, keep: float) -> str:
        """Find a length of text that fits, and say so."""
        length = ids.shape[1] // 2
        while length:
            try:
                self.gradients(ids[:, :length], keep)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.free()
            length //= 2
        return f"one text of {ids.shape[1]} tokens does not fit into memory: " + (
            f"texts of {length} tokens do" if length else "not even one token does, so free memory"
        )

    def state(self, facts: Mapping[str, object]) -> TrainingState:
        """Give what going on from here needs."""
        tensors = {f"{i}/{name}": t for i, learner in self.learners.items() for name, t in learner.tensors().items()}
        courses = {str(index): learner.facts() for index, learner in self.learners.items()}
        return TrainingState(tensors, {**facts, "step": self.step, "rows": self.rows, "courses": courses})

    def restore(self, state: TrainingState) -> None:
        """Go on from a state."""
        self.step, self.rows = state.facts["step"], state.facts["rows"]
        for index, learner in self.learners.items():
            own = {n.removeprefix(f"{index}/"): t for n, t in state.tensors.items() if n.startswith(f"{index}/")}
            learner.restore(own, state.facts["courses"][str(index)])


def learners_of(student: LinearizedForCausalLM, settings: Settings) -> dict[int, Learner]:
    """Make a learner for every layer that has something to learn."""
    found = {}
    for module in attention_modules(student.base):
        parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if parameters:
            rates = {name: settings.rate_of(name) for name in parameters}
            found[number(module)] = Learner(parameters, rates)
    return found


@contextmanager
def narrowed(student: LinearizedForCausalLM, keep: float) -> Iterator[None]:
    """While this lasts, cut the windows beside features to a share of theirs."""
    groups = [group for layer in student.students() for group in featured(layer)]
    whole = [group.window for group in groups]
    for group in groups:
        group.window = int(group.window * keep)
    try:
        yield
    finally:
        for group, window in zip(groups, whole, strict=True):
            group.window = window


@contextmanager
def without_denormals() -> Iterator[None]:
    """While this lasts, take numbers below 1e-38 as 0: weights of far keys often are, and slow a CPU up to tenfold."""
    before = bool(torch.full((1,), 1e-40).mul_(1) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


def layers_named(layers: Sequence[int]) -> str:
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
