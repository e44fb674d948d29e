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
    about: str  # what it is
    choices: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""  # from whom it is: authors, title, where it was published; none: ours

    @property
    def origin(self) -> str:
        """Say what it is, and from whom."""
        return f"{self.about} ({self.reference})" if self.reference else self.about


RECIPES: Mapping[str, Recipe] = {
    "best": Recipe(
        "what each head costs the model",
        "ours: every KV head a window, or a window with slots, in 4 to 8 bits a number, by its price; no training",
    ),
    "windows": Recipe("the same, windows alone", "as best, without slots", {"strategy": "windows"}),
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
        "the published method, to the letter",
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
}
CHOSEN = frozenset(name for recipe in RECIPES.values() for name in recipe.choices)  # the options that recipes decide

NOT_EXPRESSED: Mapping[str, str] = {  # method -> why no option of a head can be it
    "local linear attention": "its correction needs every key of the text again, so the state would grow",
    "SAS's simulated heads, PEAA": "they mix KV heads, and a group of queries reads its own KV head alone",
    "sigmoid and softplus attention, far": "their kernels are no sum of products, so no state of fixed size is exact",
    "Sinkformer, doubly stochastic rows": "columns sum to one over the whole text, and a row knows no later token",
    "SOFT, Flowformer": "their normalisers run over the whole text, and a row knows no later token",
    "CLEAR, LinFusion, LiT, LION": "they read in both directions; students are causal",
    "Kronecker attention": "scores of three tokens have no state that is a sum over single tokens",
    "ALiBi with a slope per query head": "a group of queries shares one state, which would need one for every slope",
    "TTT-MLP, ParaRNN": "their memories are not linear in what is written, so a text cannot be read in chunks",
    "log-linear attention": "its state grows with the logarithm of the length",
}
