"""Swaps what attends in a model's layers, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.plan.head_bytes import Head, Layer
from linearizer.student.attention_interface import attention_modules
from linearizer.student.layer_student import LayerStudent

UNTRAINED = "codebook"  # the feature map that heads are priced with: as good as any before training
Begin = Callable[[LayerStudent, int], None]  # initialises the student of a layer, which has this number


@contextmanager
def replace_student(module: nn.Module, other: nn.Module) -> Iterator[None]:
    """Let another module attend in a layer, whether the layer has a student or not."""
    own = getattr(module, "student", None)
    module.student = other
    try:
        yield
    finally:
        if own is None:
            del module.student
        else:
            module.student = own


@contextmanager
def exchange_students(model: PreTrainedModel, students: Sequence[nn.Module]) -> Iterator[None]:
    """Let other students attend in a model's layers."""
    modules = [module for module in attention_modules(model) if hasattr(module, "student")]
    with ExitStack() as stack:
        for module, other in zip(modules, students, strict=True):
            stack.enter_context(replace_student(module, other))
        yield


class FixedOutput(nn.Module):
    """Takes the place of a layer's student, and returns a fixed output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.output


def make_layer_student(
    layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin, index: int, device: torch.device
) -> LayerStudent:
    """Make the student of a layer, which has this number, whose KV heads hold these options."""
    student = LayerStudent([head.held for head in heads], sinks, layer.key_dim, UNTRAINED, layer.value_dim)
    begin(student, index)
    return student.to(device).eval()


@contextmanager
def fixed_answer(block: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return a fixed answer without computing."""
    own = vars(block).get("forward")  # that streams the weights of the block
    block.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
