"""Recipes: what others do and what we do, each as the choices of a plan. Whatever is given besides takes precedence.

Each is its authors' form, as far as one run can hold it, at the bytes that the budget gives:

  best       ours: every KV head a window, a window with slots, or softmax, as its measured price says; no training
  windows    the same without slots
  features   ours with learned features in place of slots: window, sinks and clusters, by a common λ, trained by layer;
             with --strategy gain-features, as their measured prices say
  swa        the same window and sinks everywhere, untrained (StreamingLLM, Xiao et al. 2024)
  duo        each KV head softmax or a window, by gates that are learned (DuoAttention, Xiao et al. 2025)
  paper      positive random features, as many in a layer as its degrees of freedom, trained by layer (NeurIPS 2025)
  performer  fixed orthogonal random features, then the model adapts (Choromanski et al. 2021)
  dijiang    fixed cosine features with learned weights, then the model adapts (Chen et al. 2024)
  hedgehog   learned maps fitted to the attention rows, then the model adapts (Zhang et al. 2024)
  lolcats    hedgehog beside a window, fitted to the attention outputs, then adapters (Zhang et al. 2025)

Where a model adapts, that is LoRA on q, k, v and o here: the teacher's own weights stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BARE = {"window": 0, "sinks": 0}  # features alone, as these authors have it
ADAPTS = {"lora": 8, "steps": 60}

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "best": {},
    "windows": {"strategy": "windows"},
    "features": {"strategy": "common-lambda", "steps": 60},
    "swa": {"strategy": "window"},
    "duo": {"strategy": "duo"},
    "paper": {"strategy": "dof", "feature_map": "prf", "per": "query", "gauge": "raw", "steps": 60, **BARE},
    "performer": {"strategy": "fix", "feature_map": "performer", "loss": "direct", **BARE, **ADAPTS},
    "dijiang": {"strategy": "fix", "feature_map": "dijiang", "loss": "direct", **BARE, **ADAPTS},
    "hedgehog": {"strategy": "fix", "feature_map": "hedgehog", "loss": "softmax+direct", **BARE, **ADAPTS},
    "lolcats": {"strategy": "fix", "feature_map": "hedgehog", "loss": "output+direct", "sinks": 0, **ADAPTS},
}
CHOSEN = frozenset(name for choices in RECIPES.values() for name in choices)  # what a recipe may decide
