"""Profile + budget -> Allocation: degrees of freedom decide how many features every KV head holds.

A strategy turns the curves N(λ) of each layer into units, which need more features at a higher level (-log λ).
The budget decides the level, and each unit receives the features that it needs at that level, in tiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from linearizer.errors import BudgetError
from linearizer.plan.allocation import Allocation, heads_replaced
from linearizer.plan.head_bytes import TILE, Head, Layer, cache_bytes, feature_bytes
from linearizer.run.measured import Curve, Profile

LEVELS = (-100.0, 100.0)  # logarithms: no unit needs a tile at the first, and the last exceeds any budget


def allocate_by_freedoms(
    profile: Profile,
    layers: Sequence[Layer],
    *,
    budget: int | None = None,
    features: int | None = None,
    strategy: str = "common-lambda",
    window: int = 0,
    sinks: int = 0,
) -> Allocation:
    """Spend a budget in tokens of cache, or a mean number of features after window and sinks, on the KV heads.

    The fixed λ of the paper's strategies is the reference of the profile. The amounts are those of a plan.
    """
    check_room(layers, budget, features, window + sinks)
    rows = [layer_units(profile, index, layer, strategy) for index, layer in enumerate(layers)]
    units = [unit for row in rows for unit in row]
    counts = iter(buy_tiles(units, bytes_for_features(layers, budget, features, window + sinks)))
    heads = tuple(tuple(Head(window, count) for unit in row for count in [next(counts)] * unit.heads) for row in rows)
    return Allocation(strategy, sinks, heads)


def check_room(layers: Sequence[Layer], budget: int | None, features: int | None, exact_tokens: int) -> None:
    """Refuse layers and amounts that leave nothing to allocate, whatever is measured later."""
    if not any(map(heads_replaced, layers)):
        raise BudgetError("the model bounds every layer itself: there is nothing to allocate")
    bytes_for_features(layers, budget, features, exact_tokens)


@dataclass(frozen=True)
class Unit:
    """KV heads of one layer that hold the same number of features."""

    heads: int
    bytes: int  # of a tile for all its heads
    features_at: Callable[[float], float]  # level -> features
    need: float  # where one level adds tiles to several units, the greatest need comes first


def layer_units(profile: Profile, index: int, layer: Layer, strategy: str) -> list[Unit]:
    """Make the units of one layer under a strategy.

    fix            the same for every head; the remaining tiles go to the heads with the most degrees of freedom
    common-lambda  N(λ*) for every KV head, one λ* for the whole model, the smallest that the budget allows
    dof            a layer in proportion to N(λ) of its neediest head (algorithm 1 of the paper)
    """
    if layer.native_window is not None:
        return []
    ridges, level, tile = profile.settings.ridges, -math.log(profile.settings.reference), TILE * feature_bytes(layer)
    measured = profile.layers[index]
    curves = [Curve.through(head.freedoms, ridges) for head in measured.heads]
    if strategy in ("fix", "common-lambda"):
        return [Unit(1, tile, math.exp if strategy == "fix" else curve.at, curve.at(level)) for curve in curves]
    queries = [Curve.through(freedoms, ridges) for freedoms in measured.query_freedoms]
    need = max(curve.at(level) for curve in queries or curves)
    return [Unit(len(curves), len(curves) * tile, lambda level: need * math.exp(level), need)]


def bytes_for_features(layers: Sequence[Layer], budget: int | None, features: int | None, exact_tokens: int) -> int:
    """Compute the bytes to spend on features, after the tokens that every head keeps exactly."""
    one_each = sum(heads_replaced(layer) * feature_bytes(layer) for layer in layers)
    if budget is None:
        return (features or 0) * one_each
    exact, least_bytes = exact_tokens * cache_bytes(layers, 1), TILE * one_each
    remaining = cache_bytes(layers, budget) - exact
    if remaining < least_bytes:
        least_tokens = -(-(exact + least_bytes) // cache_bytes(layers, 1))
        raise BudgetError(
            f"a budget of {budget} tokens is too small: {exact_tokens} exact tokens and {TILE} features for every KV "
            f"head take {least_tokens}; ask for at least that, or keep fewer exact tokens"
        )
    return remaining


def buy_tiles(units: Sequence[Unit], budget_bytes: int) -> list[int]:
    """Find the features of every unit that the budget has room for; it must cover a tile for each."""

    def tiles_at(level: float) -> list[int]:
        return [max(1, int(unit.features_at(level) / TILE + 0.5)) for unit in units]

    def bytes_of(tiles: list[int]) -> int:
        return sum(count * unit.bytes for count, unit in zip(tiles, units, strict=True))

    low, high = LEVELS
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if bytes_of(tiles_at(middle)) <= budget_bytes else (low, middle)
    tiles, next_tiles = tiles_at(low), tiles_at(high)
    waiting = [index for index in range(len(units)) if next_tiles[index] > tiles[index]]
    remaining = budget_bytes - bytes_of(tiles)
    for index in sorted(waiting, key=lambda index: (-units[index].need, units[index].bytes, index)):
        extra = (next_tiles[index] - tiles[index]) * units[index].bytes
        if extra > remaining:
            break  # a smaller unit further on must wait too, or a larger budget could take its tile away again
        tiles[index], remaining = next_tiles[index], remaining - extra
    return [count * TILE for count in tiles]
