"""The step Budget: what a budget buys and costs here, the ways to a student, and the start of a run or a job."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import duration
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, plan_cards, plan_form, planning, run_steps
from linearizer.page.calls import ONCE, QUICK, SLOW, Browser, handler, refusals
from linearizer.page.layout import lead
from linearizer.page.plan_form import (
    LEADS,
    LISTED,
    SLIDERS,
    USUAL_PAPER,
    WAYS,
    effort_choices,
    name_fields,
    reach_of,
    read_form,
    recipe_choices,
    way_choices,
    way_of,
)
from linearizer.page.planning import Examined, ExaminedEncoder, make_plan
from linearizer.page.run_steps import WATCHED_PARTS, watch_outputs, watch_run
from linearizer.page.visitors import signs_in
from linearizer.plan.plan import ADJUSTABLE, DEFAULT_BUDGET, Plan
from linearizer.plan.recipes import RECIPES
from linearizer.report import markup
from linearizer.report.markup import message_box
from linearizer.report.methods_chart import draw_methods
from linearizer.run.folder import parse_plan

if TYPE_CHECKING:
    from linearizer.workers.forecast import RunForecast

ABOUT_JOBS = (
    "The same run on hardware that the Hub rents by the minute. Only your account pays. The run is kept in a private "
    "bucket of yours, and this page follows it as any other run."
)
ABOUT_EFFORT = (
    "The effort decides how much text is read, and how long training takes. “Try it” reads so little that its prices "
    "are rough: the demo’s student had KL 0.0099 at 96 tokens by “Try it”, and 0.0010 at 64 by “Quick”."
)


def place(ui: SimpleNamespace) -> None:
    """Place the budget, its forecast, and Start; all other choices are folded."""
    ui.plan_lead = lead(*LEADS["causal"])
    with gr.Row():
        with gr.Column(scale=3, min_width=300):
            ui.budget = gr.Slider(label=SLIDERS["causal"], step=8, elem_id="budget", **reach_of(value=DEFAULT_BUDGET))
            ui.forecast = gr.HTML(elem_id="forecast")
            ui.start = gr.Button("Start", variant="primary", size="lg", elem_id="start")
            ui.start_note = gr.HTML(elem_id="start-note")
            ui.by_budget = gr.HTML(elem_id="by-budget")
        with gr.Column(scale=4, min_width=300):
            ui.budget_card = gr.HTML(message_box("Choose a model first."), elem_id="budget-card")
    with gr.Column(visible=False) as ui.encoder_sight:
        fields = plan_form.place_encoder_options(in_sight=True)
    with gr.Accordion("Change how", open=False, elem_id="how"):
        with gr.Column() as ui.causal_form:
            place_ways(ui)
            with gr.Accordion("Advanced", open=False, elem_id="advanced"):
                gr.HTML('<p class="lz-faint">The way chosen above decides the fields that are empty.</p>')
                ui.fields = plan_form.place_options()
        with gr.Column(visible=False) as ui.encoder_form:
            fields |= plan_form.place_encoder_options(in_sight=False)
        ui.encoder_fields = {name: fields[name] for name in plan_form.ENCODER_OPTIONS}
        with gr.Accordion("Do this elsewhere, or load a plan", open=False, elem_id="elsewhere"):
            ui.command = gr.Code("", language="shell", label="The same, from a command line", lines=1, wrap_lines=True)
            ui.plan = gr.Code("", language="json", label="plan.json, for --plan", lines=3, wrap_lines=True)
            load: dict[str, Any] = {"file_types": [".json"], "type": "binary", "size": "md", "elem_id": "take-plan"}
            ui.taken = gr.UploadButton("Load a plan.json", **load)
        place_job(ui)


def place_ways(ui: SimpleNamespace) -> None:
    """Place the ways to a student and the efforts, with the time that each takes here."""
    lead("Which way?", "All use the same bytes.", "h3")
    tiles: dict[str, Any] = {"elem_classes": "lz-tiles"}
    ui.way = gr.Radio(way_choices({}), value="measured", show_label=False, label="Way", elem_id="way", **tiles)
    listed: dict[str, Any] = {"value": USUAL_PAPER, "label": "Recipe", "visible": False, "elem_id": "recipe", **tiles}
    ui.listed = gr.Radio(recipe_choices(), **listed)
    with gr.Accordion("All ways as points, by bytes: click one to choose it", open=False, elem_id="methods-part"):
        ui.methods = gr.HTML(draw_methods(), elem_id="methods", js_on_load="chooseMethod(element, trigger)")
    ui.may_grow = gr.Radio(
        [("Never grows", False), ("May grow", True)],
        value=False,
        label="State",
        info="May grow: heads that are worth it keep their whole cache, so long texts take more",
        elem_id="may-grow",
    )
    lead("How thorough?", ABOUT_EFFORT, "h3")
    efforts: dict[str, Any] = {"value": "Quick", "show_label": False, "label": "How thorough", "elem_id": "effort"}
    ui.effort = gr.Radio(effort_choices({}), **efforts)


def place_job(ui: SimpleNamespace) -> None:
    """Place the choices of a job, whose cost must be agreed to."""
    with gr.Accordion("Run it in a job on your account instead", open=False, elem_id="job") as ui.job_part:
        gr.HTML(f'<p class="lz-faint">{ABOUT_JOBS}{" Sign in first." if signs_in() else ""}</p>')
        with gr.Row(elem_classes="lz-options"):
            ui.flavor = gr.Dropdown(
                [], value=None, label="Hardware", info="what it costs now", allow_custom_value=True, elem_id="flavor"
            )
            ui.job_minutes = gr.Number(
                0, label="Minutes at most", info="0: twice the forecast", precision=0, elem_id="job-minutes"
            )
            ui.job_push = gr.Textbox(
                "", label="Publish privately as", placeholder="OWNER/NAME, if at all", max_lines=1, elem_id="job-push"
            )
        ui.offer = gr.Button("What does it cost?", elem_id="job-offer")
        with gr.Column(visible=False, elem_id="job-sure") as ui.job_sure:
            ui.job_question, ui.cap = gr.HTML(elem_id="job-question"), gr.State(0.0)
            ui.start_job = gr.Button("Agree, and begin the job", variant="primary", elem_id="job-start")


def wire(ui: SimpleNamespace) -> None:
    form = [ui.budget, ui.effort, ui.may_grow, ui.way, ui.listed, *ui.fields.values(), *ui.encoder_fields.values()]
    choices, changed = [ui.inspection, *form], [ui.inspection, *form[1:]]
    outputs = [ui.budget_card, ui.forecast, ui.effort, ui.way, ui.listed, ui.command, ui.plan]
    newest_only = {**QUICK, "trigger_mode": "always_last", "js": "(...sent) => clampSlider('budget', 1, sent)"}
    changes = [part.change for part in changed]
    ui.budget.input(show_budget, choices, ui.budget_card, **newest_only)
    gr.on([*changes, ui.budget.release], show_plan, choices, outputs, **newest_only)
    gr.on([*changes, ui.budget.release], draw_budget, choices, ui.by_budget, **newest_only)
    ui.methods.click(choose_method, None, [ui.way, ui.listed], **QUICK)
    ui.start.click(start_run, [ui.memory, *choices], [*watch_outputs(ui), ui.start_note], **ONCE)
    wire_job(ui, choices)
    written = [ui.model, *form]
    uploaded = ui.taken.upload(take_plan, ui.taken, written, **ONCE)
    reused = gr.on([ui.change_model.click, ui.change_plan.click], change_run, ui.memory, written, **ONCE)
    for filled in (uploaded, reused):  # a slider that a handler sets sends no event
        filled.success(show_plan, choices, outputs, **newest_only)
    reused.success(run_steps.leave_run, ui.memory, watch_outputs(ui), **QUICK)


def wire_job(ui: SimpleNamespace, choices: list[Any]) -> None:
    job = [ui.flavor, ui.job_minutes, ui.job_push]
    ui.job_part.expand(list_hardware, ui.memory, ui.flavor, **SLOW, show_progress_on=ui.flavor)
    outputs = [ui.job_sure, ui.job_question, ui.cap]
    ui.offer.click(offer_job, [ui.memory, *job, *choices], outputs, **{**ONCE, "show_progress_on": ui.offer})
    ui.start_job.click(start_job, [ui.memory, ui.cap, *job, *choices], watch_outputs(ui), **ONCE)
    changes = [part.change for part in (*job, *choices)]
    gr.on(changes, forget_offer, None, [ui.job_sure, ui.cap], **{**QUICK, "trigger_mode": "always_last"})
    # in the browser: an answer of the server might arrive late, and erase the refusal of a newer start
    gr.on(changes, None, None, ui.start_note, js="() => ''", **QUICK)


def choose_method(event: gr.EventData) -> tuple[Any, Any]:
    """Choose the recipe of a point in the chart; a browser may send anything."""
    sent = event._data if isinstance(event._data, dict) else {}
    recipe = str(sent.get("recipe", ""))
    if recipe not in RECIPES:
        return gr.skip(), gr.skip()
    way = way_of(recipe)
    return way, gr.Radio(value=recipe if recipe in LISTED else USUAL_PAPER, visible=way == "paper")


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


def draw_budget(chosen: Examined | ExaminedEncoder | None, *choices: Any) -> str:
    """Draw the KL by the budget, apart from what a start waits for; empty where no run has priced the model."""
    if not isinstance(chosen, Examined) or chosen.priced is None:
        return ""
    with suppress(LinearizerError):  # the card says what is wrong
        return plan_cards.budget_strip(chosen.priced, make_plan(*read_form(chosen, *choices)))
    return ""


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
