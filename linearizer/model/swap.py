"""."""

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

UNTRAINED = "codebook"  # the features that heads are priced with: as good as any before training
Begin = Callable[[LayerStudent, int], None]  # begins the student of a layer, given by its number


@contextmanager
def exchanged(model: PreTrainedModel, heads: Sequence[LayerStudent]) -> Iterator[None]:
    """While this lasts, let other students attend in a model's layers."""
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
    """While this lasts, let a student's heads hold what another allocation without features gives them: a control."""
    with exchanged(student.base, make_layer_students(student, layers, allocation)):
        yield


class Seen(nn.Module):
    """Takes the place of a layer's student, and keeps what that would be given."""

    def forward(self, *given: Any) -> torch.Tensor:
        self.given = given
        return given[0].new_zeros(*given[0].shape[:-1], given[2].shape[-1])


class Answer(nn.Module):
    """Takes the place of a layer's student, and gives an output that was made before."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self.out = out

    def forward(self, *given: Any) -> torch.Tensor:
        return self.out


@contextmanager
def giving(module: nn.Module, out: torch.Tensor) -> Iterator[None]:
    """While this lasts, let a layer's attention give an output that was made before."""
    module.student = Answer(out)
    try:
        yield
    finally:
        del module.student


def seen_by(module: nn.Module, teacher: PreTrainedModel, windows: torch.Tensor) -> tuple:
    """Give what a layer attends with on texts: the layers before it are as they are."""
    module.student = seen = Seen()
    try:
        teacher.base_model(input_ids=windows.to(teacher.device), use_cache=False)
    finally:
        del module.student
    return seen.given


@contextmanager
def cut(module: nn.Module, layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin) -> Iterator[None]:
    """While this lasts, let the KV heads of a layer hold so much."""
    module.student = student_of(module, layer, heads, sinks, begin)
    try:
        yield
    finally:
        del module.student


def student_of(module: nn.Module, layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin) -> LayerStudent:
    """Make the student of a layer whose KV heads hold so much."""
    student = LayerStudent([head.held for head in heads], sinks, layer.key_dim, UNTRAINED)
    begin(student, int(module.layer_idx))  # type: ignore[arg-type]
    return student.to(next(module.parameters()).device).eval()


@contextmanager
def skipping(model: PreTrainedModel, windows: torch.Tensor) -> Iterator[Callable[[int], Any]]:
    """Give a way to run the model from a layer on: the layers before it answer what they answered the first time."""
    blocks = blocks_of(model)
    answers: list[Any] = [None] * len(blocks)

    def keep(index: int) -> Callable:
        return lambda block, args, output: answers.__setitem__(index, output)

    hooks = [block.register_forward_hook(keep(index)) for index, block in enumerate(blocks)]
    logits_of(model, windows)
    for hook in hooks:
        hook.remove()

    @contextmanager
    def skip(until: int) -> Iterator[None]:
        with ExitStack() as stack:
            for block, answer in zip(blocks[:until], answers, strict=False):
                stack.enter_context(answering(block, answer))
            yield

    yield skip


@contextmanager
def answering(block: nn.Module, answer: Any) -> Iterator[None]:
    """While this lasts, let a module answer without computing."""
    block.forward = lambda *args, **kwargs: answer
    try:
        yield
    finally:
        del block.forward
