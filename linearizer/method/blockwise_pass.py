"""Sweeps over the blocks of a model with all texts: each block's weights are read once, not once for every text.

A model whose blocks are a chain runs block by block. The model's own code says what a block is given in addition to
hidden states: it is run once with blocks that answer with what they are given, which needs no weights of theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from linearizer.method.substitute import replace_part
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.logits import PROBE_TOKENS
from linearizer.teacher.streaming import is_streamed, offload_hooks
from linearizer.teacher.support import WATCHED_TOKENS, build_blueprint, run_blueprint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Tensor = torch.Tensor
Call = tuple[tuple, dict]  # the arguments of a block
CHAINS: WeakKeyDictionary[nn.Module, Chain | None] = WeakKeyDictionary()  # of streamed models, as long as these live


@dataclass(frozen=True)
class Chain:
    """Blocks that are given what the block before them answered, and no other result of a block."""

    blocks: Sequence[nn.Module]
    others: tuple | None  # what a block answers in addition to hidden states; None: these alone

    def answer(self, hidden: Tensor) -> Any:
        """Bring hidden states into the form of a block's answer."""
        return hidden if self.others is None else (hidden, *self.others)


class Calls:
    """The arguments and answers of a model's blocks, while the model runs."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        self.blocks = blocks
        self.given: list[Call] = []
        self.answer: Any = None  # of the block that answered last
        self.chained = True

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the calls while this lasts."""
        with ExitStack() as stack:
            for block in self.blocks:
                stack.callback(block.register_forward_pre_hook(self.enter, with_kwargs=True).remove)
                stack.callback(block.register_forward_hook(self.leave).remove)
            yield

    def enter(self, block: nn.Module, args: tuple, kwargs: dict) -> Call | None:
        expected = self.blocks[len(self.given)] if len(self.given) < len(self.blocks) else None
        self.chained &= block is expected and bool(args) and isinstance(args[0], Tensor)
        if self.chained and not self.given and torch.is_grad_enabled():
            args = (args[0].detach().requires_grad_(), *args[1:])  # what comes of it tells by its gradient
        elif self.chained and self.given:
            others = (*args[1:], *kwargs.values())
            self.chained = args[0] is hidden_of(self.answer) and not any(map(requires_gradient, others))
        self.given.append((args, kwargs))
        return args, kwargs

    def leave(self, block: nn.Module, args: tuple, answer: Any) -> None:
        self.answer = answer


def hidden_of(answer: Any) -> Any:
    """Return the hidden states of what a block answered."""
    return answer[0] if isinstance(answer, tuple) else answer


def requires_gradient(value: Any) -> bool:
    """Whether a gradient reaches an argument of a block, or something in it."""
    if isinstance(value, (tuple, list)):
        return any(map(requires_gradient, value))
    return isinstance(value, Tensor) and value.requires_grad


def chain_of(model: nn.Module, texts: Tensor) -> Chain | None:
    """Find the blocks of a model by a run on a few tokens, once for streamed weights; None: they are not a chain."""
    if model in CHAINS:
        return CHAINS[model]
    calls = Calls(blocks_of(model))
    nothing_saved = torch.autograd.graph.saved_tensors_hooks(lambda x: x.shape, torch.empty)
    with torch.inference_mode(False), torch.enable_grad(), nothing_saved, calls.kept():
        run_blocks(model, texts[:1, :PROBE_TOKENS])
    chain = None
    if calls.blocks and calls.chained and len(calls.given) == len(calls.blocks):
        others = calls.answer[1:] if isinstance(calls.answer, tuple) else None
        if not any(isinstance(other, Tensor) for other in others or ()):
            chain = Chain(calls.blocks, others)
    if is_streamed(model):
        CHAINS[model] = chain
    return chain


def is_chain(config: PreTrainedConfig) -> bool:
    """Whether the blocks of a model are a chain, by its config alone."""
    model, tokens = build_blueprint(config), torch.zeros(1, WATCHED_TOKENS, dtype=torch.long)
    return run_blueprint(lambda: chain_of(model, tokens)) is not None


def run_blocks(model: nn.Module, ids: Tensor) -> None:
    """Run a model without its logits, which take most memory where the vocabulary is large."""
    device = next(model.parameters()).device
    getattr(model, "base_model", model)(input_ids=ids.to(device), use_cache=False)


@torch.no_grad()
def calls_of(model: nn.Module, chain: Chain, ids: Tensor) -> list[Call]:
    """List what the blocks are given with some texts; the first alone is given true hidden states."""
    calls = Calls(chain.blocks)

    def echo(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        return chain.answer(hidden)

    with ExitStack() as stack:
        for block in chain.blocks:
            stack.enter_context(replace_part(block, "forward", echo))
        with calls.kept():
            run_blocks(model, ids)
    return calls.given


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

    `enter` receives the numbers of a batch and of a block, and the hidden states that the block is given.
    """
    hidden = [given[0][0][0] for given in calls]
    for place, block in enumerate(chain.blocks):
        with hold_weights(block):
            for batch, given in enumerate(calls):
                (_, *args), kwargs = given[place]
                enter(batch, place, hidden[batch])
                hidden[batch] = hidden_of(block(hidden[batch], *args, **kwargs))
        yield hidden
