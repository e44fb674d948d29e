"""What each KV head costs the model, estimated from one pass forward and a few back: for models too large to measure.

If an option changes the output of a head's attention by δ, the divergence at the model's output is ½ δᵀ F δ to second
order, F being the Fisher information: the mean of g gᵀ over next tokens drawn from the teacher, g the gradient of their
log-likelihood. Tokens count one by one here (what one change does to another is left out), so that few draws do.
Dear heads, beyond the second order, come out too dear; the order of heads and options is what it is for.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.swap import Begin, student_of
from linearizer.progress import Progress, Steps
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.prices import Prices
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules

DRAWS = 4  # of next tokens, for every text

Tensor = torch.Tensor


class Watched(nn.Module):
    """Takes the place of a layer's student: attends as the teacher does, and keeps what it saw and gave."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, *given: Any) -> Tensor:
        self.given = tuple(x.detach() if isinstance(x, Tensor) else x for x in given)
        out = self.whole(*given)
        self.out = out if out.requires_grad else out.requires_grad_()
        return self.out


def estimate(
    teacher: PreTrainedModel,
    windows: Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    seed: int = 0,
) -> Steps[Prices]:
    """Price all heads, text by text: memory as training the model on one text takes, less what optimizers do."""
    modules = attention_modules(teacher)
    priced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    costs = {index: torch.zeros(len(options), layers[index].kv_heads, dtype=torch.float64) for index in priced}
    generator = torch.Generator().manual_seed(seed)
    for done, ids in enumerate(windows.split(1)):
        watched = [watch(modules[index], layers[index], sinks, begin) for index in priced]
        for index, seen, gradients in zip(priced, *gradients_of(teacher, watched, ids, generator), strict=True):
            for place, option in enumerate(options):
                with torch.no_grad():
                    heads = [option] * layers[index].kv_heads
                    other = student_of(modules[index], layers[index], heads, sinks, begin)(*seen.given)
                    change = (other - seen.out).float().unflatten(1, (layers[index].kv_heads, -1))
                    # (draws, 1, kv heads, group, tokens): the queries of a group change together
                    slope = (gradients.unflatten(2, (layers[index].kv_heads, -1)) * change).sum((-1, 3))
                    costs[index][place] += slope.square().mean(0).sum((0, 2)).double().cpu() / 2
        yield Progress("price", done + 1, len(windows), "texts")
    found = [costs[index].div(windows.numel()).T.tolist() if index in costs else [] for index in range(len(layers))]
    return Prices(sinks, tuple(options), tuple(tuple(map(tuple, rows)) for rows in found))


def watch(module: nn.Module, layer: Layer, sinks: int, begin: Begin) -> tuple[nn.Module, Watched]:
    """Make what watches a layer."""
    whole = student_of(module, layer, [Head(softmax=True)] * layer.kv_heads, sinks, begin)
    return module, Watched(whole)


def gradients_of(
    teacher: PreTrainedModel, watched: Sequence[tuple[nn.Module, Watched]], ids: Tensor, generator: torch.Generator
) -> tuple[list[Watched], list[Tensor]]:
    """Run one text; give for every layer what it saw, and for each draw the gradient of what it gave."""
    with ExitStack() as stack, attending(teacher, IMPLEMENTATION), torch.enable_grad():
        for module, seen in watched:
            module.student = seen
            stack.callback(delattr, module, "student")
        logs = teacher(input_ids=ids.to(teacher.device), use_cache=False).logits.float().log_softmax(-1)
        drawn = torch.multinomial(logs.detach().exp()[0].cpu(), DRAWS, replacement=True, generator=generator)
        outs = [seen.out for _, seen in watched]
        rows = []
        for draw in drawn.T.to(logs.device):
            chosen = logs[0].gather(-1, draw[:, None]).sum()
            rows.append([x.float() for x in torch.autograd.grad(chosen, outs, retain_graph=True)])
    return [seen for _, seen in watched], [torch.stack(parts) for parts in zip(*rows, strict=True)]
