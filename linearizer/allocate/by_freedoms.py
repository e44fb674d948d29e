"""Profile + budget -> Allocation: how much state every KV head gets. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from linearizer.errors import BudgetError, RequestError
from linearizer.run import head_bytes
from linearizer.run.allocation import Allocation, heads_replaced, is_count
from linearizer.run.head_bytes import Head, Layer
from linearizer.run.profile import Curve, Profile

DEFAULT = "common-lambda"
MOST = 2**40  # tokens or features: more is no budget but a mistake

TILE = 16  # features; what a kernel works on at once
LEVELS = (-100.0, 100.0)  # logarithms: the first wants less than a tile of anything, the last more than can be asked


def allocate(
    profile: Profile,
    layers: Sequence[Layer],
    *,
    budget: int | None = None,
    features: int | None = None,
    strategy: str = DEFAULT,
    window: int = 0,
    sinks: int = 0,
    ridge: float | None = None,
    paper_rounding: bool = False,
) -> Allocation:
    """Spend a budget in tokens of cache, or a mean number of features beside window and sinks, on the KV heads.

    `ridge` is the fixed λ of the paper's strategies (the profile's reference unless given); `paper_rounding` rounds
    features to whole numbers as the paper does, which may spend a little more than asked.
    """
    check_dial(layers, budget, features, strategy, window, sinks)
    check_profile(profile, layers)
    fixed = profile.asked.reference if ridge is None else ridge
    if not 0 < fixed < math.inf:
        raise BudgetError(f"ridge {ridge!r} is no λ: give a number above 0")
    level = -math.log(fixed)
    rows = [layer_units(profile, index, layer, strategy, level) for index, layer in enumerate(layers)]
    units = [unit for row in rows for unit in row]
    if paper_rounding:
        counts = rounded(units, strategy, features)
    else:
        counts = purchase(units, affordable(layers, budget, features, window + sinks))
    bought = iter(counts)
    heads = tuple(tuple(Head(window, each) for unit in row for each in [next(bought)] * unit.heads) for row in rows)
    return Allocation(strategy, sinks, clipped(heads, layers, paper_rounding) if strategy == "dof-clip" else heads)


def layer_units(profile: Profile, index: int, layer: Layer, strategy: str, level: float) -> list[Unit]:
    """Ask the strategy what one layer wants."""
    if layer.native_window is not None:
        return []
    found = profile.layers[index]
    heads = [Curve.through(head.freedoms, profile.asked.ridges) for head in found.heads]
    queries = [Curve.through(freedoms, profile.asked.ridges) for freedoms in found.query_freedoms]
    return UNITS_BY_STRATEGY[strategy](heads, queries, level, TILE * head_bytes.feature_bytes(layer))


def affordable(layers: Sequence[Layer], budget: int | None, features: int | None, kept: int) -> int:
    """Give the bytes to spend on features, after the tokens that every head keeps exactly."""
    one = sum(heads_replaced(layer) * head_bytes.feature_bytes(layer) for layer in layers)
    if budget is None:
        return (features or 0) * one
    fixed, least = kept * head_bytes.cache_bytes(layers, 1), TILE * one
    spend = head_bytes.cache_bytes(layers, budget) - fixed
    if spend < least:
        enough = -(-(fixed + least) // head_bytes.cache_bytes(layers, 1))
        raise BudgetError(
            f"a budget of {budget} tokens is too small: {kept} exact tokens and {TILE} features for every KV head take "
            f"{enough}; ask for at least that, or keep fewer exact tokens"
        )
    return spend


def rounded(units: Sequence[Unit], strategy: str, features: int | None) -> list[int]:
    """Round each layer's share of the mean dimension, as the paper does."""
    if features is None or strategy == "common-lambda":
        raise BudgetError("the paper's rounding needs a mean number of features, and a strategy of the paper")
    shares = [unit.wanted(0.0) for unit in units]
    mean = math.fsum(shares) / len(shares)
    return [max(1, round(features * share / mean)) for share in shares]


def clipped(heads: tuple[tuple[Head, ...], ...], layers: Sequence[Layer], exact: bool) -> tuple[tuple[Head, ...], ...]:
    """Leave no head more features than its size, in whole tiles unless exactly."""
    most = [layer.key_dim if exact else max(TILE, layer.key_dim // TILE * TILE) for layer in layers]
    return tuple(
        tuple(replace(head, features=min(head.features, limit)) for head in row)
        for row, limit in zip(heads, most, strict=True)
    )


def check_dial(layers: Sequence[Layer], budget: Any, features: Any, strategy: str, window: Any, sinks: Any) -> None:
    """Refuse what cannot be allocated to these layers, whatever will be measured of them, and say what can."""
    if strategy not in UNITS_BY_STRATEGY:
        raise BudgetError(f"there is no strategy {strategy!r}; there are {', '.join(UNITS_BY_STRATEGY)}")
    if (budget is None) == (features is None):
        raise BudgetError("give either a budget in tokens or a mean number of features, and not both")
    name, asked, least = ("features", features, TILE) if budget is None else ("budget", budget, 1)
    check_amount(name, asked, least)
    for name, asked in (("window", window), ("sinks", sinks)):
        if not is_count(asked) or asked > MOST:
            raise BudgetError(f"{name} {asked!r} cannot be: give a whole number of tokens, 0 or more")
    if not any(map(heads_replaced, layers)):
        raise BudgetError("the model bounds every layer itself: there is nothing to allocate")
    affordable(layers, budget, features, window + sinks)


def check_amount(name: str, asked: Any, least: int) -> None:
    """Refuse a dial that is no number, or one that nobody can mean."""
    if not is_count(asked) or not least <= asked <= MOST:
        raise BudgetError(f"{name} {asked!r} buys nothing: give a whole number from {least} to {MOST}")


def check_profile(profile: Profile, layers: Sequence[Layer]) -> None:
    """Refuse a profile of another model."""
    found = [len(layer.heads) for layer in profile.layers]
    if found != [heads_replaced(layer) for layer in layers]:
        raise RequestError(f"the profile is of another model (KV heads by layer: {found}): measure this one")


@dataclass(frozen=True)
class Unit:
    """KV heads of one layer that get the same."""

    heads: int
    price: int  # bytes of a tile for all its heads
    wanted: Callable[[float], float]  # level -> features
    need: float  # the greater goes first where one level calls for several tiles


def tiles(unit: Unit, level: float) -> int:
    """Round what a unit wants at a level to tiles; none is left without one."""
    return max(1, int(unit.wanted(level) / TILE + 0.5))


def purchase(units: Sequence[Unit], budget: int) -> list[int]:
    """Give the features of every unit that the budget in bytes buys; it must cover a tile for each."""

    def bought(level: float) -> list[int]:
        return [tiles(unit, level) for unit in units]

    def price(counts: list[int]) -> int:
        return sum(count * unit.price for count, unit in zip(counts, units, strict=True))

    low, high = LEVELS
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if price(bought(middle)) <= budget else (low, middle)
    counts, following = bought(low), bought(high)
    waiting = [index for index in range(len(units)) if following[index] > counts[index]]
    left = budget - price(counts)
    for index in sorted(waiting, key=lambda index: (-units[index].need, units[index].price, index)):
        extra = (following[index] - counts[index]) * units[index].price
        if extra > left:
            break  # a cheaper one further on must wait too, or a larger budget could take it away again
        counts[index], left = following[index], left - extra
    return [count * TILE for count in counts]


def fix(heads: list[Curve], queries: list[Curve], level: float, price: int) -> list[Unit]:
    """Give every head the same; the tiles of the residue go where the most freedoms are."""
    return [Unit(1, price, math.exp, curve.at(level)) for curve in heads]


def dof(heads: list[Curve], queries: list[Curve], level: float, price: int) -> list[Unit]:
    """Give a layer in proportion to N(λ) of its neediest head (algorithm 1 of the paper)."""
    return [proportional(len(heads), price, max(curve.at(level) for curve in queries or heads))]


def dof_mean(heads: list[Curve], queries: list[Curve], level: float, price: int) -> list[Unit]:
    """Give a layer in proportion to the mean of N(λ) over its heads."""
    counts = [curve.at(level) for curve in queries or heads]
    return [proportional(len(heads), price, math.fsum(counts) / len(counts))]


def common_lambda(heads: list[Curve], queries: list[Curve], level: float, price: int) -> list[Unit]:
    """Give every KV head its N(λ*), one λ* for the whole model, as small as the budget lets it be."""
    return [Unit(1, price, curve.at, curve.at(level)) for curve in heads]


def proportional(heads: int, price: int, need: float) -> Unit:
    """Want features in proportion to a need."""
    return Unit(heads, heads * price, lambda level: need * math.exp(level), need)


# A strategy turns the curves of one layer into units to buy for:
#   (of its KV heads, of its query heads where measured, -log of the fixed λ, bytes of a tile of one head) -> units
UnitsOfLayer = Callable[[list[Curve], list[Curve], float, int], list[Unit]]
UNITS_BY_STRATEGY: dict[str, UnitsOfLayer] = {
    "fix": fix,
    "dof": dof,
    "dof-clip": dof,  # then cut to the head size; what that frees is not spent again
    "dof-mean": dof_mean,
    "common-lambda": common_lambda,
}
