"""Sweeps over the blocks of a model with all texts: each block's weights are read once, not once for every text.

A model whose blocks are a chain runs block by block. The model's own code decides which arguments a block receives in
addition to hidden states: it is run once with blocks that return their input, which needs none of their weights.

Gradients of the model's output at the attention of its layers take a sweep forward, which keeps the hidden states that
every block receives, and a sweep back, which computes each block again, from the last to the first. So only one block
at a time has its graph and its weights in memory. The result is bit-identical to one graph of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.method.logits_by_rows import gradients_at_hidden, run_decoder
from linearizer.method.substitute import attending_with, fixed_answer, replace_part
from linearizer.student.attention_interface import attention_by_layer
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.logits import PROBE_TOKENS
from linearizer.teacher.streaming import is_streamed, offload_hooks

if TYPE_CHECKING:
    pass

Tensor = torch.Tensor
Call = tuple[tuple, dict]  # the arguments of a block
CHAINS: WeakKeyDictionary[nn.Module, Chain | None] = WeakKeyDictionary()  # of streamed models, while these live
# of a batch and the logits of some of its tokens, from the first on: a number to differentiate for each draw
Likelihoods = Callable[[int, Tensor], Sequence[Tensor]]
Gradients = Iterator[tuple[int, Tensor]]  # a layer, and its gradients: (draws, texts, query heads, tokens, value_dim)


@dataclass(frozen=True)
class Chain:
    """Blocks that receive the hidden states of the block before them, and no other result of a block."""

    blocks: Sequence[nn.Module]
    extra: tuple | None  # what a block answers in addition to hidden states; None: hidden states alone

    def answer(self, hidden: Tensor) -> Any:
        """Bring hidden states into the form of a block's answer."""
        return hidden if self.extra is None else (hidden, *self.extra)


class Calls:
    """The arguments and answers of a model's blocks, while the model runs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.recorded: list[Call] = []
        self.answer: Any = None  # of the block that answered last
        self.chained = True

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the calls while this lasts."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self.leave).remove)
            yield

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> Call | None:
        expected = self.blocks[len(self.recorded)] if len(self.recorded) < len(self.blocks) else None
        self.chained &= block is expected and bool(args) and isinstance(args[0], Tensor)
        if self.chained and not self.recorded and torch.is_grad_enabled():
            args = (args[0].detach().requires_grad_(), *args[1:])  # all that is computed from it requires a gradient
        elif self.chained and self.recorded:
            extra = (*args[1:], *kwargs.values())
            self.chained = args[0] is hidden_of(self.answer) and not any(map(requires_gradient, extra))
        self.recorded.append((args, kwargs))
        return args, kwargs

    def leave(self, block: nn.Module, args: tuple, answer: Any) -> None:
        self.answer = answer


def hidden_of(answer: Any) -> Any:
    """Return the hidden states of what a block answered."""
    return answer[0] if isinstance(answer, tuple) else answer


def requires_gradient(value: Any) -> bool:
    """Whether a gradient reaches an argument of a block, or a part of it."""
    if isinstance(value, Mapping):
        value = [*value.values()]
    if isinstance(value, (tuple, list)):
        return any(map(requires_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def chain_of(model: nn.Module, texts: Tensor) -> Chain | None:
    """Find the chain of a model's blocks by a run on a few tokens, once for streamed weights; None: there is none."""
    if model in CHAINS:
        return CHAINS[model]
    calls = Calls(blocks_of(model))
    nothing_saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.shape, torch.empty)
    with torch.inference_mode(False), torch.enable_grad(), nothing_saved, calls.recording():
        run_blocks(model, texts[:1, :PROBE_TOKENS])
    chain = None
    if calls.blocks and calls.chained and len(calls.recorded) == len(calls.blocks):
        extra = calls.answer[1:] if isinstance(calls.answer, tuple) else None
        if not any(isinstance(value, Tensor) for value in extra or ()):
            chain = Chain(calls.blocks, extra)
    if is_streamed(model):
        CHAINS[model] = chain
    return chain


def run_blocks(model: nn.Module, ids: Tensor) -> None:
    """Run a model without its logits, which take most memory where the vocabulary is large."""
    device = next(model.parameters()).device
    getattr(model, "base_model", model)(input_ids=ids.to(device), use_cache=False)


@torch.no_grad()
def calls_of(model: nn.Module, chain: Chain, ids: Tensor) -> list[Call]:
    """List the arguments of the blocks for a batch of texts; only the first receives true hidden states."""
    calls = Calls(chain.blocks)

    def echo(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return chain.answer(hidden)

    with ExitStack() as stack:
        for block in chain.blocks:
            stack.enter_context(replace_part(block, "forward", echo))
        with calls.recording():
            run_blocks(model, ids)
    return calls.recorded


@contextmanager
def hold_weights(block: nn.Module) -> Iterator[None]:
    """Hold the weights of a block on the device while this lasts; they may lie there already."""
    hooks = list(offload_hooks(block))
    for _, module, hook in hooks:
        hook.pre_forward(module)
        hook.offload = False  # they are there, so no call loads them again
    try:
        yield
    finally:
        for _, module, hook in hooks:
            hook.offload = True
            hook.post_forward(module, None)


@torch.no_grad()
def sweep_forward(
    chain: Chain,
    calls: Sequence[Sequence[Call]],  # [batch][block]
    enter: Callable[[int, int, Tensor], None],
) -> Iterator[list[Tensor]]:
    """Run batches of texts through one block after the other; yield their hidden states after each.

    `enter` receives the numbers of a batch and of a block, and the hidden states that the block receives.
    """
    hidden = [arguments[0][0][0] for arguments in calls]
    for place, block in enumerate(chain.blocks):
        with hold_weights(block):
            for batch, arguments in enumerate(calls):
                (_, *args), kwargs = arguments[place]
                enter(batch, place, hidden[batch])
                hidden[batch] = hidden_of(block(hidden[batch], *args, **kwargs))
        yield hidden


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
    """Run batches of texts; yield the gradients of each recording and batch, while it holds its inputs and output.

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
    """Compute the gradients from the last block to the first, and run each again by itself."""
    calls = [calls_of(teacher, chain, ids) for ids in batches]
    inputs: list[list[Tensor]] = [[] for _ in batches]  # [batch][block]
    final: list[Tensor] = []
    for hidden in sweep_forward(chain, calls, lambda batch, place, hidden: inputs[batch].append(hidden)):
        final = hidden
    modules = attention_by_layer(teacher)
    slopes: list[list[Tensor]] = []  # [batch][draw]
    with torch.enable_grad():
        for batch, ids in enumerate(batches):
            slopes.append(slopes_of(teacher, chain, ids, final[batch], partial(likelihoods, batch)))
        for place, block in reversed(list(enumerate(chain.blocks))):
            inside = set(block.modules())
            index = next((index for index, module in modules.items() if module in inside), -1)  # of no attention
            recording = recordings.get(index)
            with hold_weights(block):
                for batch, block_inputs in enumerate(inputs):
                    start, ((_, *args), kwargs) = block_inputs.pop().detach().requires_grad_(), calls[batch][place]
                    answer = hidden_of(block(start, *args, **kwargs))
                    sources = [start] if recording is None else [start, recording.output]
                    rows = [torch.autograd.grad(answer, sources, slope, retain_graph=True) for slope in slopes[batch]]
                    slopes[batch] = [row[0] for row in rows]
                    del answer
                    if recording is not None:
                        yield index, torch.stack([row[1].float() for row in rows])
                        recording.forget()


def slopes_of(
    teacher: PreTrainedModel, chain: Chain, ids: Tensor, hidden: Tensor, likelihoods: Callable
) -> list[Tensor]:
    """Compute the gradients at the hidden states after the last block, one for each draw."""
    hidden = hidden.detach().requires_grad_()
    with ExitStack() as stack:
        for block in chain.blocks:
            stack.enter_context(fixed_answer(block, chain.answer(hidden)))
        answer = run_decoder(teacher, ids)
    slopes = gradients_at_hidden(teacher, ids, answer, likelihoods)
    return [torch.autograd.grad(answer[0], hidden, slope, retain_graph=True)[0] for slope in slopes]


def at_once(
    teacher: PreTrainedModel, recordings: Mapping[int, Recording], batches: Sequence[Tensor], likelihoods: Likelihoods
) -> Gradients:
    """Compute the gradients by one graph of the whole model."""
    for batch, ids in enumerate(batches):
        with torch.enable_grad():
            answer = run_decoder(teacher, ids)
            slopes = gradients_at_hidden(teacher, ids, answer, partial(likelihoods, batch))
            outputs = [recording.output for recording in recordings.values()]
            rows = [torch.autograd.grad(answer[0], outputs, slope, retain_graph=True) for slope in slopes]
        for index, *parts in zip(recordings, *rows, strict=True):
            yield index, torch.stack(parts).float()
