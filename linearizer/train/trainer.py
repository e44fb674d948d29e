"""Trains a student step by step: the losses of a batch, their gradients, and an optimiser for every layer.

A layerwise step is one forward pass of the teacher. Each layer's loss is computed and differentiated while the layer
attends, on its own queries, keys and values, and is freed before the next layer begins.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from linearizer.errors import FaultError
from linearizer.method.blockwise_pass import Chain, calls_of, chain_of, sweep_forward
from linearizer.run.stopping import is_out_of_memory
from linearizer.student.attention_interface import Observer, attending, attention_modules, observing
from linearizer.student.layer_student import FeatureGroup
from linearizer.student.matrix_rule import MatrixRule
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import featured, layer_number, output_projections
from linearizer.teacher.logits import PROBE_TOKENS
from linearizer.teacher.streaming import is_streamed
from linearizer.train.layer_optimizer import LayerOptimizer
from linearizer.train.lora import without_adapters
from linearizer.train.losses import (
    AttentionInputs,
    LayerLoss,
    LogitHead,
    are_alike,
    direct_loss,
    hidden_states,
    layer_loss,
    logits_loss,
    normaliser_of,
    output_losses,
)
from linearizer.train.settings import LAYERWISE, TrainingSettings, draw_batch, rate_share, window_share
from linearizer.train.training_state import TrainingState

Losses = dict[str, dict[int, float]]  # "loss" and "excess" of every layer
TEACHER = "sdpa"
MAX_TOGETHER = 2**23  # numbers that all layers attend with: above it operations take longer than their calls


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
        self.chain: Chain | None = None
        if self.layerwise and is_streamed(self.base):
            with attending(self.base, TEACHER):
                self.chain = chain_of(self.base, probe)

    def steps_at_once(self) -> int:
        """Count the steps that are taken together: with a streamed teacher those up to the next state."""
        if self.chain is None or self.rows < self.settings.batch:
            return 1
        every = self.settings.save_every
        return min(every - self.step % every, self.settings.steps - self.step)

    def take_steps(self, count: int) -> list[tuple[Losses, list[str]]]:
        """Take the next steps; list of each its losses, and sentences about what went wrong."""
        if self.chain is None or self.rows < self.settings.batch:
            return [self.take_step() for _ in range(count)]
        return self.take_steps_by_layers(self.chain, count)

    def take_steps_by_layers(self, chain: Chain, count: int) -> list[tuple[Losses, list[str]]]:
        """Let every layer take some steps before the next layer does: its weights are read once for all of them.

        What the teacher hands on does not depend on its students, so the bits are those of one step after the other.
        """
        steps, batch = range(self.step, self.step + count), 0
        taken: list[Losses] = [{"loss": {}, "excess": {}} for _ in steps]
        problems: list[dict[str, list[int]]] = [{} for _ in steps]

        def enter(number_of_batch: int, place: int, hidden: torch.Tensor) -> None:
            nonlocal batch
            batch = number_of_batch

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            index, step = layer_number(module), steps[batch]
            if (optimizer := self.active().get(index)) is None:
                return
            keep = window_share(self.settings, step)
            result = self.differentiate(module, AttentionInputs(query, key, value, scale), keep, 1.0, None)
            loss, excess = float(result.loss), float(result.excess)
            taken[batch]["loss"][index], taken[batch]["excess"][index] = loss, excess
            if message := optimizer.take_step(excess, step, rate_share(self.settings, step), keep == 1.0):
                problems[batch].setdefault(message, []).append(index)
            optimizer.clear_gradients()

        ids = [draw_batch(self.texts, self.settings, step).to(self.device) for step in steps]
        with observing(self.base, observe), without_denormals():
            for _ in sweep_forward(chain, [calls_of(self.base, chain, each) for each in ids], enter):
                pass
        self.step += count
        self.check_active()
        return [
            (losses, [f"step {step + 1}: {name_layers(layers)}: {message}" for message, layers in found.items()])
            for step, losses, found in zip(steps, taken, problems, strict=True)
        ]

    def take_step(self) -> tuple[Losses, list[str]]:
        """Take one step; return its losses, and sentences about what went wrong."""
        keep = window_share(self.settings, self.step)
        losses, events = self.gradients_that_fit(draw_batch(self.texts, self.settings, self.step).to(self.device), keep)
        rate = rate_share(self.settings, self.step)
        problems: dict[str, list[int]] = {}
        for index, optimizer in self.active().items():
            if message := optimizer.take_step(losses["excess"][index], self.step, rate, keep == 1.0):
                problems.setdefault(message, []).append(index)
            optimizer.clear_gradients()
        self.step += 1
        events += [f"step {self.step}: {name_layers(layers)}: {message}" for message, layers in problems.items()]
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
                raise FaultError(self.describe_too_long(ids[:1], keep))
            self.rows = -(-self.rows // 2)
            events.append(
                f"step {self.step + 1}: out of memory; from now on {self.rows} of the batch's {len(ids)} texts at once"
            )

    def gradients(self, ids: torch.Tensor, keep: float) -> Losses:
        """Add up the gradients of the parts of a batch; return the losses, averaged over it."""
        losses: Losses = {"loss": {}, "excess": {}}
        parts = ids.split(self.rows)
        normalisers = self.normalisers(parts) if len(parts) > 1 and self.settings.loss in ("l2", "output") else {}
        for part in parts:
            share = len(part) / len(ids)
            if self.layerwise:
                of_layers = self.layer_losses(part, keep, share, normalisers)
            else:
                of_layers = self.model_losses(part, keep, share)
            for index, of_layer in of_layers.items():
                losses["loss"][index] = losses["loss"].get(index, 0.0) + share * float(of_layer.loss)
                losses["excess"][index] = losses["excess"].get(index, 0.0) + share * float(of_layer.excess)
        return losses

    @torch.no_grad()
    def normalisers(self, parts: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """Compute of a whole batch, part by part, the normaliser of each layer's loss."""
        normalisers: dict[int, torch.Tensor] = {}
        kind, active, share = self.settings.loss, self.active(), 0.0

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            if (index := layer_number(module)) in active:
                inputs = AttentionInputs(query, key, value, scale)
                new = normaliser_of(kind, module.student, inputs, self.projections.get(index))  # type: ignore[arg-type]
                before = normalisers.get(index, torch.zeros_like(new) if kind == "output" else new)
                normalisers[index] = before + share * new if kind == "output" else torch.maximum(before, new)

        for part in parts:
            share = len(part) / sum(map(len, parts))
            self.read(part, observe)
        return normalisers

    def read(self, ids: torch.Tensor, observe: Observer) -> None:
        """Let the teacher read, and show what each layer attends with."""
        with torch.no_grad(), observing(self.base, observe):
            hidden_states(self.base, ids)

    def layer_losses(
        self, ids: torch.Tensor, keep: float, share: float, normalisers: Mapping[int, torch.Tensor]
    ) -> dict[int, LayerLoss]:
        """Compute and differentiate the loss of every layer while the teacher reads.

        Of small models the layers with memories wait until it has read, and are computed together.
        """
        active, losses = self.active(), {}
        waiting: dict[nn.Module, AttentionInputs] = {}
        together = may_be_together(self.student, self.settings, ids.numel())

        def observe(
            module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, _: dict
        ) -> None:
            index = layer_number(module)
            if index not in active:
                return
            inputs = AttentionInputs(query, key, value, scale)
            groups = featured(module.student)  # type: ignore[arg-type]
            if together and len(groups) == 1 and isinstance(groups[0].feature_map, MatrixRule):
                waiting[module] = inputs
            else:
                losses[index] = self.differentiate(module, inputs, keep, share, normalisers.get(index))

        self.read(ids, observe)
        groups = [featured(module.student)[0] for module in waiting]  # type: ignore[arg-type]
        if len(waiting) > 1 and are_alike(groups, list(waiting.values())):
            return losses | self.differentiate_together(waiting, groups, keep, share, normalisers)
        return losses | {
            layer_number(module): self.differentiate(module, inputs, keep, share, normalisers.get(layer_number(module)))
            for module, inputs in waiting.items()
        }

    def differentiate_together(
        self,
        waiting: Mapping[nn.Module, AttentionInputs],
        groups: Sequence[FeatureGroup],
        keep: float,
        share: float,
        normalisers: Mapping[int, torch.Tensor],
    ) -> dict[int, LayerLoss]:
        """Compute and differentiate the losses of layers whose memories are alike."""
        indices = [layer_number(module) for module in waiting]
        projections = [self.projections[index] for index in indices]
        with torch.enable_grad():
            own = [normalisers.get(index) for index in indices]
            found = output_losses(groups, list(waiting.values()), projections, keep, own)
            (torch.stack(found).sum() * share).backward()
        for index, loss, inputs in zip(indices, found, waiting.values(), strict=True):
            check_finite(index, loss, inputs)
        return {i: LayerLoss(loss.detach(), loss.detach()) for i, loss in zip(indices, found, strict=True)}

    def differentiate(
        self, module: nn.Module, inputs: AttentionInputs, keep: float, share: float, normaliser: torch.Tensor | None
    ) -> LayerLoss:
        """Compute and differentiate the loss of one layer."""
        index = layer_number(module)
        with torch.enable_grad():
            arguments = module.student, inputs, self.projections.get(index), keep, normaliser
            result = layer_loss(self.settings.loss, *arguments)  # type: ignore[arg-type]
            (result.loss * share).backward()
        check_finite(index, result.loss, inputs)
        return LayerLoss(result.loss.detach(), result.excess)

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
            optimizer.clear_gradients()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def describe_too_long(self, ids: torch.Tensor, keep: float) -> str:
        """Say that one text does not fit into memory, and which length does."""
        length = ids.shape[1] // 2
        while length:
            try:
                self.gradients(ids[:, :length], keep)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
            self.free_memory()
            length //= 2
        return f"one text of {ids.shape[1]} tokens does not fit into memory: " + (
            f"texts of {length} tokens do" if length else "not even one token does, so free memory"
        )

    def state(self, facts: Mapping[str, object]) -> TrainingState:
        """Collect all that resuming from here needs."""
        tensors = {f"{i}/{name}": t for i, layer in self.optimizers.items() for name, t in layer.tensors().items()}
        layers = {str(index): optimizer.facts() for index, optimizer in self.optimizers.items()}
        return TrainingState(tensors, {**facts, "step": self.step, "rows": self.rows, "layers": layers})

    def restore(self, state: TrainingState) -> None:
        """Resume from a state."""
        self.step, self.rows = state.facts["step"], state.facts["rows"]
        for index, optimizer in self.optimizers.items():
            own = {n.removeprefix(f"{index}/"): t for n, t in state.tensors.items() if n.startswith(f"{index}/")}
            optimizer.restore(own, state.facts["layers"][str(index)])


def check_finite(index: int, loss: torch.Tensor, inputs: AttentionInputs) -> None:
    """Refuse a loss that is not finite because the teacher is not."""
    if not loss.isfinite() and not inputs.is_finite():
        raise FaultError(f"layer {index}: the teacher's own queries, keys or values are not finite")


def may_be_together(student: LinearizedForCausalLM, settings: TrainingSettings, tokens: int) -> bool:
    """Tell whether layers with memories that are alike are computed together: those of small models.

    Their numbers for one token are at most those of queries, keys and values.
    """
    config = student.base.config.get_text_config()
    return settings.loss == "output" and tokens <= MAX_TOGETHER // (3 * config.num_hidden_layers * config.hidden_size)


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
    """Shorten the windows beside features, for as long as the context lasts, to a share of their length."""
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


def name_layers(layers: Sequence[int]) -> str:
    """Name layers in a sentence."""
    return f"layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}"
