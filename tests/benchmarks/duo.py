"""DuoAttention (2410.10819): each KV head keeps its whole cache or a window, by learned gates.

A gate says how much a KV head needs its whole cache instead of a window: the head attends with α softmax + (1 - α)
window. The α are trained so that the model's last hidden states stay the same and the mean α is small, on texts in
which passages are repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.substitute import attending_with
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, token_bytes
from linearizer.progress import Progress, Steps, finish
from linearizer.run.folder import Run
from linearizer.run.measured import SMALLEST
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.load import Teacher

GATE_STEPS = 60
GATE_RATE = 0.02
GATE_SPARSITY = 0.05  # weight of the mean α in the loss
GATE_BATCH = 2  # texts

Tensor = torch.Tensor
Gates = Sequence[Sequence[float]]  # [layer][KV head], none in a native layer


def allocate_as_duo(run: Run, teacher: Teacher) -> Allocation:
    """Learn the gates of a run's teacher, and allocate by them."""
    plan, layers, sinks = run.plan, teacher.inspection.layers, run.plan.resolved_sinks
    window = max(plan.budget or 0, 2 * sinks) - sinks
    gates = finish(learn_gates(teacher.model, TextsOfRun.of(run, teacher).priced, layers, window, sinks, GATE_STEPS))
    return allocate_by_gates(gates, layers, plan.budget or 0, sinks, plan.target_tokens(run.positions))


class Gated(nn.Module):
    """Replaces a layer's student: mixes softmax and window attention by one gate for each KV head."""

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
    alphas: list[Tensor] = [gate.alpha for gate in gates.values()]
    optimizer = torch.optim.Adam(alphas, lr=GATE_RATE)
    for step in range(steps):
        rows = torch.arange(step * GATE_BATCH, (step + 1) * GATE_BATCH) % len(texts)
        ids = texts[rows].to(device)
        with torch.no_grad():
            expected = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        with attending_with(teacher, gates):
            hidden = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        error = (hidden - expected).square().sum() / expected.square().sum()
        loss = error + GATE_SPARSITY * torch.cat(alphas).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for alpha in alphas:
                alpha.clamp_(0, 1)
        yield Progress("gates", step + 1, steps, "steps", {"error": error.item()})
    return tuple(tuple(gates[index].alpha.tolist()) if index in gates else () for index in range(len(layers)))


def allocate_by_gates(gates: Gates, layers: Sequence[Layer], budget: int, sinks: int, length: int) -> Allocation:
    """Leave softmax as many heads as the budget has room for at a length, and give the others one window size."""
    tokens = {(index, head): token_bytes(layers[index]) for index, row in enumerate(gates) for head in range(len(row))}
    order = sorted(tokens, key=lambda place: -gates[place[0]][place[1]])

    def tokens_of_others(count: int) -> int:
        """Compute the tokens that each other head can hold beside the first softmax heads."""
        full, windows = (sum(map(tokens.__getitem__, places)) for places in (order[:count], order[count:]))
        return (cache_bytes(layers, budget) - length * full) // windows if windows else 0

    least_tokens = sinks + max(SMALLEST, budget // 4)  # a window is worth more than another softmax head
    count = next((n for n in range(len(order)) if tokens_of_others(n + 1) < least_tokens), len(order))
    window = Head(window=tokens_of_others(count) - sinks)
    heads = {place: Head(softmax=True) if rank < count else window for rank, place in enumerate(order)}
    rows = (tuple(heads[index, head] for head in range(len(row))) for index, row in enumerate(gates))
    return Allocation("duo", sinks, tuple(rows))
