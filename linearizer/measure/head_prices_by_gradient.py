"""Estimates prices of heads from one pass forward and a few back, in place of a pass for every price.

If an option changes the output of a head's attention by δ, the kl at the model's output is ½ δᵀ F δ to second order,
F being the Fisher information: the mean of g gᵀ over next tokens drawn from the teacher, g the gradient of their
log-likelihood. Each token's change counts alone (what one change does to another is left out), so that few draws do.
A large kl lies beyond the second order and is overestimated; the estimate serves to order heads and options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.logits import vocabulary
from linearizer.model.swap import Begin, make_layer_student
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.prices import KlOfLayers, Prices
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules
from linearizer.runtime.layer_student import generator_at

DRAWS = 4  # of next tokens, for every text
MAX_GRADIENTS = 2**27  # of several texts together, with their logits

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
    before: tuple[int, KlOfLayers] = (0, ()),
    keep: Callable[[int, KlOfLayers], None] = lambda texts, kl: None,
) -> Steps[Prices]:
    """Estimate the prices of all heads, in the memory of training on a few texts without an optimiser.

    `keep` receives how many texts are done, and the kl summed over their tokens; `before` is that of an earlier call,
    to go on from. Every text draws its next tokens for itself.
    """
    modules = attention_modules(teacher)
    priced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    done, sums = before[0], {index: torch.zeros(layers[index].kv_heads, len(options)).double() for index in priced}
    if done:
        sums = {index: torch.tensor(before[1][index], dtype=torch.float64) for index in priced}
    together = texts_together(teacher, layers, texts.shape[1])
    for first in range(done, len(texts), together):
        ids = texts[first : first + together]
        recordings = {index: recording_of(modules[index], layers[index], sinks, begin) for index in priced}
        generators = [generator_at(seed, done + text) for text in range(len(ids))]
        gradients = gradients_of(teacher, [(modules[index], recordings[index]) for index in priced], ids, generators)
        for (index, recording), gradient in zip(recordings.items(), gradients, strict=True):
            for place, option in enumerate(options):
                with torch.no_grad():
                    heads = [option] * layers[index].kv_heads
                    output = make_layer_student(modules[index], layers[index], heads, sinks, begin)(*recording.inputs)
                    change = (output - recording.output).float().unflatten(1, (layers[index].kv_heads, -1))
                    # (draws, texts, KV heads, group, tokens): the queries of a group change together
                    slope = (gradient.unflatten(2, (layers[index].kv_heads, -1)) * change).sum((-1, 3))
                    sums[index][:, place] += slope.square().mean(0).sum((0, 2)).double().cpu() / 2
        done += len(ids)
        keep(done, table(sums, len(layers)))
        yield Progress(EventName.PRICE, done, len(texts), "texts")
    return Prices(
        sinks, tuple(options), table({index: own / texts.numel() for index, own in sums.items()}, len(layers))
    )


def table(kl: Mapping[int, Tensor], layers: int) -> tuple[tuple[tuple[float, ...], ...], ...]:
    """Lay the kl of layers (KV heads, options) out, with no heads in those that are not priced."""
    return tuple(tuple(map(tuple, kl[index].tolist())) if index in kl else () for index in range(layers))


def texts_together(teacher: PreTrainedModel, layers: Sequence[Layer], length: int) -> int:
    """Compute how many texts are run together, by the gradients and the logits that are held of each."""
    outputs = sum(layer.query_heads * layer.value_dim for layer in layers if layer.native_window is None)
    return max(1, MAX_GRADIENTS // (length * (DRAWS * outputs + 3 * vocabulary(teacher))))


def recording_of(module: nn.Module, layer: Layer, sinks: int, begin: Begin) -> Recording:
    """Make the recording of a layer."""
    return Recording(make_layer_student(module, layer, [Head(softmax=True)] * layer.kv_heads, sinks, begin))


def gradients_of(
    teacher: PreTrainedModel,
    recordings: Sequence[tuple[nn.Module, Recording]],
    ids: Tensor,
    generators: Sequence[torch.Generator],
) -> list[Tensor]:
    """Run some texts; return for every layer the gradients of its output, one for each draw of next tokens."""
    with ExitStack() as stack, attending(teacher, IMPLEMENTATION), torch.enable_grad():
        for module, recording in recordings:
            module.student = recording
            stack.callback(delattr, module, "student")
        logs = teacher(input_ids=ids.to(teacher.device), use_cache=False).logits.float().log_softmax(-1)
        pairs = zip(logs.detach().exp().cpu(), generators, strict=True)
        drawn = torch.cat([torch.multinomial(text, DRAWS, replacement=True, generator=draw) for text, draw in pairs])
        outputs = [recording.output for _, recording in recordings]
        rows = []
        for draw in drawn.T.to(logs.device):
            likelihood = logs.flatten(0, 1).gather(-1, draw[:, None]).sum()
            rows.append([x.float() for x in torch.autograd.grad(likelihood, outputs, retain_graph=True)])
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
