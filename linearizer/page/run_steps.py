"""The run above all steps, the steps Measure and Train, and how the page follows its run.

It polls: a cheap call every few seconds, and a drawing of the pieces that have changed.

Gradio takes a millisecond for every output of an answer, used or not. So `poll_run` has few outputs, and marks among
them tell the page whether there is something to draw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from html import escape
from types import SimpleNamespace
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from linearizer.errors import LinearizerError, NotAgreed, RequestError
from linearizer.page import actions, cards, plan_cards, run_state, sending
from linearizer.page.calls import ONCE, QUICK, Browser, handler
from linearizer.page.chat import compare
from linearizer.page.layout import ABOUT_NEEDS, chart, lead, show_note
from linearizer.page.plan_form import reach_of
from linearizer.page.run_state import PART_PREFIX
from linearizer.page.visitors import Visitor
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report import markup
from linearizer.report.parts import PART_VIEWS
from linearizer.run.folder import Run
from linearizer.run.training_end import read_training
from linearizer.workers import control

SOON_SECONDS = 0.2  # until the page polls after an action
IDLE_POLL_SECONDS = 5.0  # between two polls while nothing is running
WATCHED_PARTS = ("memory", "seen", "walk", "timer", "touched", "note")
RUN_ACTIONS: dict[str, Callable[[Visitor, str], str]] = {  # by the buttons above the steps
    "stop": actions.stop_run,
    "resume": actions.resume_run,
    "use": actions.end_training,
    "pay": partial(actions.resume_run, pay=True),
}
POLL_SECONDS = 3.0  # between two polls of a live run
PLOTS = ("curves", "losses")
TEXTS = ("verdict", "usage")
LOCKED = {"compare": gr.Button, "file": gr.UploadButton, "branch": gr.Button}  # until a step of the run is reached
OFFERS = {"download": "student", "to_chat": "compare", "to_publish": "student", "picture": "pictures"}  # with needs
OFFERS |= {"recorded_place": "recorded", "prompts_place": "prompts"}
CAUSAL_TABS = ("step_3", "step_6")  # not for encoders
TABS = ("step_2", "step_3", "step_4", "step_5", "step_6")
POLLED_PIECES = ("card", "training", "evaluating card")  # that poll_run sends itself


def place_run(ui: SimpleNamespace) -> None:
    """Place the state of a run and the actions on it above the steps, where every screen shows them."""
    ui.run_card = gr.HTML(elem_id="run-card")
    names = {"stop": "Stop", "use": "End training now", "resume": "Resume", "pay": "Agree, and begin another job"}
    with gr.Row(elem_id="acts"):
        for name, title in names.items():
            look: dict[str, Any] = {"variant": "primary" if name in ("resume", "pay") else "secondary", "size": "md"}
            setattr(ui, name, gr.Button(title, visible=False, elem_id=name, **look))


def place_measuring(ui: SimpleNamespace) -> None:
    about = (
        "A head is a part of the model that looks back at earlier tokens. The original model, the teacher, reads text, "
        "and each head is measured."
    )
    lead("What does each head need?", about)
    pending = "It fills while the heads are measured."
    colours = {"Degrees of freedom": 0, "Price": 1}  # the traces of the picture
    look: dict[str, Any] = {"label": "Colour", "show_label": False, "elem_id": "colour", "render": False}
    ui.colour = gr.Radio([*colours.items()], value=0, **look)
    ui.needs = chart("Need, price, purchase", ABOUT_NEEDS, "needs", pending, ui.colour)
    other = "Another budget, in tokens of cache"
    ui.other = gr.Slider(label=other, step=8, elem_id="other", **reach_of(value=DEFAULT_BUDGET))
    ui.other_card = gr.HTML(elem_id="other-card")
    about = "The mean of the heads of each layer, and of all. The dotted line is the λ of the picture above."
    ui.curves = chart("Degrees of freedom by λ", about, pending="It is drawn once all heads are measured.")
    ui.branch = gr.Button("Start a run with this budget, without measuring again", elem_id="branch", interactive=False)


def place_training(ui: SimpleNamespace) -> None:
    lead(
        "Training the student",
        "Features learn from the teacher's queries, keys and values, one layer at a time. Without features, the "
        "student fits copies of some of its teacher's weights.",
    )
    ui.training = gr.HTML(elem_id="training")
    about, pending = "Distance to the smallest possible loss.", "It is drawn once training has begun."
    ui.losses = chart("Loss of each layer", about, pending=pending)


def watch_outputs(ui: SimpleNamespace) -> list[Any]:
    return [getattr(ui, name) for name in WATCHED_PARTS]


def wire(ui: SimpleNamespace, opened: Any) -> None:
    """Connect the parts that show a run: the page polls when it is opened, and then at every tick."""
    outputs = [getattr(ui, name) for name in OUTPUTS]
    card_outputs = [ui.run_card, ui.training, ui.evaluating, ui.mark]
    for event in (opened.success, ui.timer.tick):
        event(poll_run, ui.memory, card_outputs, **{**QUICK, "trigger_mode": "once"})
    ui.all.expand(None, None, ui.opened, js="() => true", **QUICK)
    changes = [ui.mark.change, ui.opened.change]
    gr.on(changes, draw_changes, [ui.memory, ui.seen, ui.at, ui.touched, ui.opened], outputs, **QUICK)
    newest_only = {**QUICK, "trigger_mode": "always_last", "js": "(...sent) => clampSlider('other', 1, sent)"}
    ui.other.input(share_budget, [ui.memory, ui.other], [ui.other_card, ui.touched], **newest_only)
    ui.colour.change(None, ui.colour, None, js="colourHeads", **QUICK)
    ui.branch.click(branch_run, [ui.memory, ui.other], watch_outputs(ui), **ONCE)
    ui.to_chat.click(None, None, None, js="() => goTo('compare')", **QUICK)
    ui.to_publish.click(None, None, None, js="openPublishing", **QUICK)
    for name, action in {**RUN_ACTIONS, "stop_evaluating": actions.stop_evaluation}.items():
        getattr(ui, name).click(ask_run(action), ui.memory, [ui.timer, ui.note, ui.pay], **ONCE)


def watch_run(browser: Browser, name: str | None) -> tuple[Any, ...]:
    """Show a run, of which nothing was drawn yet, from its profile step on; return WATCHED_PARTS in their order."""
    step = 1 if not name else 5 if browser.visitor.find_run(name).is_encoder_run else 3
    return (
        {**browser.memory, "run": name},
        {"shown": str(step)},
        gr.Tabs(selected=step),
        gr.Timer(SOON_SECONDS, active=True),
        False,
        show_note(""),  # the old note was about another run
    )


@handler
def branch_run(browser: Browser, budget: float) -> tuple[Any, ...]:
    """Start a run with another budget from what this one has measured."""
    return watch_run(browser, actions.branch_run(browser.visitor, browser.run_name, int(budget)))


@handler
def leave_run(browser: Browser) -> tuple[Any, ...]:
    """Stop watching a run, which goes on."""
    return watch_run(browser, None)


def ask_run(action: Callable[[Visitor, str], str]) -> Callable:
    """Return the handler of a button that acts on the run; what costs money must be confirmed first."""

    @handler
    def ask(browser: Browser) -> tuple[Any, Any, Any]:
        try:
            action(browser.visitor, browser.run_name)
        except NotAgreed as question:
            return gr.skip(), show_note(markup.message_box(str(question))), gr.Button(visible=True)
        return gr.Timer(SOON_SECONDS), show_note(""), gr.Button(visible=False)

    return ask


@handler
def share_budget(browser: Browser, budget: float) -> tuple[str, bool]:
    """Share out another budget without the model. The card carries the figure of the bars, which the browser draws."""
    try:
        if not browser.run_name or not browser.find_run().has_file("profile.json"):
            return "", False
        figure, card = plan_cards.draw_shares(browser.find_run(), int(budget))
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), True
    return card + f'<i hidden data-figure="{escape(figure)}"></i>', True


def plot_json(figure: str | None) -> Any:
    """Send a figure that is JSON already."""
    return None if figure is None else PlotData(type="plotly", plot=figure)


@handler
def poll_run(browser: Browser) -> tuple[str, str, str, str]:
    """Return three cards, and the marks of all other pieces of the page."""
    if not browser.run_name:
        return "", "", "", "none"
    try:
        run, parts = read_watched(browser)
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), "", "", "gone"
    marks = {key: part.mark for key, part in parts.items() if key not in POLLED_PIECES}
    mark = json.dumps([browser.run_name, marks, publication_piece(run, parts).mark])
    card, training, evaluating = (parts[key].value for key in POLLED_PIECES)
    return card, training, evaluating, mark


def read_watched(browser: Browser) -> tuple[Run, dict[str, run_state.Piece]]:
    """Return the run that a page watches, and its pieces."""
    if not browser.run_name:
        raise RequestError("no run is watched")
    run = browser.find_run()
    return run, run_state.read_pieces(run, time.time())


@handler
def draw_changes(browser: Browser, drawn_marks: dict[str, str], at: float, touched: bool, opened: bool) -> list[Any]:
    """Send the pieces that changed since this page was last drawn; those of an evaluation once they are opened."""
    try:
        run, parts = read_watched(browser)
    except LinearizerError:  # without a run, or where it was deleted
        # if nothing was shown yet, the steps stay as the visitor has opened them
        emptied = show_nothing() | show_attached(None) if drawn_marks or browser.run_name else {}
        return in_order(emptied | ({"walk": gr.Tabs(selected=1)} if browser.run_name else {}))
    parts = {key: part for key, part in parts.items() if opened or not key.startswith(PART_PREFIX)}
    another = drawn_marks.get("id") not in (None, parts["id"].mark)
    if drawn_marks.get("id") != parts["id"].mark:  # a new run may have the name of a deleted one
        drawn_marks = {name: step for name, step in drawn_marks.items() if name == "shown"}
    changed = {key: part.value for key, part in parts.items() if drawn_marks.get(key) != part.mark}
    drawn = show_nothing() | show_attached(run) | compare.show_kept(browser, another) if "id" in changed else {}
    drawn |= {name: plot_json(changed[name]) for name in PLOTS if name in changed}
    drawn |= {name: changed[name] for name in TEXTS if name in changed}
    for part in (part for part in PART_VIEWS if PART_PREFIX + part in changed):
        tables, figure = changed[PART_PREFIX + part]()  # drawn when it is first shown
        drawn |= {f"{part}_place": gr.Column(visible=True), f"{part}_tables": tables}
        drawn[f"{part}_chart"] = plot_json(figure)
    drawn |= show_allowed(parts)
    if "trains" in changed:
        drawn["step_4"] = gr.Tab(visible=changed["trains"], interactive=True)
    if "can" in changed:
        drawn |= {name: gr.Button(visible=changed["can"][name]) for name in RUN_ACTIONS}
        drawn |= {name: gr.update(visible=changed["can"][needed]) for name, needed in OFFERS.items()}
    drawing = changed.get("shares" if "shares" in parts else "measuring")
    if drawing is not None and not touched:
        drawn |= draw_heads(drawing)
    # only if the visitor is still where the page went by itself: at the run's step, or where the run was opened
    if "stage" in changed and not touched and int(at) == int(drawn_marks.get("stage", drawn_marks.get("shown", 1))):
        drawn["walk"] = gr.Tabs(selected=changed["stage"])
    sent = sending.PUBLICATIONS.get(run.key)
    live = {parts["state"].value, parts["evaluating"].value} & set(control.LIVE) or sent and not sent.is_over
    drawn["seen"] = {**drawn_marks, **{key: part.mark for key, part in parts.items()}}
    drawn["timer"] = gr.Timer(POLL_SECONDS if live else IDLE_POLL_SECONDS)
    drawn["sent"], drawn["snippet"] = publication_piece(run, parts).value
    return in_order(drawn)


def show_allowed(parts: Mapping[str, run_state.Piece]) -> dict[str, Any]:
    """Enable the buttons whose step the run has reached; until there is a result, say that it is awaited."""
    can, evaluating = parts["can"].value, parts["evaluating"].value in control.LIVE
    allowed = dict(zip(LOCKED, (can["compare"], can["compare"], "shares" in parts), strict=True))
    updates: dict[str, Any] = {name: LOCKED[name](interactive=is_allowed) for name, is_allowed in allowed.items()}
    updates["evaluate"] = gr.Button(interactive=can["student"] and not evaluating)
    updates["stop_evaluating"] = gr.Button(visible=evaluating)
    return {**updates, "awaited": gr.HTML(visible="verdict" not in parts)}


def in_order(drawn: dict[str, Any]) -> list[Any]:
    """Return the updates in the order of OUTPUTS; the other parts stay as they are."""
    return [drawn.get(name, gr.skip()) for name in OUTPUTS]


def show_attached(run: Run | None) -> dict[str, Any]:
    """Open every step of a run, the first two as cards; without a run, show the two as forms and close the others."""
    watching, is_encoder = run is not None, run is not None and run.is_encoder_run
    updates: dict[str, Any] = {name: gr.Tab(interactive=watching) for name in TABS}
    visibility: Any = "hidden" if is_encoder else True
    updates |= {name: gr.Tab(interactive=watching, visible=visibility) for name in CAUSAL_TABS}
    updates |= {f"{name}_choice": gr.Column(visible=not watching) for name in ("model", "plan")}
    updates |= {f"{name}_of_run": gr.Column(visible=watching) for name in ("model", "plan")}
    if run is None:
        return {**updates, "run_model": "", "run_plan": ""}
    updates["all"] = gr.Accordion(visible=not is_encoder)
    updates["note"] = show_note("")
    if is_encoder:
        from linearizer.encoders.encoder_folder import EncoderRun
        from linearizer.page import encoder_cards

        encoder = EncoderRun(run)
        card = encoder_cards.model_card(encoder.inspection)
        return {**updates, "run_model": card, "run_plan": encoder_cards.plan_card(encoder.plan)}
    decided_by = run.plan.strategy_spec.decided_by
    updates["colour"] = gr.Radio(visible=decided_by == "prices")
    updates["run_plan"] = plan_cards.plan_card(run.plan, read_training(run))
    if run.has_file("inspection.json"):
        budget = run.plan.budget or DEFAULT_BUDGET
        other = gr.Slider(**reach_of(run.positions, budget, value=budget))
        updates |= {"run_model": plan_cards.model_card(run.inspection), "other": other}
    return updates


def show_nothing() -> dict[str, Any]:
    """Empty the parts that show a run."""
    updates: dict[str, Any] = dict.fromkeys((*PLOTS, "needs", "held"))
    updates |= dict.fromkeys((*TEXTS, "other_card", "sent"), "")
    updates |= {name: gr.update(visible=False) for name in (*RUN_ACTIONS, *OFFERS)}
    updates |= {name: part(interactive=False) for name, part in LOCKED.items()}
    updates |= {"evaluate": gr.Button(interactive=False), "stop_evaluating": gr.Button(visible=False)}
    for part in PART_VIEWS:
        updates |= {f"{part}_place": gr.Column(visible=False), f"{part}_tables": "", f"{part}_chart": None}
    return {**updates, "seen": {}, "timer": gr.Timer(IDLE_POLL_SECONDS), "snippet": gr.Code(visible=False)}


OTHERS = ("walk", "note", "other", "colour", "awaited", "all")
# Of draw_changes: the names of parts of the page.
OUTPUTS = (*show_nothing(), *show_attached(None), *OTHERS, *compare.OUTPUTS)


def draw_heads(draw: Callable[[], tuple[str, str]]) -> dict[str, Any]:
    """Draw what the run has decided, or before that what is predicted for its budget, or what is measured so far."""
    try:
        figure, card = draw()
        return {"needs": plot_json(figure), "held": plot_json(figure), "other_card": card}
    except LinearizerError as error:
        return {"other_card": markup.message_box(str(error), "bad")}


def publication_piece(run: Run, parts: dict[str, run_state.Piece]) -> run_state.Piece:
    """Show a publication by this server, or else the last one in the run's log."""
    publication, card = sending.PUBLICATIONS.get(run.key), ""
    published = parts["published"].value if "published" in parts else None
    if publication is not None:
        published = asdict(publication.published) if publication.published else None
        card = cards.sending_card(publication.repo_id, publication.progress, publication.error)
    card, snippet = (cards.published_card(published), published.get("snippet", "")) if published else (card, "")
    return run_state.Piece(card, (card, gr.Code(value=snippet, visible=bool(snippet))))
