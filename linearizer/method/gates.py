"""Learns a gate for every KV head, as DuoAttention does: how much the head needs its whole cache instead of a window.

A head attends with α softmax + (1 - α) window. The α are trained so that the model's last hidden states stay the same
and the mean α is small, on texts in which passages are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.substitute import replace_student
from linearizer.plan.head_bytes import Layer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.student.attention_interface import IMPLEMENTATION, attending, attention_modules
from linearizer.student.layer_student import LayerStudent

RATE = 0.02
SPARSITY = 0.05  # weight of the mean α in the loss
BATCH = 2  # texts

Tensor = torch.Tensor


class Gated(nn.Module):
    """Takes the place of a layer's student: mixes softmax and window attention by one gate for each KV head."""

    def __init__(self, layer: Layer, window: int, sinks: int) -> None:
        super().__init__()
        self.softmax = LayerStudent(["softmax"] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.window = LayerStudent([[window, 0]] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.alpha = nn.Parameter(torch.ones(layer.kv_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: None) -> Tensor:
        softmax, window = (student(q, k, v, scale, real, None) for student in (self.softmax, self.window))
        alpha = self.alpha.to(softmax.dtype).repeat_interleave(q.shape[1] // len(self.alpha))[:, None, None]
        return window + alpha * (softmax - window)


def learn_gates(
    teacher: PreTrainedModel, texts: torch.Tensor, layers: Sequence[Layer], window: int, sinks: int, steps: int
) -> Steps[tuple[tuple[float, ...], ...]]:
    """Train one gate per KV head on texts (texts, tokens), none in native layers; return them as [layer][KV head]."""
    device = next(teacher.parameters()).device
    gates = {
        index: Gated(layer, window, sinks).to(device)
        for index, layer in enumerate(layers)
        if layer.native_window is None
    }
    modules = attention_modules(teacher)
    alphas: list[Tensor] = [gate.alpha for gate in gates.values()]
    optimizer = torch.optim.Adam(alphas, lr=RATE)
    for step in range(steps):
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(texts)
        ids = texts[rows].to(device)
        with torch.no_grad():
            expected = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        with ExitStack() as stack, attending(teacher, IMPLEMENTATION):
            for index, gate in gates.items():
                stack.enter_context(replace_student(modules[index], gate))
            hidden = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        error = (hidden - expected).square().sum() / expected.square().sum()
        loss = error + SPARSITY * torch.cat(alphas).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for alpha in alphas:
                alpha.clamp_(0, 1)
        yield Progress(EventName.GATES, step + 1, steps, "steps", {"error": error.item()})
    return tuple(tuple(gates[index].alpha.tolist()) if index in gates else () for index in range(len(layers)))
