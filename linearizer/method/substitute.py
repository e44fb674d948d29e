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
from linearizer.teacher.layers import blocks_of

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


def attention_inputs(module: nn.Module, teacher: PreTrainedModel, texts: torch.Tensor) -> tuple:
    """Record what a layer attends with on texts."""
    recorder = InputRecorder()
    with replace_student(module, recorder):
        teacher.base_model(input_ids=texts.to(teacher.device), use_cache=False)
    return recorder.inputs


def make_layer_student(
    layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin, index: int, device: torch.device
) -> LayerStudent:
    """Make the student of a layer, which has this number, whose KV heads hold these options."""
    student = LayerStudent([head.held for head in heads], sinks, layer.key_dim, UNTRAINED, layer.value_dim)
    begin(student, index)
    return student.to(device).eval()


class BlockAnswers:
    """The answers of a model's blocks to some texts: with them the model can run again from a block on."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = blocks_of(model)
        self.answers: list[Any] = [None] * len(self.blocks)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep what the blocks answer while this lasts."""

        def keep(index: int) -> Callable:
            return lambda block, args, output: self.answers.__setitem__(index, output)

        with ExitStack() as stack:
            for index, block in enumerate(self.blocks):
                stack.callback(block.register_forward_hook(keep(index)).remove)
            yield

    @contextmanager
    def skipping(self, until: int, after: int | None = None) -> Iterator[None]:
        """Let the blocks before a number, and after another, give their kept answers while this lasts."""
        with ExitStack() as stack:
            for index, (block, answer) in enumerate(zip(self.blocks, self.answers, strict=True)):
                if index < until or (after is not None and index > after):
                    stack.enter_context(fixed_answer(block, answer))
            yield


class FixedAnswer:
    """Takes the place of a module's code, and gives a fixed answer without computing."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer


def is_fixed(block: nn.Module) -> bool:
    """Tell whether a module gives a fixed answer."""
    return isinstance(vars(block).get("forward"), FixedAnswer)


@contextmanager
def fixed_answer(block: nn.Module, answer: Any) -> Iterator[None]:
    """Let a module return a fixed answer without computing."""
    own = vars(block).get("forward")  # that streams the weights of the block
    block.forward = FixedAnswer(answer)
    try:
        yield
    finally:
        if own is None:
            del block.forward
        else:
            block.forward = own
