"""Measures prices of heads: the kl at the model's output when one KV head alone holds an option.

An option is what a head may hold: a window, alone or with slots or features (not trained here), or its whole cache.
All other heads stay as in the teacher, so prices add up as far as heads do not make up for each other.
whole_student.py measures whether they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.model.devices import device_kind
from linearizer.model.logits import kl_of, logits_of
from linearizer.model.swap import (
    Begin,
    FixedOutput,
    attention_inputs,
    make_layer_student,
    replace_student,
    skipping_first_layers,
)
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.head_bytes import BLOCK, Head, Layer
from linearizer.run.inspection import Inspection
from linearizer.run.plan import Plan
from linearizer.run.prices import SMALLEST, Prices
from linearizer.runtime.attention_interface import IMPLEMENTATION, attending, attention_modules

MEASURABLE_OPERATIONS = {"cpu": 1.2e14, "cuda": 6e16}  # about 20 minutes; beyond, prices are estimated
KlOfLayers = Sequence[tuple[tuple[float, ...], ...]]  # [layer][KV head][option]


def options_to_price(length: int, far: str = "slots", bits: int = 16) -> tuple[Head, ...]:
    """List windows that double in size, alone and with slots or features, as far as texts of `length` tell them apart.

    The largest are three quarters of a text: the few heads that recall need that much.
    `far` names what holds older tokens: "slots", "features", or "" for nothing.
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


def pricing_operations(plan: Plan, inspection: Inspection) -> float:
    """Count the operations of measuring all prices: each price runs half of the model on average."""
    length = min(plan.length, inspection.max_positions or plan.length)
    heads = sum(layer.kv_heads for layer in inspection.layers if layer.native_window is None)
    offered = len(options_to_price(length, plan.rules.far_field, plan.kept_bits))
    return heads * offered / 2 * max(2, plan.texts // 2) * length * 2 * inspection.parameters


def choose_pricing(plan: Plan, inspection: Inspection) -> str:
    """Choose how a plan finds its prices, by arithmetic: a measured time would differ from run to run."""
    if plan.prices != "auto" or plan.rules.decided_by != "prices":
        return plan.prices
    most = MEASURABLE_OPERATIONS[device_kind(plan.device)]
    return "measured" if pricing_operations(plan, inspection) <= most else "estimated"


@torch.inference_mode()
def measure_prices(
    teacher: PreTrainedModel,
    texts: torch.Tensor,
    layers: Sequence[Layer],
    options: Sequence[Head],
    sinks: int,
    begin: Begin,
    before: KlOfLayers = (),
    keep: Callable[[KlOfLayers], None] = lambda kl: None,
) -> Steps[Prices]:
    """Let one KV head after the other hold each option, and measure the kl at the model's output.

    `keep` receives the kl of all finished layers after each layer; `before` is that of an earlier call, to go on from.
    """
    expected = logits_of(teacher, texts)
    modules, kl = attention_modules(teacher), list(before)
    heads = [0 if layer.native_window is not None else layer.kv_heads for layer in layers]
    total, done = sum(heads) * len(options), sum(heads[: len(kl)]) * len(options)
    with attending(teacher, IMPLEMENTATION), skipping_first_layers(teacher, texts) as skip:
        for index, (module, layer) in list(enumerate(zip(modules, layers, strict=True)))[len(kl) :]:
            if layer.native_window is not None:
                kl.append(())
                continue
            kl_of_layer: list[list[float]] = []  # [option][head]
            with skip(index):
                inputs = attention_inputs(module, teacher, texts)
                softmax = attention_output(module, layer, Head(softmax=True), sinks, begin, inputs)
                for option in options:
                    # one student for all heads of the layer, whose output is then used for one head at a time
                    output = attention_output(module, layer, option, sinks, begin, inputs)
                    kl_of_layer.append([])
                    for head in range(layer.kv_heads):
                        changed = FixedOutput(with_head(softmax, output, head, layer.kv_heads))
                        with replace_student(module, changed):
                            kl_of_layer[-1].append(kl_of(expected, logits_of(teacher, texts)).mean().item())
                        done += 1
                        yield Progress(EventName.PRICE, done, total, "prices")
            kl.append(tuple(zip(*kl_of_layer, strict=True)))
            keep(kl)
    return Prices(sinks, tuple(options), tuple(kl))


def attention_output(
    module: nn.Module, layer: Layer, option: Head, sinks: int, begin: Begin, inputs: tuple
) -> torch.Tensor:  # (texts, query heads, tokens, value_dim)
    """Compute what a layer's attention gives if all its KV heads hold an option."""
    return make_layer_student(module, layer, [option] * layer.kv_heads, sinks, begin)(*inputs)


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
