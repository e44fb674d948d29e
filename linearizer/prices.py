"""Prices + budget -> Allocation: every KV head gets what spares the model most per byte."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from linearizer.allocation import Allocation
from linearizer.cost import Head, Layer, cache_bytes, head_bytes
from linearizer.errors import BudgetError, RequestError

LEAST = 1e-9  # nats: below this a price is rounding
SMALLEST = 4  # tokens of the least window that is priced


@dataclass(frozen=True)
class Prices:
    """KL in nats per token when one KV head alone is cut to an option; a head left softmax costs nothing."""

    sinks: int
    options: tuple[Head, ...]
    divergences: tuple[tuple[tuple[float, ...], ...], ...]  # [layer][kv head][option]; no heads in a native layer

    def to_json(self) -> str:
        """Write the prices as text that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Prices:
        """Read prices that `to_json` wrote."""
        try:
            read = json.loads(text)
            found = tuple(tuple(tuple(row) for row in layer) for layer in read["divergences"])
            return Prices(read["sinks"], tuple(Head(**option) for option in read["options"]), found)
        except (ValueError, TypeError, KeyError) as error:
            raise RequestError(f"the prices cannot be read ({error}): measure them again") from error


@dataclass(frozen=True)
class Offer:
    """One thing that a head may hold."""

    head: Head
    bytes: int
    divergence: float


def check_least(layers: Sequence[Layer], budget: int, sinks: int) -> None:
    """Refuse a budget that does not pay for the least that every head may hold, before anything is measured."""
    if budget < sinks + SMALLEST:
        raise BudgetError(
            f"a budget of {budget} tokens is too small: {sinks} sinks and a window of {SMALLEST} for every KV head "
            f"take {sinks + SMALLEST}; ask for at least that, or keep fewer sinks"
        )


def choose(
    prices: Prices, layers: Sequence[Layer], budget: int, length: int, constant: bool = False
) -> tuple[Allocation, float]:
    """Spend a budget in tokens of cache; return also the divergence that the prices add up to.

    A head left softmax is paid for at `length` tokens; `constant` leaves none, so that the state never grows.
    """
    rows = [
        [hull(offers(prices, layer, row, length, constant)) for row in found]
        for layer, found in zip(layers, prices.divergences, strict=True)
    ]
    ladders = [ladder for row in rows for ladder in row]
    paid, least = cache_bytes(layers, budget), sum(ladder[0].bytes for ladder in ladders)
    if paid < least:
        enough = -(-least // cache_bytes(layers, 1))
        raise BudgetError(f"a budget of {budget} tokens is too small: the least options of all KV heads take {enough}")
    steps = climb(ladders, paid - least)
    taken = iter(ladder[step] for ladder, step in zip(ladders, steps, strict=True))
    chosen = [[next(taken) for _ in row] for row in rows]
    allocation = Allocation("gain", prices.sinks, tuple(tuple(offer.head for offer in row) for row in chosen))
    return allocation, math.fsum(offer.divergence for row in chosen for offer in row)


def offers(prices: Prices, layer: Layer, row: Sequence[float], length: int, constant: bool) -> Iterator[Offer]:
    """Give all that one head may hold, windows between the priced ones too."""

    def offer(head: Head, divergence: float) -> Offer:
        return Offer(head, head_bytes(head, layer, prices.sinks, length), max(divergence, 0.0))

    for head, divergence in zip(prices.options, row, strict=True):
        yield offer(head, divergence)
    windows = sorted((head.window, found) for head, found in zip(prices.options, row, strict=True) if not head.features)
    for low, high in pairwise(windows):
        yield from (offer(Head(window=window), found) for window, found in between(low, high))
    if not constant:
        yield offer(Head(softmax=True), 0.0)


def between(low: tuple[int, float], high: tuple[int, float], parts: int = 4) -> Iterator[tuple[int, float]]:
    """Give windows between two priced ones; prices fall about as a power of the window."""
    if low[0] < 1:
        return
    logs = [math.log(max(price, LEAST)) for _, price in (low, high)]
    for part in range(1, parts):
        share = part / parts
        window = round(low[0] * (high[0] / low[0]) ** share)
        yield window, math.exp(logs[0] + share * (logs[1] - logs[0]))


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
