"""Estimates prices of heads from one pass forward and a few back: for models too large to measure every head.

If an option changes the output of a head's attention by δ, the kl at the model's output is ½ δᵀ F δ to second order,
F being the Fisher information: the mean of g gᵀ over next tokens drawn from the teacher, g the gradient of their
log-likelihood. Each token's change counts alone (what one change does to another is left out), so that few draws do.
A large kl lies beyond the second order and is overestimated; the estimate serves to order heads and options.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.swap import Begin, make_layer_student
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.prices import Prices
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules

DRAWS = 4  # of next tokens, for every text

Tensor = torch.Tensor


class Recording(nn.Module):
    """Takes the place of a layer's student: attends as the teacher does, and keeps its inputs and its output."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.softmax = softmax

    def forward(self, *inputs: Any) -> Tensor:
        self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
        output = self.softmax(*inputs)
        self.output = output if output.requires_grad else output.requires_grad_()
        return self.output


def estimate_prices(
    teacher: PreTrainedModel,
    texts: Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    seed: int = 0,
) -> Steps[Prices]:
    """Estimate the prices of all heads, text by text, in the memory of training on one text without an optimiser."""
    modules = attention_modules(teacher)
    priced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    sums = {index: torch.zeros(len(options), layers[index].kv_heads, dtype=torch.float64) for index in priced}
    generator = torch.Generator().manual_seed(seed)
    for done, ids in enumerate(texts.split(1)):
        recordings = {index: recording_of(modules[index], layers[index], sinks, begin) for index in priced}
        gradients = gradients_of(teacher, [(modules[index], recordings[index]) for index in priced], ids, generator)
        for (index, recording), gradient in zip(recordings.items(), gradients, strict=True):
            for place, option in enumerate(options):
                with torch.no_grad():
                    heads = [option] * layers[index].kv_heads
                    output = make_layer_student(modules[index], layers[index], heads, sinks, begin)(*recording.inputs)
                    change = (output - recording.output).float().unflatten(1, (layers[index].kv_heads, -1))
                    # (draws, 1, KV heads, group, tokens): the queries of a group change together
                    slope = (gradient.unflatten(2, (layers[index].kv_heads, -1)) * change).sum((-1, 3))
                    sums[index][place] += slope.square().mean(0).sum((0, 2)).double().cpu() / 2
        yield Progress(EventName.PRICE, done + 1, len(texts), "texts")
    kl = [sums[index].div(texts.numel()).T.tolist() if index in sums else [] for index in range(len(layers))]
    return Prices(sinks, tuple(options), tuple(tuple(map(tuple, rows)) for rows in kl))


def recording_of(module: nn.Module, layer: Layer, sinks: int, begin: Begin) -> Recording:
    """Make the recording of a layer."""
    return Recording(make_layer_student(module, layer, [Head(softmax=True)] * layer.kv_heads, sinks, begin))


def gradients_of(
    teacher: PreTrainedModel, recordings: Sequence[tuple[nn.Module, Recording]], ids: Tensor, generator: torch.Generator
) -> list[Tensor]:
    """Run one text; return for every layer the gradients of its output, one for each draw of next tokens."""
    with ExitStack() as stack, attending(teacher, IMPLEMENTATION), torch.enable_grad():
        for module, recording in recordings:
            module.student = recording
            stack.callback(delattr, module, "student")
        logs = teacher(input_ids=ids.to(teacher.device), use_cache=False).logits.float().log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp()[0].cpu(), DRAWS, replacement=True, generator=generator)
        outputs = [recording.output for _, recording in recordings]
        rows = []
        for draw in drawn.T.to(logs.device):
            likelihood = logs[0].gather(-1, draw[:, None]).sum()
            rows.append([x.float() for x in torch.autograd.grad(likelihood, outputs, retain_graph=True)])
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
