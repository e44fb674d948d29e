"""Prices + budget -> Allocation: every KV head gets what spares the model most per byte."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from linearizer.errors import BudgetError
from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Head, Layer, cache_bytes, head_bytes
from linearizer.run.prices import SMALLEST, Prices

LEAST = 1e-9  # nats: below this a price is rounding


@dataclass(frozen=True)
class Offer:
    """One thing that a head may hold."""

    head: Head
    bytes: int
    divergence: float


def check_least(layers: Sequence[Layer], budget: int, sinks: int, bits: int = 16) -> None:
    """Refuse a budget that does not pay for the least that every head may hold, before anything is measured."""
    priced = [layer for layer in layers if layer.native_window is None]
    least = sum(layer.kv_heads * head_bytes(Head(window=SMALLEST, bits=bits), layer, sinks, 0) for layer in priced)
    if priced and budget * cache_bytes(layers, 1) < least:
        raise BudgetError(
            f"a budget of {budget} tokens is too small: {sinks} sinks and a window of {SMALLEST} for every KV head "
            f"take {-(-least // cache_bytes(layers, 1))}; ask for at least that{', or keep fewer sinks' * bool(sinks)}"
        )


@dataclass(frozen=True)
class Market:
    """What every KV head may hold, from the least on: each offer dearer and better than the one before."""

    sinks: int
    ladders: tuple[tuple[Offer, ...], ...]
    counts: tuple[int, ...]  # heads of each layer
    paid: int  # bytes

    @staticmethod
    def of(prices: Prices, layers: Sequence[Layer], budget: int, length: int, constant: bool = False) -> Market:
        """Price what heads may hold; one left softmax is paid for at `length` tokens, `constant` leaves none."""
        rows = [
            [tuple(hull(offers(prices, layer, row, length, constant))) for row in found]
            for layer, found in zip(layers, prices.divergences, strict=True)
        ]
        ladders = tuple(ladder for row in rows for ladder in row)
        paid, least = cache_bytes(layers, budget), sum(ladder[0].bytes for ladder in ladders)
        if paid < least:
            enough = -(-least // cache_bytes(layers, 1))
            raise BudgetError(
                f"a budget of {budget} tokens is too small: the least options of all KV heads take {enough}"
            )
        return Market(prices.sinks, ladders, tuple(map(len, rows)), paid)

    def allocation(self, steps: Sequence[int]) -> Allocation:
        """Give every head the offer at its step."""
        taken = iter(ladder[step].head for ladder, step in zip(self.ladders, steps, strict=True))
        return Allocation("gain", self.sinks, tuple(tuple(next(taken) for _ in range(count)) for count in self.counts))

    def steps(self, allocation: Allocation) -> list[int]:
        """Find the steps of an allocation that was bought here."""
        heads = (head for row in allocation.heads for head in row)
        return [[offer.head for offer in ladder].index(head) for ladder, head in zip(self.ladders, heads, strict=True)]

    def divergence(self, steps: Sequence[int]) -> float:
        """Give what the prices of these steps add up to."""
        return math.fsum(ladder[step].divergence for ladder, step in zip(self.ladders, steps, strict=True))

    def left(self, steps: Sequence[int]) -> int:
        """Give the bytes that these steps leave."""
        return self.paid - sum(ladder[step].bytes for ladder, step in zip(self.ladders, steps, strict=True))


def choose(
    prices: Prices, layers: Sequence[Layer], budget: int, length: int, constant: bool = False
) -> tuple[Allocation, float]:
    """Spend a budget in tokens of cache; return also the divergence that the prices add up to."""
    market = Market.of(prices, layers, budget, length, constant)
    steps = climb(market.ladders, market.left([0] * len(market.ladders)))
    return market.allocation(steps), market.divergence(steps)


def exchanged(market: Market, allocation: Allocation, tried: set[int]) -> Allocation | None:
    """Give the dearest head that was not tried yet a step up, paid by steps down where they cost least.

    Prices are of one head alone; together heads may make up for each other, or not: measuring tells.
    """
    own = market.steps(allocation)
    for head in sorted(range(len(own)), key=lambda head: -market.ladders[head][own[head]].divergence):
        if head not in tried and own[head] + 1 < len(market.ladders[head]):
            tried.add(head)
            steps = list(own)
            steps[head] += 1
            if descend(market, steps, keep=head):
                return market.allocation(steps)
    return None


def descend(market: Market, steps: list[int], keep: int) -> bool:
    """Take steps down, the cheapest per byte first, until the budget is kept; tell whether it could be."""
    while market.left(steps) < 0:
        below = [
            (rate(ladder[step - 1], ladder[step]), head)
            for head, (ladder, step) in enumerate(zip(market.ladders, steps, strict=True))
            if head != keep and step
        ]
        if not below:
            return False
        steps[min(below)[1]] -= 1
    return True


def offers(prices: Prices, layer: Layer, row: Sequence[float], length: int, constant: bool) -> Iterator[Offer]:
    """Give all that one head may hold, what lies between two priced options too."""

    def offer(head: Head, divergence: float) -> Offer:
        return Offer(head, head_bytes(head, layer, prices.sinks, length), max(divergence, 0.0))

    families: dict[str, list[tuple[Head, float]]] = {}
    for head, divergence in zip(prices.options, row, strict=True):
        yield offer(head, divergence)
        families.setdefault(family(head), []).append((head, divergence))
    for found in families.values():
        for low, high in pairwise(sorted(found, key=lambda one: one[0].window + one[0].slots + one[0].features)):
            yield from (offer(head, divergence) for head, divergence in between(low, high))
    if not constant:
        yield offer(Head(softmax=True, bits=prices.options[0].bits), 0.0)


def family(head: Head) -> str:
    """Say which options lie on one line, so that there is something between them."""
    if not head.slots and not head.features:
        return "windows"
    kind, size = ("slots", head.slots) if head.slots else ("features", head.features)
    return f"even {kind}" if head.window == size else f"{kind} beside {head.window}"


def between(low: tuple[Head, float], high: tuple[Head, float], parts: int = 4) -> Iterator[tuple[Head, float]]:
    """Give heads between two priced ones; prices fall about as a power of the size."""
    logs = [math.log(max(price, LEAST)) for _, price in (low, high)]
    for part in range(1, parts):
        share = part / parts
        size = {
            name: round(getattr(low[0], name) ** (1 - share) * getattr(high[0], name) ** share)
            for name in ("window", "slots", "features")
        }
        yield replace(low[0], **size), math.exp(logs[0] + share * (logs[1] - logs[0]))


def hull(found: Iterator[Offer]) -> list[Offer]:
    """Keep the offers that a price per byte could ever choose: each dearer and better, with falling returns."""
    kept: list[Offer] = []
    for offer in sorted(found, key=lambda offer: (offer.bytes, offer.divergence)):
        if kept and offer.divergence >= kept[-1].divergence:
            continue
        while len(kept) > 1 and rate(kept[-1], offer) >= rate(kept[-2], kept[-1]):
            kept.pop()
        if kept and offer.bytes == kept[-1].bytes:
            kept.pop()
        kept.append(offer)
    return kept


def rate(worse: Offer, better: Offer) -> float:
    """Nats spared per byte."""
    return (worse.divergence - better.divergence) / max(better.bytes - worse.bytes, 1)


def climb(ladders: Sequence[Sequence[Offer]], left: int) -> list[int]:
    """Take the step that spares most per byte, again and again, while there is money for any."""
    steps = [0] * len(ladders)
    upgrades = sorted(
        (
            (rate(*pair), index, step)
            for index, ladder in enumerate(ladders)
            for step, pair in enumerate(pairwise(ladder), 1)
        ),
        key=lambda upgrade: (-upgrade[0], upgrade[2], upgrade[1]),
    )
    for _, index, step in upgrades:
        cost = ladders[index][step].bytes - ladders[index][steps[index]].bytes
        if cost <= left:
            steps[index], left = step, left - cost
    return steps
