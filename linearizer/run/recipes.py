"""Recipes: published methods and ours, each as the choices of a plan; what is given besides takes precedence.

Each is its authors' form, as far as one run can hold it, at the bytes that the budget gives. Where a model adapts, that
is LoRA on q, k, v and o: the teacher's own weights stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

WITHOUT_WINDOW = {"window": 0, "sinks": 0}  # features alone, as these authors have it
WITH_ADAPTERS = {"lora": 8, "steps": 60}


@dataclass(frozen=True)
class Recipe:
    """The choices that a name stands for."""

    label: str  # on the page
    about: str  # in `--help`: what it is and from whom
    choices: Mapping[str, Any] = field(default_factory=dict)


RECIPES: Mapping[str, Recipe] = {
    "best": Recipe(
        "what each head costs the model",
        "ours: every KV head a window, or a window with slots, by its price; no training",
    ),
    "windows": Recipe("the same, windows alone", "as best, without slots", {"strategy": "windows"}),
    "features": Recipe(
        "degrees of freedom, trained features",
        "ours: window, sinks and learned features by a common λ, trained by layer",
        {"strategy": "common-lambda", "steps": 60},
    ),
    "swa": Recipe(
        "a plain window",
        "the same window and sinks everywhere, untrained (StreamingLLM, Xiao et al. 2024)",
        {"strategy": "window"},
    ),
    "duo": Recipe(
        "learned gates (DuoAttention)",
        "each KV head softmax or a window, by learned gates; needs --may-grow (DuoAttention, Xiao et al. 2025)",
        {"strategy": "duo"},
    ),
    "paper": Recipe(
        "the published method, to the letter",
        "positive random features by the degrees of freedom of a layer, trained by layer (NeurIPS 2025)",
        {"strategy": "dof", "feature_map": "prf", "per": "query", "gauge": "raw", "steps": 60, **WITHOUT_WINDOW},
    ),
    "performer": Recipe(
        "Performer",
        "fixed orthogonal random features, then adapters (Choromanski et al. 2021)",
        {"strategy": "fix", "feature_map": "performer", "loss": "direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
    ),
    "dijiang": Recipe(
        "DiJiang",
        "fixed cosine features with learned weights, then adapters (Chen et al. 2024)",
        {"strategy": "fix", "feature_map": "dijiang", "loss": "direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
    ),
    "hedgehog": Recipe(
        "Hedgehog",
        "learned maps fitted to the attention rows, then adapters (Zhang et al. 2024)",
        {"strategy": "fix", "feature_map": "hedgehog", "loss": "softmax+direct", **WITHOUT_WINDOW, **WITH_ADAPTERS},
    ),
    "lolcats": Recipe(
        "LoLCATs",
        "hedgehog beside a window, fitted to the attention outputs, then adapters (Zhang et al. 2025)",
        {"strategy": "fix", "feature_map": "hedgehog", "loss": "output+direct", "sinks": 0, **WITH_ADAPTERS},
    ),
}
CHOSEN = frozenset(name for recipe in RECIPES.values() for name in recipe.choices)  # the options that recipes decide
