"""Prices of heads: the kl that each KV head costs the model when it alone holds an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from linearizer.plan.head_bytes import Head
from linearizer.plan.json_products import JsonProduct

KlOfLayer = tuple[tuple[float, ...], ...]  # [KV head][option]
SMALLEST = 4  # tokens of the smallest window that is priced


@dataclass(frozen=True)
class Prices(JsonProduct):
    """The kl in nats per token, each doubling of a text counting alike, when one KV head alone holds an option.

    A head left softmax costs none.

    Softmax heads of few bits are among the options: their kl is what these bits cost a head, whatever else it holds.
    """

    json_remedy = "measure them again"

    sinks: int
    options: tuple[Head, ...]
    kl: tuple[KlOfLayer, ...]  # [layer]; no heads in a native layer

    def of_options(self, is_wanted: Callable[[Head], bool]) -> Prices:
        """Keep the options that are wanted."""
        kept = [index for index, option in enumerate(self.options) if is_wanted(option)]
        kl = tuple(tuple(tuple(row[index] for index in kept) for row in layer) for layer in self.kl)
        return Prices(self.sinks, tuple(self.options[index] for index in kept), kl)


@dataclass(frozen=True)
class LayerPrices(JsonProduct):
    """The prices of one layer, kept while others are measured, or their sums over the tokens of a group of texts."""

    json_remedy = "remove them"

    sinks: int
    options: tuple[Head, ...]
    kl: KlOfLayer
