"""The plan of a run: every option, checked where the plan is made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any

from linearizer.errors import BudgetError, RequestError
from linearizer.plan.head_bytes import BITS, FEATURE_MAPS, SINKS, TILE
from linearizer.plan.json_products import JsonProduct
from linearizer.plan.options import check_options, option, options_of, write_options
from linearizer.plan.recipes import CHOSEN, RECIPES, STRATEGIES, Strategy, choices_of
from linearizer.student.update_rules import UPDATE_RULES

DEFAULT_BUDGET = 256  # tokens of cache, where a command or the page is given none
MIN_FEATURES_IN_TOKENS = 18  # tokens of cache that take the bytes of the fewest features of a head
MAX_TOKENS = 2**40  # a larger budget, window or number of features is a mistake
USUAL_TEXTS, USUAL_LENGTH = 8, 512
MEASURED_TOKENS = 2**13  # of all texts: the longer they are, the fewer
FEWEST_TEXTS = 3  # where they are long: one to price heads on, and two to compare students on
BUDGETS_IN_LENGTH = 16  # tokens of a text for each token of the budget: what fits into a state whole has no price
BUDGETS_IN_GRAPH = 4  # where all layers are in memory at once, to be differentiated
PRICED_LENGTH = 4096  # tokens of a text that heads are priced on, at least: beyond it a student leaves its teacher
MIN_SAMPLES, MAX_SAMPLES = 32, 1024  # queries and keys of a head, half and half
MAX_STEPS = 10**9
ALLOCATION = "what heads hold"  # options by which an allocation is decided again from what a run has measured
METHOD, MEASURING, TRAINING, MACHINE = "the method", "measuring", "training", "the machine"
BY_RECIPE = "the recipe's"
YIELDING = ("texts", "length")  # options that, where they are left out, shrink to what a text has
FITTED = "squares"  # the loss in closed form
LOSSES = ("softmax", "output", FITTED, "direct", "logits", "softmax+direct", "output+direct")
HEALING_RANK = 8  # of the adapters that make up for what heads without features lost

allocating, measuring, training, machine = (
    partial(option, group=group) for group in (ALLOCATION, MEASURING, TRAINING, MACHINE)
)


@dataclass(frozen=True)
class Plan(JsonProduct):
    """Everything that decides what a run makes: two runs of one plan on one machine make the same."""

    json_indent = 1

    model: str
    budget: int | None = allocating(
        None,
        "tokens: the state may take the bytes that the teacher's KV cache takes at this length",
        str(DEFAULT_BUDGET),
        least=1,
        most=MAX_TOKENS,
        error=BudgetError,
    )
    features: int | None = allocating(
        None,
        "instead of a budget: the mean number of features per KV head, the paper's C",
        least=TILE,
        most=MAX_TOKENS,
        error=BudgetError,
    )
    recipe: str = option("best", "the method; other options take precedence", choices=tuple(RECIPES), group=METHOD)
    strategy: str = allocating(
        "gain", "how the budget is shared out", BY_RECIPE, choices=tuple(STRATEGIES), error=BudgetError
    )
    window: int | None = allocating(
        None,
        "tokens before each token that are exact, where heads hold features",
        "half of the budget",
        least=0,
        most=MAX_TOKENS,
    )
    sinks: int | None = allocating(
        None,
        "tokens at the start of a text that are exact",
        f"measured where heads have prices, else {SINKS}; none with --features",
        least=0,
        most=MAX_TOKENS,
    )
    bits: int | None = allocating(
        None,
        "bits of a number in the keys and values that are kept",
        "as pays for each head with gain, 8 with gain-features, else 16",
        choices=BITS,
    )
    feature_map: str = training(
        "clusters",
        "what makes features of queries and keys, or a memory that is written by a rule",
        BY_RECIPE,
        choices=(*FEATURE_MAPS, *UPDATE_RULES),
    )
    text: str = measuring(
        "builtin", "the text to measure and train on: builtin, self, file:PATH or dataset:ID[:config][:split][:column]"
    )
    texts: int | None = measuring(
        None, "how many texts to measure", f"{USUAL_TEXTS}, fewer where texts are long, or the source is short", least=1
    )
    length: int | None = measuring(
        None,
        "tokens of a text, at most what the model's positions allow",
        f"{BUDGETS_IN_LENGTH} times the budget, at least {USUAL_LENGTH}, or {PRICED_LENGTH} where heads have prices; "
        f"{BUDGETS_IN_GRAPH} times where a loss runs through the whole model; fewer where the source is short",
        least=1,
    )
    steps: int = training(
        0,
        "steps of training; 0: none. Where heads hold no features, what the layers write is fitted to the teacher's on "
        "as many texts, which makes up for a part of what the heads lost",
        BY_RECIPE,
        least=0,
        most=MAX_STEPS,
    )
    loss: str | None = training(
        None,
        "layer by layer (softmax, output), in closed form for the maps by which layers write (squares), or end to end "
        "(direct, logits)",
        f"{BY_RECIPE}; squares where heads hold no features",
        choices=LOSSES,
    )
    lora: int | None = training(
        None,
        "rank of adapters on q, k, v and o that a loss end to end trains too; 0: none",
        f"{BY_RECIPE}; {HEALING_RANK} where heads hold no features and are trained end to end",
        least=0,
    )
    batch: int = training(2, "texts of a step", least=1)
    target_length: int | None = allocating(
        None,
        "tokens at which the bytes of heads that may grow count",
        "the model's positions",
        least=1,
        most=MAX_TOKENS,
    )
    may_grow: bool = allocating(False, "let heads keep their whole cache, softmax: the state then grows with the text")
    seed: int = machine(0, "the seed of everything that is drawn at random", least=0, most=2**63 - 1)
    device: str = machine("auto", "auto, cpu, cuda, cuda:1, …")
    dtype: str = machine(
        "auto",
        "the type of number to compute in; auto is the teacher's own, or float32 where a CPU computes that faster",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    @staticmethod
    def of(recipe: str = "best", **given: Any) -> Plan:
        """Take a recipe's choices for the options that are not given."""
        if recipe == "best" and given.get("features") is not None:
            recipe = "features"  # the paper's dial counts what only this recipe has
        if unknown := sorted(given.keys() - options_of(Plan).keys()):
            raise RequestError(f"{', '.join(unknown)} is unknown: there are {', '.join(sorted(options_of(Plan)))}")
        return Plan(**{"recipe": recipe, **choices_of(recipe), **given})

    def to_json(self) -> str:
        """Write the options that are set: an option that is left out is read as None again."""
        return json.dumps(
            {name: value for name, value in asdict(self).items() if value is not None}, indent=self.json_indent
        )

    def changed(self, **given: Any) -> Plan:
        """Change some options; another recipe than the plan's brings its own choices for all that recipes decide."""
        if given.get("recipe", self.recipe) == self.recipe:
            return replace(self, **given)
        kept = {name: value for name, value in asdict(self).items() if name not in CHOSEN}
        return Plan.of(**{**kept, **given})

    def __post_init__(self) -> None:
        check_options(self)
        if (self.budget is None) == (self.features is None):
            raise BudgetError("a plan needs either a budget in tokens of cache or a mean number of features, not both")
        if self.rules.spends_tokens and self.budget is None:
            raise BudgetError(
                f"the strategy {self.strategy} spends a budget in tokens: ask for one instead of features"
            )
        if self.window is not None and self.budget is not None and self.window + self.kept_sinks > self.budget:
            raise BudgetError(
                f"a budget of {self.budget} tokens is too small for a window of {self.window} and {self.kept_sinks} "
                f"sinks: ask for a window of at most {max(self.budget - self.kept_sinks, 0)}, or leave it out"
            )
        self.check_memory()
        if self.bits is not None and self.bits not in self.rules.bits:
            kept = " or ".join(map(str, sorted(self.rules.bits)))
            raise RequestError(
                f"the strategy {self.strategy} keeps {kept} bits a number: ask for these, or leave it out"
            )
        if self.rules.decided_by == "gates" and not self.may_grow:
            raise RequestError(
                "duo lets heads keep their whole cache by its nature, so its state grows with the text: add "
                "--may-grow, or ask for another recipe"
            )

    def check_memory(self) -> None:
        """Refuse a memory that the strategy cannot share out, or that the loss says nothing of."""
        if self.memory and self.strategy != "memory":
            raise RequestError(
                f"the strategy {self.strategy} shares out features, of which {self.memory} has none: ask for "
                "--strategy memory"
            )
        if self.strategy == "memory" and not self.memory:
            raise RequestError(
                f"the strategy memory needs a memory, and feature map {self.feature_map!r} is none: ask for "
                f"--feature-map {' or '.join(list(UPDATE_RULES)[-3:])}, or another strategy"
            )
        if self.memory and self.trains and "softmax" in self.kept_loss:
            raise RequestError(
                f"{self.memory} has no rows of attention, which the loss softmax compares: ask for --loss output"
            )

    @property
    def memory(self) -> str:
        """The memory in place of features; none: features."""
        return self.feature_map if self.feature_map in UPDATE_RULES and self.rules.far_field == "features" else ""

    @property
    def kept_sinks(self) -> int:
        """The plan's sinks, or the most that are kept."""
        if self.sinks is not None:
            return self.sinks
        return 0 if self.budget is None else min(SINKS, self.budget // 8)

    @property
    def kept_window(self) -> int:
        """The plan's window, or what with the sinks is half of the budget, less where features need the room."""
        if self.window is not None:
            return self.window
        budget = self.budget or 0
        return max(min(budget // 2, budget - MIN_FEATURES_IN_TOKENS) - self.kept_sinks, 0)

    @property
    def kept_texts(self) -> int:
        """The plan's number of texts, or a number that leaves about as many tokens whatever their length."""
        shared = MEASURED_TOKENS // (self.length or self.usual_length)
        return self.texts or min(USUAL_TEXTS, max(FEWEST_TEXTS, shared))

    @property
    def usual_length(self) -> int:
        """The tokens of a text where the plan names no number: several times what the state can hold whole."""
        least = PRICED_LENGTH if self.rules.decided_by == "prices" else USUAL_LENGTH
        return max(least, (BUDGETS_IN_GRAPH if self.differentiates_all else BUDGETS_IN_LENGTH) * (self.budget or 0))

    def kept_length(self, positions: int | None) -> int:
        """The plan's tokens of a text, or the usual number, within the model's positions."""
        length = self.length or self.usual_length
        return min(length, positions or length)

    def sized(self, positions: int | None) -> Plan:
        """Decide how many tokens a text has, within the model's positions, and then how many texts there are."""
        plan = replace(self, length=self.kept_length(positions))
        return replace(plan, texts=plan.kept_texts)

    @property
    def drawn_tokens(self) -> int:
        """Count the tokens that queries are drawn from, and as many keys."""
        return self.kept_texts * max(self.kept_length(None) - self.kept_sinks, 0)

    @property
    def samples(self) -> int:
        """How many queries and keys of a head its degrees of freedom are computed from, half and half."""
        return max(MIN_SAMPLES, min(MAX_SAMPLES, 2 * self.drawn_tokens // 8 * 8))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The numbers of the options that yield to a text, usual numbers where they are left out."""
        return {"texts": self.kept_texts, "length": self.kept_length(None)}

    @property
    def kept_bits(self) -> int:
        """The plan's bits, or the bits that options are priced with."""
        return self.bits or self.rules.bits[0]

    @property
    def fewer_bits(self) -> tuple[int, ...]:
        """Bits that heads may have instead, where that pays."""
        return () if self.bits else self.rules.fewer

    @property
    def dial(self) -> str:
        """What the plan spends, in words."""
        return f"{self.budget} tokens of cache" if self.features is None else f"{self.features} features per KV head"

    @property
    def in_brief(self) -> str:
        """What the plan spends, and how."""
        return f"{self.dial}{', may grow' * self.may_grow}, {self.recipe}"

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
    def trains(self) -> bool:
        """Whether training is asked for."""
        return bool(self.steps)

    @property
    def heals(self) -> bool:
        """Whether training has no features to learn, and may only make up for what the heads lost."""
        return self.trains and not self.may_hold_features

    @property
    def kept_loss(self) -> str:
        """The plan's loss, or the loss that suits what is trained."""
        if self.heals:
            return self.loss or ("logits" if self.lora else FITTED)
        return self.loss or "softmax"

    @property
    def kept_lora(self) -> int:
        """The plan's rank of adapters, or that of adapters that make up for what the heads lost."""
        adapts = self.heals and FITTED not in self.kept_loss.split("+")
        return (HEALING_RANK if adapts else 0) if self.lora is None else self.lora

    @property
    def differentiates_all(self) -> bool:
        """Whether a loss runs through the whole model: that of adapters, or of gates."""
        return bool(self.kept_lora) or self.rules.decided_by == "gates"

    @property
    def changes_weights(self) -> bool:
        """Whether training changes the teacher's weights: by adapters, or where what layers write is fitted."""
        return bool(self.kept_lora) or (self.trains and FITTED in self.kept_loss.split("+"))

    @property
    def texts_measured(self) -> int:
        """How many texts, from the first on, are measured; where heads have prices or gates, two or more."""
        return max(self.kept_texts, 2) if self.rules.product in ("prices", "gates") else self.kept_texts

    @property
    def texts_priced(self) -> int:
        """How many texts, from the first on, heads are priced on; students are compared on others."""
        return max(1, self.kept_texts // 2)

    def command(self) -> str:
        """Write `linearizer run …` with the recipe and every option that is not the recipe's."""
        words = ["linearizer", "run", self.model]
        if self.recipe != ("best" if self.features is None else "features"):  # what a dial alone stands for
            words += ["--recipe", self.recipe]
        usual = {field.name: field.default for field in fields(self)} | dict(choices_of(self.recipe))
        usual |= {"model": self.model, "recipe": self.recipe}
        return shlex.join([*words, *write_options(self, usual)])
