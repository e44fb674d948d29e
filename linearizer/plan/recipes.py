"""Recipes: published methods and ours, each as the choices of a plan; what is given besides takes precedence.

Each is its authors' form, as far as one run can hold it, at the bytes that the budget gives. Where a model adapts, that
is LoRA on q, k, v and o: the teacher's own weights stay. A strategy says what heads may hold, and which measurement
decides how the budget is shared out among them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from linearizer.student.update_rules import UPDATE_RULES

SUMMARY = Path(__file__).with_name("quality.json")  # which the benchmark writes


@dataclass(frozen=True)
class Strategy:
    """How a budget becomes an allocation."""

    about: str
    decided_by: Literal["prices", "gates", "freedoms", "budget"]  # "budget": nothing has to be measured
    far_field: Literal["slots", "features", ""] = ""  # what heads may hold beside a window
    bits: tuple[int, ...] = (16,)  # that a number in keys and values may have; the first is the default
    fewer: tuple[int, ...] = ()  # that heads may have where that pays, unless bits are asked for

    @property
    def spends_tokens(self) -> bool:
        """Whether the budget is given in tokens of cache; otherwise it may be a mean number of features."""
        return self.decided_by != "freedoms"

    @property
    def product(self) -> str:
        """Name the product of a run that is measured last, and that decides; every run has a profile."""
        return self.decided_by if self.decided_by in ("prices", "gates") else "profile"


STRATEGIES: Mapping[str, Strategy] = {
    "gain": Strategy(
        "a window or slots by each head's price; with --may-grow softmax, too",
        "prices",
        "slots",
        (8, 16, 6, 5, 4),
        (6, 5, 4),
    ),
    "gain-features": Strategy("as gain, with features in place of slots", "prices", "features", (8, 16)),
    "windows": Strategy("as gain, without slots", "prices", "", (16, 8, 6, 5, 4)),
    "window": Strategy("the same window for every head", "budget", "", (16, 8, 6, 5, 4)),
    "memory": Strategy("the same memory for every head, beside a window: --feature-map names it", "budget", "features"),
    "duo": Strategy("softmax or a window by learned gates; needs --may-grow", "gates"),
    "fix": Strategy("the same number of features for every head", "freedoms", "features"),
    "dof": Strategy("features by the most degrees of freedom in a layer (the paper)", "freedoms", "features"),
    "dof-clip": Strategy("as dof, but at most the head size", "freedoms", "features"),
    "dof-mean": Strategy("features by the mean degrees of freedom of a layer", "freedoms", "features"),
    "common-lambda": Strategy("features by degrees of freedom at one λ for all heads", "freedoms", "features"),
}


WITHOUT_WINDOW = {"window": 0, "sinks": 0}  # features alone, as these authors have it
WITH_ADAPTERS = {"lora": 8, "steps": 60}


@dataclass(frozen=True)
class Recipe:
    """The choices that a name stands for."""

    label: str  # on the page
    about: str  # what it is
    choices: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""  # authors, title, where it was published; none: ours

    @property
    def origin(self) -> str:
        """Say what it is, with its reference."""
        return f"{self.about} ({self.reference})" if self.reference else self.about


def by_rule(name: str) -> Recipe:
    """Make the recipe of a memory beside a window and sinks, trained layer by layer on what attention puts out."""
    rule, usual = UPDATE_RULES[name], {"strategy": "memory", "feature_map": name, "loss": "output", "steps": 60}
    about, more = f"{rule.about}, beside a window", {}
    if name == "liger":
        about, more = f"{about} of equal share, then adapters", {"loss": "output+direct", "sinks": 0, "lora": 8}
    return Recipe(rule.label, about, {**usual, **more}, rule.reference)


RECIPES: Mapping[str, Recipe] = {
    "best": Recipe(
        "what each head costs the model",
        "ours: every KV head a window, or a window with slots, in 4 to 8 bits a number, by its price; no training",
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
    "duo": Recipe(
        "learned gates (DuoAttention)",
        "each KV head softmax or a window, by learned gates; needs --may-grow",
        {"strategy": "duo"},
        "Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, ICLR "
        "2025, arXiv:2410.10819",
    ),
    "paper": Recipe(
        "the published method",
        "positive random features by the degrees of freedom of a layer, trained by layer",
        {"strategy": "dof", "feature_map": "prf", "per": "query", "gauge": "raw", "steps": 60, **WITHOUT_WINDOW},
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
CHOSEN = frozenset(name for recipe in RECIPES.values() for name in recipe.choices)  # the options that recipes decide

NOT_EXPRESSED: Mapping[str, str] = {  # method -> why no head can hold it
    "local linear attention": "its correction needs every key of the text again, so the state would grow",
    "SAS's simulated heads, PEAA": "they mix KV heads, and a group of queries reads its own KV head alone",
    "sigmoid and softplus attention, far": "their kernels are no sum of products, so no state of fixed size is exact",
    "Sinkformer, doubly stochastic rows": "columns sum to one over the whole text, and a row knows no later token",
    "SOFT, Flowformer": "their normalisers run over the whole text, and a row knows no later token",
    "CLEAR, LinFusion, LiT, LION": "they read in both directions; students are causal",
    "Kronecker attention": "scores of three tokens have no state that is a sum over single tokens",
    "ALiBi teachers (bloom, mpt, falcon)": "their code adds the bias outside transformers' attention interface, so "
    "no layer is seen",
    "ALiBi with a slope per query head": "a group of queries shares one state, which would need one for every slope",
    "TTT-MLP, ParaRNN": "their memories are not linear in what is written, so a text cannot be read in chunks",
    "log-linear attention": "its state grows with the logarithm of the length",
}


def choices_of(recipe: str) -> Mapping[str, Any]:
    """Give the choices of a recipe; an unknown recipe has none, and is refused by the plan."""
    return RECIPES[recipe].choices if recipe in RECIPES else {}


@dataclass(frozen=True)
class Quality:
    """How a recipe did with the demo model at one budget: means over seeds, from the quality table."""

    budget: int  # tokens of the teacher's cache
    kl: float  # nats from the teacher, at the output
    recall: float  # what a student gains when a passage comes again, as a share of what its teacher gains
    seeds: int
    untrained: bool = False  # measured as the recipe begins: its training was not


@cache
def measured_quality() -> Mapping[str, Sequence[Quality]]:
    """Read how each recipe did, by budget; a recipe that was not measured is missing."""
    rows: dict[str, list[dict[str, Any]]] = json.loads(SUMMARY.read_text(encoding="utf-8"))
    return {recipe: tuple(Quality(**row) for row in of_recipe) for recipe, of_recipe in rows.items()}
