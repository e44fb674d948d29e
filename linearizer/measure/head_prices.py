"""What each KV head costs the model: the divergence at its output when that head alone is cut to each option.

An option is what a head may hold: a window, alone or with slots or features, which are not trained here, or its whole
cache. The teacher's other heads stay as they are, so prices add up as far as heads do not make up for each other;
trying.py measures how far that is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.logits import divergence, logits_of
from linearizer.model.swap import Begin, giving, seen_by, skipping, student_of
from linearizer.progress import Progress, Steps
from linearizer.run.head_bytes import BLOCK, Head, Layer
from linearizer.run.prices import SMALLEST, Prices
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules

Found = Sequence[tuple[tuple[float, ...], ...]]  # [layer][head][option]


def options(length: int, far: str = "slots", bits: int = 16) -> tuple[Head, ...]:
    """Windows, alone and with slots or features, that double, as far as texts of this length can tell them apart.

    The largest are three quarters of a text: the few heads that recall are worth that, and nothing less will do.
    `far` is what older tokens go into: "slots", "features", or "" for nothing.
    """
    most = 3 * length // 4
    windows = [Head(window=window, bits=bits) for window in [*doubling(SMALLEST, most), most]]
    if not far:
        return tuple(windows)
    least = min(BLOCK, max(SMALLEST, length // 8))
    slim = [(least, count) for count in [*doubling(least, most), most]]
    even = [(count, count) for count in doubling(2 * least, length // 2)]
    if far == "slots" and least > SMALLEST:
        slim += [(least // 2, count) for count in doubling(least // 4, 2 * least)]
    return tuple(windows + [Head(window=window, bits=bits, **{far: count}) for window, count in slim + even])  # type: ignore[arg-type]


def doubling(first: int, end: int) -> list[int]:
    """List first, 2 · first, 4 · first, … below an end."""
    return [first << step for step in range(30) if first << step < end]


def measuring_seconds(
    teacher: PreTrainedModel, layers: Sequence[Layer], options: Sequence[Head], windows: torch.Tensor
) -> float:
    """Guess how long `price` takes, from one pass: each price runs half of the model on average."""
    begun = time.perf_counter()
    with torch.inference_mode():
        logits_of(teacher, windows).sum().item()
    heads = sum(layer.kv_heads for layer in layers if layer.native_window is None)
    return (time.perf_counter() - begun) * heads * len(options) / 2


@torch.inference_mode()
def price(
    teacher: PreTrainedModel,
    windows: torch.Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    before: Found = (),
    keep: Callable[[Found], None] = lambda found: None,
) -> Steps[Prices]:
    """Cut one head after the other to each option and measure what the model's output loses.

    `before` are the prices of the first layers, as `keep` was given them after each layer.
    """
    expected = logits_of(teacher, windows)
    modules, found = attention_modules(teacher), list(before)
    heads = [0 if layer.native_window is not None else layer.kv_heads for layer in layers]
    total, done = sum(heads) * len(options), sum(heads[: len(found)]) * len(options)
    with attending(teacher, IMPLEMENTATION), skipping(teacher, windows) as skip:
        for index, (module, layer) in list(enumerate(zip(modules, layers, strict=True)))[len(found) :]:
            if layer.native_window is not None:
                found.append(())
                continue
            costs: list[list[float]] = []  # [option][head]
            with skip(index):
                seen = seen_by(module, teacher, windows)
                whole = answer(module, layer, [Head(softmax=True)] * layer.kv_heads, sinks, begin, seen)
                for option in options:
                    # one student for all heads of the layer, which then answers for one head at a time
                    cut_all = answer(module, layer, [option] * layer.kv_heads, sinks, begin, seen)
                    costs.append([])
                    for head in range(layer.kv_heads):
                        with giving(module, with_head(whole, cut_all, head, layer.kv_heads)):
                            costs[-1].append(divergence(expected, logits_of(teacher, windows)).mean().item())
                        done += 1
                        yield Progress("price", done, total, "prices")
            found.append(tuple(zip(*costs, strict=True)))
            keep(found)
    return Prices(sinks, tuple(options), tuple(found))


def answer(
    module: nn.Module, layer: Layer, heads: Sequence[Head], sinks: int, begin: Begin, seen: tuple
) -> torch.Tensor:
    """Give what a layer's attention is if its KV heads hold so much: (texts, query heads, tokens, value_dim)."""
    return student_of(module, layer, heads, sinks, begin)(*seen)


def with_head(whole: torch.Tensor, other: torch.Tensor, head: int, kv_heads: int) -> torch.Tensor:
    """Take one KV head, with the queries of its group, from the other."""
    group = whole.shape[1] // kv_heads
    mixed = whole.clone()
    mixed[:, head * group : (head + 1) * group] = other[:, head * group : (head + 1) * group]
    return mixed


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
