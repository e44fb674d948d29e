"""What whole students cost the model, measured: prices are of one head alone, and heads may make up for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from linearizer.model.logits import divergence, logits_of
from linearizer.model.swap import Begin, cut
from linearizer.progress import Progress, Steps
from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Layer
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules


@torch.inference_mode()
def costs(
    teacher: PreTrainedModel,
    windows: torch.Tensor,
    layers: Sequence[Layer],
    allocations: Sequence[Allocation],
    begin: Begin,
) -> Steps[list[float]]:
    """Give the divergence of each student at the model's output, in nats per token."""
    expected, found = logits_of(teacher, windows), []
    for done, allocation in enumerate(allocations):
        yield Progress("try", done, len(allocations), "students")
        found.append(cost(teacher, windows, layers, allocation, begin, expected))
    return found


@torch.inference_mode()
def exchange(
    teacher: PreTrainedModel,
    windows: torch.Tensor,
    layers: Sequence[Layer],
    allocation: Allocation,
    other: Callable[[Allocation], Allocation | None],
    most: int,
    begin: Begin,
) -> Steps[tuple[Allocation, float]]:
    """Measure an allocation, then one by one what `other` makes of the best so far; give the best and its cost."""
    expected = logits_of(teacher, windows)
    best, least = allocation, cost(teacher, windows, layers, allocation, begin, expected)
    for done in range(most + 1):
        yield Progress("exchange", done, most, "students", {"kl": least})
        candidate = other(best) if done < most else None
        if candidate is None:
            break
        if (found := cost(teacher, windows, layers, candidate, begin, expected)) < least:
            best, least = candidate, found
    return best, least


def cost(
    teacher: PreTrainedModel,
    windows: torch.Tensor,
    layers: Sequence[Layer],
    allocation: Allocation,
    begin: Begin,
    expected: torch.Tensor,
) -> float:
    """Give how far one student's output is from the expected logits."""
    modules, rows = attention_modules(teacher), zip(layers, allocation.heads, strict=True)
    with attending(teacher, IMPLEMENTATION), ExitStack() as stack:
        for module, (layer, heads) in zip(modules, rows, strict=True):
            if heads:
                stack.enter_context(cut(module, layer, heads, allocation.sinks, begin))
        return divergence(expected, logits_of(teacher, windows)).mean().item()
