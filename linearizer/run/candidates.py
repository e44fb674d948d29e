"""What was measured of an allocation beside plain allocations of the same bytes, and which of them was made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from linearizer.plan.json_products import JsonProduct

CANDIDATES = "candidates.json"  # of a run's folder
ROUNDING = 1e-3  # nats per token, which half precision alone costs


@dataclass(frozen=True)
class Candidate:
    """An allocation and its kl in nats per token, over each length."""

    name: str
    kl: tuple[float, ...]

    @property
    def score(self) -> float:
        """The mean logarithm over the lengths: a student is to be good at all of them, also where all have a large kl.

        What is smaller than rounding is alike.
        """
        return sum(math.log(max(kl, ROUNDING)) for kl in self.kl) / len(self.kl)


@dataclass(frozen=True)
class Candidates(JsonProduct):
    """All allocations that were measured, on texts that no head was priced on."""

    json_remedy = "measure them again"

    lengths: tuple[int, ...]  # tokens from the start of a text
    measured: tuple[Candidate, ...]

    @property
    def kept(self) -> Candidate:
        """The candidate with the smallest kl by ratios; where several have it, the first."""
        return min(self.measured, key=lambda candidate: candidate.score)

    @property
    def in_words(self) -> str:
        """Name the kept candidate, say why, and give the kl of all over each length."""
        lengths = ", ".join(f"{length:,}" for length in self.lengths)
        rows = "; ".join(f"{each.name} " + ", ".join(f"{kl:.4f}" for kl in each.kl) for each in self.measured)
        return f"{self.why} KL over the first {lengths} tokens of text that was not priced: {rows}."

    @property
    def why(self) -> str:
        """Name the kept candidate, and say why it was kept."""
        if (count := len(self.measured)) == 1:
            return f"Kept: {self.kept.name}, the only allocation of these bytes."
        return f"Kept: {self.kept.name}, the smallest KL of {count} allocations of the same bytes."
