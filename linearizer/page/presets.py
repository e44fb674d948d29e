"""The ways to a student that the page offers in sight: each stands for a recipe, or for a list of recipes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from linearizer.plan.recipes import RECIPES, measured_quality
from linearizer.student.update_rules import beginning

SHOWN_BUDGET = 64  # of the measurements on the demo model that are quoted
TITLES = {"per": "Degrees of freedom per", "lora": "Rank of adapters", "dtype": "Type of number"}  # of some options


@dataclass(frozen=True)
class Way:
    """A way to a student."""

    title: str
    does: str
    expect: str  # of its students, without numbers
    recipe: str | None  # None: one of the other recipes, chosen from a list


WAYS = {
    "measured": Way(
        "Measured memory, no training",
        "Every head, a part of the model that looks back at the text, keeps a window of the newest tokens, and slots "
        "of merged older tokens where these pay.",
        "Expect the student nearest to its teacher.",
        "best",
    ),
    "features": Way(
        "Train linear features",
        "Linear attention: every head sums older text up in features, more of them where its attention needs more. "
        "Each layer is trained, and its loss is drawn.",
        "Expect more distance to the teacher, above all with a small budget.",
        "features",
    ),
    "paper": Way(
        "Reproduce a paper",
        "A published method in its authors’ form, at the same bytes.",
        "Expect a student to compare ours with.",
        None,
    ),
}
LISTED = tuple(name for name in RECIPES if name not in {way.recipe for way in WAYS.values()})
USUAL_PAPER = "paper"


def expected_quality(recipe: str) -> str:
    """Say how a recipe did on the demo model; nothing where that was not measured."""
    rows = [row for row in measured_quality().get(recipe, ()) if row.budget == SHOWN_BUDGET]
    if not rows:
        return ""
    return f"On the demo at {SHOWN_BUDGET} tokens: {rows[0].kl:.2g} nats of kl{', untrained' * rows[0].untrained}."


def way_of(recipe: str) -> str:
    """Name the way that offers a recipe."""
    return next((name for name, way in WAYS.items() if way.recipe == recipe), "paper")


def recipe_of(way: str, listed: str) -> str:
    """Name the recipe of a way, where `listed` is chosen in the list of recipes."""
    return WAYS[way].recipe or listed if way in WAYS else listed


def way_choices(times: dict[str, str]) -> list[tuple[str, str]]:
    """Write the ways as choices of several lines, with how long each takes here where that is known."""
    choices = []
    for name, way in WAYS.items():
        expect = f"{way.expect} {expected_quality(way.recipe or '')}".strip()
        choices.append(("\n".join(filter(None, (way.title, way.does, expect, times.get(name)))), name))
    return choices


def recipe_choices() -> list[tuple[str, str]]:
    """Write the listed recipes as choices of several lines: what each is, and its reference."""
    choices = []
    for name in sorted(LISTED, key=lambda name: not RECIPES[name].reference):  # published methods first
        recipe = RECIPES[name]
        about, quality = f"{upper_first(name_fields(recipe.about))}.", (begins_like(name), expected_quality(name))
        lines = upper_first(recipe.label), about, upper_first(recipe.reference) or "Ours.", *quality
        choices.append(("\n".join(filter(None, lines)), name))
    return choices


def begins_like(name: str) -> str:
    """Say as a sentence which other memory a memory is until it is trained."""
    return f"{upper_first(text)}." if (text := beginning(name)) else ""


def name_fields(text: str) -> str:
    """Name options as the fields of the page do: `--may-grow` is “May grow”."""
    return re.sub(r"--([a-z-]+)", lambda flag: f"“{field_title(flag[1])}”", text)


def field_title(option: str) -> str:
    name = option.replace("_", "-")
    return TITLES.get(name, name.replace("-", " ").capitalize())


def upper_first(text: str) -> str:
    return text[:1].upper() + text[1:]
