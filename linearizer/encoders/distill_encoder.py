"""Distils an encoder's student: its layers learn the outputs of its teacher's layers, to make up for slots."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cosine_similarity

from linearizer.encoders.attention_interface import IMPLEMENTATION
from linearizer.encoders.encoder_inputs import Inputs, batches
from linearizer.encoders.modeling_encoder import LinearizedEncoder
from linearizer.errors import LinearizerError
from linearizer.progress import Progress, Steps
from linearizer.teacher.observing import attending

Weights = Mapping[str, torch.Tensor]
Group = TypeVar("Group")
NO_WEIGHTS: Weights = {}
RATE = 2e-5  # of Adam at first; it falls to 0


def distil(student: LinearizedEncoder, inputs: Sequence[Inputs], batch: int) -> Steps[None]:
    """Train a student's layers on the outputs of its teacher's: the untrained student with softmax."""

    def loss_on(group: Inputs, initial: Weights) -> torch.Tensor:
        with torch.no_grad():
            target = read_states(student, group, "sdpa", initial)
        return states_loss(read_states(student, group, IMPLEMENTATION), target)

    return train_layers(student, list(batches(list(inputs), batch)), loss_on)


def train_layers(
    student: nn.Module, inputs: Sequence[Group], loss_on: Callable[[Group, Weights], torch.Tensor]
) -> Steps[None]:
    """Train the layers of a student, except embeddings, once on each group of inputs except the last.

    The last group decides: if training did not lower the loss there, the weights are restored. `loss_on` also gets the
    initial weights.
    """
    *groups, check = inputs
    weights = layer_weights(student)
    initial = {name: weight.detach().clone() for name, weight in weights.items()}
    with torch.no_grad():
        before = loss_on(check, initial)
    for weight in weights.values():
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(weights.values(), RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(1, len(groups)))
    for number, group in enumerate(groups):
        loss = loss_on(group, initial)
        if not torch.isfinite(loss):
            raise LinearizerError(f"the loss of step {number + 1} is not finite: ask for --steps 0, or another seed")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        optimizer.step()
        schedule.step()
        yield Progress("distill", number + 1, len(groups), "steps", {"loss": loss.item()})
    student.requires_grad_(False)
    if not loss_on(check, initial) < before:
        for name, weight in weights.items():
            weight.copy_(initial[name])


def layer_weights(student: nn.Module) -> dict[str, nn.Parameter]:
    """Return the weights of a student by name, without those that turn tokens or patches into vectors."""
    embedding = {x for m in student.modules() if isinstance(m, nn.Embedding | nn.Conv2d) for x in m.parameters()}
    return {name: x for name, x in student.named_parameters() if x not in embedding and "embed" not in name}


def read_states(
    student: LinearizedEncoder,
    inputs: Inputs,
    implementation: str,
    weights: Weights = NO_WEIGHTS,
) -> tuple[torch.Tensor, ...]:
    """Return the hidden states after each layer, with other `weights`; with "sdpa" a student attends as its teacher."""
    device = next(student.parameters()).device
    kwargs = {**{name: x.to(device) for name, x in inputs.items()}, "output_hidden_states": True}
    with attending(student.base, implementation):
        out = functional_call(student, dict(weights), kwargs=kwargs)
    final = getattr(out, "last_hidden_state", None)
    return (*out.hidden_states[1:], *(() if final is None else (final,)))


def states_loss(states: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the mean error of layers' hidden states relative to their variance, plus 1 - cosine of last means."""
    errors = [
        (mine - target).square().sum() / (target - target.mean((0, 1))).square().sum().clamp_min(1e-12)
        for mine, target in zip(states, targets, strict=True)
    ]
    turned = 1 - cosine_similarity(states[-1].mean(1), targets[-1].mean(1)).mean()
    return torch.stack(errors).mean() + turned
