"""Gates that tell KV heads which need their whole cache from those that do with a window, learned as DuoAttention does.

A head attends with α softmax + (1 - α) window; the α are trained so that the model's last hidden states stay and the
sum of the α is small, on texts in which passages come again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.progress import Progress, Steps
from linearizer.run.head_bytes import Layer
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules
from linearizer.runtime.layer_student import LayerStudent

RATE = 0.02
SPARSITY = 0.05
BATCH = 2

Tensor = torch.Tensor


class Gated(nn.Module):
    """A layer between its teacher and its window."""

    def __init__(self, layer: Layer, window: int, sinks: int) -> None:
        super().__init__()
        self.whole = LayerStudent(["softmax"] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.near = LayerStudent([[window, 0]] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.alpha = nn.Parameter(torch.ones(layer.kv_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: None) -> Tensor:
        whole, near = (part(q, k, v, scale, real, None) for part in (self.whole, self.near))
        alpha = self.alpha.to(whole.dtype).repeat_interleave(q.shape[1] // len(self.alpha))[:, None, None]
        return near + alpha * (whole - near)


def learn_gates(
    teacher: PreTrainedModel, windows: torch.Tensor, layers: Sequence[Layer], window: int, sinks: int, steps: int
) -> Steps[tuple[tuple[float, ...], ...]]:
    """Train one gate per KV head on texts (texts, tokens); none in a layer that the teacher bounds itself."""
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
        rows = torch.arange(step * BATCH, (step + 1) * BATCH) % len(windows)
        ids = windows[rows].to(device)
        with torch.no_grad():
            wanted = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        with ExitStack() as stack, attending(teacher, IMPLEMENTATION):
            for index, gate in gates.items():
                modules[index].student = gate
                stack.callback(delattr, modules[index], "student")
            given = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        error = (given - wanted).square().sum() / wanted.square().sum()
        loss = error + SPARSITY * torch.cat(alphas).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for alpha in alphas:
                alpha.clamp_(0, 1)
        yield Progress("gates", step + 1, steps, "steps", {"error": error.item()})
    return tuple(tuple(gates[index].alpha.tolist()) if index in gates else () for index in range(len(layers)))
