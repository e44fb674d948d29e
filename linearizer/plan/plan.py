"""The plan of a run: every option, checked where the plan is made."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from linearizer.errors import BudgetError, RequestError
from linearizer.plan.head_bytes import BITS, FEATURE_MAPS, SINKS, TILE
from linearizer.plan.json_products import JsonProduct
from linearizer.plan.options import check_options, option, options_of, write_options
from linearizer.plan.recipes import (
    FORMER_RECIPES,
    FORMER_STRATEGIES,
    RECIPES,
    STRATEGIES,
    USUAL_CHOICES,
    Strategy,
    choices_of,
    find_recipe,
    find_strategy,
)
from linearizer.student.update_rules import UPDATE_RULES

DEFAULT_BUDGET = 256  # tokens of cache, if a command or the page names none
MIN_FEATURES_IN_TOKENS = 18  # tokens of cache that take the bytes of the fewest features of a head
MAX_TOKENS = 2**40  # a larger budget, window or number of features is a mistake
USUAL_TEXTS, USUAL_LENGTH = 8, 512
MEASURED_TOKENS = 2**13  # of all texts: longer texts are fewer
FEWEST_TEXTS = 3  # if they are long: one to price heads on, and two to compare students on
BUDGETS_IN_LENGTH = 16  # tokens of a text for each token of the budget: a text that fits into a state has no price
BUDGETS_IN_GRAPH = 4  # if all layers are in memory at once for their gradients
PRICED_LENGTH = 4096  # tokens of a text that heads are priced on, at least: beyond it a student leaves its teacher
MIN_SAMPLES, MAX_SAMPLES = 32, 1024  # queries and keys of a head, half and half
MAX_STEPS = 10**9
ALLOCATION = "what heads hold"  # options by which a run's measurements can be allocated again
METHOD, MEASURING, TRAINING, MACHINE = "the method", "measuring", "training", "the machine"
BY_RECIPE = "the recipe's"  # the default of an option that recipes decide, until the plan is made
ADJUSTABLE = ("texts", "length")  # options that shrink to the length of a source, if they are left out
LOSSES = ("softmax", "l2", "output", "direct", "logits", "softmax+direct", "output+direct")
ADAPTER_RANK = 8  # where heads hold no features, and only adapters can be trained
FORMER_LOSSES = ("squares",)  # of stored runs: it fitted what layers write, which spoiled longer texts

allocating, measuring, training, machine = (
    partial(option, group=group) for group in (ALLOCATION, MEASURING, TRAINING, MACHINE)
)


@dataclass(frozen=True)
class Plan(JsonProduct):
    """Everything that decides the result of a run: two runs of one plan on one machine have the same result."""

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
    recipe: str = option(
        "best",
        "the method; other options take precedence",
        choices=tuple(RECIPES),
        former=tuple(FORMER_RECIPES),
        group=METHOD,
    )
    strategy: str = allocating(
        BY_RECIPE,
        "how the budget is shared out",
        choices=tuple(STRATEGIES),
        former=tuple(FORMER_STRATEGIES),
        hidden=True,
        error=BudgetError,
    )
    window: int | None = allocating(
        BY_RECIPE,
        "tokens before each token that are exact, where heads hold features",
        "half of the budget",
        least=0,
        most=MAX_TOKENS,
    )
    sinks: int | None = allocating(
        BY_RECIPE,
        "tokens at the start of a text that are exact",
        f"measured where heads have prices, else {SINKS}; none with --features",
        least=0,
        most=MAX_TOKENS,
    )
    bits: int | None = allocating(
        None,
        "bits of a number in the keys and values of the state",
        "chosen for each head where it has a price, else 16",
        choices=BITS,
    )
    feature_map: str = training(
        BY_RECIPE,
        "the map from queries and keys to features, or a memory that is written by a rule",
        choices=(*FEATURE_MAPS, *UPDATE_RULES),
        hidden=True,
    )
    text: str = measuring(
        "builtin", "the text to measure and train on: builtin, self, file:PATH or dataset:ID[:config][:split][:column]"
    )
    text_only: bool = measuring(False, "leave out what reads pictures, in a model that does")
    texts: int | None = measuring(
        None, "how many texts to measure", f"{USUAL_TEXTS}, fewer where texts are long, or the source is short", least=1
    )
    length: int | None = measuring(
        None,
        "tokens of a text, at most as many as the model's positions allow",
        f"{BUDGETS_IN_LENGTH} times the budget, at least {USUAL_LENGTH}, or {PRICED_LENGTH} where heads have prices; "
        f"{BUDGETS_IN_GRAPH} times where a loss runs through the whole model; fewer where the source is short",
        least=1,
    )
    steps: int = training(
        BY_RECIPE,
        "steps of training; 0: none. Where heads hold no features, adapters are trained",
        least=0,
        most=MAX_STEPS,
    )
    loss: str | None = training(
        BY_RECIPE,
        "layer by layer (softmax, l2, output), or end to end (direct, logits)",
        f"{BY_RECIPE}; logits where heads hold no features",
        choices=LOSSES,
        former=FORMER_LOSSES,
        hidden=True,
    )
    lora: int | None = training(
        BY_RECIPE,
        "rank of adapters on q, k, v and o that an end-to-end loss also trains; 0: none",
        f"{BY_RECIPE}; {ADAPTER_RANK} where heads hold no features",
        least=0,
    )
    batch: int = training(BY_RECIPE, "texts of a step", least=1)
    target_length: int | None = allocating(
        None,
        "tokens for which the bytes of heads that may grow are counted",
        "the model's positions",
        least=1,
        most=MAX_TOKENS,
    )
    may_grow: bool = allocating(False, "let heads keep their whole cache, softmax: the state then grows with the text")
    seed: int = machine(0, "the seed of everything that is drawn at random", least=0, most=2**63 - 1)
    device: str = machine("auto", "auto, cpu, cuda, cuda:1, …")
    dtype: str = machine(
        "auto",
        "the number type to compute in; auto: the teacher's type, or float32 where a CPU is faster in it",
        choices=("auto", "float32", "bfloat16", "float16"),
    )

    @staticmethod
    def of(recipe: str = "best", **options: Any) -> Plan:
        """Make a plan of a recipe and options; refuse options that no plan has."""
        if unknown := sorted(options.keys() - options_of(Plan).keys()):
            raise RequestError(f"{', '.join(unknown)} is unknown: there are {', '.join(sorted(options_of(Plan)))}")
        return Plan(**{"recipe": recipe, **options})

    def to_json(self) -> str:
        """Write the options that are set, and None in place of a recipe's choice; other options are read as None."""
        chosen = find_recipe(self.recipe).choices
        written = {name: value for name, value in asdict(self).items() if value is not None or name in chosen}
        return json.dumps(written, indent=self.json_indent)

    def changed(self, **options: Any) -> Plan:
        """Change options; another recipe than the plan's also changes all other options that recipes decide."""
        if options.get("recipe", self.recipe) == self.recipe:
            return replace(self, **options)
        unchanged = {name: value for name, value in asdict(self).items() if name not in USUAL_CHOICES}
        return Plan.of(**{**unchanged, **options})

    def __post_init__(self) -> None:
        options_of(Plan)["recipe"].check(self.recipe)
        if self.recipe == "best" and self.features is not None:
            object.__setattr__(self, "recipe", "features")  # only this recipe has the unit of the paper
        for name, choice in choices_of(self.recipe).items():
            if getattr(self, name) == BY_RECIPE:
                object.__setattr__(self, name, choice)
        check_options(self)
        if (self.budget is None) == (self.features is None):
            raise BudgetError("a plan needs either a budget in tokens of cache or a mean number of features, not both")
        if self.strategy_spec.spends_tokens and self.budget is None:
            raise BudgetError(
                f"the strategy {self.strategy} spends a budget in tokens: ask for one instead of features"
            )
        sinks = self.resolved_sinks
        if self.window is not None and self.budget is not None and self.window + sinks > self.budget:
            raise BudgetError(
                f"a budget of {self.budget} tokens is too small for a window of {self.window} and {sinks} sinks: "
                f"ask for a window of at most {max(self.budget - sinks, 0)}, or leave it out"
            )
        self.check_memory()
        if self.bits is not None and self.bits not in self.strategy_spec.bits:
            allowed = " or ".join(map(str, sorted(self.strategy_spec.bits)))
            raise RequestError(
                f"the strategy {self.strategy} keeps {allowed} bits a number: ask for these, or leave it out"
            )

    def check_memory(self) -> None:
        """Refuse a memory that the strategy cannot share out, or that the loss cannot train."""
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
        if self.memory and self.trains and self.resolved_loss.partition("+")[0] in ("softmax", "l2"):
            raise RequestError(
                f"{self.memory} has no rows of attention, which the loss {self.resolved_loss} compares: ask for "
                "--loss output"
            )

    @property
    def memory(self) -> str:
        """The memory that replaces features; none: features."""
        return self.feature_map if self.feature_map in UPDATE_RULES and self.may_hold_features else ""

    @property
    def resolved_sinks(self) -> int:
        """The plan's sinks, or the largest number that is kept."""
        if self.sinks is not None:
            return self.sinks
        return 0 if self.budget is None else min(SINKS, self.budget // 8)

    @property
    def resolved_window(self) -> int:
        """The plan's window, or half of the budget minus the sinks, or less if features need the room."""
        if self.window is not None:
            return self.window
        budget = self.budget or 0
        return max(min(budget // 2, budget - MIN_FEATURES_IN_TOKENS) - self.resolved_sinks, 0)

    @property
    def resolved_texts(self) -> int:
        """The plan's number of texts, or a number for about the same number of tokens in texts of any length."""
        shared = MEASURED_TOKENS // (self.length or self.usual_length)
        return self.texts or min(USUAL_TEXTS, max(FEWEST_TEXTS, shared))

    @property
    def usual_length(self) -> int:
        """The tokens of a text if the plan names no number: several times as many as the state can hold exactly."""
        least = PRICED_LENGTH if self.strategy_spec.decided_by == "prices" else USUAL_LENGTH
        budgets = BUDGETS_IN_GRAPH if self.resolved_lora and not self.distils else BUDGETS_IN_LENGTH
        return max(least, budgets * (self.budget or 0))

    def resolved_length(self, positions: int | None) -> int:
        """The plan's number of tokens of a text, or the usual number, within the model's positions."""
        length = self.length or self.usual_length
        return min(length, positions or length)

    def sized(self, positions: int | None) -> Plan:
        """Decide the number of tokens of a text, within the model's positions, and then the number of texts."""
        plan = replace(self, length=self.resolved_length(positions))
        return replace(plan, texts=plan.resolved_texts)

    @property
    def distils(self) -> bool:
        """Whether windows and slots stay as they were bought, and adapters learn to read with them."""
        return self.trains and not self.may_hold_features

    @property
    def texts_learnt(self) -> int:
        """The number of texts to train on."""
        return self.steps * self.batch

    @property
    def drawn_tokens(self) -> int:
        """Count the tokens from which queries and keys are drawn."""
        return self.resolved_texts * max(self.resolved_length(None) - self.resolved_sinks, 0)

    @property
    def samples(self) -> int:
        """The number of queries and keys of a head for its degrees of freedom, half and half."""
        return max(MIN_SAMPLES, min(MAX_SAMPLES, 2 * self.drawn_tokens // 8 * 8))

    @property
    def sizes(self) -> Mapping[str, int]:
        """The values of the options that are adjusted to a source, usual values if they are left out."""
        return {"texts": self.resolved_texts, "length": self.resolved_length(None)}

    @property
    def resolved_bits(self) -> int:
        """The plan's bits, or the bits in which options are priced."""
        return self.bits or self.strategy_spec.bits[0]

    @property
    def fewer_bits(self) -> tuple[int, ...]:
        """Fewer bits that heads may have instead, where that pays."""
        return () if self.bits else self.strategy_spec.fewer

    @property
    def budget_in_words(self) -> str:
        """The plan's budget, in words."""
        return f"{self.budget} tokens of cache" if self.features is None else f"{self.features} features per KV head"

    @property
    def in_brief(self) -> str:
        """The plan's budget and method, in words."""
        return f"{self.budget_in_words}{', may grow' * self.may_grow}, {self.recipe}"

    def target_tokens(self, positions: int) -> int:
        """Return the length for which bytes of softmax heads are counted; `positions` are the model's."""
        return self.target_length or positions

    @property
    def strategy_spec(self) -> Strategy:
        """What heads may hold under the plan's strategy, and what decides."""
        return find_strategy(self.strategy)

    @property
    def may_hold_features(self) -> bool:
        return self.strategy_spec.far_field == "features"

    @property
    def trains(self) -> bool:
        """Whether the run trains."""
        return bool(self.steps)

    @property
    def resolved_loss(self) -> str:
        """The plan's loss, or the loss that suits what is trained."""
        return self.loss or ("softmax" if self.may_hold_features else "logits")

    @property
    def resolved_lora(self) -> int:
        """The plan's rank of adapters, or the usual rank where there is nothing else to train; 0: none."""
        if self.lora is not None or self.loss in FORMER_LOSSES:
            return self.lora or 0
        return ADAPTER_RANK if self.distils else 0

    @property
    def changes_weights(self) -> bool:
        """Whether training changes the teacher's weights, as it must where there are no features."""
        return bool(self.resolved_lora) or self.distils

    @property
    def texts_measured(self) -> int:
        """The number of texts, from the first on, to measure; two or more if heads have prices."""
        return max(self.resolved_texts, 2) if self.strategy_spec.decided_by == "prices" else self.resolved_texts

    @property
    def texts_priced(self) -> int:
        """The number of texts, from the first on, to price heads on; students are compared on others."""
        return max(1, self.resolved_texts // 2)

    def command(self) -> str:
        """Write `linearizer run …` with the recipe and every option that is not the recipe's."""
        words = ["linearizer", "run", self.model]
        if self.recipe != ("best" if self.features is None else "features"):  # the default for its unit
            words += ["--recipe", self.recipe]
        usual = {**choices_of(self.recipe), "model": self.model, "recipe": self.recipe}
        return shlex.join([*words, *write_options(self, usual)])
