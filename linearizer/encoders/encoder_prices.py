"""Prices of the ways in which each head of a text encoder can attend, and the choice for a budget of keys.

A price is an estimate of the kl at the model's output. The teacher reads some inputs, and outputs are drawn from its
predictions; gradients show how the likelihood of a draw changes with the output of each head. To second order, the kl
is half of the mean square of the change that a way of attending makes. Changes at all tokens are added before they are
squared, since they affect one output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention

from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer
from linearizer.encoders.attention_interface import replaced_modules
from linearizer.encoders.encoder_inputs import Inputs
from linearizer.encoders.encoder_quality import TOKENS_APART, last_hidden, log_similarities
from linearizer.encoders.key_budget import AROUND, WINDOW_SHARE, spend_keys
from linearizer.encoders.modeling_encoder import LinearizedEncoder
from linearizer.errors import BudgetError
from linearizer.method.by_prices import Offer, choose_levels, efficient_offers
from linearizer.progress import Progress, Steps

PARTS = (0.25, 0.375, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0)  # shares of the budget for a head
WINDOWS = (0.1, WINDOW_SHARE, 0.6)  # of the keys of a head with slots
DRAWN = 2**14  # tokens times draws of each input, within these numbers of draws
LEAST_DRAWS, MOST_DRAWS = 8, 64
SLOPES = 2**30  # bytes of gradients at once


def list_offers(budget: int, first: int, last: int, slots: bool, tokens: int) -> list[BothWays]:
    """List the ways in which a head may attend; the last sees all tokens of a text."""
    offers = dict[BothWays, None]()
    for part in PARTS:
        for share in (*WINDOWS * slots, 1.0):
            try:
                way = spend_keys(round(part * budget), 1, first, last, slots=share < 1, window_share=share)
            except BudgetError:
                continue
            if way.keys < tokens:
                offers[way] = None
    return [*offers, BothWays((-(-tokens // AROUND),), 0, first, last)]


def choose_by_prices(prices: torch.Tensor, offers: Sequence[BothWays], budget: int, tokens: int) -> list[HeadsOfLayer]:
    """Choose how each head attends, so that a token sees `budget` keys in the mean over all heads.

    `prices`: (layers, heads, offers).
    """
    layers, heads, _ = prices.shape
    of_heads = [
        efficient_offers(Offer(way, min(way.keys, tokens), kl) for way, kl in zip(offers, kls, strict=True))
        for kls in prices.flatten(0, 1).tolist()
    ]
    levels = choose_levels(of_heads, budget * layers * heads)
    ways = [of_head[level].head for of_head, level in zip(of_heads, levels, strict=True)]
    return [HeadsOfLayer(tuple(ways[begin : begin + heads])) for begin in range(0, len(ways), heads)]


@dataclass
class Exact:
    """Attends as the teacher does, and stores its inputs and output."""

    inputs: tuple[Any, ...] = ()
    out: Any = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, grid: Sequence[int] = ()
    ) -> torch.Tensor:
        self.inputs = query.detach(), key.detach(), value.detach(), scale, grid
        out = scaled_dot_product_attention(query, key, value, scale=scale)
        self.out = out if out.requires_grad else out.requires_grad_()
        return self.out


def measure_prices(
    student: LinearizedEncoder, inputs: Sequence[Inputs], offers: Sequence[BothWays], seed: int
) -> Steps[torch.Tensor]:
    """Estimate the kl of each way for each head: (layers, heads, offers); the student has the teacher's weights."""
    layers = [Exact() for _ in replaced_modules(student.base)]
    student.attend_with(layers)
    with torch.no_grad():
        outputs = [predicted(student, text) for text in inputs]
    _, heads, tokens, _ = layers[0].out.shape
    draws = min(max(DRAWN // tokens, LEAST_DRAWS), MOST_DRAWS)
    slopes = draw_slopes(outputs, draws, torch.Generator().manual_seed(seed))
    changed = torch.zeros(draws, len(layers), heads, len(offers), dtype=torch.float64)
    at_once = max(1, SLOPES // (4 * len(layers) * layers[0].out.numel()))
    for number, text in enumerate(inputs, 1):
        with torch.enable_grad():
            output = predicted(student, text)
        for begin in range(0, draws, at_once):
            rows, by_draw = slice(begin, begin + at_once), []
            for slope in slopes[number - 1][rows].to(output.device):
                outs = [layer.out for layer in layers]
                by_draw.append(torch.autograd.grad(output, outs, slope, retain_graph=True))
                yield Progress("price", number - 1, len(inputs), "texts")
            for index, (layer, *of_layer) in enumerate(zip(layers, *by_draw, strict=True)):
                of_draws = torch.cat(of_layer).transpose(0, 1).flatten(2)  # (heads, draws, tokens · dim)
                for offer, way in enumerate(offers):
                    change = way.attend(*layer.inputs) - layer.out.detach()
                    effects = of_draws @ change[0].flatten(1)[..., None]
                    changed[rows, index, :, offer] += effects[..., 0].T.cpu()
                    yield Progress("price", number - 1, len(inputs), "texts")
        yield Progress("price", number, len(inputs), "texts")
    return changed.square().mean(0) / (2 * len(inputs))


def predicted(model: LinearizedEncoder, inputs: Inputs) -> torch.Tensor:
    """Return what outputs are drawn from: logits (tokens or 1, classes), or the mean of the hidden states (dim,)."""
    out = model(**{name: x.to(model.device) for name, x in inputs.items()}, output_hidden_states=True)
    logits = getattr(out, "logits", None)
    if logits is None:
        return last_hidden(out)[0].mean(0)
    return logits[0, ::TOKENS_APART] if logits.ndim == 3 else logits


def draw_slopes(outputs: Sequence[torch.Tensor], draws: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Draw classes, or similar inputs, and return the gradients of their log likelihood: (draws, …) per output."""
    if outputs[0].ndim == 2:
        return [slopes_of_logits(x.cpu(), draws, generator) for x in outputs]
    means = torch.stack([x.cpu() for x in outputs]).requires_grad_()
    with torch.enable_grad():
        likelihoods = log_similarities(means)
        drawn = likelihoods.detach().exp().multinomial(draws, replacement=True, generator=generator)
        slopes = [
            torch.autograd.grad(likelihoods.gather(1, x[:, None]).sum(), means, retain_graph=True)[0] for x in drawn.T
        ]
    return list(torch.stack(slopes, 1))


def slopes_of_logits(logits: torch.Tensor, draws: int, generator: torch.Generator) -> torch.Tensor:
    """Draw a class for each row, and return slopes for the mean over rows."""
    shares = logits.softmax(-1)
    drawn = shares.multinomial(draws, replacement=True, generator=generator).T  # (draws, rows)
    hits = torch.nn.functional.one_hot(drawn, logits.shape[-1])
    return (hits - shares) / len(logits) ** 0.5
