"""How features are shared out: one function per strategy."""

from __future__ import annotations

import math
from collections.abc import Callable

from linearizer.purchase import Unit
from linearizer.run.profile import Curve

# A strategy turns the curves of one layer into units to buy for:
#   (of its KV heads, of its query heads where measured, -log of the fixed λ, bytes of a tile of one head) -> units
Strategy = Callable[[list[Curve], list[Curve], float, int], list[Unit]]


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


STRATEGIES: dict[str, Strategy] = {
    "fix": fix,
    "dof": dof,
    "dof-clip": dof,  # then cut to the head size; what that frees is not spent again
    "dof-mean": dof_mean,
    "common-lambda": common_lambda,
}
