"""Measures the kl of whole students: a price is of one head alone, and heads may make up for each other."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from transformers import PreTrainedModel

from linearizer.method.substitute import Begin, make_layer_student, replace_student
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.student.attention_interface import IMPLEMENTATION, attending, attention_modules, device_of
from linearizer.teacher.logits import kl_of, logits_of


def measure_students(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    allocations: Sequence[Allocation],
    begin: Begin,
) -> Steps[list[float]]:
    """Measure the kl of each allocation's student, in nats per token."""
    kl = yield from kl_by_token(teacher, texts, layers, allocations, begin, EventName.TRY)
    return [own.mean().item() for own in kl]


@torch.inference_mode()
def kl_by_token(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    allocations: Sequence[Allocation],
    begin: Begin,
    step: EventName = EventName.CHECK,
) -> Steps[list[torch.Tensor]]:  # (texts, tokens) for each allocation
    """Measure the kl of each allocation's student at every token, in nats."""
    kl: list[torch.Tensor] = []
    yield Progress(step, 0, len(allocations), "students")
    expected = logits_of(teacher, texts)
    for allocation in allocations:
        kl.append(kl_of(expected, logits_of_student(teacher, texts, layers, allocation, begin)))
        yield Progress(step, len(kl), len(allocations), "students")
    return kl


def logits_of_student(
    teacher: PreTrainedModel, texts: torch.Tensor, layers: Sequence[Layer], allocation: Allocation, begin: Begin
) -> torch.Tensor:  # (texts, tokens, vocabulary)
    """Give the logits of one student, whose heads hold what the allocation says."""
    modules, rows = attention_modules(teacher), zip(layers, allocation.heads, strict=True)
    with attending(teacher, IMPLEMENTATION), ExitStack() as stack:
        for index, (module, (layer, heads)) in enumerate(zip(modules, rows, strict=True)):
            if heads:
                device = device_of(module, teacher.device)
                held = make_layer_student(layer, heads, allocation.sinks, begin, index, device)
                stack.enter_context(replace_student(module, held))
        return logits_of(teacher, texts)
