"""The form of a plan: the ways to a student in sight, and under Advanced a field for every other option of Plan.

Every field holds text, and an empty field leaves the option to the recipe. A new option of a plan needs no code here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.errors import RequestError
from linearizer.page.layout import lead_html
from linearizer.page.limits import budget_reach
from linearizer.page.planning import EFFORTS, Examined, ExaminedEncoder, make_plan
from linearizer.plan.encoder_plan import EncoderPlan
from linearizer.plan.options import Option, options_of
from linearizer.plan.plan import ALLOCATION, DEFAULT_BUDGET, MACHINE, MEASURING, TRAINING, Plan
from linearizer.plan.recipes import RECIPES, by_score, score_in_words
from linearizer.plan.rule_papers import beginning

if TYPE_CHECKING:
    from linearizer.plan.encoder_plan import EncoderInspection

TITLES = {"lora": "Rank of adapters", "dtype": "Type of number"}  # of some options
IN_SIGHT = ("model", "budget", "may_grow", "recipe")
GROUPS = (MEASURING, TRAINING, ALLOCATION, MACHINE)
OPTIONS = {name: option for name, option in options_of(Plan).items() if name not in IN_SIGHT}
ENCODER_OPTIONS = {name: option for name, option in options_of(EncoderPlan).items() if name not in ("model", "budget")}
ENCODER_IN_SIGHT = ("length", "text", "pictures")  # encoders of texts have the first two
BY_EFFORT = frozenset(name for sizes, _ in EFFORTS.values() for name in sizes)
WIDE = 24  # characters that fit into a field
TRUTH = [("yes", "true"), ("no", "false")]


@dataclass(frozen=True)
class Way:
    """A way to a student."""

    title: str
    does: str
    recipe: str | None  # None: one of the listed recipes


WAYS = {
    "measured": Way(
        "Measured memory, no training",
        "Every head keeps a window of new tokens, and slots of merged older tokens where these pay.",
        "best",
    ),
    "distilled": Way(
        "Measured memory, distilled",
        "The same, then small adapters learn from the teacher’s answers. They stay if they help on other texts.",
        "distilled",
    ),
    "features": Way(
        "Train linear features",
        "Linear attention: every head sums older text up in features, which are trained.",
        "features",
    ),
    "paper": Way("Reproduce a paper", "A published method in its authors’ form, at the same bytes.", None),
}
LOSING = sum("worse" in score_in_words(name) for name in RECIPES)
OF_PAPERS = (
    f"Of {len(RECIPES)} recipes {LOSING} are worse than a plain window of the same bytes; each says what it reached."
)
COSTS = {"Try it": "ten times the KL"}  # of the demo's student at 96 tokens, with Quick's at 64
LISTED = tuple(name for name in RECIPES if name not in {way.recipe for way in WAYS.values()})
USUAL_PAPER = "paper"


def way_of(recipe: str) -> str:
    """Name the way that offers a recipe."""
    return next((name for name, way in WAYS.items() if way.recipe == recipe), "paper")


def recipe_of(way: str, listed: str) -> str:
    """Name the recipe of a way; `listed` is the choice in the list of recipes."""
    return WAYS[way].recipe or listed if way in WAYS else listed


def way_choices(times: dict[str, str]) -> list[tuple[str, str]]:
    """Return the ways as choices of several lines, with the time that each takes here, if known."""
    reached = {name: f"{score_in_words(way.recipe)}." if way.recipe else OF_PAPERS for name, way in WAYS.items()}
    return [(join_lines(way.title, way.does, reached[name], times.get(name)), name) for name, way in WAYS.items()]


def effort_choices(times: dict[str, str]) -> list[tuple[str, str]]:
    """Return the efforts as choices, with the time that each takes here, if known."""
    return [(", ".join(filter(None, (name, COSTS.get(name), times.get(name)))), name) for name in EFFORTS]


def recipe_choices() -> list[tuple[str, str]]:
    """Return the listed recipes as choices of several lines, the best first: name, score, meaning, reference."""
    choices = []
    for name in by_score(LISTED):
        recipe = RECIPES[name]
        like = f"{beginning(name)}.".removeprefix(".")
        sentences = f"{name_fields(recipe.about)}.", recipe.reference or "Ours.", like
        choices.append((join_lines(recipe.label, f"{score_in_words(name)}.".removeprefix("."), *sentences), name))
    return choices


def join_lines(*lines: str | None) -> str:
    """Join the lines that are not empty; each begins with a capital."""
    return "\n".join((line[:1].upper() + line[1:]).strip() for line in lines if line)


def name_fields(text: str) -> str:
    """Name options by their fields on the page: `--may-grow` is “May grow”."""
    return re.sub(r"--([a-z-]+)", lambda flag: f"“{field_title(flag[1])}”", text)


def field_title(option: str) -> str:
    name = option.replace("_", "-")
    return TITLES.get(name, name.replace("-", " ").capitalize())


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


def place_encoder_options(in_sight: bool) -> dict[str, gr.components.Component]:
    """Place the fields of an encoder's options that are in sight, or the others."""
    chosen = [option for name, option in ENCODER_OPTIONS.items() if (name in ENCODER_IN_SIGHT) == in_sight]
    with gr.Row(elem_classes="lz-options"):
        return {option.name: place_option(option, "encoder") for option in chosen}


def place_option(option: Option, prefix: str = "option") -> gr.components.Component:
    """Place the field of one option."""
    usual = "as thorough as chosen" if option.name in BY_EFFORT else name_fields(option.usual)
    about = name_fields(option.limits.about)
    if len(usual) > WIDE:
        about, usual = f"{about}; usual: {usual}", ""
    shared: dict[str, Any] = {
        "label": field_title(option.name),
        "info": about,
        "min_width": 250,
        "elem_id": f"{prefix}-{option.name}",
    }
    choices = TRUTH if option.value_kind is bool else [(str(choice), str(choice)) for choice in option.limits.choices]
    if choices:
        return gr.Dropdown([(f"usual: {usual}" if usual else "usual", ""), *choices], value="", **shared)
    return gr.Textbox("", placeholder=usual, max_lines=1, **shared)


def read_fields(values: Sequence[Any], options: Mapping[str, Option] = OPTIONS) -> dict[str, Any]:
    """Read the fields that are not empty."""
    written = {name: str(value or "").strip() for name, value in zip(options, values, strict=True)}
    return {name: options[name].parse(text) for name, text in written.items() if text}


def write_plan(plan: Plan, requested: Collection[str] = ()) -> tuple[Any, ...]:
    """Return the values of the form that make a plan: model, budget, effort, growth, way, listed recipe, and fields.

    The effort is the nearest to the plan. The options that still differ are written into the fields, and `requested`.
    """
    budget, way, mine = plan.budget or DEFAULT_BUDGET, way_of(plan.recipe), {**asdict(plan), **plan.sizes}

    def differing(effort: str) -> set[str]:
        options = {"recipe": plan.recipe, "may_grow": plan.may_grow, "features": plan.features}
        try:
            base = make_plan(plan.model, budget, effort, options)
        except RequestError:  # these options need the plan's other options
            base = Plan(plan.model, DEFAULT_BUDGET)
        usual = {**asdict(base), **base.sizes, "features": None}
        return {name for name in OPTIONS if mine[name] != usual[name]} | {*requested}

    effort = min(EFFORTS, key=lambda name: len(differing(name)))
    written = differing(effort)
    fields = (write_value(mine[name]) if name in written else "" for name in OPTIONS)
    listed = gr.skip() if WAYS[way].recipe else plan.recipe
    return plan.model, budget, effort, plan.may_grow, way, listed, *fields


def write_encoder_plan(plan: EncoderPlan) -> tuple[Any, ...]:
    """Return the values of the form that make the plan of an encoder's run."""
    usual = EncoderPlan(plan.model)
    fields = ("" if (mine := getattr(plan, name)) == getattr(usual, name) else mine for name in ENCODER_OPTIONS)
    return plan.model, plan.budget, *[gr.skip()] * (4 + len(OPTIONS)), *map(write_value, fields)


def write_value(value: Any) -> str:
    """Write a value of an option as `Option.parse` reads it; None as empty text."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


ABOUT_BUDGET = (
    "The student’s memory (its state) may take as many bytes as the teacher’s KV cache takes after this many tokens."
)
LEADS = {  # of the second step: its title and text
    "causal": ("How much may it remember?", ABOUT_BUDGET),
    "encoder": (
        "How many tokens may each token see?",
        "A token of the student costs what a token of the teacher costs among this many tokens, however long the text.",
    ),
}
SLIDERS = {"causal": "Tokens of cache", "encoder": "Tokens that each token sees"}
# The parts of the second step that change with the model.
FORM = (
    *("budget", "plan_lead", "causal_form", "encoder_form", "encoder_sight", "job_part", "text_only"),
    *ENCODER_IN_SIGHT,
)


def reach_of(positions: int | None = None, planned: int | None = None, **how: Any) -> dict[str, Any]:
    """Describe the reach of the budget's slider, as arguments of a slider; `how` are others."""
    least, most = budget_reach(positions, planned)
    about = f"a whole number from {least} to {most:,}; beyond it, the nearest is taken"
    return {"minimum": least, "maximum": most, "info": about, **how}


def show_form(
    positions: int | None, budget: float | None, encoder: EncoderInspection | None = None, pictures: bool = False
) -> list[Any]:
    """Show the form of a causal model or of an encoder: the range and the title of the slider, and the fields.

    `pictures`: the model reads them, and a student may leave that out.
    """
    kind, input_kind = "encoder" if encoder else "causal", encoder and encoder.reads
    parts = {
        "budget": gr.Slider(**reach_of(positions, None if budget is None else int(budget), label=SLIDERS[kind])),
        "plan_lead": gr.HTML(lead_html(*LEADS[kind])),
        "causal_form": gr.Column(visible=encoder is None),
        "encoder_form": gr.Column(visible=encoder is not None),
        "encoder_sight": gr.Column(visible=encoder is not None),
        "job_part": gr.Accordion(visible=encoder is None),  # jobs do not know encoders
        "text_only": gr.update(visible=pictures),
        "length": gr.Textbox(visible=input_kind == "texts"),
        "text": gr.Textbox(visible=input_kind != "pictures"),
        "pictures": gr.Textbox(visible=input_kind == "pictures"),
    }
    return [parts[part] for part in FORM]


def read_form(
    chosen: Examined | ExaminedEncoder | None,
    budget: float,
    effort: str,
    may_grow: bool,
    way: str,
    listed: str,
    *fields: Any,
) -> tuple[str, int, str, dict[str, Any]]:
    """Return the model, budget, effort and options of the form, from the choices in sight and the other fields."""
    if chosen is None:
        raise RequestError("no model was chosen yet: choose one in the first step")
    causal_fields, encoder_fields = fields[: len(OPTIONS)], fields[len(OPTIONS) :]
    if isinstance(chosen, ExaminedEncoder):
        options = read_fields(encoder_fields, ENCODER_OPTIONS)
    else:
        options = {"may_grow": may_grow, "recipe": recipe_of(way, listed), **read_fields(causal_fields)}
    return chosen.inspection.name, int(budget), effort, options
