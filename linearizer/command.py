"""The command line that asks for what a plan asks for."""

from __future__ import annotations

import shlex
from dataclasses import fields

from linearizer.plan import Plan


def command_of(plan: Plan) -> str:
    """Write `linearizer run …` with every choice that is not the default."""
    words = ["linearizer", "run", plan.model]
    for field in fields(Plan):
        asked = getattr(plan, field.name)
        if field.name == "model" or asked == field.default:
            continue
        words.append(f"--{field.name.replace('_', '-')}")
        if asked is not True:
            words.append(str(asked))
    return shlex.join(words)
