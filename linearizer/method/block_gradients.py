"""Computes the gradients of a model's output at the attention of its layers, block by block.

A sweep forward keeps the hidden states that every block is given; a sweep back computes each block again, from the last
to the first. So one block alone has a graph, and its weights, in memory at a time, whatever the number of texts. The
bits are those of one graph of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.method.blockwise_pass import Chain, calls_of, hidden_of, hold_weights, sweep_forward
from linearizer.method.substitute import attending_with, fixed_answer
from linearizer.student.attention_interface import attention_modules
from linearizer.teacher.streaming import is_streamed

Tensor = torch.Tensor
Likelihoods = Callable[[int, Tensor], Sequence[Tensor]]  # of a batch and its logits: a number to differentiate a draw
Gradients = Iterator[tuple[int, Tensor]]  # a layer, and its gradients: (draws, texts, query heads, tokens, value_dim)


class Recording(nn.Module):
    """Takes the place of a layer's student: attends as the teacher does, and keeps its inputs and its output."""

    def __init__(self, softmax: nn.Module) -> None:
        super().__init__()
        self.softmax = softmax
        self.inputs: tuple = ()
        self.output = torch.empty(0)

    def forward(self, *inputs: Any) -> Tensor:
        output = self.softmax(*inputs)
        if torch.is_grad_enabled():
            self.inputs = tuple(x.detach() if isinstance(x, Tensor) else x for x in inputs)
            self.output = output if output.requires_grad else output.requires_grad_()
        return output

    def forget(self) -> None:
        """Let go of what was kept."""
        self.inputs, self.output = (), torch.empty(0)


def gradients_by_layer(
    teacher: PreTrainedModel,
    recordings: Mapping[int, Recording],
    batches: Sequence[Tensor],
    likelihoods: Likelihoods,
    chain: Chain | None,
) -> Gradients:
    """Run batches of texts; yield for each and for each recording, which then holds inputs and output, the gradients.

    The batches of a layer come in their order. `chain` is the teacher's; None: it has none.
    """
    if chain is None and is_streamed(teacher):
        raise RequestError(
            "its blocks hand each other more than hidden states, so heads cannot be priced while its weights do not "
            "fit into memory: use a larger machine, or --strategy window"
        )
    batches = [ids.to(teacher.device) for ids in batches]
    with attending_with(teacher, recordings):
        if chain is not None:
            yield from by_blocks(teacher, recordings, batches, likelihoods, chain)
        else:
            yield from at_once(teacher, recordings, batches, likelihoods)


def by_blocks(
    teacher: PreTrainedModel,
    recordings: Mapping[int, Recording],
    batches: Sequence[Tensor],
    likelihoods: Likelihoods,
    chain: Chain,
) -> Gradients:
    """Compute the gradients from the last block to the first, each of which is run again by itself."""
    calls = [calls_of(teacher, chain, ids) for ids in batches]
    given: list[list[Tensor]] = [[] for _ in batches]  # [batch][block]
    last: list[Tensor] = []
    for hidden in sweep_forward(chain, calls, lambda batch, place, hidden: given[batch].append(hidden)):
        last = hidden
    modules = attention_modules(teacher)
    slopes: list[list[Tensor]] = []  # [batch][draw]
    with torch.enable_grad():
        for batch, ids in enumerate(batches):
            slopes.append(slopes_of(teacher, chain, ids, last[batch], lambda logits, b=batch: likelihoods(b, logits)))
        for place, block in reversed(list(enumerate(chain.blocks))):
            inside = set(block.modules())
            index = next(index for index, module in enumerate(modules) if module in inside)
            own = recordings.get(index)
            with hold_weights(block):
                for batch, before in enumerate(given):
                    start, ((_, *args), kwargs) = before.pop().detach().requires_grad_(), calls[batch][place]
                    answer = hidden_of(block(start, *args, **kwargs))
                    wanted = [start] if own is None else [start, own.output]
                    rows = [torch.autograd.grad(answer, wanted, slope, retain_graph=True) for slope in slopes[batch]]
                    slopes[batch] = [row[0] for row in rows]
                    del answer
                    if own is not None:
                        yield index, torch.stack([row[1].float() for row in rows])
                        own.forget()


def slopes_of(
    teacher: PreTrainedModel, chain: Chain, ids: Tensor, hidden: Tensor, likelihoods: Callable
) -> list[Tensor]:
    """Compute the gradients at the hidden states after the last block, one for each draw."""
    hidden = hidden.detach().requires_grad_()
    with ExitStack() as stack:
        for block in chain.blocks:
            stack.enter_context(fixed_answer(block, chain.answer(hidden)))
        numbers = likelihoods(teacher(input_ids=ids, use_cache=False).logits)
    return [torch.autograd.grad(number, hidden, retain_graph=True)[0] for number in numbers]


def at_once(
    teacher: PreTrainedModel, recordings: Mapping[int, Recording], batches: Sequence[Tensor], likelihoods: Likelihoods
) -> Gradients:
    """Compute the gradients by one graph of the whole model."""
    for batch, ids in enumerate(batches):
        with torch.enable_grad():
            numbers = likelihoods(batch, teacher(input_ids=ids, use_cache=False).logits)
            outputs = [each.output for each in recordings.values()]
            rows = [[x.float() for x in torch.autograd.grad(n, outputs, retain_graph=True)] for n in numbers]
        for index, *parts in zip(recordings, *rows, strict=True):
            yield index, torch.stack(parts)
