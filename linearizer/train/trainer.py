"""Trains a student step by step: the losses of a batch, their gradients, and an optimiser for every layer.

A layerwise step is one forward pass of the teacher. Each layer's loss is computed and differentiated while the layer
attends, on its own queries, keys and values, and is freed before the next layer begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict

import torch
from torch import nn

from linearizer.errors import FaultError
from linearizer.run.stopping import is_out_of_memory
from linearizer.student.attention_interface import attending, attention_modules, observing
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import featured, layer_number, output_projections
from linearizer.teacher.logits import PROBE_TOKENS
from linearizer.train.layer_optimizer import LayerOptimizer
from linearizer.train.lora import without_adapters
from linearizer.train.losses import (
    AttentionInputs,
    LayerLoss,
    LogitHead,
    direct_loss,
    hidden_states,
    layer_loss,
    logits_loss,
)
from linearizer.train.settings import LAYERWISE, TrainingSettings, draw_batch, rate_share, window_share
from linearizer.train.training_state import TrainingState

Losses = dict[str, dict[int, float]]  # "loss" and "excess" of every layer
TEACHER = "sdpa"


class Trainer:
    """A training of which `step` steps are done."""

    def __init__(self, student: LinearizedForCausalLM, texts: torch.Tensor, settings: TrainingSettings) -> None:
        self.student, self.texts, self.settings = student, texts, settings
        self.base, self.device = student.base, next(student.parameters()).device
        self.optimizers = make_optimizers(student, settings)
        self.step, self.rows = 0, settings.batch  # rows: texts that run through the model together
        self.layerwise = settings.loss in LAYERWISE
        probe = texts[:1, :PROBE_TOKENS].to(self.device)
        self.projections: Mapping[int, nn.Module] = {}
        if settings.loss == "output":
            self.projections = output_projections(self.base, probe)
        self.head = None if self.layerwise else LogitHead(self.base, probe)

    def take_step(self) -> tuple[Losses, list[str]]:
        """Take one step; return its losses, and sentences about what went wrong."""
        keep = window_share(self.settings, self.step)
        losses, events = self.gradients_that_fit(draw_batch(self.texts, self.settings, self.step).to(self.device), keep)
        rate = rate_share(self.settings, self.step)
        problems: dict[str, list[int]] = {}
        for index, optimizer in self.active().items():
            if message := optimizer.take_step(losses["excess"][index], self.step, rate, keep == 1.0):
                problems.setdefault(message, []).append(index)
            optimizer.adam.zero_grad()
        self.step += 1
        for message, layers in problems.items():
            events.append(f"step {self.step}: layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: {message}")
        self.check_active()
        return losses, events

    def check_active(self) -> None:
        """End a training in which no layer trains any more."""
        if not self.active():
            reasons = {optimizer.status.given_up for optimizer in self.optimizers.values()}
            raise FaultError(
                f"no layer is left to train at step {self.step} ({'; '.join(sorted(map(str, reasons)))}): use a "
                f"smaller learning rate than rate={self.settings.rate:g}, or another loss than {self.settings.loss!r}"
            )

    def active(self) -> dict[int, LayerOptimizer]:
        """List the layers that still train."""
        return {index: optimizer for index, optimizer in self.optimizers.items() if optimizer.status.given_up is None}

    def gradients_that_fit(self, ids: torch.Tensor, keep: float) -> tuple[Losses, list[str]]:
        """Compute the gradients of a batch, split into as many parts as memory requires."""
        events: list[str] = []
        while True:
            try:
                with without_denormals():
                    return self.gradients(ids, keep), events
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.free_memory()
            if self.rows == 1:
                raise FaultError(
                    f"one text of {ids.shape[1]} tokens does not fit into memory: ask for shorter texts (--length)"
                )
            self.rows = -(-self.rows // 2)
            events.append(
                f"step {self.step + 1}: out of memory; from now on {self.rows} of the batch's {len(ids)} texts at once"
            )

    def gradients(self, ids: torch.Tensor, keep: float) -> Losses:
        """Add up the gradients of the parts of a batch; return the losses, averaged over it."""
        losses: Losses = {"loss": {}, "excess": {}}
        compute = self.layer_losses if self.layerwise else self.model_losses
        for part in ids.split(self.rows):
            share = len(part) / len(ids)
            for index, of_layer in compute(part, keep, share).items():
                for name, means in losses.items():
                    means[index] = means.get(index, 0.0) + share * float(getattr(of_layer, name))
        return losses

    def layer_losses(self, ids: torch.Tensor, keep: float, share: float) -> dict[int, LayerLoss]:
        """Compute and differentiate the loss of every layer while the teacher reads."""
        active, losses = self.active(), dict[int, LayerLoss]()

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            if (index := layer_number(module)) not in active:
                return
            inputs, projection = AttentionInputs(query, key, value, scale), self.projections.get(index)
            with torch.enable_grad():
                result = layer_loss(self.settings.loss, module.student, inputs, projection)  # type: ignore[arg-type]
                (result.loss * share).backward()
            if not result.loss.isfinite() and not inputs.is_finite():
                raise FaultError(f"layer {index}: the teacher's own queries, keys or values are not finite")
            losses[index] = LayerLoss(result.loss.detach(), result.excess)

        with torch.no_grad(), narrower_windows(self.student, keep), observing(self.base, observe):
            hidden_states(self.base, ids)
        return losses

    def model_losses(self, ids: torch.Tensor, keep: float, share: float) -> dict[int, LayerLoss]:
        """Compute and differentiate the loss of the whole student, which all layers share."""
        assert self.head is not None
        teacher = None
        if self.settings.loss == "logits":
            with torch.no_grad(), attending(self.base, TEACHER), without_adapters(self.base):
                teacher = hidden_states(self.base, ids)
            if not teacher.isfinite().all():
                raise FaultError(
                    "the teacher's hidden states are not finite: load it in float32, or repair its weights"
                )
        with narrower_windows(self.student, keep):
            hidden = hidden_states(self.base, ids)
        loss = direct_loss(self.head, hidden, ids) if teacher is None else logits_loss(self.head, hidden, teacher)
        (loss * share).backward()
        return dict.fromkeys(self.active(), LayerLoss(loss.detach(), loss.detach()))

    def free_memory(self) -> None:
        """Free what a step held when it ran out of memory."""
        for optimizer in self.optimizers.values():
            optimizer.adam.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state(self, facts: Mapping[str, object]) -> TrainingState:
        """Collect all that resuming from here needs."""
        tensors = {f"{i}/{name}": t for i, layer in self.optimizers.items() for name, t in layer.tensors().items()}
        layers = {str(index): asdict(optimizer.status) for index, optimizer in self.optimizers.items()}
        return TrainingState(tensors, {**facts, "step": self.step, "rows": self.rows, "layers": layers})

    def restore(self, state: TrainingState) -> None:
        """Resume from a state."""
        self.step, self.rows = state.facts["step"], state.facts["rows"]
        for index, optimizer in self.optimizers.items():
            tensors = {n.removeprefix(f"{index}/"): t for n, t in state.tensors.items() if n.startswith(f"{index}/")}
            optimizer.restore(tensors, state.facts["layers"][str(index)])


def make_optimizers(student: LinearizedForCausalLM, settings: TrainingSettings) -> dict[int, LayerOptimizer]:
    """Make an optimiser for every layer that has parameters to train."""
    optimizers = {}
    for module in attention_modules(student.base):
        if found := {name: p for name, p in module.named_parameters() if p.requires_grad}:
            rates = {name: settings.rate_of(name) for name in found}
            optimizers[layer_number(module)] = LayerOptimizer(found, rates)
    return optimizers


@contextmanager
def narrower_windows(student: LinearizedForCausalLM, keep: float) -> Iterator[None]:
    """Shorten the windows of heads with features, for as long as the context lasts, to a share of their length."""
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
    """Round numbers below 1e-38 to 0: weights of far keys often are so small, and slow a CPU up to tenfold."""
    before = bool(torch.full((1,), 1e-40).mul_(1) == 0)
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)
