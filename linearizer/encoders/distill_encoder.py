"""Distils an encoder's student: its layers learn to write what its teacher's write, so that they make up for slots."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.functional import cosine_similarity
from transformers import PreTrainedModel

from linearizer.encoders.attention_interface import IMPLEMENTATION
from linearizer.encoders.encoder_inputs import Inputs, batches
from linearizer.encoders.modeling_encoder import LinearizedEncoder
from linearizer.errors import LinearizerError
from linearizer.progress import Progress, Steps

RATE = 1e-4  # of Adam at first; it falls to nothing


def distil(student: LinearizedEncoder, inputs: Sequence[Inputs], batch: int) -> Steps[None]:
    """Train the layers of a student, embeddings aside, on each input once but those of the last batch.

    These decide: a student that training did not bring nearer to its teacher there is left as it was. The teacher is
    the student as it was: its outputs are read before the weights that they come from change.
    """
    groups = list(batches(list(inputs), batch))
    targets = []
    for number, group in enumerate(groups):
        targets.append(read_states(student, group, "sdpa"))
        yield Progress("read teacher", number + 1, len(groups), "batches")
    *learnt, check = zip(groups, targets, strict=True)
    weights, before = layer_weights(student), check_loss(student, *check)
    kept = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.requires_grad_(True)
    optimizer = torch.optim.Adam(weights, RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, max(1, len(learnt)))
    for number, (group, target) in enumerate(learnt):
        loss = states_loss(read_states(student, group, IMPLEMENTATION), target)
        if not torch.isfinite(loss):
            raise LinearizerError(f"the loss of step {number + 1} is not finite: ask for --steps 0, or another seed")
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        schedule.step()
        yield Progress("distil", number + 1, len(learnt), "steps", {"loss": loss.item()})
    student.requires_grad_(False)
    if not check_loss(student, *check) < before:
        for weight, value in zip(weights, kept, strict=True):
            weight.copy_(value)


def check_loss(student: LinearizedEncoder, inputs: Inputs, target: Sequence[torch.Tensor]) -> float:
    """Return the loss on inputs that nothing is learnt from."""
    with torch.no_grad():
        return float(states_loss(read_states(student, inputs, IMPLEMENTATION), target))


def layer_weights(student: LinearizedEncoder) -> list[nn.Parameter]:
    """List the weights of a student but those that turn tokens or patches into vectors."""
    embedding = {x for m in student.modules() if isinstance(m, nn.Embedding | nn.Conv2d) for x in m.parameters()}
    return [weight for name, weight in student.named_parameters() if weight not in embedding and "embed" not in name]


def read_states(student: LinearizedEncoder, inputs: Inputs, implementation: str) -> tuple[torch.Tensor, ...]:
    """Return the hidden states after each layer; with "sdpa" a student attends as its teacher."""
    base: PreTrainedModel = student.base
    base.set_attn_implementation(implementation)
    try:
        with torch.set_grad_enabled(implementation == IMPLEMENTATION and torch.is_grad_enabled()):
            device = next(student.parameters()).device
            out = student(**{name: x.to(device) for name, x in inputs.items()}, output_hidden_states=True)
    finally:
        base.set_attn_implementation(IMPLEMENTATION)
    last = getattr(out, "last_hidden_state", None)
    return (*out.hidden_states[1:], *(() if last is None else (last,)))


def states_loss(states: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the error of hidden states relative to their variance, a mean over layers, and that of their last mean."""
    errors = [
        (mine - target).square().sum() / (target - target.mean((0, 1))).square().sum().clamp_min(1e-12)
        for mine, target in zip(states, targets, strict=True)
    ]
    turned = 1 - cosine_similarity(states[-1].mean(1), targets[-1].mean(1)).mean()
    return torch.stack(errors).mean() + turned
