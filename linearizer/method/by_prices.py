"""Prices + budget -> Allocation: the budget goes to the KV heads where a byte saves the model most kl."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Generic, TypeVar

from linearizer.errors import BudgetError
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, head_bytes, token_bytes
from linearizer.run.measured import SMALLEST, Prices

MIN_KL = 1e-9  # nats: a smaller kl is rounding
NEAR = 3 / 4  # of a size: above it, the larger head may hold a whole text
STEEPEST = 3  # power of the size by which kl may fall, apart from the remaining tokens of a text
PARTS = 4  # into which sizes divide the way between two options


Option = TypeVar("Option")


@dataclass(frozen=True)
class Offer(Generic[Option]):
    """An option of one head, with what it takes of the budget and its kl."""

    head: Option
    cost: float
    kl: float


@dataclass(frozen=True)
class OffersOfHeads:
    """The offers of every KV head, from the smallest on: each next offer has more bytes and a smaller kl."""

    sinks: int
    offers: tuple[tuple[Offer[Head], ...], ...]  # [KV head, layer by layer][level]
    heads_per_layer: tuple[int, ...]
    budget_bytes: int

    @staticmethod
    def of(prices: Prices, layers: Sequence[Layer], budget: int, length: int, may_grow: bool = False) -> OffersOfHeads:
        """List the offers; softmax, which takes the bytes of `length` tokens, only where heads `may_grow`."""
        rows = [
            [tuple(efficient_offers(offers_for_head(prices, layer, kl, length, may_grow))) for kl in kl_of_layer]
            for layer, kl_of_layer in zip(layers, prices.kl, strict=True)
        ]
        offers = tuple(offers_of_head for row in rows for offers_of_head in row)
        budget_bytes, least_bytes = cache_bytes(layers, budget), sum(levels[0].cost for levels in offers)
        if budget_bytes < least_bytes:
            least_tokens = -(-least_bytes // cache_bytes(layers, 1))
            raise BudgetError(
                f"a budget of {budget} tokens is too small: the least options of all KV heads take {least_tokens}"
            )
        return OffersOfHeads(prices.sinks, offers, tuple(map(len, rows)), budget_bytes)

    def allocation(self, levels: Sequence[int], strategy: str) -> Allocation:
        """Make the allocation that these levels stand for; `strategy` is its name."""
        heads = (offers[level].head for offers, level in zip(self.offers, levels, strict=True))
        rows = tuple(tuple(next(heads) for _ in range(count)) for count in self.heads_per_layer)
        return Allocation(strategy, self.sinks, rows)

    def taken(self, allocation: Allocation) -> list[Offer[Head]]:
        """Find the offer of every head of an allocation that was made of these offers."""
        heads = (head for row in allocation.heads for head in row)
        by_head = ({offer.head: offer for offer in offers} for offers in self.offers)
        return [offers[head] for offers, head in zip(by_head, heads, strict=True)]


def check_least_budget(layers: Sequence[Layer], budget: int, sinks: int, bits: int = 16) -> None:
    """Refuse a budget that is below the smallest option of every head, before anything is measured."""
    replaced = [layer for layer in layers if layer.native_window is None]
    least = sum(layer.kv_heads * head_bytes(Head(window=SMALLEST, bits=bits), layer, sinks, 0) for layer in replaced)
    if replaced and budget * cache_bytes(layers, 1) < least:
        raise BudgetError(
            f"a budget of {budget} tokens is too small: {sinks} sinks and a window of {SMALLEST} for every KV head "
            f"take {-(-least // cache_bytes(layers, 1))}; ask for at least that{', or keep fewer sinks' * bool(sinks)}"
        )


def upgrades_by_worth(offers: Sequence[Sequence[Offer]]) -> list[tuple[float, int, int]]:
    """List kl saved per cost, head and level of every upgrade, from the one that saves most per cost on."""
    return sorted(
        (
            (kl_saved_per_cost(*pair), head, level)
            for head, of_head in enumerate(offers)
            for level, pair in enumerate(pairwise(of_head), 1)
        ),
        key=lambda upgrade: (-upgrade[0], upgrade[2], upgrade[1]),
    )


def find_equal_share(options: Sequence[Head], layer: Layer, sinks: int, budget: int) -> int:
    """Find the option by which heads are compared: the largest that an equal share of a budget buys."""
    sizes = {at: head_bytes(option, layer, sinks, 0) for at, option in enumerate(options) if not option.softmax}
    fitting = [at for at in sizes if sizes[at] <= budget * token_bytes(layer)]
    return max(fitting or [min(sizes, key=sizes.__getitem__)], key=sizes.__getitem__)


def kl_by_bytes(offers: OffersOfHeads) -> list[tuple[float, float]]:
    """List the bytes of all heads and their predicted kl, from the least budget to the largest that buys anything."""
    smallest = [offers_of_head[0] for offers_of_head in offers.offers]
    bytes, kl = sum(offer.cost for offer in smallest), math.fsum(offer.kl for offer in smallest)
    points = [(bytes, kl)]
    for _, head, level in upgrades_by_worth(offers.offers):
        before, after = offers.offers[head][level - 1 : level + 1]
        bytes, kl = bytes + after.cost - before.cost, max(kl + after.kl - before.kl, 0.0)
        points.append((bytes, kl))
    return points


def allocate_by_prices(offers: OffersOfHeads, strategy: str) -> Allocation:
    """Spend the bytes of the budget where they save most kl."""
    return offers.allocation(choose_levels(offers.offers, offers.budget_bytes), strategy)


def choose_levels(offers: Sequence[Sequence[Offer]], budget: float) -> list[int]:
    """Take the upgrade that saves most kl per cost, again and again, while the budget has room for any."""
    levels = [0] * len(offers)
    remaining = budget - sum(of_head[0].cost for of_head in offers)
    for _, head, level in upgrades_by_worth(offers):
        extra = offers[head][level].cost - offers[head][levels[head]].cost
        if extra <= remaining:
            levels[head], remaining = level, remaining - extra
    return levels


def offers_for_head(
    prices: Prices, layer: Layer, kl_of_options: Sequence[float], length: int, may_grow: bool
) -> Iterator[Offer[Head]]:
    """List all that one head may hold: the options, sizes between them, and softmax if it `may_grow`.

    Each is offered in the bits that it was priced with, and in fewer: rounding costs the same whatever a head holds.
    """
    rounding = {prices.options[0].bits: 0.0}
    series: dict[str, list[tuple[Head, float]]] = {}
    for head, kl in zip(prices.options, kl_of_options, strict=True):
        if head.softmax:
            rounding[head.bits] = max(kl, 0.0)
        else:
            series.setdefault(series_of(head), []).append((head, kl))
    text_tokens = max(map(tokens_of, prices.options))
    sizes = [pair for priced in series.values() for pair in with_sizes_between(priced, text_tokens)]
    if may_grow:
        sizes.append((Head(softmax=True), 0.0))
    for head, kl in sizes:
        for bits, rounding_kl in rounding.items():
            option = replace(head, bits=bits)
            yield Offer(option, head_bytes(option, layer, prices.sinks, length), max(kl, 0.0) + rounding_kl)


def series_of(head: Head) -> str:
    """Name the series of options that differ only in size, so that sizes between two of them make sense."""
    if not head.slots:
        return "windows"
    return "even" if head.window == head.slots else f"slots beside {head.window}"


def with_sizes_between(priced: Sequence[tuple[Head, float]], text_tokens: int) -> Iterator[tuple[Head, float]]:
    """List options that differ only in size, and heads between them; no kl falls steeper than believed.

    The kl falls with the tokens of a text that a head does not hold, times a power of the size: a steeper fall on the
    few priced texts does not hold on others. No size is listed between options that are near each other, since the
    larger may hold a whole text.
    """
    smaller: tuple[Head, float] | None = None
    for head, kl in sorted(priced, key=lambda pair: tokens_of(pair[0])):
        if smaller is not None:
            smaller_size, size = tokens_of(smaller[0]), tokens_of(head)
            remaining = (text_tokens - size) / max(text_tokens - smaller_size, 1)
            kl = max(kl, smaller[1] * remaining * (smaller_size / size) ** STEEPEST)
            if smaller_size < NEAR * size:
                yield from interpolate(smaller, (head, kl))
        smaller = head, kl
        yield smaller


def tokens_of(head: Head) -> int:
    """Count what a head holds beside its sinks: tokens and slots."""
    return head.window + head.slots


def interpolate(low: tuple[Head, float], high: tuple[Head, float]) -> Iterator[tuple[Head, float]]:
    """List heads between two options with their kl, which falls about as a power of the size."""
    logs = [math.log(max(kl, MIN_KL)) for _, kl in (low, high)]
    for share in (part / PARTS for part in range(1, PARTS)):
        size = {
            name: round(getattr(low[0], name) ** (1 - share) * getattr(high[0], name) ** share)
            for name in ("window", "slots")
        }
        yield replace(low[0], **size), math.exp(logs[0] + share * (logs[1] - logs[0]))


def efficient_offers(offers: Iterable[Offer[Option]]) -> list[Offer[Option]]:
    """Keep the lower convex hull of kl over cost: more cost, a smaller kl, and ever less of it saved per cost."""
    hull: list[Offer[Option]] = []
    for offer in sorted(offers, key=lambda offer: (offer.cost, offer.kl)):
        if hull and offer.kl >= hull[-1].kl:
            continue
        while len(hull) > 1 and kl_saved_per_cost(hull[-1], offer) >= kl_saved_per_cost(hull[-2], hull[-1]):
            hull.pop()
        hull.append(offer)
    return hull


def kl_saved_per_cost(smaller: Offer, larger: Offer) -> float:
    """Return the nats that each further byte, or key, saves."""
    return (smaller.kl - larger.kl) / (larger.cost - smaller.cost)
