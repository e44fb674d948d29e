"""The layers of a model shared out to processes, each with a device: what a layer needs, no other layer computes.

A run's own process has the share with number 0, and is the only one that writes its log.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

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


ALL = Share()


class Helpers(Protocol):
    """Other processes that work on the layers of a run."""

    @property
    def count(self) -> int:
        """The number of processes, with that of the run itself."""

    def beside(self, task: str, steps: Steps[Product]) -> Steps[Product]:
        """Let the others do their shares of a task while the steps of this process's share are taken."""

    def close(self) -> None:
        """End the others."""


class Nobody:
    """No helpers."""

    count = 1

    def beside(self, task: str, steps: Steps[Product]) -> Steps[Product]:
        return steps

    def close(self) -> None:
        pass


ALONE: Helpers = Nobody()
