"""The command line that asks for what a plan asks for."""

from __future__ import annotations

import shlex
from dataclasses import fields

from linearizer.run.plan import Plan
from linearizer.run.recipes import RECIPES


def command_of(plan: Plan) -> str:
    """Write `linearizer run …` with the recipe, and every choice that is not the recipe's."""
    usual = {field.name: field.default for field in fields(Plan)} | dict(RECIPES.get(plan.recipe, {}))
    words = ["linearizer", "run", plan.model]
    if plan.recipe != ("best" if plan.features is None else "features"):  # what a dial alone stands for
        words += ["--recipe", plan.recipe]
    for name, choice in usual.items():
        asked = getattr(plan, name)
        if name in ("model", "recipe") or asked is None or asked == choice:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if asked is not True:
            words.append(str(asked))
    return shlex.join(words)
