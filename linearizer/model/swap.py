"""Swaps what attends in a model's layers, for as long as a context lasts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.checkpoint import make_layer_students
from linearizer.model.layers import blocks_of
from linearizer.model.logits import logits_of
from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Head, Layer
from linearizer.runtime.attention_interface import attention_modules
from linearizer.runtime.layer_student import LayerStudent
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

UNTRAINED = "codebook"  # the feature map that heads are priced with: as good as any before training
Begin = Callable[[LayerStudent, int], None]  # initialises the student of a layer, which has this number


@contextmanager
def exchanged(model: PreTrainedModel, heads: Sequence[LayerStudent]) -> Iterator[None]:
    """Let other students attend in a model's layers."""
    modules = [module for module in attention_modules(model) if hasattr(module, "student")]
    own = [module.student for module in modules]
    for module, other in zip(modules, heads, strict=True):
        module.student = other
    try:
        yield
    finally:
        for module, kept in zip(modules, own, strict=True):
            module.student = kept


@contextmanager
def holding(student: LinearizedForCausalLM, layers: Sequence[Layer], allocation: Allocation) -> Iterator[None]:
    """Let a student's heads hold another allocation, without features: a control."""
    with exchanged(student.base, make_layer_students(student, layers, allocation)):
        yield


class InputRecorder(nn.Module):
    """Takes the place of a layer's student, and keeps its inputs."""

    def forward(self, *inputs: Any) -> torch.Tensor:
        self.inputs = inputs
        return inputs[0].new_zeros(*inputs[0].shape[:-1], inputs[2].shape[-1])


class FixedOutput(nn.Module):
    """Takes the place of a layer's student, and returns a fixed output."""

    def __init__(self, output: torch.Tensor) -> None:
        super().__init__()
        self.output = output

    def forward(self, *inputs: Any) -> torch.Tensor:
        return self.output


@contextmanager
def fixed_output(module: nn.Module, output: torch.Tensor) -> Iterator[None]:
    """Let a layer's attention return a fixed output."""
    module.student = FixedOutput(output)
    try:
        yield
    finally:
        del module.student


def attention_inputs(module: nn.Module, teacher: PreTrainedModel, texts: torch.Tensor) -> tuple:
    """Record what a layer attends with on texts."""
    module.student = recorder = InputRecorder()
    try:
        teacher.base_model(input_ids=texts.to(teacher.device), use_cache=False)
    finally:
        del module.student
    return recorder.inputs


@contextmanager
def heads_holding(module: nn.Module, layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin) -> Iterator[None]:
    """Let each KV head of a layer hold an option."""
    module.student = make_layer_student(module, layer, heads, sinks, begin)
    try:
        yield
    finally:
        del module.student


def make_layer_student(
    module: nn.Module, layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin
) -> LayerStudent:
    """Make the student of a layer whose KV heads hold these options."""
    student = LayerStudent([head.held for head in heads], sinks, layer.key_dim, UNTRAINED)
    begin(student, int(module.layer_idx))  # type: ignore[arg-type]
    return student.to(next(module.parameters()).device).eval()


@contextmanager
def skipping_first_layers(model: PreTrainedModel, texts: torch.Tensor) -> Iterator[Callable[[int], Any]]:
    """Yield a context for running the model from a layer on: the layers before it return their first answers again."""
    blocks = blocks_of(model)
    answers: list[Any] = [None] * len(blocks)

    def keep(index: int) -> Callable:
        return lambda block, args, output: answers.__setitem__(index, output)

    hooks = [block.register_forward_hook(keep(index)) for index, block in enumerate(blocks)]
    logits_of(model, texts)
    for hook in hooks:
        hook.remove()

    @contextmanager
    def skip(until: int) -> Iterator[None]:
        with ExitStack() as stack:
            for block, answer in zip(blocks[:until], answers, strict=False):
                stack.enter_context(fixed_answer(block, answer))
            yield

    yield skip


@contextmanager
def fixed_answer(block: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return a fixed answer without computing."""
    block.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        del block.forward
