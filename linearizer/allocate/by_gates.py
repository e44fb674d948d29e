"""Gates + budget -> Allocation: heads with large gates are left softmax, and the others share the remaining bytes."""

from __future__ import annotations

from collections.abc import Sequence

from linearizer.run.allocation import Allocation
from linearizer.run.head_bytes import Head, Layer, cache_bytes, token_bytes
from linearizer.run.prices import SMALLEST

Gates = Sequence[Sequence[float]]  # [layer][KV head], none in a native layer


def allocate_by_gates(gates: Gates, layers: Sequence[Layer], budget: int, sinks: int, length: int) -> Allocation:
    """Leave softmax as many heads as the budget has room for at a length, and give the others one window size."""
    order = sorted(
        ((index, head) for index, row in enumerate(gates) for head in range(len(row))),
        key=lambda place: -gates[place[0]][place[1]],
    )
    softmax: set[tuple[int, int]] = set()
    least = sinks + max(SMALLEST, budget // 4)  # a window is worth more than another softmax head
    for place in order:
        if window_tokens(layers, gates, softmax | {place}, budget, length) < least:
            break
        softmax.add(place)
    window = window_tokens(layers, gates, softmax, budget, length) - sinks
    return Allocation(
        "duo",
        sinks,
        tuple(
            tuple(Head(softmax=True) if (index, head) in softmax else Head(window=window) for head in range(len(row)))
            for index, row in enumerate(gates)
        ),
    )


def window_tokens(
    layers: Sequence[Layer], gates: Gates, softmax: set[tuple[int, int]], budget: int, length: int
) -> int:
    """Compute the tokens that each other head can hold beside some softmax heads."""
    left = cache_bytes(layers, budget) - sum(length * token_bytes(layers[index]) for index, _ in softmax)
    one_each = sum(
        token_bytes(layer)
        for index, (layer, row) in enumerate(zip(layers, gates, strict=True))
        for head in range(len(row))
        if (index, head) not in softmax
    )
    return left // one_each if one_each else 0
