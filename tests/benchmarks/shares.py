"""Shares of a budget as others give them to heads, beside ours and equal ones, for the same bytes in all.

Each prices a head with so many tokens in its own way; the solver is ours, which is theirs, too: the lower hull of the
prices, and what saves most per byte again and again. What a head then does with its bytes is another matter, so that
shares and memories can be told apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from linearizer.method.by_prices import OffersOfHeads, allocate_by_prices
from linearizer.method.decide import allocate_alike
from linearizer.method.recorder import Samples, samples_of
from linearizer.method.substitute import attending_with, make_students
from linearizer.method.texts import TextsOfRun
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, head_bytes, slot_bytes, token_bytes
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.measured import KlOfLayer, Prices
from linearizer.teacher.load import Teacher
from linearizer.teacher.logits import logits_of, losses_of
from linearizer.teacher.observing import observing
from tests.benchmarks.rivals import attention_of

SIZES = (4, 16, 64, 192, 384)  # tokens that heads are priced with
READ = 0.8  # of a text, after which its other tokens are the future
NOISE = 0.01  # of a curve
PRICED = 4  # texts, where a curve takes a pass for every head and size

Tensor = torch.Tensor


def price_heads(kind: str, run: Run, teacher: Teacher) -> Prices:
    """Price every head with so many tokens, in the way of this kind."""
    plan, texts, layers = run.plan, TextsOfRun.of(run, teacher).priced, teacher.inspection.layers
    options = tuple(Head(window=size, bits=plan.resolved_bits) for size in SIZES)
    return Prices(plan.resolved_sinks, options, PRICES[kind](teacher.model, layers, texts, plan, samples_of(run)))


def share_out(prices: Prices, plan: Plan, layers: Sequence[Layer]) -> Allocation:
    """Assign every head its share by prices, which it spends on a window; what buys nothing is shared out equally."""
    bought = allocate_by_prices(OffersOfHeads.of(prices, layers, plan.budget or 0, 0), plan.strategy)
    left = cache_bytes(layers, plan.budget or 0) - bought.state_bytes(layers, 0)
    rows = list(zip(bought.heads, layers, strict=True))
    more = left // sum(len(row) * token_bytes(layer, plan.resolved_bits) for row, layer in rows)
    return replace(
        bought, heads=tuple(tuple(replace(head, window=head.window + more) for head in row) for row, _ in rows)
    )


def with_slots(allocation: Allocation, layers: Sequence[Layer]) -> Allocation:
    """Let every head spend its share on as many tokens in its window as slots, as where all heads hold the same."""
    rows = zip(allocation.heads, layers, strict=True)
    heads = tuple(tuple(half_slots(head, layer, allocation.sinks) for head in row) for row, layer in rows)
    return replace(allocation, heads=heads)


def half_slots(head: Head, layer: Layer, sinks: int) -> Head:
    """Spend the bytes of a head on half as many tokens, and as many slots."""
    token, slot = token_bytes(layer, head.bits), slot_bytes(layer, head.bits)
    room = head_bytes(head, layer, sinks, 0) - sinks * token_bytes(layer)
    slots = room // (token + slot)
    return Head(window=(room - slots * slot) // token, slots=slots, bits=head.bits)


@torch.inference_mode()
def prices_by_utility(
    model: PreTrainedModel, layers: Sequence[Layer], texts: Tensor, plan: Plan, samples: Samples
) -> tuple[KlOfLayer, ...]:
    """Price tokens by what the future would have read of those that an eviction drops (LU-KV, 2602.08585).

    The eviction is h2o's, after most of a text; what is read of a token is its weight times its value's norm.
    """
    prices: list[Tensor] = []

    def observe(module: object, q: Tensor, k: Tensor, v: Tensor, scale: float, _: dict) -> None:
        read = int(READ * k.shape[-2])
        weights = attention_of(q, k, scale).sum(2)
        so_far, later = weights[..., :read, :read].sum(-2), weights[..., read:, :read].mean(-2)
        prices.append(utility_lost(so_far, later * v[..., :read, :].norm(dim=-1)).mean(0))

    with observing(model, observe):
        model.base_model(input_ids=texts.to(model.device), use_cache=False)
    return tuple(tuple(map(tuple, layer.tolist())) for layer in prices)


def utility_lost(so_far: Tensor, utility: Tensor) -> Tensor:  # (…, sizes)
    """Add up the utility (…, tokens) of what is dropped at each size: the newer half of it stays, and the heaviest."""
    lost, tokens = [], so_far.shape[-1]
    for size in SIZES:
        newer = torch.arange(tokens, device=so_far.device) >= tokens - size // 2
        stays = so_far.masked_fill(newer, torch.inf).topk(min(size, tokens), -1).indices
        lost.append(utility.sum(-1) - utility.gather(-1, stays).sum(-1))
    return torch.stack(lost, -1)


@torch.inference_mode()
def prices_by_loss(
    model: PreTrainedModel, layers: Sequence[Layer], texts: Tensor, plan: Plan, samples: Samples
) -> tuple[KlOfLayer, ...]:
    """Price tokens by the loss (log-perplexity) when one head holds them beside others' equal shares (2602.16284)."""
    texts, alike = texts[:: max(1, len(texts) // PRICED)], allocate_alike(layers, plan, plan.resolved_sinks)

    def loss_of(allocation: Allocation) -> float:
        with attending_with(model, make_students(model, layers, allocation, samples)):
            logits = logits_of(model, texts)
        return losses_of(logits[:, :-1], texts[:, 1:]).mean().item()

    def price(index: int, head: int, size: int) -> float:
        row = list(alike.heads[index])
        row[head] = half_slots(Head(window=size, bits=plan.resolved_bits), layers[index], alike.sinks)
        return loss_of(replace(alike, heads=(*alike.heads[:index], tuple(row), *alike.heads[index + 1 :])))

    return tuple(
        tuple(falling([price(index, head, size) for size in SIZES]) for head in range(len(row)))
        for index, row in enumerate(alike.heads)
    )


def falling(losses: Sequence[float]) -> tuple[float, ...]:
    """Return how far each loss lies above the least of its curve, at least by the part of it that is noise."""
    least = min(losses)
    return tuple(max(loss - least, NOISE * (max(losses) - least)) for loss in losses)


PRICES: dict[str, Callable[..., tuple[KlOfLayer, ...]]] = {  # [layer][KV head][size]
    "lu-kv": prices_by_utility,
    "log-perplexity": prices_by_loss,
}
ABOUT = {
    "our prices": "the bytes of each head's share by our prices",
    "lu-kv": "shares by what the future would read of what is dropped (LU-KV, 2602.08585)",
    "log-perplexity": "shares by curves of log-perplexity (Attention Matching, 2602.16284)",
}
