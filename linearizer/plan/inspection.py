"""Facts about a model from its config and the sizes of its files."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from linearizer.amounts import size
from linearizer.errors import UnsupportedModel
from linearizer.plan.head_bytes import Layer
from linearizer.plan.json_products import JsonProduct


@dataclass(frozen=True)
class Budget:
    """A budget in tokens of cache: its bytes, and the features that they buy."""

    tokens: int
    bytes: int
    features_mean: float  # per KV head, if nothing else is bought


@dataclass(frozen=True, kw_only=True)
class ModelFacts(JsonProduct):
    """Facts about a model of any kind without its weights."""

    name: str
    revision: str | None = None
    architecture: str
    model_type: str
    tested: bool = False  # whether tests of this project cover its kind
    parameters: int
    licence: str | None = None
    gated: bool = False
    terms: dict[str, Any] = field(default_factory=dict)  # licence and language as the teacher's card states them


@dataclass(frozen=True, kw_only=True)
class Inspection(ModelFacts):
    """Facts about a causal language model; its layers only as far as its code could be run."""

    supported: bool
    reason: str | None  # why it is not supported
    remedy: str | None  # what to do instead
    layers: tuple[Layer, ...]
    scalings: tuple[float, ...]  # of each layer's scores
    positions: str | None
    max_positions: int | None
    weight_bytes: int
    cache_bytes_per_token: int  # in the layers that a student replaces
    budgets: tuple[Budget, ...]
    tower_of: str | None = None  # the class of the whole model, if this is its text tower
    text_because: str | None = None  # why it is, if that is known
    reads_pictures: bool = False  # whether its student reads pictures, too
    quantised: str | None = None  # how its weights are quantised
    packed: bool = False  # whether they stay so while it computes
    links: bool = True  # whether a student loads from its unchanged files
    vocabulary: int = 0  # entries; 0 where its config does not say
    gguf: str | None = None  # the file of its weights, if that is a GGUF file
    recurrent_layers: int = 0  # that keep a state of fixed size of their own
    recurrent_bytes: int = 0  # of these states, for one text
    alters_scores: bool = False  # whether it caps scores, or has learned sinks
    resting: int = 0  # parameters that a token does not use: those of other experts

    @property
    def reads(self) -> str:
        """Say what its student reads beside text, or why it reads no pictures; "" for a model of text."""
        if self.reads_pictures:
            return "its student reads pictures, too"
        because = f", because {self.text_because}" if self.text_because else ""
        return f"the text tower of {self.tower_of}: its student reads no pictures{because}" if self.tower_of else ""

    @property
    def active(self) -> int:
        """The parameters that a token uses."""
        return self.parameters - self.resting

    @property
    def number_bytes(self) -> int:
        """The bytes of a number in a floating type, judging by its files: a smaller number is packed.

        The small numbers of a GGUF file are expanded to float32.
        """
        small = self.gguf is not None and self.weight_bytes < 1.5 * self.parameters
        return 4 if small or self.weight_bytes >= 3 * self.parameters else 2

    @property
    def expanded_bytes(self) -> int:
        """The bytes of its weights in memory: more than in its files, if they are expanded."""
        expanded = self.quantised is not None and not self.packed
        return self.parameters * self.number_bytes if expanded else self.weight_bytes

    @property
    def replaced_layers(self) -> list[Layer]:
        """The layers that a student replaces: those without a window of their own."""
        return [layer for layer in self.layers if layer.native_window is None]

    @property
    def beside_state(self) -> str:
        """State what recurrent layers keep beside a student's state; "" if there are none."""
        kept = size(self.recurrent_bytes)
        return f"{self.recurrent_layers} recurrent layers keep {kept} beside it" if self.recurrent_layers else ""

    def describe_shape(self) -> list[tuple[str, str]]:
        """Describe layers, attention and positions, as pairs of a name and words."""
        attending = [layer for layer in self.layers if layer.kv_heads]
        shapes = sorted({(layer.query_heads, layer.kv_heads, layer.key_dim) for layer in attending})
        heads = "; ".join(f"{query} query heads on {kv} KV heads of size {dim}" for query, kv, dim in shapes)
        windowed = sum(layer.native_window is not None for layer in attending)
        reading = sum(layer.reads is not None for layer in self.layers)
        parts = [
            str(len(self.layers)),
            *[f"{windowed} with windows of their own"] * bool(windowed),
            *[f"{len(attending) - windowed} grow with the text"] * (len(attending) < len(self.layers)),
            *[f"{reading} attend to the keys and values of others"] * bool(reading),
            *[f"{self.recurrent_layers} keep {size(self.recurrent_bytes)} that does not"] * bool(self.recurrent_layers),
        ]
        return [
            ("layers", ", ".join(parts)),
            ("attention", heads or "unknown"),
            ("positions", f"{self.positions or 'unknown'}, at most {self.max_positions or 'any number'}"),
            ("licence", (self.licence or "not stated") + (", gated" if self.gated else "")),
        ]

    def require_support(self) -> None:
        """Raise an error with the reason if the model cannot be linearized."""
        if not self.supported:
            raise UnsupportedModel(f"{self.name!r} cannot be linearized, because {self.reason}: {self.remedy}")
