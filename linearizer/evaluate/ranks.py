"""How far two lists agree in their order."""

from __future__ import annotations

import math
from collections.abc import Sequence


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Correlate the ranks of two lists, equal values sharing theirs; None where one list is all alike, or too short."""
    if len(one) != len(other):
        raise ValueError(f"lists of {len(one)} and {len(other)} values have no ranks to compare")
    a, b = ranks(one), ranks(other)
    a, b = ([value - (len(a) + 1) / 2 for value in each] for each in (a, b))
    size = math.sqrt(math.fsum(x * x for x in a) * math.fsum(x * x for x in b))
    return math.fsum(x * y for x, y in zip(a, b, strict=True)) / size if len(a) > 2 and size > 0 else None


def ranks(values: Sequence[float]) -> list[float]:
    """Number values from 1 by their order; equal ones get the mean of their numbers."""
    order = sorted(range(len(values)), key=values.__getitem__)
    found = [0.0] * len(values)
    begin = 0
    while begin < len(order):
        end = begin
        while end < len(order) and values[order[end]] == values[order[begin]]:
            end += 1
        for place in order[begin:end]:
            found[place] = (begin + 1 + end) / 2
        begin = end
    return found
