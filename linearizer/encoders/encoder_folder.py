"""The folder of an encoder's run. What every run has lies in it as run/folder.py says, and besides:

RUN/encoder.json     its plan, as decided
RUN/ways.json        how each head of the student attends, and how that was chosen
RUN/state/window/    the control: a window of as many keys, distilled as the student is
RUN/quality.json     how close the student and its controls are to the teacher
RUN/times.json       how long a layer takes over the number of tokens
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer, read_layers
from linearizer.encoders.encoder_quality import Judgement, LayerTime
from linearizer.encoders.key_budget import spend_keys
from linearizer.plan.encoder_inspection import EncoderInspection
from linearizer.plan.encoder_plan import EncoderPlan
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
    kl: dict[str, float]  # before training, of each that there was to choose from; nothing where there was no choice

    @classmethod
    def of(cls, chosen: str, layers: Sequence[HeadsOfLayer], kl: dict[str, float]) -> ChosenWays:
        different = [*dict.fromkeys(how for layer in layers for how in layer.ways)]
        heads = tuple(tuple(different.index(how) for how in layer.ways) for layer in layers)
        ways = tuple((how.block, how.slots) for how in different)
        return cls(chosen, ways, heads, different[0].first, different[0].last, kl)

    @property
    def layers(self) -> list[HeadsOfLayer]:
        return read_layers(self.ways, self.heads, self.first, self.last)


@dataclass(frozen=True)
class EncoderRun:
    """The run of an encoder, and what was decided before its work."""

    run: Run

    @cached_property
    def plan(self) -> EncoderPlan:
        return self.run.encoder_plan

    @cached_property
    def inspection(self) -> EncoderInspection:
        return self.run.parse_file("inspection.json", EncoderInspection.from_json, again=False)

    @property
    def window(self) -> Path:
        """The checkpoint of the control; there is none where nothing is trained, or the student is a window itself."""
        return self.run.folder / "state" / "window"

    @property
    def tokens(self) -> int:
        """The tokens of a text or picture."""
        return self.plan.length or self.inspection.tokens

    @property
    def both_ways(self) -> BothWays:
        """How all heads attend if they attend alike."""
        return attention_of(self.plan, self.inspection)

    @property
    def ways(self) -> ChosenWays:
        """How each head of the student attends: all alike, where nothing else was chosen."""
        found = self.run.product(WAYS, ChosenWays.from_json)
        return found or ChosenWays.of(EQUAL, self.alike(self.both_ways), {})

    def alike(self, how: BothWays) -> list[HeadsOfLayer]:
        """Let all heads attend in one way."""
        return [HeadsOfLayer((how,) * self.inspection.heads)] * self.inspection.layers

    @property
    def keys(self) -> float:
        """How many keys a token sees, a mean over all heads of the student."""
        return sum(layer.keys for layer in self.ways.layers) / self.inspection.layers

    @property
    def typical_layer(self) -> HeadsOfLayer:
        """A layer whose heads are as different as all heads are."""
        heads = sorted((how for layer in self.ways.layers for how in layer.ways), key=lambda how: how.keys)
        return HeadsOfLayer(tuple(heads[self.inspection.layers // 2 :: self.inspection.layers]))

    @property
    def plain_window(self) -> BothWays:
        """A window of as many keys."""
        how = self.both_ways
        return spend_keys(self.plan.budget, len(how.block), how.first, how.last, slots=False)

    @property
    def is_window(self) -> bool:
        """Whether the student is a plain window itself."""
        return self.ways.layers == self.alike(self.plain_window)

    @property
    def stretched(self) -> bool:
        """Whether texts have more tokens than the teacher has positions."""
        return self.tokens > self.inspection.tokens

    @property
    def judgements(self) -> dict[str, Judgement]:
        """How close the student and its controls are to the teacher, by what was read: the run's own texts first."""
        return self.run.product(QUALITY, lambda text: read_json(dict[str, Judgement], text)) or {}

    @property
    def times(self) -> list[LayerTime]:
        """How long a layer takes, where that was measured."""
        return self.run.product(TIMES, lambda text: read_json(dict[str, list[LayerTime]], text)["times"]) or []


def check_budget(plan: EncoderPlan, inspection: EncoderInspection) -> None:
    """Refuse a budget that is too small, or with which there is nothing to save."""
    inspection.check_worth(plan.budget, plan.length or inspection.tokens)
    attention_of(plan, inspection)


def attention_of(plan: EncoderPlan, inspection: EncoderInspection) -> BothWays:
    """Spend the budget of a plan; refuse one that is too small."""
    axes = 1 if inspection.reads == "texts" else 2
    return spend_keys(plan.budget, axes, inspection.first, inspection.last, plan.slots)
