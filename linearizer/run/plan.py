"""What was asked of a run, checked at the door."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from linearizer.errors import BudgetError, RequestError
from linearizer.run.head_bytes import SINKS
from linearizer.run.recipes import CHOSEN, RECIPES
from linearizer.run.strategies import STRATEGIES, Strategy

KINDS: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "int | None": (int, type(None)),
    "float | None": (float, int, type(None)),
    "bool": (bool,),
}
MIN_FEATURES_IN_TOKENS = 18  # tokens of cache that take the bytes of the fewest features of a head
YEAR = 365 * 24 * 60  # minutes
PRICES = ("auto", "measured", "estimated")


@dataclass(frozen=True)
class Plan:
    """Everything that decides what a run makes; two runs of one plan on one machine make the same."""

    model: str
    budget: int | None = None  # tokens of the teacher's cache whose bytes the state may take
    features: int | None = None  # instead of a budget: mean features per KV head, the paper's C
    recipe: str = "best"  # what the choices below were taken from
    strategy: str = "gain"
    window: int | None = None  # exact tokens per KV head; None: half of the budget
    sinks: int | None = None  # None: what measuring finds best where heads are priced, else 4, or none with features
    bits: int | None = None  # of a number in keys and values that are kept; None: 8 where `best` prices heads, else 16
    feature_map: str = "clusters"
    text: str = "builtin"
    texts: int = 8  # how many windows of text are measured
    length: int = 512  # tokens of each, at most what the model's positions allow
    samples: int = 2048  # queries and keys of a head that its degrees of freedom are computed from
    per: str = "kv"
    normalise: str = "trace"
    gauge: str = "centred"
    steps: int = 0  # of training the feature maps
    minutes: float | None = None  # instead of steps: as many as fit, once a few were timed
    loss: str = "softmax"  # softmax, l2 or output, a layer at a time; direct or logits, end to end; a + b: one by one
    lora: int = 0  # rank of adapters on q, k, v and o where a loss is end to end
    batch: int = 2  # texts of a step
    target_length: int | None = None  # where heads left softmax are priced; None: what the model's positions allow
    constant: bool = False  # no head is left softmax, so that the state never grows
    prices: str = "auto"  # of heads: measured, estimated, or what this machine has the time for
    exchanges: int = 12  # allocations near the chosen one that are measured, too
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"

    @staticmethod
    def of(recipe: str = "best", **given: Any) -> Plan:
        """Take a recipe's choices for what is not given."""
        if recipe == "best" and given.get("features") is not None:
            recipe = "features"  # the paper's dial counts what only this recipe has
        return Plan(**{"recipe": recipe, **RECIPES.get(recipe, {}), **given})

    def changed(self, **given: Any) -> Plan:
        """Change what is given; another recipe than the plan's brings its own choices for all that recipes decide."""
        if given.get("recipe", self.recipe) == self.recipe:
            return replace(self, **given)
        kept = {name: value for name, value in asdict(self).items() if name not in CHOSEN}
        return Plan.of(**{**kept, **given})

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in KINDS[str(field.type)]:
                raise RequestError(f"{field.name} {value!r} is of the wrong kind: give {field.type}")
        if self.recipe not in RECIPES:
            raise RequestError(f"recipe {self.recipe!r} is none of {', '.join(RECIPES)}")
        if not 0 <= self.seed < 2**63:
            raise RequestError(f"seed {self.seed} cannot be: give a whole number from 0 to 2^63 - 1")
        if (self.budget is None) == (self.features is None):
            raise BudgetError("a plan needs either a budget in tokens of cache or a mean number of features, not both")
        for name in ("budget", "features"):
            if (asked := getattr(self, name)) is not None and asked < 1:
                raise BudgetError(f"{name} {asked} buys nothing: give a whole number, at least 1")
        if self.strategy not in STRATEGIES:
            raise BudgetError(f"strategy {self.strategy!r} is none of {', '.join(STRATEGIES)}")
        if self.rules.spends_tokens and self.budget is None:
            raise BudgetError(f"the strategy {self.strategy} spends a budget in tokens: give one instead of features")
        if self.minutes is not None and not 0 < self.minutes <= YEAR:
            raise RequestError(f"minutes {self.minutes} are no time to train: give more than 0, and a year's at most")
        if self.minutes is not None and not self.may_learn:
            raise RequestError(
                f"recipe {self.recipe!r} with the strategy {self.strategy} has nothing that learns: leave out minutes, "
                "or ask for another recipe, or for gain-features"
            )
        if self.bits not in (None, 8, 16):
            raise RequestError(f"bits {self.bits} cannot be: give 8 or 16")
        if self.bits is not None and self.bits not in self.rules.bits:
            raise RequestError(f"the strategy {self.strategy} keeps 16 bits a number: leave out bits")
        if self.prices not in PRICES:
            raise RequestError(f"prices {self.prices!r} is none of {', '.join(PRICES)}")
        if self.constant and self.rules.decided_by == "gates":
            raise RequestError("duo leaves heads softmax by its nature: leave out constant, or ask for another recipe")
        for name in ("texts", "length", "samples"):
            if getattr(self, name) < 1:
                raise RequestError(f"{name} {getattr(self, name)} is too few: give at least 1")
        for name in ("window", "sinks", "steps", "lora", "exchanges"):
            if (getattr(self, name) or 0) < 0:
                raise RequestError(f"{name} {getattr(self, name)} cannot be: give 0 or more")
        if self.target_length is not None and self.target_length < 1:
            raise RequestError(
                f"target length {self.target_length} is no length: give at least 1, or leave it out for as many tokens "
                "as the model's positions allow"
            )

    @property
    def kept_sinks(self) -> int:
        """The sinks asked for, or the most that are kept."""
        if self.sinks is not None:
            return self.sinks
        return 0 if self.budget is None else min(SINKS, self.budget // 8)

    @property
    def kept_window(self) -> int:
        """The window asked for, or what with the sinks is half of the budget, less where features need the room."""
        if self.window is not None:
            return self.window
        return (
            0
            if self.budget is None
            else max(min(self.budget // 2, self.budget - MIN_FEATURES_IN_TOKENS) - self.kept_sinks, 0)
        )

    @property
    def kept_bits(self) -> int:
        return self.bits or self.rules.bits[0]

    def target_tokens(self, positions: int) -> int:
        """The length at which the bytes of softmax heads count; `positions` are the model's."""
        return self.target_length or positions

    @property
    def rules(self) -> Strategy:
        """What heads may hold under the plan's strategy, and what decides."""
        return STRATEGIES[self.strategy]

    @property
    def may_hold_features(self) -> bool:
        return self.rules.far_field == "features"

    @property
    def may_learn(self) -> bool:
        """Whether a student may hold what training changes: features, or adapters."""
        return bool(self.lora) or self.may_hold_features

    @property
    def trains(self) -> bool:
        """Whether training is asked for, by steps or by minutes."""
        return bool(self.steps) or self.minutes is not None

    @property
    def texts_measured(self) -> int:
        """How many texts, from the first on, are measured; heads are priced, and gates learned, on two or more."""
        return max(self.texts, 2) if self.rules.product in ("prices", "gates") else self.texts

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


def command_of(plan: Plan) -> str:
    """Write `linearizer run …` with the recipe, and every choice that is not the recipe's."""
    usual = {field.name: field.default for field in fields(Plan)} | dict(RECIPES.get(plan.recipe, {}))
    words = ["linearizer", "run", plan.model]
    if plan.recipe != ("best" if plan.features is None else "features"):  # what a dial alone stands for
        words += ["--recipe", plan.recipe]
    for name, choice in usual.items():
        asked = getattr(plan, name)
        if name in ("model", "recipe") or asked is None or asked == choice:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if asked is not True:
            words.append(str(asked))
    return shlex.join(words)
