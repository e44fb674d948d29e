"""Computes the gradients of a model's output at the attention of its layers, block by block.

A pass forward keeps what every block is given; a pass back computes each block again, from the last to the first. So
one block alone has a graph, and its weights, in memory at a time. The bits are those of one graph of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.model.layers import blocks_of
from linearizer.model.logits import PROBE_TOKENS
from linearizer.model.streaming import is_streamed
from linearizer.model.swap import fixed_answer
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules

Tensor = torch.Tensor
Likelihoods = Callable[[Tensor], Sequence[Tensor]]  # of logits: the numbers to differentiate, one for each draw


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


class BlockCalls:
    """What the blocks of a model are given and answer."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.given: list[tuple[tuple, dict]] = []
        self.answer: Any = None  # of the block that answered last
        self.in_a_chain = True  # each block is given what the one before it answered, and no other result of a block

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the calls while this lasts."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self.leave).remove)
            yield

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> None:
        self.in_a_chain &= block is self.blocks[len(self.given)] and bool(args) and isinstance(args[0], Tensor)
        if self.given and self.in_a_chain:
            others = (*args[1:], *kwargs.values())
            self.in_a_chain = args[0] is first_of(self.answer) and not any(map(requires_gradient, others))
        self.given.append((args, kwargs))

    def leave(self, block: nn.Module, args: tuple, answer: Any) -> None:
        self.answer = answer


def first_of(answer: Any) -> Any:
    """Give the hidden states of what a block answered."""
    return answer[0] if isinstance(answer, tuple) else answer


def requires_gradient(value: Any) -> bool:
    """Tell whether a gradient reaches an argument of a block, or something in it."""
    if isinstance(value, (tuple, list)):
        return any(map(requires_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


@contextmanager
def recording(teacher: PreTrainedModel, recordings: Mapping[int, Recording]) -> Iterator[None]:
    """Let recordings attend in some layers."""
    modules = attention_modules(teacher)
    with ExitStack() as stack, attending(teacher, IMPLEMENTATION):
        for index, each in recordings.items():
            modules[index].student = each
            stack.callback(delattr, modules[index], "student")
        yield


def is_chain(teacher: PreTrainedModel, recordings: Mapping[int, Recording], ids: Tensor) -> bool:
    """Tell whether the blocks of a model run by themselves: none is given what an earlier block hands to it alone."""
    blocks = blocks_of(teacher)
    calls = BlockCalls(blocks)
    nothing_saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.shape, torch.empty)
    with recording(teacher, recordings), torch.enable_grad(), nothing_saved, calls.kept():
        teacher(input_ids=ids[:1, :PROBE_TOKENS].to(teacher.device), use_cache=False)
    for each in recordings.values():
        each.forget()
    return bool(blocks) and calls.in_a_chain and len(calls.given) == len(blocks)


def gradients_by_layer(
    teacher: PreTrainedModel, recordings: Mapping[int, Recording], ids: Tensor, likelihoods: Likelihoods, chain: bool
) -> Iterator[tuple[int, Tensor]]:
    """Run some texts; yield for each recording, which then holds the layer's inputs and output, its gradients.

    They are of shape (draws, texts, query heads, tokens, value_dim). `chain` is what `is_chain` tells.
    """
    if not chain and is_streamed(teacher):
        raise RequestError(
            "its blocks hand each other more than hidden states, so prices cannot be estimated while its weights do "
            "not fit into memory: use --prices measured, or a larger machine"
        )
    by_layer = by_blocks if chain else at_once
    with recording(teacher, recordings):
        yield from by_layer(teacher, recordings, ids.to(teacher.device), likelihoods)


def by_blocks(
    teacher: PreTrainedModel, recordings: Mapping[int, Recording], ids: Tensor, likelihoods: Likelihoods
) -> Iterator[tuple[int, Tensor]]:
    """Compute the gradients from the last block to the first, each of which is run again by itself."""
    calls, modules = BlockCalls(blocks_of(teacher)), attention_modules(teacher)
    with torch.no_grad(), calls.kept():
        teacher.base_model(input_ids=ids, use_cache=False)
    hidden = first_of(calls.answer).detach().requires_grad_()
    answer = (hidden, *calls.answer[1:]) if isinstance(calls.answer, tuple) else hidden
    with torch.enable_grad():
        with ExitStack() as stack:
            for block in calls.blocks:
                stack.enter_context(fixed_answer(block, answer))
            numbers = likelihoods(teacher(input_ids=ids, use_cache=False).logits)
        slopes = [torch.autograd.grad(number, hidden, retain_graph=True)[0] for number in numbers]
        del numbers
        for block in reversed(calls.blocks):
            args, kwargs = calls.given.pop()
            index = next(i for i, module in enumerate(modules) if module in set(block.modules()))
            hidden = args[0].detach().requires_grad_()
            answer = first_of(block(hidden, *args[1:], **kwargs))
            wanted = [hidden, recordings[index].output] if index in recordings else [hidden]
            rows = [torch.autograd.grad(answer, wanted, slope, retain_graph=True) for slope in slopes]
            slopes = [row[0] for row in rows]
            del answer
            if index in recordings:
                yield index, torch.stack([row[1].float() for row in rows])
                recordings[index].forget()


def at_once(
    teacher: PreTrainedModel, recordings: Mapping[int, Recording], ids: Tensor, likelihoods: Likelihoods
) -> Iterator[tuple[int, Tensor]]:
    """Compute the gradients by one graph of the whole model."""
    with torch.enable_grad():
        numbers = likelihoods(teacher(input_ids=ids, use_cache=False).logits)
        outputs = [each.output for each in recordings.values()]
        rows = [[x.float() for x in torch.autograd.grad(number, outputs, retain_graph=True)] for number in numbers]
    for index, *parts in zip(recordings, *rows, strict=True):
        yield index, torch.stack(parts)
