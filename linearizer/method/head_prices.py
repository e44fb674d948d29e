"""Measures prices of heads: the kl at the model's output when one KV head alone holds an option.

It is a mean over the places of a text, in which each doubling of the text counts alike.

An option is what a head may hold: a window, alone or with slots or features (not trained here), or its whole cache.
All other heads stay as in the teacher, so prices add up as far as heads do not make up for each other.
whole_student.py measures whether they do.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache, partial

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.method.blockwise_pass import hold_weights
from linearizer.method.shared_reads import in_step, passes_at_once
from linearizer.method.substitute import (
    Begin,
    BlockAnswers,
    FixedOutput,
    attention_inputs,
    make_layer_student,
    replace_student,
)
from linearizer.plan.head_bytes import BLOCK, Head, Layer
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.prices import SMALLEST, KlOfLayer, Prices
from linearizer.run.sharing import ALL, Share
from linearizer.student.attention_interface import IMPLEMENTATION, attending, attention_modules
from linearizer.teacher.layers import layer_number
from linearizer.teacher.logits import kl_of, logits_of

MANY = 4  # blocks of slots
BEGINNING = 64  # of a text's parts: the tokens in it count alike
Place = tuple[int, int, int]  # layer, KV head, option


def options_to_price(length: int, far: str = "slots", bits: int = 16, fewer: Sequence[int] = ()) -> tuple[Head, ...]:
    """List windows that double in size, alone and with slots or features, as far as texts of `length` tell them apart.

    The largest are three quarters of a text: the few heads that recall need that much. With slots a head may also hold
    a whole text, token by token: in few bits that takes no more than what merges its last quarter in many.
    `far` names what holds older tokens: "slots", "features", or "" for nothing.
    Beside many slots the window is two blocks: a smaller one would merge its tokens more often.
    What `fewer` bits cost is measured once for a head, with its whole cache, and added to the price of what it holds.
    """
    most = 3 * length // 4
    windows = [Head(window=window, bits=bits) for window in [*list_doublings(SMALLEST, most), most]]
    rounded = [Head(softmax=True, bits=count) for count in fewer]
    least = min(BLOCK, max(SMALLEST, length // 8))
    slim = [(least, count) for count in [*list_doublings(least, most), most]]
    even = [(count, count) for count in list_doublings(2 * least, length // 2)]
    held: list[Head] = []
    if far == "slots" and least > SMALLEST:
        wide = 2 * least
        narrow, many = ([pair for pair in slim if (pair[1] > MANY * least) == is_many] for is_many in (False, True))
        slim = [*narrow, *((wide, count) for _, count in [narrow[-1], *many])]
        slim += [(least // 2, count) for count in list_doublings(least // 4, 2 * least)]
        slim.append((wide, length - wide))
    if far:
        pairs = dict.fromkeys(slim + even)
        held = [Head(window=window, bits=bits, **{far: count}) for window, count in pairs]  # type: ignore[arg-type]
    return tuple(windows + held + rounded)


def list_doublings(first: int, end: int) -> list[int]:
    """List first, 2 · first, 4 · first, … below an end."""
    return [first << step for step in range(30) if first << step < end]


def place_weights(tokens: int, device: torch.device | str = "cpu") -> torch.Tensor:  # (tokens,)
    """Weigh the places of a text, 1 in the mean: each doubling of a text counts alike, whatever its length.

    The kl grows with the place. In a plain mean the end of the texts would decide, and short texts would pay for it.
    """
    weights = 1 / (torch.arange(tokens, device=device) + tokens / BEGINNING)
    return weights / weights.mean()


@torch.inference_mode()
def measure_prices(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    before: Mapping[int, KlOfLayer] | None = None,
    keep: Callable[[int, KlOfLayer], None] = lambda index, kl: None,
    share: Share = ALL,
) -> Steps[Prices]:
    """Let one KV head after the other hold each option, and measure the kl at the model's output.

    `keep` receives each layer of the share and its kl; `before` holds those of earlier calls, which are not repeated.
    """
    kl = dict(before or {})
    priced = [index for index, layer in enumerate(layers) if layer.native_window is None]
    own = share.part_of({index: layers[index].kv_heads * passes_from(layers, index) for index in priced})
    missing = [index for index in own if index not in kl]
    total, left = (sum(layers[index].kv_heads for index in some) * len(options) for some in (own, missing))
    pricer = HeadPricer(teacher, texts, layers, sinks, begin) if missing else None
    for index in missing:
        rows: list[list[float]] = [[] for _ in range(layers[index].kv_heads)]  # [head][option]
        for head, _, price in pricer.measure(index, options):  # type: ignore[union-attr]
            rows[head].append(price)
            left -= 1
            yield Progress(EventName.PRICE, total - left, total, "prices")
        kl[index] = tuple(map(tuple, rows))
        keep(index, kl[index])
    return Prices(sinks, tuple(options), tuple(kl.get(index, ()) for index in range(len(layers))))


@torch.inference_mode()
def measure_some_prices(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    prices: Prices,
    places: Sequence[Place],
    begin: Begin,
) -> Steps[dict[Place, float]]:
    """Measure the kl of some heads with an option each, which have been estimated."""
    kl: dict[Place, float] = {}
    pricer = HeadPricer(teacher, texts, layers, prices.sinks, begin)
    for index in sorted({layer for layer, _, _ in places}):
        wanted = {(head, option) for layer, head, option in places if layer == index}
        for head, option, price in pricer.measure(index, prices.options, wanted):
            kl[index, head, option] = price
            yield Progress(EventName.PRICE, len(kl), len(places), "prices")
    return kl


class HeadPricer:
    """Measures one price after the other at a teacher, whose layers before the head in question run once."""

    def __init__(
        self, teacher: PreTrainedModel, texts: torch.Tensor, layers: Sequence[Layer], sinks: int, begin: Begin
    ) -> None:
        self.teacher, self.texts, self.layers, self.sinks, self.begin = teacher, texts, layers, sinks, begin
        self.modules, self.answers = attention_modules(teacher), BlockAnswers(teacher)
        with self.answers.kept():
            self.expected = logits_of(teacher, texts)

    def measure(
        self, index: int, options: Sequence[Head], wanted: Collection[tuple[int, int]] | None = None
    ) -> Iterator[tuple[int, int, float]]:
        """Yield head, number of the option, and kl, for the heads of a layer and the options that are wanted."""
        blocks = self.answers.blocks
        with attending(self.teacher, IMPLEMENTATION), hold_weights(blocks[index]) if blocks else nullcontext():
            with self.answers.skipping(index, after=index):
                inputs = attention_inputs(self.modules[index], self.teacher, self.texts)
            with self.answers.skipping(index):
                yield from self.measure_with(inputs, index, options, wanted)

    def measure_with(
        self, inputs: tuple, index: int, options: Sequence[Head], wanted: Collection[tuple[int, int]] | None
    ) -> Iterator[tuple[int, int, float]]:
        """Measure the heads of a layer that attends with these inputs."""
        module, layer = self.modules[index], self.layers[index]
        softmax = attention_output(module, layer, Head(softmax=True), self.sinks, self.begin, inputs)
        weights = place_weights(self.texts.shape[1], self.expected.device)
        places = [
            (number, head)
            for number in range(len(options))
            for head in range(layer.kv_heads)
            if wanted is None or (head, number) in wanted
        ]

        @lru_cache(maxsize=1)
        def output_of(number: int) -> torch.Tensor:
            """Let one student attend for all heads of the layer, whose output is used for one head at a time."""
            return attention_output(module, layer, options[number], self.sinks, self.begin, inputs)

        def price(number: int, head: int) -> float:
            changed = FixedOutput(with_head(softmax, output_of(number), head, layer.kv_heads))
            with replace_student(module, changed):
                kl = kl_of(self.expected, logits_of(self.teacher, self.texts))
                return (weights * kl).mean().item()

        size = passes_at_once(self.teacher, self.texts.numel())
        for first in range(0, len(places), size):
            some = places[first : first + size]
            kl = in_step(self.teacher, [partial(price, *place) for place in some])
            for (number, head), price_of_head in zip(some, kl, strict=True):
                yield head, number, price_of_head


def attention_output(
    module: nn.Module, layer: Layer, option: Head, sinks: int, begin: Begin, inputs: tuple
) -> torch.Tensor:  # (texts, query heads, tokens, value_dim)
    """Compute what a layer's attention gives if all its KV heads hold an option."""
    heads = [option] * layer.kv_heads
    return make_layer_student(layer, heads, sinks, begin, layer_number(module), inputs[0].device)(*inputs)


def passes_from(layers: Sequence[Layer], index: int) -> float:
    """Tell what share of a model runs for a price in one of its layers."""
    return (len(layers) - index) / len(layers)


def with_head(whole: torch.Tensor, other: torch.Tensor, head: int, kv_heads: int) -> torch.Tensor:
    """Replace the output of one KV head, that is of all query heads of its group, by the other output."""
    group = whole.shape[1] // kv_heads
    mixed = whole.clone()
    mixed[:, head * group : (head + 1) * group] = other[:, head * group : (head + 1) * group]
    return mixed


def with_repeats(texts: torch.Tensor, passage: int, seed: int) -> torch.Tensor:
    """Repeat earlier passages at random places in the second half of the texts: what recall is priced on."""
    generator = torch.Generator().manual_seed(seed)
    texts = texts.clone()
    for text in texts[len(texts) // 2 :]:
        for first, second in draw_places(len(text), passage, generator):
            text[second : second + passage] = text[first : first + passage].clone()
    return texts


def draw_places(tokens: int, passage: int, generator: torch.Generator) -> Iterator[tuple[int, int]]:
    """Draw pairs of places, the second after the first, a pair for every four passages of text."""
    for _ in range(tokens // (4 * passage)):
        first, second = (torch.randperm(tokens // passage, generator=generator)[:2].sort().values * passage).tolist()
        yield first, second
