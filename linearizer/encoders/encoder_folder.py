"""The folder of an encoder's run: the files of every run (run/folder.py), and also:

RUN/encoder.json     its plan, as decided
RUN/ways.json        how each head of the student attends, and how that was chosen
RUN/state/window/    the control: a window of as many keys, distilled like the student
RUN/quality.json     how close the student and its controls are to the teacher
RUN/times.json       how long a layer takes, by the number of tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer, read_layers
from linearizer.encoders.encoder_quality import Judgement, LayerTime
from linearizer.encoders.key_budget import spend_keys
from linearizer.plan.encoder_plan import EncoderInspection, EncoderPlan
from linearizer.plan.json_products import JsonProduct, read_json
from linearizer.run.folder import Run

WAYS, QUALITY, TIMES = "ways.json", "quality.json", "times.json"
BY_PRICE, EQUAL, PLAIN = "each head by its price", "all heads alike", "a window alone"


@dataclass(frozen=True)
class ChosenWays(JsonProduct):
    """How each head of a student attends, and how that was chosen."""

    chosen: str  # one of the three above
    ways: tuple[tuple[tuple[int, ...], int], ...]  # a block and a number of slots
    heads: tuple[tuple[int, ...], ...]  # which of these each head has, layer by layer
    first: int  # global tokens
    last: int
    kl: dict[str, float]  # of each candidate before training; empty if there was no choice

    @classmethod
    def of(cls, chosen: str, layers: Sequence[HeadsOfLayer], kl: dict[str, float]) -> ChosenWays:
        different = [*dict.fromkeys(way for layer in layers for way in layer.ways)]
        heads = tuple(tuple(different.index(way) for way in layer.ways) for layer in layers)
        ways = tuple((way.block, way.slots) for way in different)
        return cls(chosen, ways, heads, different[0].first, different[0].last, kl)

    @property
    def layers(self) -> list[HeadsOfLayer]:
        return read_layers(self.ways, self.heads, self.first, self.last)


@dataclass(frozen=True)
class EncoderRun:
    """The run of an encoder, and what was decided at its start."""

    run: Run

    @cached_property
    def plan(self) -> EncoderPlan:
        return self.run.encoder_plan

    @cached_property
    def inspection(self) -> EncoderInspection:
        return self.run.parse_file("inspection.json", EncoderInspection.from_json, again=False)

    @property
    def window(self) -> Path:
        """The checkpoint of the control; none if nothing is trained, or the student is itself a window."""
        return self.run.folder / "state" / "window"

    @property
    def tokens(self) -> int:
        """The tokens of a text or picture."""
        return self.plan.length or self.inspection.tokens

    @property
    def both_ways(self) -> BothWays:
        """How all heads attend if they all attend in one way."""
        return attention_of(self.plan, self.inspection)

    @property
    def ways(self) -> ChosenWays:
        """How each head of the student attends: all in one way if nothing else was chosen."""
        stored = self.run.product(WAYS, ChosenWays.from_json)
        return stored or ChosenWays.of(EQUAL, self.uniform_layers(self.both_ways), {})

    def uniform_layers(self, way: BothWays) -> list[HeadsOfLayer]:
        """Return layers whose heads all attend in one way."""
        return [HeadsOfLayer((way,) * self.inspection.heads)] * self.inspection.layers

    @property
    def keys(self) -> float:
        """How many keys a token sees, a mean over all heads of the student; none sees more than there are tokens."""
        ways = [way for layer in self.ways.layers for way in layer.ways]
        return sum(min(way.keys, self.tokens) for way in ways) / len(ways)

    @property
    def typical_layer(self) -> HeadsOfLayer:
        """A layer with a sample of the ways of all heads."""
        heads = sorted((way for layer in self.ways.layers for way in layer.ways), key=lambda way: way.keys)
        return HeadsOfLayer(tuple(heads[self.inspection.layers // 2 :: self.inspection.layers]))

    @property
    def plain_window(self) -> BothWays:
        """A window of as many keys."""
        way = self.both_ways
        return spend_keys(self.plan.budget, len(way.block), way.first, way.last, slots=False)

    @property
    def is_window(self) -> bool:
        """Whether the student is a plain window itself."""
        return self.ways.layers == self.uniform_layers(self.plain_window)

    @property
    def stretched(self) -> bool:
        """Whether texts have more tokens than the teacher has positions."""
        return self.tokens > self.inspection.tokens

    @property
    def judgements(self) -> dict[str, Judgement]:
        """How close the student and its controls are to the teacher, by source: the run's texts first."""
        return self.run.product(QUALITY, lambda text: read_json(dict[str, Judgement], text)) or {}

    @property
    def times(self) -> list[LayerTime]:
        """How long a layer takes, if that was measured."""
        return self.run.product(TIMES, lambda text: read_json(dict[str, list[LayerTime]], text)["times"]) or []


def check_budget(plan: EncoderPlan, inspection: EncoderInspection) -> None:
    """Refuse a budget that is too small, or that saves nothing."""
    inspection.check_worth(plan.budget, plan.length or inspection.tokens)
    attention_of(plan, inspection)


def attention_of(plan: EncoderPlan, inspection: EncoderInspection) -> BothWays:
    """Spend the budget of a plan; refuse one that is too small."""
    axes = 1 if inspection.reads == "texts" else 2
    return spend_keys(plan.budget, axes, inspection.first, inspection.last, plan.slots)
