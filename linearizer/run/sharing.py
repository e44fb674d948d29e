"""The layers of a model shared out to processes, each with a device: what a layer needs, no other layer computes.

A run's own process has the share with number 0, and is the only one that writes its log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from linearizer.progress import Steps

Product = TypeVar("Product")
HELPED = "helped"  # the step of the progress that ends a task of a helper


@dataclass(frozen=True)
class Share:
    """The layers that one of several processes works on."""

    number: int = 0
    count: int = 1

    def has(self, layer: int) -> bool:
        return layer % self.count == self.number

    def section(self, layers: Sequence[int]) -> list[int]:
        """List the layers that fall to this process where all cost the same, one after the other."""
        return list(layers[self.number * len(layers) // self.count : (self.number + 1) * len(layers) // self.count])

    def part_of(self, costs: Mapping[int, float]) -> list[int]:
        """List the layers of this process by what each costs: the dearest first, each to the process with the least."""
        loads, own = [0.0] * self.count, []
        for layer in sorted(costs, key=lambda layer: (-costs[layer], layer)):
            least = min(range(self.count), key=loads.__getitem__)
            loads[least] += costs[layer]
            if least == self.number:
                own.append(layer)
        return sorted(own)


ALL = Share()


class Helpers:
    """Other processes that work on the layers of a run: here there are none."""

    @property
    def count(self) -> int:
        """The number of processes, with that of the run itself."""
        return 1

    def begin(self) -> None:
        """Let the others load the teacher, before there is a task for them."""

    def prepare(self, task: str) -> None:
        """Let the others prepare for a task that is to come."""

    def beside(self, task: str, steps: Steps[Product]) -> Steps[tuple[Product, list[Any]]]:
        """Let the others do their shares of a task while the steps of this process's share are taken.

        Give its product, and the products of the others in their order, as JSON can write them.
        """
        return (yield from steps), []

    def close(self) -> None:
        """End the others."""


ALONE = Helpers()
