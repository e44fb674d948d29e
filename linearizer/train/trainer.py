"""Trains a student step by step: the losses of a batch, their gradients, and an optimiser for every layer.

A layerwise step is one forward pass of the teacher. Each layer's loss is computed and differentiated while the layer
attends, on its own queries, keys and values, and is freed before the next layer begins. A layer whose training diverges
returns to its last good state. Ranks share the layers, or the texts of an end-to-end step, and take each step together.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from linearizer.errors import FaultError
from linearizer.method.choose import in_float32
from linearizer.run.disk import NUMBER
from linearizer.run.stopping import is_out_of_memory
from linearizer.student.attention_interface import attention_modules
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import blocks_of, featured, layer_number, output_projections
from linearizer.teacher.logits import PROBE_TOKENS, drawn_places
from linearizer.teacher.observing import attending_as_teacher, observing
from linearizer.teacher.ram import free_bytes
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.train.lora import without_adapters
from linearizer.train.losses import (
    STUDENT_WIDTHS,
    AttentionInputs,
    LayerLoss,
    LogitHead,
    direct_loss,
    hidden_states,
    layer_loss,
    logits_loss,
    recomputed_blocks,
)
from linearizer.train.settings import LAYERWISE, TrainingSettings, draw_batch, rate_share, window_share
from linearizer.train.training_state import TrainingState

Losses = dict[str, dict[int, float]]  # "loss" and "excess" of every layer
COPY_EVERY = 10  # steps between copies of a good state
HIGH = 10.0  # times the loss at the start: above it a loss counts as high
NOISE = 1e-3  # a loss below this is noise: it may grow without counting as high
MAX_HIGH_STEPS = 20  # steps for which a loss may stay high
MEMORY = 0.9  # of the running mean of the loss
MOMENTS = ("step", "exp_avg", "exp_avg_sq")  # Adam's state of a parameter


class Trainer:
    """A training of which `step` steps are done."""

    def __init__(
        self, student: LinearizedForCausalLM, texts: torch.Tensor, settings: TrainingSettings, ranks: Ranks = ALONE
    ) -> None:
        self.student, self.texts, self.settings, self.ranks = student, texts, settings, ranks
        self.device = next(student.parameters()).device
        self.optimizers = make_optimizers(student, settings)
        self.step, self.rows = 0, settings.batch  # rows: texts that run through the model together
        self.is_whole = True  # all layers are at this step
        self.layerwise = settings.loss in LAYERWISE
        self.own = ranks.share([*self.optimizers]) if self.layerwise else [*self.optimizers]
        probe = texts[:1, :PROBE_TOKENS].to(self.device)
        self.projections: Mapping[int, nn.Module] = {}
        if settings.loss == "output":
            self.projections = output_projections(self.student, probe)
        self.head = None if self.layerwise else LogitHead(self.student, probe)
        width = STUDENT_WIDTHS * student.config.get_text_config().hidden_size * len(blocks_of(student))
        self.recomputes = NUMBER * width * settings.batch * texts.shape[1] > free_bytes(self.device) / 2

    def take_step(self) -> tuple[Losses, list[str]]:
        """Take one step; return its losses, and sentences about what went wrong."""
        keep = window_share(self.settings, self.step)
        losses, events = self.gradients_that_fit(draw_batch(self.texts, self.settings, self.step).to(self.device), keep)
        losses = self.add_up(losses)
        rate = rate_share(self.settings, self.step)
        problems: dict[str, list[int]] = {}
        self.is_whole = False
        for index, optimizer in self.active(self.own).items():
            if message := optimizer.take_step(losses["excess"][index], self.step, rate, keep == 1.0):
                problems.setdefault(message, []).append(index)
            optimizer.adam.zero_grad()
        self.step, self.is_whole = self.step + 1, True
        for message, layers in self.gather_problems(problems).items():
            events.append(f"step {self.step}: layer{'s' * (len(layers) > 1)} {', '.join(map(str, layers))}: {message}")
        if not self.active():
            reasons = {optimizer.status.given_up for optimizer in self.optimizers.values()}
            raise FaultError(
                f"no layer is left to train at step {self.step} ({'; '.join(sorted(map(str, reasons)))}): ask for "
                f"another --loss than {self.settings.loss!r}, or train nothing (--steps 0)"
            )
        return losses, events

    def active(self, layers: Iterable[int] | None = None) -> dict[int, LayerOptimizer]:
        """List the layers that still train: all, or some of them."""
        chosen = {index: self.optimizers[index] for index in (self.optimizers if layers is None else layers)}
        return {index: optimizer for index, optimizer in chosen.items() if optimizer.status.given_up is None}

    def add_up(self, losses: Losses) -> Losses:
        """Add up the losses of all ranks, and the gradients of an end-to-end loss."""
        if not self.layerwise and self.ranks.count > 1:
            weights = [p for optimizer in self.active().values() for p in optimizer.parameters.values()]
            for p in weights:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            self.ranks.add_up([p.grad for p in weights if p.grad is not None])
        total: Losses = {"loss": {}, "excess": {}}
        for of_rank in self.ranks.gather(losses):
            for name, of_layers in of_rank.items():
                for index, loss in of_layers.items():
                    total[name][index] = total[name].get(index, 0.0) + loss
        return total

    def gather_problems(self, problems: dict[str, list[int]]) -> dict[str, list[int]]:
        """Gather what went wrong in a step, and the states of all layers."""
        if not self.layerwise:  # all ranks train all layers alike
            return problems
        gathered: dict[str, list[int]] = {}
        for statuses, of_rank in self.ranks.gather(({i: self.optimizers[i].status for i in self.own}, problems)):
            for index in statuses.keys() - {*self.own}:
                self.optimizers[index].status = statuses[index]
            for message, layers in of_rank.items():
                gathered[message] = sorted([*gathered.get(message, []), *layers])
        return gathered

    def gather_layers(self) -> None:
        """Bring the layers that other ranks train to the state that they have there."""
        if not self.layerwise or self.ranks.count == 1:
            return
        own = {index: {n: x.cpu() for n, x in self.optimizers[index].tensors().items()} for index in self.own}
        for of_rank in self.ranks.gather(own):
            for index in of_rank.keys() - {*self.own}:
                self.optimizers[index].restore(of_rank[index], asdict(self.optimizers[index].status))

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
        texts = len(ids)
        if not self.layerwise:
            ids = ids[self.ranks.number :: self.ranks.count]
        for part in ids.split(self.rows) if len(ids) else ():
            share = len(part) / texts
            for index, of_layer in compute(part, keep, share).items():
                for name, means in losses.items():
                    means[index] = means.get(index, 0.0) + share * float(getattr(of_layer, name))
        return losses

    def layer_losses(self, ids: torch.Tensor, keep: float, share: float) -> dict[int, LayerLoss]:
        """Compute and differentiate the loss of every layer while the teacher reads."""
        active, losses = self.active(self.own), dict[int, LayerLoss]()

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

        with torch.no_grad(), narrower_windows(self.student, keep), observing(self.student, observe):
            hidden_states(self.student, ids)
        return losses

    def model_losses(self, ids: torch.Tensor, keep: float, share: float) -> dict[int, LayerLoss]:
        """Compute and differentiate the loss of the whole student, which all layers share."""
        assert self.head is not None
        teacher = None
        if self.settings.loss == "logits":
            with torch.no_grad(), attending_as_teacher(self.student), without_adapters(self.student):
                teacher = hidden_states(self.student, ids)
            if not teacher.isfinite().all():
                raise FaultError(
                    "the teacher's hidden states are not finite: load it in float32, or repair its weights"
                )
        with (
            narrower_windows(self.student, keep),
            recomputed_blocks(self.student) if self.recomputes else nullcontext(),
        ):
            hidden = hidden_states(self.student, ids)
            loss = direct_loss(self.head, hidden, ids) if teacher is None else logits_loss(self.head, hidden, teacher)
            (loss * share).backward()
        return dict.fromkeys(self.active(), LayerLoss(loss.detach(), loss.detach()))

    @torch.no_grad()
    def kl_of_adapters(self, texts: torch.Tensor) -> tuple[float, float]:
        """Measure the student's KL without its adapters and with them, at some places of texts."""
        assert self.head is not None, "adapters are trained end to end"
        ids, places, head = texts.to(self.device), drawn_places(texts.shape[1]), self.head

        def rows() -> torch.Tensor:
            return hidden_states(self.student, ids)[:, places.to(self.device)]

        with without_denormals(), in_float32(self.student):
            with without_adapters(self.student):
                without = rows()
                with attending_as_teacher(self.student):
                    expected = rows()
            return float(logits_loss(head, without, expected)), float(logits_loss(head, rows(), expected))

    def free_memory(self) -> None:
        """Free the memory of a step that ran out of it."""
        for optimizer in self.optimizers.values():
            optimizer.adam.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def state(self, facts: Mapping[str, object]) -> TrainingState:
        """Collect everything that resuming from this step needs."""
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
    for module in attention_modules(student):
        if parameters := {name: p for name, p in module.named_parameters() if p.requires_grad}:
            rates = {name: settings.rate_of(name) for name in parameters}
            optimizers[layer_number(module)] = LayerOptimizer(parameters, rates)
    return optimizers


@contextmanager
def narrower_windows(student: LinearizedForCausalLM, keep: float) -> Iterator[None]:
    """Shorten the windows of heads with features to a share of their length while the context lasts."""
    groups = [group for layer in student.students() for group in featured(layer)]
    full_lengths = [group.window for group in groups]
    for group in groups:
        group.window = int(group.window * keep)
    try:
        yield
    finally:
        for group, window in zip(groups, full_lengths, strict=True):
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


@dataclass
class LayerStatus:
    """The state of a layer's training, without its tensors."""

    start: float | None = None  # its first loss with whole windows
    recent: float | None = None  # running mean of the loss with whole windows
    high: int = 0  # steps for which the loss has been high
    rate: float = 1.0  # the share of its learning rate that remains after it diverged
    given_up: str | None = None  # the reason why it is no longer trained


class LayerOptimizer:
    """Trains some parameters by Adam, with a learning rate for each."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], rates: Mapping[str, float]) -> None:
        self.parameters, self.rates, self.status = dict(parameters), dict(rates), LayerStatus()
        self.good = self.copy_parameters()
        self.reset_adam()

    def reset_adam(self) -> None:
        """Start Adam without moments."""
        groups = [{"params": [p], "full": self.rates[name]} for name, p in self.parameters.items()]
        self.adam = torch.optim.Adam(groups, lr=0.0, betas=(0.9, 0.99))

    def copy_parameters(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.parameters.items()}

    @torch.no_grad()
    def return_to_good_state(self) -> None:
        """Restore the last copy of the parameters."""
        for name, p in self.parameters.items():
            p.copy_(self.good[name])
        self.reset_adam()

    def take_step(self, loss: float, step: int, rate: float, whole_windows: bool) -> str | None:
        """Update the parameters by their gradients; return a sentence if the training went wrong.

        A loss with smaller windows does not measure progress, and is not compared with others.
        """
        status = self.status
        if not self.is_finite(loss):
            self.return_to_good_state()
            status.given_up = "its loss or gradient is not finite"
            return f"{status.given_up}; it returns to its last good state and is not trained any further"
        if whole_windows:
            status.start = loss if status.start is None else status.start
            status.recent = loss if status.recent is None else MEMORY * status.recent + (1 - MEMORY) * loss
            status.high = status.high + 1 if loss > HIGH * max(status.start, NOISE) else 0
        if status.high >= MAX_HIGH_STEPS:
            self.return_to_good_state()
            status.high, status.rate = 0, status.rate / 2
            return (
                f"its loss stays at {loss:.3g}, from {status.start:.3g} at the start; it returns to its last good "
                f"state, its learning rate halved to {status.rate:g} of the setting"
            )
        if status.high == 0 and step % COPY_EVERY == 0:
            self.good = self.copy_parameters()
        for group in self.adam.param_groups:
            group["lr"] = group["full"] * rate * status.rate
        self.adam.step()
        return None

    def is_finite(self, loss: float) -> bool:
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return math.isfinite(loss) and all(bool(gradient.isfinite().all()) for gradient in gradients)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor that resuming needs."""
        named: dict[str, torch.Tensor] = {}
        for name, p in self.parameters.items():
            named |= {f"{name}/now": p.detach(), f"{name}/good": self.good[name]}
            named |= {f"{name}/{moment}": value for moment, value in self.adam.state.get(p, {}).items()}
        return named

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, torch.Tensor], facts: Mapping[str, Any]) -> None:
        """Resume from `tensors` and `facts` of an earlier optimiser."""
        self.status = LayerStatus(**facts)
        self.reset_adam()
        for name, p in self.parameters.items():
            p.copy_(tensors[f"{name}/now"])
            self.good[name].copy_(tensors[f"{name}/good"])
            if f"{name}/{MOMENTS[0]}" in tensors:
                moments = {moment: tensors[f"{name}/{moment}"].clone() for moment in MOMENTS}
                self.adam.state[p] = {m: t if m == "step" else t.to(p.device) for m, t in moments.items()}
