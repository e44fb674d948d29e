"""Handlers of the first two steps: what a model is, what a plan means and takes here, the start of a run or a job."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import gradio as gr

from linearizer.amounts import duration
from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, plan_cards, plan_form, planning, zerogpu
from linearizer.page.calls import Browser, handler, refusals
from linearizer.page.handlers import watch_run
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET
from linearizer.page.planning import Examined, make_plan
from linearizer.page.presets import WAYS, name_fields, recipe_of, way_choices
from linearizer.plan.plan import YIELDING, Plan
from linearizer.report import markup
from linearizer.run.folder import parse_plan

if TYPE_CHECKING:
    from linearizer.workers.forecast import RunForecast


@handler
def show_model(browser: Browser, model: str | None) -> tuple[Any, ...]:
    """Say what a model is."""
    closed = gr.Button(interactive=False), gr.Tab(interactive=False), gr.skip()  # the second step needs a model
    if not model:
        return markup.message_box("No model is named: type one, or take the demo."), None, *closed
    try:
        examined = planning.examine_model(browser.visitor, model)
    except RequestError as error:
        return markup.message_box(str(error), "bad"), None, *closed
    inspection = examined.inspection
    most = max(2 * MIN_BUDGET, min(MAX_BUDGET, inspection.max_positions or MAX_BUDGET))
    return (
        plan_cards.model_card(inspection),
        examined if inspection.supported else None,
        gr.Button(interactive=inspection.supported),
        gr.Tab(interactive=inspection.supported),
        gr.Slider(maximum=most),
    )


def read_form(
    chosen: Examined | None, budget: float, effort: str, may_grow: bool, way: str, listed: str, *fields: Any
) -> tuple[str, int, str, dict[str, Any]]:
    """Read the form, what is chosen in sight and the fields under Advanced: model, budget, effort and options."""
    if chosen is None:
        raise RequestError("no model was chosen yet: choose one in the first step")
    options = {"may_grow": may_grow, "recipe": recipe_of(way, listed), **plan_form.read_fields(fields)}
    return chosen.inspection.name, int(budget), effort, options


def show_budget(chosen: Examined | None, *choices: Any) -> str:
    """Say what a budget means, while the slider moves."""
    if chosen is None:
        return markup.message_box("Choose a model first.")
    try:
        plan = make_plan(*read_form(chosen, *choices))
        chosen.check(plan)
    except LinearizerError as error:
        return markup.message_box(name_fields(str(error)), "bad")
    return plan_cards.budget_card(plan, chosen.inspection.layers, chosen.positions)


def show_plan(
    chosen: Examined | None, budget: float, effort: str, may_grow: bool, way: str, listed: str, *fields: Any
) -> tuple[Any, ...]:
    """Say what a budget means, what each way and effort takes here, each forecast once, and what does it elsewhere."""
    card = show_budget(chosen, budget, effort, may_grow, way, listed, *fields)
    ways, recipes = gr.Radio(choices=way_choices({})), gr.Radio(visible=way in WAYS and WAYS[way].recipe is None)
    if chosen is None:
        return card, "", "", ways, recipes, "", ""

    def plan_of(effort: str, way: str) -> Plan:
        return make_plan(*read_form(chosen, budget, effort, may_grow, way, listed, *fields))

    @cache
    def forecast(effort: str, way: str) -> RunForecast:
        chosen.check(plan := plan_of(effort, way))
        return chosen.forecast(plan)

    elsewhere = "", ""
    try:
        plan = plan_of(effort, way)
        elsewhere = plan.command(), plan.to_json()
        efforts = {name: forecast(name, way) for name in planning.EFFORTS}
        here = plan_cards.machine_card(chosen.machine(plan), efforts[effort])
    except LinearizerError:  # what is wrong stands in the card
        return card, "", "", ways, recipes, *elsewhere
    times = {name: time_of(partial(forecast, effort, name)) for name in WAYS}
    table = plan_cards.efforts_table(efforts, effort, lent=zerogpu.on_zerogpu())
    return card, table, here, gr.Radio(choices=way_choices(times)), recipes, *elsewhere


def time_of(forecast: Callable[[], RunForecast]) -> str:
    """Say how long a way takes here; nothing where it cannot be combined with the other choices."""
    try:
        return f"About {duration(forecast().seconds)} here."
    except LinearizerError:
        return ""


@handler
def start_run(browser: Browser, *choices: Any) -> tuple[Any, ...]:
    """Start a run of the form; from here on the page only watches."""
    return watch_run(browser, actions.start_run(browser.visitor, *read_form(*choices)))


@handler
def change_run(browser: Browser) -> tuple[Any, ...]:
    """Take the choices of the run that is watched, for another run."""
    run = browser.find_run()
    return plan_form.write_plan(run.plan, [name for name in YIELDING if run.given[name] is not None])


@refusals()
def take_plan(content: bytes | None) -> tuple[Any, ...]:
    """Take the choices of a plan.json."""
    plan = parse_plan("the file", content if isinstance(content, bytes) else b"")
    return plan_form.write_plan(plan, [name for name in YIELDING if getattr(plan, name) is not None])


@handler
def list_hardware(browser: Browser) -> Any:
    """Ask the Hub what jobs can run on."""
    return gr.Dropdown(choices=[(each.in_words, each.name) for each in actions.list_hardware(browser.visitor)])


@handler
def offer_job(browser: Browser, *choices: Any) -> tuple[Any, str, float]:
    """Say what a job costs at most."""
    from linearizer.workers import hub_start

    flavor, minutes, push, chosen, *form = choices
    plan, (flavor, minutes, push) = make_plan(*read_form(chosen, *form)), read_job(flavor, minutes, push)
    token = browser.visitor.token
    job = hub_start.offer_job(plan, chosen.inspection, flavor, minutes=minutes or None, push=push or None, token=token)
    sentence = job.in_words + (f"; it publishes {job.push}" if job.push else "")
    return gr.Column(visible=True), markup.message_box(sentence[0].upper() + sentence[1:] + "."), job.cap


@handler
def start_job(browser: Browser, *choices: Any) -> tuple[Any, ...]:
    """Begin a job whose cap was agreed to; from here on the page only watches."""
    cap, flavor, minutes, push, *form = choices
    model, budget, effort, options = read_form(*form)
    flavor, minutes, push = read_job(flavor, minutes, push)
    chosen = budget, effort, options, minutes, push
    return watch_run(browser, actions.start_job(browser.visitor, model, flavor, cap, *chosen))


def read_job(flavor: str | None, minutes: str | None, push: str | None) -> tuple[str, int, str]:
    """Read the choices of a job."""
    if not flavor:
        raise RequestError("no hardware was chosen: choose what the job runs on")
    text = (minutes or "").strip()
    if text and not text.isdecimal():
        raise RequestError(f"{text[:40]!r} is no number of minutes: give a whole number, or leave it empty")
    return str(flavor), int(text or 0), (push or "").strip()


def hide_question() -> tuple[Any, float]:
    """Take back the question where something else was chosen since."""
    return gr.Column(visible=False), 0.0
