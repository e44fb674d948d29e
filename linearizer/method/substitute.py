"""Lets students attend in a model's layers while a context lasts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.initialise import initialise_layer
from linearizer.method.recorder import Samples
from linearizer.plan.allocation import Allocation, check_allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.student.attention_interface import IMPLEMENTATION, attention_by_layer, attention_modules, device_of
from linearizer.student.layer_student import LayerStudent, SharedStudent
from linearizer.teacher.observing import attending


@contextmanager
def replace_part(module: nn.Module, name: str, replacement: Any) -> Iterator[None]:
    """Replace a part or method of a module while the context lasts."""
    original = vars(module).get(name, module._modules.get(name))
    setattr(module, name, replacement)
    try:
        yield
    finally:
        delattr(module, name) if original is None else setattr(module, name, original)


@contextmanager
def exchange_students(model: PreTrainedModel, students: Sequence[nn.Module]) -> Iterator[None]:
    """Let other students attend in a model's layers."""
    modules = [module for module in attention_modules(model) if hasattr(module, "student")]
    with ExitStack() as stack:
        for module, student in zip(modules, students, strict=True):
            stack.enter_context(replace_part(module, "student", student))
        yield


@contextmanager
def attending_with(teacher: PreTrainedModel, students: Mapping[int, nn.Module]) -> Iterator[None]:
    """Let students attend in the layers of a teacher that have these numbers."""
    modules = attention_by_layer(teacher)
    with ExitStack() as stack, attending(teacher, IMPLEMENTATION):
        for index, student in students.items():
            stack.enter_context(replace_part(modules[index], "student", student))
        yield


def fixed_answer(block: nn.Module, answer: Any) -> AbstractContextManager[None]:
    """Let a module return a fixed answer and compute nothing."""
    return replace_part(block, "forward", lambda *args, **kwargs: answer)


def make_layer_student(
    layer: Layer,
    heads: Sequence[Head],
    sinks: int,
    samples: Samples,
    index: int,
    device: torch.device,
    feature_map: str = "prf",
    exact_tokens: int = 0,
) -> LayerStudent:
    """Make the student of the layer with this number, in which each KV head holds its option."""
    held = [head.to_config() for head in heads]
    student = LayerStudent(held, sinks, layer.key_dim, feature_map, layer.value_dim, exact_tokens)
    initialise_layer(student, samples, index)
    return student.to(device).eval()


def make_students(
    model: PreTrainedModel,
    layers: Sequence[Layer],
    allocation: Allocation,
    samples: Samples,
    feature_map: str = "prf",
    exact_tokens: int = 0,
) -> dict[int, nn.Module]:
    """Make the students of a model's layers by their numbers, as an allocation says what each KV head holds."""
    check_allocation(allocation, layers)
    modules = attention_by_layer(model)
    students: dict[int, nn.Module] = {}
    for index, (layer, heads) in enumerate(zip(layers, allocation.heads, strict=True)):
        if heads:
            place = index, device_of(modules[index], model.device)
            made = make_layer_student(layer, heads, allocation.sinks, samples, *place, feature_map, exact_tokens)
            students[index] = made
        elif isinstance(student := students.get(reads := -1 if layer.reads is None else layer.reads), LayerStudent):
            students[index] = SharedStudent(student, reads)
    return students
