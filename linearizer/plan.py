"""What was asked of a run, checked at the door."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields

from linearizer.errors import BudgetError, RequestError

SINKS = 4  # tokens at the start of a text that most models lean on
LEAST = 18  # tokens of cache that the fewest features of a head cost


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a run makes; two runs of one plan on one machine make the same."""

    model: str
    budget: int | None = None  # tokens of the teacher's cache whose bytes the state may take
    features: int | None = None  # instead of a budget: mean features per KV head, the paper's C
    strategy: str = "common-lambda"
    window: int | None = None  # exact tokens per KV head; None: half of the budget
    sinks: int | None = None  # None: 4, or none where features are asked for
    feature_map: str = "clusters"
    text: str = "builtin"
    texts: int = 8  # how many windows of text are measured
    length: int = 512  # tokens of each, at most what the model's positions allow
    samples: int = 2048  # queries and keys of a head that its degrees of freedom are computed from
    per: str = "kv"
    normalise: str = "trace"
    gauge: str = "centred"
    steps: int = 60  # of training the feature maps; 0: none
    loss: str = "softmax"  # softmax, l2 or output, a layer at a time; direct or logits, end to end
    batch: int = 2  # texts of a step
    target_length: int | None = None  # where `gain` prices heads left softmax; None: what the model's positions allow
    constant: bool = False  # `gain` leaves no head softmax, so that the state never grows
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    def __post_init__(self) -> None:
        if (self.budget is None) == (self.features is None):
            raise BudgetError("a plan needs either a budget in tokens of cache or a mean number of features, not both")
        for name in ("budget", "features"):
            if (asked := getattr(self, name)) is not None and asked < 1:
                raise BudgetError(f"{name} {asked} buys nothing: give a whole number, at least 1")
        if self.strategy == "gain" and self.budget is None:
            raise BudgetError("the strategy gain spends a budget in tokens: give one instead of features")
        for name in ("texts", "length", "samples"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} {getattr(self, name)} is too few: give at least 1")
        for name in ("window", "sinks", "steps"):
            if (getattr(self, name) or 0) < 0:
                raise RequestError(f"{name} {getattr(self, name)} cannot be: give 0 or more")

    @property
    def kept_sinks(self) -> int:
        if self.sinks is not None:
            return self.sinks
        return 0 if self.budget is None else min(SINKS, self.budget // 8)

    @property
    def kept_window(self) -> int:
        """The window asked for, or what with the sinks is half of the budget, less where features need the room."""
        if self.window is not None:
            return self.window
        return 0 if self.budget is None else max(min(self.budget // 2, self.budget - LEAST) - self.kept_sinks, 0)

    def differences(self, other: Plan) -> list[str]:
        """Name what another plan asks for otherwise."""
        pairs = [(f.name, getattr(self, f.name), getattr(other, f.name)) for f in fields(self)]
        return [f"{name} {mine!r} instead of {theirs!r}" for name, mine, theirs in pairs if mine != theirs]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @staticmethod
    def from_json(text: str) -> Plan:
        try:
            return Plan(**json.loads(text))
        except (ValueError, TypeError) as error:
            raise RequestError(f"the plan cannot be read ({error}): start a new run") from error
