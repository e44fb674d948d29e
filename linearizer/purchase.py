"""A budget spent on features, a tile at a time, in one order that no budget changes.

Each unit says how many features it wants at each level of spending, and that number never falls as the level rises.
So the level that first calls for a tile orders all tiles, and a budget buys a beginning of that order: a larger budget
never takes a tile away. Largest remainders would not do: a remainder that is large under one budget need not be under
the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

TILE = 16  # features; what a kernel works on at once
LEVELS = (-100.0, 100.0)  # logarithms: the first wants less than a tile of anything, the last more than can be asked


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
        cost = (following[index] - counts[index]) * units[index].price
        if cost > left:
            break  # a cheaper one further on must wait too, or a larger budget could take it away again
        counts[index], left = following[index], left - cost
    return [count * TILE for count in counts]
