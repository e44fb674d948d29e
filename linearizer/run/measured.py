"""What a run measures: the features that KV heads need, the price of each option in a head, the kl of allocations."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

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
        return (
            f"Kept: {self.kept.name}; no other of {count} allocations of the same bytes has a smaller mean log KL "
            f"(a KL below {ROUNDING:g} counts as {ROUNDING:g})."
        )


@dataclass(frozen=True)
class ProfileSettings:
    """How to measure. The paper uses all tokens and does not centre keys: sinks=0, gauge="raw", per="query"."""

    text: str = ""  # its source
    samples: int = 1024  # queries and keys of a head, half and half: a multiple of 8
    sinks: int = 4  # first tokens of each text that are left out
    per: Literal["kv", "query"] = "kv"  # one curve for every KV head; or also for every query head
    gauge: Literal["raw", "centred"] = "centred"  # unchanged keys, or minus their mean, to which a softmax is blind
    seed: int = 0
    ridges: tuple[float, ...] = tuple(2.0**-exponent for exponent in range(21))  # falling
    reference: float = 2.0**-8  # the λ of the paper's table of heads

    def at_reference(self, freedoms: Sequence[float]) -> float:
        """Read N off a curve at the reference ridge, which need not be on the grid."""
        return Curve.through(freedoms, self.ridges).at(-math.log(self.reference))

    def error_at_reference(self, errors: Sequence[float]) -> float | None:
        """Read the error of log N at the ridge that is nearest to the reference."""
        nearest = min(range(len(self.ridges)), key=lambda at: abs(math.log(self.ridges[at] / self.reference)))
        return errors[nearest] if errors else None


@dataclass(frozen=True)
class HeadProfile:
    """One KV head, with the queries of its group."""

    freedoms: tuple[float, ...]  # N(λ) for every ridge of the profile
    errors: tuple[float, ...] = ()  # half of the 95% interval of log N(λ); none in profiles of earlier versions


@dataclass(frozen=True)
class LayerProfile:
    """The KV heads of one layer; none where the teacher bounds the layer itself."""

    heads: tuple[HeadProfile, ...]
    query_freedoms: tuple[tuple[float, ...], ...] = ()  # [query head][ridge], with per="query"


@dataclass(frozen=True)
class Profile(JsonProduct):
    """A model measured on a text."""

    settings: ProfileSettings
    tokens: int  # no padding among them
    layers: tuple[LayerProfile, ...]


@dataclass(frozen=True)
class Curve:
    """N(λ) of one head, interpolated between the ridges on logarithmic axes, where it is smooth."""

    levels: tuple[float, ...]  # -log λ, rising
    logs: tuple[float, ...]  # log N, rising

    @staticmethod
    def through(freedoms: Sequence[float], ridges: Sequence[float]) -> Curve:
        """Draw the curve through the measured points."""
        logs = accumulate((math.log(max(count, 1e-9)) for count in freedoms), max)
        return Curve(tuple(-math.log(ridge) for ridge in ridges), tuple(logs))

    def at(self, level: float) -> float:
        """Read N off at -log λ; beyond the grid N goes in proportion to 1/λ."""
        if level <= self.levels[0]:
            return math.exp(self.logs[0] + level - self.levels[0])
        if level >= self.levels[-1]:
            return math.exp(self.logs[-1] + level - self.levels[-1])
        after = bisect_right(self.levels, level)
        low, high = self.logs[after - 1], self.logs[after]
        slope = (high - low) / (self.levels[after] - self.levels[after - 1])
        # never past the next point by a rounding: allocations rely on a curve that does not fall
        return math.exp(min(low + slope * (level - self.levels[after - 1]), high))
