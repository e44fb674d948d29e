"""The ways to a student that the page offers in sight: each stands for a recipe, or for a list of recipes."""

from __future__ import annotations

from dataclasses import dataclass

from linearizer.run.recipes import RECIPES


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
        "Every KV head gets a window, or a window with slots, by what it costs the model’s output.",
        "Expect the student nearest to its teacher.",
        "best",
    ),
    "features": Way(
        "Train linear features",
        "Linear attention proper: degrees of freedom share out the features, and each layer is trained; its loss is "
        "drawn.",
        "Expect more distance to the teacher, above all with a small budget.",
        "features",
    ),
    "paper": Way(
        "Reproduce a paper",
        "A published method in its authors’ form, at the same bytes.",
        "Expect a point to compare with.",
        None,
    ),
}
LISTED = tuple(name for name in RECIPES if name not in {way.recipe for way in WAYS.values()})
USUAL_PAPER = "paper"


def way_of(recipe: str) -> str:
    """Name the way that offers a recipe."""
    return next((name for name, way in WAYS.items() if way.recipe == recipe), "paper")


def recipe_of(way: str, listed: str) -> str:
    """Name the recipe of a way, where `listed` is chosen in the list of recipes."""
    return WAYS[way].recipe or listed if way in WAYS else listed


def way_choices(times: dict[str, str]) -> list[tuple[str, str]]:
    """Write the ways as choices of several lines, with how long each takes here where that is known."""
    return [
        ("\n".join(filter(None, (way.title, way.does, way.expect, times.get(name, "")))), name)
        for name, way in WAYS.items()
    ]


def recipe_choices() -> list[tuple[str, str]]:
    """Write the listed recipes as choices of several lines: what each is, and its reference."""
    choices = []
    for name in sorted(LISTED, key=lambda name: not RECIPES[name].reference):  # published methods first
        recipe = RECIPES[name]
        label = recipe.label[:1].upper() + recipe.label[1:]
        choices.append(("\n".join((label, recipe.about, recipe.reference or "Ours.")), name))
    return choices
