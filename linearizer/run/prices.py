"""Prices of heads: the kl that each KV head costs the model when it alone holds an option."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from linearizer.run.head_bytes import Head
from linearizer.run.json_products import JsonProduct

SMALLEST = 4  # tokens of the smallest window that is priced


@dataclass(frozen=True)
class Prices(JsonProduct):
    """The kl in nats per token when one KV head alone holds an option; a head left softmax costs none."""

    json_remedy: ClassVar = "measure them again"

    sinks: int
    options: tuple[Head, ...]
    kl: tuple[tuple[tuple[float, ...], ...], ...]  # [layer][KV head][option]; no heads in a native layer

    def of_options(self, is_wanted: Callable[[Head], bool]) -> Prices:
        """Keep the options that are wanted."""
        kept = [index for index, option in enumerate(self.options) if is_wanted(option)]
        kl = tuple(tuple(tuple(row[index] for index in kept) for row in layer) for layer in self.kl)
        return Prices(self.sinks, tuple(self.options[index] for index in kept), kl)


@dataclass(frozen=True)
class PartialPrices(JsonProduct):
    """The prices of the first layers, kept while the other layers are measured."""

    json_remedy: ClassVar = "remove them"

    prices: Prices
    drawn: str  # the state of the random generator, in hexadecimal digits
