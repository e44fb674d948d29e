"""Handlers of the first two steps: describe a model, show what a plan buys and costs, start a run or a job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import duration
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, plan_cards, plan_form, planning
from linearizer.page.calls import Browser, handler, refusals
from linearizer.page.handlers import WATCHED_PARTS, watch_run
from linearizer.page.layout import LEADS, SLIDERS, UNCHOSEN, lead_html, reach_of
from linearizer.page.plan_form import WAYS, effort_choices, name_fields, recipe_of, way_choices
from linearizer.page.planning import Examined, ExaminedEncoder, make_plan
from linearizer.plan.plan import ADJUSTABLE, Plan
from linearizer.report import markup
from linearizer.run.folder import parse_plan

if TYPE_CHECKING:
    from linearizer.plan.encoder_plan import EncoderInspection
    from linearizer.workers.forecast import RunForecast

# The parts of the second step that change with the model.
FORM = (
    *("budget", "plan_lead", "causal_form", "encoder_form", "encoder_sight", "job_part", "text_only"),
    *plan_form.ENCODER_IN_SIGHT,
)


@handler
def show_model(browser: Browser, model: str | None, budget: float | None) -> tuple[Any, ...]:
    """Describe a model, and open the next step if it is supported."""

    def show(card: str, chosen: Examined | ExaminedEncoder | None = None, form: Sequence[Any] = ()) -> tuple[Any, ...]:
        title = "Continue" if chosen else "Choose another model" if model else UNCHOSEN
        opened = gr.Button(title, interactive=chosen is not None), gr.Tab(interactive=chosen is not None)
        return card, chosen, *opened, *(form or [gr.skip()] * len(FORM))

    if not model:
        return show(markup.message_box("No model is named: type one, or take the demo."))
    try:
        examined = planning.examine_model(browser.visitor, model)
    except LinearizerError as error:
        return show(markup.message_box(str(error), "bad"))
    if isinstance(examined, ExaminedEncoder):
        from linearizer.page.encoder_cards import model_card

        encoder = examined.inspection
        return show(model_card(encoder), examined, show_form(encoder.tokens, budget, encoder))
    card, inspection = plan_cards.model_card(examined.inspection), examined.inspection
    if not inspection.supported:
        return show(card)
    form = show_form(inspection.max_positions, budget, pictures=inspection.reads_pictures)
    return show(card, examined.with_runs(browser.visitor), form)


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
    causal_fields, encoder_fields = fields[: len(plan_form.OPTIONS)], fields[len(plan_form.OPTIONS) :]
    if isinstance(chosen, ExaminedEncoder):
        options = plan_form.read_fields(encoder_fields, plan_form.ENCODER_OPTIONS)
    else:
        options = {"may_grow": may_grow, "recipe": recipe_of(way, listed), **plan_form.read_fields(causal_fields)}
    return chosen.inspection.name, int(budget), effort, options


def show_budget(chosen: Examined | ExaminedEncoder | None, *choices: Any) -> str:
    """Describe a budget while the slider moves."""
    if chosen is None:
        return markup.message_box("Choose a model first.")
    try:
        form = read_form(chosen, *choices)
        if isinstance(chosen, ExaminedEncoder):
            from linearizer.page.encoder_cards import keys_card

            return keys_card(chosen.plan(*form), chosen.inspection)
        plan = chosen.plan(*form)
    except LinearizerError as error:
        return markup.message_box(name_fields(str(error)), "bad")
    kl = plan_cards.expected_kl(chosen.priced, plan)
    inspection = chosen.part_for(plan)
    return plan_cards.budget_card(plan, inspection.layers, chosen.positions, kl, inspection.beside_state)


def show_plan(chosen: Examined | ExaminedEncoder | None, *choices: Any) -> tuple[Any, ...]:
    """Describe a budget, the time of each way and effort here, and the command that does the same elsewhere."""
    card, forecast_html, command, written = show_budget(chosen, *choices), "", "", ""
    if not isinstance(chosen, Examined):
        with suppress(LinearizerError):  # the card says what is wrong
            if chosen is not None:
                encoder = chosen.plan(*read_form(chosen, *choices))
                forecast_html = plan_cards.forecast_card(planning.machine_of(encoder), chosen.forecast(encoder))
                command = encoder.command()
        return card, forecast_html, *[gr.skip()] * 3, command, written
    budget, effort, may_grow, way, *fields = choices
    times, efforts = dict[str, str](), dict[str, str]()

    @cache
    def forecast(effort: str, way: str) -> RunForecast:
        return chosen.forecast(chosen.plan(*read_form(chosen, budget, effort, may_grow, way, *fields)))

    with suppress(LinearizerError):  # the card says what is wrong
        plan = make_plan(*read_form(chosen, *choices))
        command, written = plan.command(), plan.to_json()
        forecast_html = plan_cards.forecast_card(planning.machine_of(plan), forecast(effort, way))
        efforts = {name: f"about {duration(forecast(name, way).seconds)}" for name in planning.EFFORTS}
        for name in WAYS:
            with suppress(LinearizerError):  # a way that cannot be combined with the other choices
                times[name] = f"About {duration(forecast(effort, name).seconds)} here."
    listed = gr.Radio(visible=way in WAYS and WAYS[way].recipe is None)
    radios = gr.Radio(choices=effort_choices(efforts)), gr.Radio(choices=way_choices(times)), listed
    return card, forecast_html, *radios, command, written


@handler
def start_run(browser: Browser, *choices: Any) -> tuple[Any, ...]:
    """Start a run of the form, which the page then watches. A refusal stays until another choice is made."""
    try:
        model, budget, effort, options = read_form(*choices)
        if isinstance(choices[0], ExaminedEncoder):
            name = actions.start_encoder_run(browser.visitor, model, budget, options)
        else:
            name = actions.start_run(browser.visitor, model, budget, effort, options)
        return (*watch_run(browser, name), "")
    except LinearizerError as error:
        return (*[gr.skip()] * len(WATCHED_PARTS), markup.message_box(name_fields(str(error)), "bad"))


@handler
def change_run(browser: Browser) -> tuple[Any, ...]:
    """Fill in the choices of the watched run, for another run."""
    run = browser.find_run()
    if run.is_encoder_run:
        return in_reach(*plan_form.write_encoder_plan(run.encoder_plan))
    return write_causal(run.plan, [name for name in ADJUSTABLE if run.requested[name] is not None])


@refusals()
def take_plan(content: bytes | None) -> tuple[Any, ...]:
    """Fill in the choices of a plan.json."""
    plan = parse_plan("the file", content if isinstance(content, bytes) else b"")
    return write_causal(plan, [name for name in ADJUSTABLE if getattr(plan, name) is not None])


def write_causal(plan: Plan, requested: Collection[str]) -> tuple[Any, ...]:
    """Return the values of the whole form; its fields of encoders are empty."""
    return *in_reach(*plan_form.write_plan(plan, requested)), *[""] * len(plan_form.ENCODER_OPTIONS)


def in_reach(model: str, budget: int, *others: Any) -> tuple[Any, ...]:
    """Put the slider at a plan's budget, in a range that includes it."""
    return model, gr.Slider(**reach_of(planned=budget, value=budget)), *others


@handler
def list_hardware(browser: Browser) -> Any:
    """List the hardware for jobs, or the reason why the Hub does not answer."""
    try:
        listed = actions.list_hardware(browser.visitor)
    except LinearizerError as error:
        return gr.Dropdown(choices=[], info=markup.without_folders(str(error)))
    return gr.Dropdown(choices=[(hardware.in_words, hardware.name) for hardware in listed], info="what it costs now")


@handler
def offer_job(browser: Browser, *choices: Any) -> tuple[Any, str, float]:
    """Show the most that a job costs."""
    from linearizer.workers import hub_jobs

    (flavor, minutes, push), (chosen, *form) = read_job(*choices[:3]), choices[3:]
    plan, token = make_plan(*read_form(chosen, *form)), browser.visitor.token
    part = chosen.part_for(plan)
    job = hub_jobs.offer_job(plan, part, flavor, minutes=minutes or None, push=push or None, token=token)
    sentence = job.in_words + (f"; it publishes {job.push}" if job.push else "")
    return gr.Column(visible=True), markup.message_box(f"{sentence[0].upper()}{sentence[1:]}."), job.cap


@handler
def start_job(browser: Browser, cap: float, *choices: Any) -> tuple[Any, ...]:
    """Begin a job at a cap that was agreed to, and watch it."""
    model, budget, effort, options = read_form(*choices[3:])
    flavor, minutes, push = read_job(*choices[:3])
    run = actions.start_job(browser.visitor, model, flavor, cap, budget, effort, options, minutes, push)
    return watch_run(browser, run)


def read_job(flavor: str | None, minutes: float | None, push: str | None) -> tuple[str, int, str]:
    """Read the choices of a job."""
    if not flavor:
        raise RequestError("no hardware was chosen: choose what the job runs on")
    return str(flavor), int(minutes or 0), (push or "").strip()


def forget_offer() -> tuple[Any, float]:
    """Withdraw the offer of a job, because another choice was made."""
    return gr.Column(visible=False), 0.0
