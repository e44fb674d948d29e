"""Allocates for a run, after measuring the prices of KV heads or learning gates.

A gate says how much a KV head needs its whole cache instead of a window, as in DuoAttention: the head attends with
α softmax + (1 - α) window. The α are trained so that the model's last hidden states stay the same and the mean α is
small, on texts in which passages are repeated.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.method.by_prices import MIN_KL
from linearizer.method.choose import kl_by_token
from linearizer.method.decide import allocate_alike, decide, fewer_bits, sinks_to_try
from linearizer.method.head_prices import ALL, Part, Share, estimate_prices, options_to_price, with_repeats
from linearizer.method.initialise import begin_of
from linearizer.method.substitute import Begin, attending_with
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.plan.plan import USUAL_LENGTH
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.files import remove, writing
from linearizer.run.folder import Run
from linearizer.run.measured import KlOfLayer, Prices
from linearizer.run.stopping import interruptible, log_progress
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.load import Teacher, texts_of_run

GATE_STEPS = 60
SINKS_LENGTH = 4  # budgets: sinks matter as soon as the first tokens leave a head's window
MOST_REPEATED = 64  # tokens of a repeated passage: short ones repeat at many distances
LAYERS = "state/priced"  # a file for each priced layer and group of texts, until all are priced
GATE_RATE = 0.02
GATE_SPARSITY = 0.05  # weight of the mean α in the loss
GATE_BATCH = 2  # texts
Tensor = torch.Tensor
Product = TypeVar("Product")


class Helpers(Protocol):
    """Other processes that price some of the heads."""

    @property
    def count(self) -> int:
        """The number of processes, including the run's own."""

    def beside(self, sinks: int, steps: Steps[Product]) -> Steps[Product]:
        """Let the helpers price their shares while this process takes the steps of its own share."""


def allocate(run: Run, teacher: Teacher, token: str | None, helpers: Helpers | None = None) -> Steps[Allocation]:
    """Decide what every head holds, after taking the measurements that the plan's strategy needs."""
    if run.plan.strategy_spec.decided_by == "prices" and run.prices is None:
        yield from price_heads(run, teacher, texts_to_price_on(run, teacher, token), helpers)
    if run.plan.strategy_spec.decided_by == "gates" and run.gates is None:
        texts, plan = texts_to_price_on(run, teacher, token), run.plan
        window = max(plan.budget or 0, 2 * plan.resolved_sinks) - plan.resolved_sinks
        steps = learn_gates(teacher.model, texts, teacher.inspection.layers, window, plan.resolved_sinks, GATE_STEPS)
        run.write_product("gates.json", json.dumps({"gates": (yield from log_progress(run, steps))}))
    return decide(run, run.plan, teacher.inspection.layers)


def texts_to_price_on(run: Run, teacher: Teacher, token: str | None) -> torch.Tensor:
    """Take half of the profiled texts, and repeat passages in half of these."""
    with interruptible(run):
        texts = texts_of_run(run, teacher, run.plan.texts_priced, token)
    passage = max(2, min(texts.shape[1] // 16, MOST_REPEATED))
    return with_repeats(texts, passage, run.plan.seed)


def price_heads(run: Run, teacher: Teacher, texts: torch.Tensor, helpers: Helpers | None = None) -> Steps[Prices]:
    """Estimate the prices of all KV heads."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    sinks = next(iter(stored.values())).sinks if stored else (yield from choose_sinks(run, teacher, texts))
    begin = begin_of(run)
    count = 1 if helpers is None else helpers.count
    steps = price_share(run, teacher, texts, sinks, begin, Share(0, count))
    prices = yield from log_progress(run, steps if helpers is None else helpers.beside(sinks, steps))
    if count > 1:  # the helpers have stored their prices
        prices = yield from log_progress(run, price_share(run, teacher, texts, sinks, begin))
    run.write_product("prices.json", prices.to_json())
    remove(run.folder / LAYERS)
    run.log(EventName.PRICED, tokens=texts.numel())
    return prices


def help_pricing(run: Run, teacher: Teacher, token: str | None, sinks: int, share: Share) -> Steps[None]:
    """Price a share of the layers for the process of a run."""
    yield from price_share(run, teacher, texts_to_price_on(run, teacher, token), sinks, begin_of(run), share)


def price_share(
    run: Run, teacher: Teacher, texts: torch.Tensor, sinks: int, begin: Begin, share: Share = ALL
) -> Steps[Prices]:
    """Estimate the prices of a share of the layers, and store those of each layer in a file of its own."""
    options = options_of(run, teacher, texts)
    stored = read_priced_layers(run, options)
    with writing(run.folder / LAYERS):
        (run.folder / LAYERS).mkdir(exist_ok=True)  # without its parents: a deleted run stays deleted

    def keep(part: Part, kl: KlOfLayer) -> None:
        run.write_product(f"{LAYERS}/{'-'.join(map(str, part))}.json", Prices(sinks, options, (kl,)).to_json())

    arguments = (teacher.model, texts, teacher.inspection.layers, options, sinks, begin)
    stored_kl = {part: prices.kl[0] for part, prices in stored.items()}
    return (yield from estimate_prices(*arguments, run.plan.seed, stored_kl, keep, share))


def options_of(run: Run, teacher: Teacher, texts: torch.Tensor) -> tuple[Head, ...]:
    """List the options that the heads of a run are priced with."""
    plan = run.plan
    bits = plan.resolved_bits, fewer_bits(plan, teacher.inspection.layers)
    return options_to_price(texts.shape[1], plan.strategy_spec.far_field, *bits)


def read_priced_layers(run: Run, options: tuple[Head, ...]) -> dict[Part, Prices]:
    """Read the layers that were priced when a run was stopped, each on some texts; drop those that are damaged."""
    stored: dict[Part, Prices] = {}
    for path in sorted((run.folder / LAYERS).glob("*.json")):
        name = f"{LAYERS}/{path.name}"
        try:
            layer = run.parse_file(name, Prices.from_json)
        except RequestError as error:
            run.log(EventName.DROPPED, file=name, why=str(error.__cause__ or error))
            remove(path)
            continue
        if layer.options == options:
            index, _, first = path.stem.partition("-")
            stored[int(index), int(first)] = layer
    return stored


def choose_sinks(run: Run, teacher: Teacher, texts: torch.Tensor) -> Steps[int]:
    """Choose the number of sinks with the smallest kl of a student whose heads all hold the same."""
    counts = sinks_to_try(run.plan)
    if len(counts) == 1:
        return counts[0]
    layers, length = teacher.inspection.layers, max(USUAL_LENGTH, SINKS_LENGTH * (run.plan.budget or 0))
    students, texts = [allocate_alike(layers, run.plan, count) for count in counts], texts[:, :length]
    steps = kl_by_token(teacher.model, texts, layers, students, begin_of(run), EventName.TRY)
    kl = [kl_of_tokens.mean().item() for kl_of_tokens in (yield from log_progress(run, steps))]
    best = min(zip(counts, kl, strict=True), key=lambda pair: max(pair[1], MIN_KL))[0]
    run.log(EventName.TRIED, sinks=dict(zip(map(str, counts), kl, strict=True)), kept=best)
    return best


class Gated(nn.Module):
    """Replaces a layer's student: mixes softmax and window attention by one gate for each KV head."""

    def __init__(self, layer: Layer, window: int, sinks: int) -> None:
        super().__init__()
        self.softmax = LayerStudent(["softmax"] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.window = LayerStudent([[window, 0]] * layer.kv_heads, sinks, layer.key_dim, "prf")
        self.alpha = nn.Parameter(torch.ones(layer.kv_heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None, memory: None) -> Tensor:
        softmax, window = (student(q, k, v, scale, real, None) for student in (self.softmax, self.window))
        alpha = self.alpha.to(softmax.dtype).repeat_interleave(q.shape[1] // len(self.alpha))[:, None, None]
        return window + alpha * (softmax - window)


def learn_gates(
    teacher: PreTrainedModel, texts: torch.Tensor, layers: Sequence[Layer], window: int, sinks: int, steps: int
) -> Steps[tuple[tuple[float, ...], ...]]:
    """Train one gate per KV head on texts (texts, tokens), none in native layers; return them as [layer][KV head]."""
    device = next(teacher.parameters()).device
    gates = {
        index: Gated(layer, window, sinks).to(device)
        for index, layer in enumerate(layers)
        if layer.native_window is None
    }
    alphas: list[Tensor] = [gate.alpha for gate in gates.values()]
    optimizer = torch.optim.Adam(alphas, lr=GATE_RATE)
    for step in range(steps):
        rows = torch.arange(step * GATE_BATCH, (step + 1) * GATE_BATCH) % len(texts)
        ids = texts[rows].to(device)
        with torch.no_grad():
            expected = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        with attending_with(teacher, gates):
            hidden = teacher.base_model(input_ids=ids, use_cache=False)[0].float()
        error = (hidden - expected).square().sum() / expected.square().sum()
        loss = error + GATE_SPARSITY * torch.cat(alphas).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for alpha in alphas:
                alpha.clamp_(0, 1)
        yield Progress(EventName.GATES, step + 1, steps, "steps", {"error": error.item()})
    return tuple(tuple(gates[index].alpha.tolist()) if index in gates else () for index in range(len(layers)))
