"""How recipes did with the demo model at equal bytes: a summary of the quality table, which the benchmark writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SUMMARY = Path(__file__).with_name("quality.json")


@dataclass(frozen=True)
class Quality:
    """Means over seeds at one budget."""

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
