"""The form of a plan under Advanced: a field for every option that is not chosen in sight, as Plan describes it.

Every field holds text, and empty text leaves the option to the recipe, so that a new option of a plan needs no code.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import Any

import gradio as gr

from linearizer.errors import RequestError
from linearizer.page.planning import EFFORTS, make_plan
from linearizer.page.presets import field_title, name_fields, recipe_of, way_of
from linearizer.plan.options import Option, options_of
from linearizer.plan.plan import ALLOCATION, DEFAULT_BUDGET, MACHINE, MEASURING, TRAINING, Plan

IN_SIGHT = ("model", "budget", "may_grow", "recipe")
GROUPS = (MEASURING, TRAINING, ALLOCATION, MACHINE)
OPTIONS = {name: option for name, option in options_of(Plan).items() if name not in IN_SIGHT}
BY_EFFORT = frozenset(name for sizes, _ in EFFORTS.values() for name in sizes)
WIDE = 24  # characters that a field has no room for
TRUTH = [("yes", "true"), ("no", "false")]


def place_options() -> dict[str, gr.components.Component]:
    """Place the fields of all options, group by group, and return them by the names of the options, in their order."""
    fields: dict[str, gr.components.Component] = {}
    for group in dict.fromkeys((*GROUPS, *(option.limits.group for option in OPTIONS.values()))):
        grouped = {name: option for name, option in OPTIONS.items() if option.limits.group == group}
        if grouped:
            gr.HTML(f'<h3 class="lz-group">{group[:1].upper()}{group[1:]}</h3>')
            with gr.Row(elem_classes="lz-options"):
                fields |= {name: place_option(option) for name, option in grouped.items()}
    return {name: fields[name] for name in OPTIONS}


def place_option(option: Option) -> gr.components.Component:
    """Place the field of one option."""
    usual = "as thorough as chosen" if option.name in BY_EFFORT else name_fields(option.usual)
    about = name_fields(option.limits.about)
    if len(usual) > WIDE:
        about, usual = f"{about}; usual: {usual}", ""
    shared: dict[str, Any] = {
        "label": field_title(option.name),
        "info": about,
        "min_width": 250,
        "elem_id": f"option-{option.name}",
    }
    choices = TRUTH if option.value_kind is bool else [(str(choice), str(choice)) for choice in option.limits.choices]
    if choices:
        return gr.Dropdown([(f"usual: {usual}" if usual else "usual", ""), *choices], value="", **shared)
    return gr.Textbox("", placeholder=usual, max_lines=1, **shared)


def read_fields(values: Sequence[Any]) -> dict[str, Any]:
    """Read the fields; what is empty is left out."""
    written = {name: str(value or "").strip() for name, value in zip(OPTIONS, values, strict=True)}
    return {name: OPTIONS[name].parse(text) for name, text in written.items() if text}


def write_plan(plan: Plan, asked: Collection[str] = ()) -> tuple[Any, ...]:
    """Give the values of the form that make a plan: model, budget, effort, growth, way, listed recipe, and fields.

    Of the efforts, the nearest to the plan is taken; what then still differs is written into the fields, and so is what
    was `asked` for.
    """
    given = {"recipe": plan.recipe, "may_grow": plan.may_grow, "features": plan.features}
    nearest: tuple[str, dict[str, str]] | None = None
    for effort in EFFORTS:
        try:
            base = make_plan(plan.model, plan.budget or DEFAULT_BUDGET, effort, given)
        except RequestError:  # what the plan says besides makes it possible
            base = Plan(plan.model, DEFAULT_BUDGET)
        mine, usual = ({**asdict(each), **each.sizes} for each in (plan, base))
        changed = {name for name in OPTIONS if mine[name] != usual[name]} - {"features"} | {*asked}
        changed |= {"features"} if plan.features is not None else set()
        texts = {name: write_value(mine[name]) for name in OPTIONS if name in changed}
        if nearest is None or len(texts) < len(nearest[1]):
            nearest = effort, texts
    assert nearest is not None
    effort, texts = nearest
    way = way_of(plan.recipe)
    listed = gr.skip() if recipe_of(way, "") else plan.recipe
    fields = (texts.get(name, "") for name in OPTIONS)
    return plan.model, plan.budget or DEFAULT_BUDGET, effort, plan.may_grow, way, listed, *fields


def write_value(value: Any) -> str:
    """Write a value of an option as `Option.parse` reads it; None as nothing."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
