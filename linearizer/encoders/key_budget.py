"""How a budget of keys becomes a way to attend."""

from __future__ import annotations

import math

from linearizer.encoders.attention_both_ways import BothWays
from linearizer.encoders.slots_of_all import search_keys
from linearizer.errors import BudgetError

AROUND = 3  # blocks along an axis that a token sees: its own and one on either side
WINDOW_SHARE = 0.3  # of the keys of a text, where there are slots, too
LEAST_SLOTS = 8  # with fewer, a larger window serves better


def spend_keys(
    budget: int, axes: int, first: int, last: int, slots: bool, window_share: float = WINDOW_SHARE
) -> BothWays:
    """Spend a budget: with it a token costs what a token of the teacher costs among as many tokens.

    `axes`: 1 for texts, 2 for pictures. Without slots all keys go into the window.
    """
    left = budget - 2 * (first + last)
    window = window_share * left if slots else left
    block = block_of(window, axes)
    if block is None and slots:
        return spend_keys(budget, axes, first, last, slots=False)
    if block is None:
        least = AROUND**axes + 2 * (first + last)
        raise BudgetError(f"a budget of {budget} keys is too small: ask for {least} or more")
    count = int(left - math.prod(AROUND * size for size in block) - search_keys(1)) if slots else 0
    if slots and count < LEAST_SLOTS:
        return spend_keys(budget, axes, first, last, slots=False)
    return BothWays(block, count, first, last)


def block_of(keys: float, axes: int) -> tuple[int, ...] | None:
    """Return the largest block with no more keys near it; in two dimensions at most twice as wide as high."""
    if axes == 1:
        return (int(keys) // AROUND,) if keys >= AROUND else None
    most = int(keys) // AROUND**2
    sizes = [(high, min(most // high, 2 * high)) for high in range(1, math.isqrt(most) + 1)]
    return max(sizes, key=lambda size: (math.prod(size), size[0]), default=None)
