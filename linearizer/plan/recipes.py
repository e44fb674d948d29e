"""Recipes: published methods and ours, each as the choices of a plan; other options take precedence.

Each has its authors' form, as far as one run allows, at the bytes of the budget. Where a model adapts, it does so by
LoRA on q, k, v and o: the teacher's own weights do not change. A strategy says what heads may hold, and which
measurement decides how the budget is shared out among them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from linearizer.plan.json_products import read_json
from linearizer.plan.rule_papers import RULE_PAPERS
from linearizer.student.update_rules import UPDATE_RULES

SUMMARY = Path(__file__).with_name("quality.json")  # written by the benchmark
SCORED = 64  # tokens of the teacher's cache: the budget at which every recipe was measured
WINDOW = "swa"  # the recipe that others are held against


@dataclass(frozen=True)
class Strategy:
    """Describes how a budget becomes an allocation."""

    about: str
    decided_by: Literal["prices", "freedoms", "budget", "former"]  # "budget": nothing has to be measured
    far_field: Literal["slots", "features", ""] = ""  # what heads may hold in addition to a window
    bits: tuple[int, ...] = (16,)  # that a number in keys and values may have; the first is the default
    fewer: tuple[int, ...] = ()  # that heads may have where that pays, unless the plan sets bits

    @property
    def spends_tokens(self) -> bool:
        """Whether the budget is in tokens of cache; otherwise it may be a mean number of features."""
        return self.decided_by != "freedoms"

    @property
    def product(self) -> str:
        """Name the last measured product of a run, by which it decides; every run has a profile."""
        return "prices" if self.decided_by == "prices" else "profile"


STRATEGIES: Mapping[str, Strategy] = {
    "gain": Strategy(
        "a window or slots by each head's price; with --may-grow softmax, too",
        "prices",
        "slots",
        (8, 16, 6, 5, 4),
        (6, 5, 4),
    ),
    "windows": Strategy("as gain, without slots", "prices", "", (8, 16, 6, 5, 4), (6, 5, 4)),
    "window": Strategy("the same window for every head", "budget", "", (16, 8, 6, 5, 4)),
    "memory": Strategy("the same memory for every head, beside a window: --feature-map names it", "budget", "features"),
    "fix": Strategy("the same number of features for every head", "freedoms", "features"),
    "dof": Strategy("features by the most degrees of freedom in a layer (the paper)", "freedoms", "features"),
    "common-lambda": Strategy("features by degrees of freedom at one λ for all heads", "freedoms", "features"),
}
FORMER_STRATEGIES: Mapping[str, Strategy] = {  # of stored runs: they measured worse
    "gain-features": Strategy("as gain, with features in place of slots", "former", "features", (8, 16)),
    "duo": Strategy("softmax or a window by learned gates", "former"),
}

WITHOUT_WINDOW = {"window": 0, "sinks": 0}  # features alone, as in these papers
WITH_ADAPTERS = {"lora": 8, "steps": 60}


@dataclass(frozen=True)
class Recipe:
    """The choices that a name stands for."""

    label: str  # on the page
    about: str  # what it is
    choices: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""  # authors, title and place of publication; none: ours

    @property
    def origin(self) -> str:
        """The description with its reference."""
        return f"{self.about} ({self.reference})" if self.reference else self.about


def by_rule(name: str) -> Recipe:
    """Make the recipe of a memory with a window and sinks, trained layer by layer on the outputs of attention."""
    paper, choices = RULE_PAPERS[name], {"strategy": "memory", "feature_map": name, "loss": "output", "steps": 60}
    about = f"{paper.about}, beside a window"
    if name == "liger":
        about += " of equal share, then adapters"
        choices |= {"loss": "output+direct", "sinks": 0, "lora": 8}
    return Recipe(paper.label, about, choices, paper.reference)


RECIPES: Mapping[str, Recipe] = {
    "best": Recipe(
        "what each head costs the model",
        "ours: every KV head a window, or a window with slots, in 4 to 8 bits a number, by its price; no training",
    ),
    "distilled": Recipe(
        "what each head costs the model, then distilled",
        "ours: as best; then adapters on q, k, v and o learn from the teacher’s logits, end to end, and stay if the "
        "student is better with them on other texts",
        {"steps": 20, "batch": 1},
    ),
    "windows": Recipe("windows alone, by their prices", "as best, without slots", {"strategy": "windows"}),
    "features": Recipe(
        "degrees of freedom, trained features",
        "ours: window, sinks and learned features by a common λ, trained by layer",
        {"strategy": "common-lambda", "steps": 60},
    ),
    "swa": Recipe(
        "a plain window",
        "the same window and sinks everywhere, untrained",
        {"strategy": "window"},
        "StreamingLLM: Xiao et al., Efficient Streaming Language Models with Attention Sinks, ICLR 2024, "
        "arXiv:2309.17453",
    ),
    "paper": Recipe(
        "Degrees of Freedom for Linear Attention (NeurIPS 2025)",
        "positive random features by the degrees of freedom of a layer, trained by layer",
        {"strategy": "dof", "feature_map": "prf", "steps": 60, **WITHOUT_WINDOW},
        "Nishikawa, Higuchi and Suzuki, Degrees of Freedom for Linear Attention: Distilling Softmax Attention with "
        "Optimal Feature Efficiency, NeurIPS 2025, arXiv:2507.03340",
    ),
    "performer": Recipe(
        "Performer",
        "fixed orthogonal random features, then adapters",
        {"strategy": "fix", "feature_map": "performer", "loss": "direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
        "Choromanski et al., Rethinking Attention with Performers, ICLR 2021, arXiv:2009.14794",
    ),
    "dijiang": Recipe(
        "DiJiang",
        "fixed cosine features with learned weights, then adapters",
        {"strategy": "fix", "feature_map": "dijiang", "loss": "direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
        "Chen et al., DiJiang: Efficient Large Language Models through Compact Kernelization, ICML 2024, "
        "arXiv:2403.19928",
    ),
    "hedgehog": Recipe(
        "Hedgehog",
        "learned maps fitted to the attention rows, then adapters",
        {"strategy": "fix", "feature_map": "hedgehog", "loss": "softmax+direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
        "Zhang et al., The Hedgehog & the Porcupine: Expressive Linear Attentions with Softmax Mimicry, ICLR 2024, "
        "arXiv:2402.04347",
    ),
    "lolcats": Recipe(
        "LoLCATs",
        "hedgehog beside a window, fitted to the attention outputs, then adapters",
        {"strategy": "fix", "feature_map": "hedgehog", "loss": "output+direct", "sinks": 0, **WITH_ADAPTERS},
        "Zhang et al., LoLCATs: On Low-Rank Linearizing of Large Language Models, ICLR 2025, arXiv:2410.10254",
    ),
    "sas": Recipe(
        "SAS, the feature half",
        "features of a small network over queries and keys, beside a window; its simulated heads are not there",
        {"strategy": "fix", "feature_map": "mlp", "steps": 60},
        "Zheng et al., SAS: Simulated Attention Score, NeurIPS 2025, arXiv:2507.07694",
    ),
    **{name: by_rule(name) for name in UPDATE_RULES},
}
FORMER_RECIPES: Mapping[str, Recipe] = {  # of stored runs
    "duo": Recipe("learned gates (DuoAttention)", "each KV head softmax or a window", {"strategy": "duo"})
}
USUAL_CHOICES: Mapping[str, Any] = {  # for the options that recipes decide
    **{"strategy": "gain", "feature_map": "clusters", "steps": 0, "batch": 2},
    **dict.fromkeys(("loss", "lora", "window", "sinks")),
}


def find_recipe(name: str) -> Recipe:
    return {**FORMER_RECIPES, **RECIPES}[name]


def choices_of(name: str) -> Mapping[str, Any]:
    """Return what a recipe chooses for each option that recipes decide."""
    return {**USUAL_CHOICES, **find_recipe(name).choices}


def find_strategy(name: str) -> Strategy:
    return {**FORMER_STRATEGIES, **STRATEGIES}[name]


@dataclass(frozen=True)
class Quality:
    """The quality of a recipe with the demo model at one budget: means over seeds, from the quality table."""

    budget: int  # tokens of the teacher's cache
    kl: float  # nats from the teacher, at the output
    recall: float  # the student's gain on a repeated passage, as a share of its teacher's gain
    seeds: int
    untrained: bool = False  # measured without the recipe's training


@cache
def measured_quality() -> Mapping[str, Sequence[Quality]]:
    """Read the results of each recipe, by budget; a recipe that was not measured is missing."""
    return read_json(dict[str, tuple[Quality, ...]], SUMMARY.read_text(encoding="utf-8"))


def score_of(recipe: str) -> Quality | None:
    """Return the quality of a recipe at the bytes at which all recipes were measured; None: not measured."""
    return next((row for row in measured_quality().get(recipe, ()) if row.budget == SCORED), None)


def by_score(names: Iterable[str]) -> list[str]:
    """Sort recipes by their score, the best first, and those that were not measured last."""
    scores = {name: score_of(name) for name in names}
    return sorted(scores, key=lambda name: math.inf if (score := scores[name]) is None else score.kl)


def score_in_words(recipe: str) -> str:
    """Say what a recipe reached, and whether it loses to a plain window of the same bytes; empty if not measured."""
    score, window = score_of(recipe), score_of(WINDOW)
    if score is None or window is None:
        return ""
    reached = f"KL {score.kl:.2g} with the demo model at the bytes of {SCORED} tokens{', untrained' * score.untrained}"
    if recipe == WINDOW or score.kl < window.kl:
        return reached
    return f"{reached}: worse than a plain window ({window.kl:.2g})"
