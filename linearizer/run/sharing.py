"""The pricing of a model's heads shared out to processes, each with a device: no price hangs on another.

A run's own process has the share with number 0, and is the only one that writes its log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from linearizer.progress import Steps

Product = TypeVar("Product")


@dataclass(frozen=True)
class Share:
    """The layers that one of several processes works on."""

    number: int = 0
    count: int = 1

    def part_of(self, costs: Mapping[int, float]) -> list[int]:
        """List the layers of this process by what each costs: the dearest first, each to the process with the least."""
        loads, layers = [0.0] * self.count, []
        for layer in sorted(costs, key=lambda layer: (-costs[layer], layer)):
            least = min(range(self.count), key=loads.__getitem__)
            loads[least] += costs[layer]
            if least == self.number:
                layers.append(layer)
        return sorted(layers)


ALL = Share()


class Helpers:
    """Other processes that price some of the heads: here there are none."""

    count = 1  # processes, with that of the run itself

    def beside(self, sinks: int, steps: Steps[Product]) -> Steps[Product]:
        """Let the others price their shares while the steps of this process's share are taken."""
        return (yield from steps)


ALONE = Helpers()
