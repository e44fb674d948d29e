"""What each KV head costs the model: the divergence at its output when that head alone is cut to each option.

An option is what a head may hold: a window, a window with features, or its whole cache. The teacher's other heads
stay as they are, so prices add up as far as heads do not make up for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.cost import Head, Layer
from linearizer.outputs import divergence, logits_of
from linearizer.prices import SMALLEST, Prices
from linearizer.progress import Progress, Steps
from linearizer.runtime.attention import IMPLEMENTATION, attending, attention_modules, hand_over_state
from linearizer.runtime.student import SOFTMAX, LayerStudent

Begin = Callable[[LayerStudent, int], None]  # gives a layer's untrained students their features


def window_options(length: int) -> tuple[Head, ...]:
    """Windows that double, as far as texts of this length can tell them from the whole cache."""
    return tuple(Head(window=window) for window in (SMALLEST << step for step in range(30)) if window < length)


@torch.inference_mode()
def price(
    teacher: PreTrainedModel,
    windows: torch.Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    feature_map: str = "codebook",
    begin: Begin | None = None,
) -> Steps[Prices]:
    """Cut one head after the other to each option and measure what the model's output loses."""
    expected = logits_of(teacher, windows)
    modules, found = attention_modules(teacher), []
    total, done = sum(layer.kv_heads for layer in layers if layer.native_window is None), 0
    with attending(teacher, IMPLEMENTATION), skipping(teacher, windows) as skip:
        for index, (module, layer) in enumerate(zip(modules, layers, strict=True)):
            rows = []
            for head in range(layer.kv_heads if layer.native_window is None else 0):
                row = []
                for option in options:
                    with skip(index), cut(module, layer, head, option, sinks, feature_map, begin):
                        row.append(divergence(expected, logits_of(teacher, windows)).mean().item())
                rows.append(tuple(row))
                done += 1
                yield Progress("price", done, total, "heads")
            found.append(tuple(rows))
    return Prices(sinks, tuple(options), tuple(found))


@contextmanager
def cut(
    module: nn.Module, layer: Layer, head: int, option: Head, sinks: int, feature_map: str, begin: Begin | None
) -> Iterator[None]:
    """While this lasts, let one KV head of a layer hold an option and the others all they have read."""
    held: list[Any] = [SOFTMAX] * layer.kv_heads
    held[head] = [option.window, option.features]
    student = LayerStudent(held, sinks, layer.key_dim, feature_map).to(next(module.parameters()).device).eval()
    if begin is not None:
        begin(student, int(module.layer_idx))  # type: ignore[arg-type]
    module.student = student
    hook = module.register_forward_pre_hook(hand_over_state, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()
        del module.student


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


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of one list that hold one attention module each: the layers of a model."""
    attention = set(attention_modules(model))
    for parts in model.modules():
        if isinstance(parts, nn.ModuleList) and len(parts) == len(attention):
            if all(len(attention & set(part.modules())) == 1 for part in parts):
                return list(parts)
    return []


def with_repeats(windows: torch.Tensor, passage: int, seed: int) -> torch.Tensor:
    """Let the second half of the texts say an earlier passage again, at random places: what recall is priced on."""
    generator = torch.Generator().manual_seed(seed)
    windows = windows.clone()
    for text in windows[len(windows) // 2 :]:
        for begin, again in passages(len(text), passage, generator):
            text[again : again + passage] = text[begin : begin + passage].clone()
    return windows


def passages(tokens: int, passage: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw pairs of places, the second after the first, one for every four passages of text."""
    for _ in range(tokens // (4 * passage)):
        first, second = (torch.randperm(tokens // passage, generator=generator)[:2].sort().values * passage).tolist()
        yield first, second
