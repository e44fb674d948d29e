"""What every KV head needs, costs and holds: degrees of freedom, a price, and the memory that a budget buys it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from linearizer.method.by_prices import find_equal_share
from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation, heads_replaced
from linearizer.plan.head_bytes import Head, Layer
from linearizer.report.line_chart import SUPERSCRIPTS
from linearizer.report.tables import Table
from linearizer.run.folder import Run
from linearizer.run.measured import Curve, Profile

LEVELS = (-40.0, 40.0)  # -log λ between which a budget's λ is sought
APART = 1 / 3  # of all ranks: heads whose two ranks differ by more are named
MAX_NAMED = 3  # heads
MIN_CORRELATED = 5  # heads


@dataclass(frozen=True)
class HeadNeed:
    """One KV head; what is not known yet is None."""

    layer: int
    head: int
    freedoms: float | None = None  # N(λ) at the reference
    interval: tuple[float, float] | None = None  # of freedoms, 95%, over texts
    at_budget: float | None = None  # N(λ) at the λ of the budget
    price: float | None = None  # kl in nats per token, if it alone has an equal share of the budget
    held: Head | None = None
    tokens: float = 0.0  # of cache that its memory takes the bytes of
    exact: float = 0.0  # of these, in exact tokens

    @property
    def name(self) -> str:
        return f"layer {self.layer}, KV head {self.head}"


@dataclass(frozen=True)
class HeadNeeds:
    """All KV heads that a student replaces."""

    heads: tuple[HeadNeed, ...]
    layers: int
    ridge: float  # the λ of freedoms
    share: float  # tokens of cache that a head has where all have the same
    length: int  # tokens of a text that a run reads
    budget_ridge: float | None = None  # where heads have as many degrees of freedom as tokens, on average
    option: Head | None = None  # what every head alone holds in the prices

    @property
    def pairs(self) -> list[HeadNeed]:
        """The heads with both a need and a price."""
        return [head for head in self.heads if head.freedoms is not None and head.price is not None]

    @property
    def meaning(self) -> str:
        """Say what degrees of freedom count, with the number that decides."""
        text = (
            f"Degrees of freedom, N(λ), at λ = {power_of_two(self.ridge)}: the directions that each hold more than "
            f"{self.ridge:.2%} of a head’s attention kernel, so the features that it needs for an error of that size."
        )
        if self.budget_ridge is None:
            return text
        level = power_of_two(self.budget_ridge)
        return f"{text} With {self.share:.0f} tokens of cache a head, a budget reaches λ = {level} on average."

    @property
    def agreement(self) -> str:
        """Say how need and price agree, and for which heads they do not; empty until both are known."""
        heads = self.pairs
        if len(heads) < MIN_CORRELATED or self.option is None:
            return ""
        needs, prices = ranks([head.freedoms or 0.0 for head in heads]), ranks([head.price or 0.0 for head in heads])
        rho, low, high = correlate(needs, prices)
        words = "agree" if low > 0 else "contradict each other" if high < 0 else "show no agreement"
        begin = (
            f"Need and price {words} in this model: rank correlation {rho:.2f} (95%: {low:.2f} to {high:.2f}) over "
            f"{len(heads)} KV heads, each alone with {self.option.in_brief}"
        )
        apart = sorted(range(len(heads)), key=lambda at: -abs(needs[at] - prices[at]))[:MAX_NAMED]
        named = [
            f"{heads[at].name} (need {len(heads) + 1 - needs[at]:.0f}, price {len(heads) + 1 - prices[at]:.0f})"
            for at in apart
            if abs(needs[at] - prices[at]) > APART * len(heads)
        ]
        return f"{begin}. Their ranks, 1 being the most, differ most in {'; '.join(named)}." if named else f"{begin}."

    def to_plain(self) -> dict[str, Any]:
        """Return plain values."""
        return {**asdict(self), "meaning": self.meaning, "agreement": self.agreement}


@dataclass
class Measuring:
    """What a run has measured so far, layer by layer, before it is written."""

    freedoms: dict[int, list[float]] = field(default_factory=dict)
    prices: dict[int, list[float]] = field(default_factory=dict)

    def add(self, event: Mapping[str, Any]) -> None:
        """Take what an event of the log tells."""
        if event["done"] == 1 and "freedoms" in event:
            self.freedoms.clear()
        if "freedoms" in event:
            self.freedoms.setdefault(event["layer"], []).append(event["freedoms"])
        if "kl_of_heads" in event:
            self.prices[event["layer"]] = event["kl_of_heads"]

    @property
    def count(self) -> int:
        return sum(map(len, self.freedoms.values())) + len(self.prices)


def needs_of(run: Run, allocation: Allocation | None = None, measuring: Measuring | None = None) -> HeadNeeds:
    """Collect what the heads of a run need and cost, and what an allocation, or none, gives them."""
    layers, budget = run.layers, run.plan.budget or 0
    so_far = measuring or Measuring()
    heads = [HeadNeed(index, head) for index, layer in enumerate(layers) for head in range(heads_replaced(layer))]
    length = run.plan.resolved_length(run.positions)
    needs = HeadNeeds(tuple(heads), len(layers), 2.0**-8, float(budget), length)
    if (profile := run.profile) is not None:
        needs = with_freedoms(needs, profile)
    else:
        needs = with_numbers(needs, "freedoms", so_far.freedoms)
    if (prices := run.prices) is not None and any(map(heads_replaced, layers)):
        at = find_equal_share(prices.options, next(filter(heads_replaced, layers)), prices.sinks, budget)
        rows = {index: [kl[at] for kl in rows] for index, rows in enumerate(prices.kl)}
        needs = replace(with_numbers(needs, "price", rows), option=prices.options[at])
    else:
        needs = with_numbers(needs, "price", so_far.prices)
    return needs if allocation is None else with_memory(needs, allocation, layers, profile)


def with_numbers(needs: HeadNeeds, name: str, rows: Mapping[int, Sequence[float]]) -> HeadNeeds:
    """Add a number of some heads, by layer."""
    heads = list(needs.heads)
    for place, head in enumerate(heads):
        if head.head < len(row := rows.get(head.layer, ())):
            changed: dict[str, Any] = {name: row[head.head]}
            heads[place] = replace(head, **changed)
    return replace(needs, heads=tuple(heads))


def with_freedoms(needs: HeadNeeds, profile: Profile) -> HeadNeeds:
    """Add the degrees of freedom of all heads, and their errors."""
    settings, heads = profile.settings, []
    for head in needs.heads:
        measured = profile.layers[head.layer].heads[head.head]
        freedoms, error = settings.at_reference(measured.freedoms), settings.error_at_reference(measured.errors)
        interval = None if error is None else (freedoms * math.exp(-error), freedoms * math.exp(error))
        heads.append(replace(head, freedoms=freedoms, interval=interval))
    return replace(needs, heads=tuple(heads), ridge=settings.reference)


def with_memory(
    needs: HeadNeeds, allocation: Allocation, layers: Sequence[Layer], profile: Profile | None
) -> HeadNeeds:
    """Add what an allocation gives the heads, and the λ at which they need as much on average."""
    heads = []
    for head in needs.heads:
        held, layer = allocation.heads[head.layer][head.head], layers[head.layer]
        token = head_bytes.token_bytes(layer)
        tokens = head_bytes.head_bytes(held, layer, allocation.sinks, needs.length) / token
        near = allocation.sinks + held.window * head_bytes.token_bytes(layer, held.bits) / token
        heads.append(replace(head, held=held, tokens=tokens, exact=tokens if held.softmax else near))
    share = sum(head.tokens for head in heads) / max(1, len(heads))
    if profile is None or not heads or not share:
        return replace(needs, heads=tuple(heads), share=share)
    curves = [
        Curve.through(profile.layers[head.layer].heads[head.head].freedoms, profile.settings.ridges) for head in heads
    ]
    level = find_level(curves, share)
    heads = [replace(head, at_budget=curve.at(level)) for head, curve in zip(heads, curves, strict=True)]
    return replace(needs, heads=tuple(heads), share=share, budget_ridge=math.exp(-level))


def find_level(curves: Sequence[Curve], tokens: float) -> float:
    """Find -log λ at which heads have as many degrees of freedom as tokens, on average."""
    low, high = LEVELS
    while low < (middle := (low + high) / 2) < high and high - low > 1e-6:
        low, high = (
            (middle, high) if sum(curve.at(middle) for curve in curves) < tokens * len(curves) else (low, middle)
        )
    return low


def power_of_two(number: float) -> str:
    """Write a number as a power of two: 2⁻⁸, or 2⁻¹¹·³."""
    return f"2{f'{math.log2(number):.1f}'.removesuffix('.0').translate(SUPERSCRIPTS)}"


def ranks(values: Sequence[float]) -> list[float]:
    """Rank values from 1 on, the smallest first; equal ones share the mean of their ranks."""
    order = sorted(values)
    first = {value: place for place, value in reversed([*enumerate(order, 1)])}
    return [first[value] + (order.count(value) - 1) / 2 for value in values]


def correlate(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Compute the correlation of two lists of ranks, and its 95% interval by Fisher’s z (Bonett and Wright, 2000)."""
    middle = (len(first) + 1) / 2
    products = [sum((a - middle) * (b - middle) for a, b in zip(x, y, strict=True)) for x, y in (
        (first, second), (first, first), (second, second)
    )]  # fmt: skip
    if not products[1] * products[2]:
        return 0.0, -1.0, 1.0
    rho = products[0] / math.sqrt(products[1] * products[2])
    z, half = math.atanh(min(max(rho, -0.9999), 0.9999)), 1.96 * math.sqrt((1 + rho**2 / 2) / (len(first) - 3))
    return rho, math.tanh(z - half), math.tanh(z + half)


def needs_table(needs: HeadNeeds) -> Table:
    """Show need, price and memory of all heads, a row for each layer."""
    rows: list[Sequence[object]] = [("layer", f"N(λ) at {power_of_two(needs.ridge)}, with 95% intervals")]
    titles = ["price, 10⁻³ nats"] * bool(needs.pairs) + ["memory, tokens of cache"] * bool(needs.budget_ridge)
    rows[0] = (*rows[0], *titles)
    for index in sorted({head.layer for head in needs.heads}):
        heads = [head for head in needs.heads if head.layer == index]
        cells = [" · ".join(map(write_freedoms, heads))]
        cells += [" · ".join(f"{1000 * (head.price or 0):.2g}" for head in heads)] * bool(needs.pairs)
        cells += [" · ".join(f"{head.tokens:.0f}" for head in heads)] * bool(needs.budget_ridge)
        rows.append((index, *cells))
    return Table(rows, tuple(filter(None, (needs.meaning, needs.agreement))))


def write_freedoms(head: HeadNeed) -> str:
    """Write the degrees of freedom of a head with their 95% interval: 19.7 (12–32)."""
    if head.freedoms is None:
        return "?"
    low, high = (f"{end:.2g}" if end < 10 else f"{end:.0f}" for end in head.interval or (0.0, 0.0))
    return f"{head.freedoms:.1f}" + (f" ({low}–{high})" if head.interval else "")
