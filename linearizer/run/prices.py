"""The measured kl of each option in a single KV head, its price, and of whole allocations."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from linearizer.plan.head_bytes import Head
from linearizer.plan.json_products import JsonProduct

KlOfLayer = tuple[tuple[float, ...], ...]  # [KV head][option]
SMALLEST = 4  # tokens of the smallest window that is priced
CANDIDATES = "candidates.json"  # of a run's folder
ROUNDING = 1e-3  # nats per token: the kl of half precision alone


@dataclass(frozen=True)
class Prices(JsonProduct):
    """The kl in nats per token when one KV head alone holds an option; each doubling of a text counts equally.

    A softmax head costs nothing. The options include softmax heads of few bits: their kl is the price of these bits,
    whatever a head holds.
    """

    sinks: int
    options: tuple[Head, ...]
    kl: tuple[KlOfLayer, ...]  # [layer]; no heads in a native layer

    def of_options(self, is_wanted: Callable[[Head], bool]) -> Prices:
        """Keep the options that are wanted."""
        indices = [index for index, option in enumerate(self.options) if is_wanted(option)]
        kl = tuple(tuple(tuple(row[index] for index in indices) for row in layer) for layer in self.kl)
        return Prices(self.sinks, tuple(self.options[index] for index in indices), kl)


@dataclass(frozen=True)
class Candidate:
    """An allocation and its kl in nats per token, over each length."""

    name: str
    kl: tuple[float, ...]

    @property
    def score(self) -> float:
        """The mean logarithm over the lengths, so that every length counts, also one where all have a large kl.

        All kl below rounding count as equal.
        """
        return sum(math.log(max(kl, ROUNDING)) for kl in self.kl) / len(self.kl)


@dataclass(frozen=True)
class Candidates(JsonProduct):
    """All measured allocations, on texts that no head was priced on."""

    lengths: tuple[int, ...]  # tokens from the start of a text
    measured: tuple[Candidate, ...]

    @property
    def kept(self) -> Candidate:
        """The candidate with the smallest score, or the first of several."""
        return min(self.measured, key=lambda candidate: candidate.score)

    @property
    def in_words(self) -> str:
        """Name the kept candidate with the reason, and list the kl of all over each length."""
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        rows = "; ".join(f"{each.name} " + ", ".join(f"{kl:.4f}" for kl in each.kl) for each in self.measured)
        return f"{self.why} KL over the first {lengths} tokens of text that was not priced: {rows}."

    @property
    def why(self) -> str:
        """Name the kept candidate, with the reason."""
        if (count := len(self.measured)) == 1:
            return f"Kept: {self.kept.name}, the only allocation of these bytes."
        return f"Kept: {self.kept.name}, the smallest KL of {count} allocations of the same bytes."
