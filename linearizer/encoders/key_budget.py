"""Turns a budget of keys into a way to attend."""

from __future__ import annotations

import math

from linearizer.encoders.attention_both_ways import BothWays, search_keys
from linearizer.errors import BudgetError

AROUND = 3  # blocks along an axis that a token sees: its own and one on either side
WINDOW_SHARE = 0.3  # of the keys, if there are slots, too
LEAST_SLOTS = 8  # with fewer, a larger window is better


def spend_keys(
    budget: int, axes: int, first: int, last: int, slots: bool, window_share: float = WINDOW_SHARE
) -> BothWays:
    """Spend a budget of keys: a token costs as much as a token of the teacher in a text of `budget` tokens.

    `axes`: 1 for texts, 2 for pictures. Without slots all keys go into the window.
    """
    remaining = budget - 2 * (first + last)
    window = window_share * remaining if slots else remaining
    block = block_of(window, axes)
    if block is None and slots:
        return spend_keys(budget, axes, first, last, slots=False)
    if block is None:
        smallest = AROUND**axes + 2 * (first + last)
        raise BudgetError(f"a budget of {budget} keys is too small: ask for {smallest} or more")
    count = int(remaining - math.prod(AROUND * size for size in block) - search_keys(1)) if slots else 0
    if slots and count < LEAST_SLOTS:
        return spend_keys(budget, axes, first, last, slots=False)
    return BothWays(block, count, first, last)


def block_of(keys: float, axes: int) -> tuple[int, ...] | None:
    """Return the largest block with at most `keys` near it; in two dimensions at most twice as wide as high."""
    if axes == 1:
        return (int(keys) // AROUND,) if keys >= AROUND else None
    blocks = int(keys) // AROUND**2
    sizes = [(high, min(blocks // high, 2 * high)) for high in range(1, math.isqrt(blocks) + 1)]
    return max(sizes, key=lambda size: (math.prod(size), size[0]), default=None)
