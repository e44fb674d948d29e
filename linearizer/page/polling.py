"""How the page polls its run: a light question every few seconds, and a drawing of what has changed.

Gradio takes a millisecond for every output of an answer, used or not. So `poll_run` has few outputs, and marks among
them say whether there is something to draw.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import gradio as gr
from gradio.components.plot import PlotData

from linearizer.errors import LinearizerError, RequestError
from linearizer.page import cards, plan_cards, run_state, sending
from linearizer.page.calls import Browser, handler
from linearizer.page.handlers import ASKED, IDLE_POLL_SECONDS, show_note
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET
from linearizer.page.run_state import PART_PREFIX
from linearizer.page.visitors import is_example
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report import markup
from linearizer.report.parts import PART_VIEWS
from linearizer.run.folder import Run
from linearizer.workers import control

EXAMPLE_NOTE = (
    "This is a finished example that comes with Linearizer, a run of the demo model. Chat with its student under "
    "Compare; it cannot be evaluated further or published."
)
POLL_SECONDS = 3.0  # between two polls of a run at work
PLOTS = ("map", "prices", "losses")
TEXTS = ("verdict", "usage")
LOCKED = {"compare": gr.Button, "file": gr.UploadButton, "branch": gr.Button}  # until a step of the run is reached
TABS = ("step_2", "step_3", "step_4", "step_5", "step_6")
PLACES = ("prices_place", "freedoms_place", "awaited", "all")
PARTS = tuple(f"{part}_{piece}" for part in PART_VIEWS for piece in ("place", "tables", "chart"))
OF_CAUSAL_TABS = ("step_3", "step_6")  # not for encoders
CHOSEN = ("model_choice", "model_of_run", "run_model", "plan_choice", "plan_of_run", "run_plan")
OUTPUTS = (  # of draw_changes: the names of parts of the page
    *("seen", "timer", "walk", "note", "bars", "other", "other_card", "sent", "snippet", "evaluate", "stop_evaluating"),
    *(*ASKED, "download", *PLOTS, *TEXTS, *LOCKED, *TABS, *PLACES, *PARTS, *CHOSEN),
)
POLLED_PIECES = ("card", "training", "evaluating card")  # that poll_run sends itself


def plot_json(figure: str | None) -> Any:
    """Send a figure that is JSON already."""
    return None if figure is None else PlotData(type="plotly", plot=figure)


@handler
def poll_run(browser: Browser) -> tuple[str, str, str, str]:
    """Return three cards, and the marks of the pieces of the page."""
    if not browser.run_name:
        return "", "", "", "none"
    try:
        run, parts = read_watched(browser)
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), "", "", "gone"
    rest = {key: part.mark for key, part in parts.items() if key not in POLLED_PIECES}
    mark = json.dumps([browser.run_name, rest, publication_piece(run, parts).mark])
    card, training, evaluating = (parts[key].value for key in POLLED_PIECES)
    return card, training, evaluating, mark


def read_watched(browser: Browser) -> tuple[Run, dict[str, run_state.Piece]]:
    """Return the run that a page watches, and its pieces."""
    if not browser.run_name:
        raise RequestError("no run is watched")
    run = browser.find_run()
    return run, run_state.read_pieces(run, time.time())


@handler
def draw_changes(browser: Browser, seen: dict[str, str], at: float, touched: bool, opened: bool) -> list[Any]:
    """Send the pieces that are new since this page was last drawn; those of an evaluation once they are opened."""
    try:
        run, parts = read_watched(browser)
    except LinearizerError:  # without a run, or where it was deleted
        # where nothing was shown yet, steps stay as the visitor has opened them
        return in_order(show_nothing() | show_attached(None) if seen or browser.run_name else {})
    parts = {key: part for key, part in parts.items() if opened or not key.startswith(PART_PREFIX)}
    if seen.get("id") != parts["id"].mark:  # it may have the name of a run that was deleted
        seen = {name: step for name, step in seen.items() if name == "shown"}
    new = {key: part.value for key, part in parts.items() if seen.get(key) != part.mark}
    drawn = show_nothing() | show_attached(run) if "id" in new else {}
    drawn |= {name: plot_json(new[name]) for name in PLOTS if name in new}
    drawn |= {name: new[name] for name in TEXTS if name in new}
    for part in (part for part in PART_VIEWS if PART_PREFIX + part in new):
        tables, figure = new[PART_PREFIX + part]()  # drawn when it is first shown
        drawn |= {f"{part}_place": gr.Column(visible=True), f"{part}_tables": tables}
        drawn[f"{part}_chart"] = plot_json(figure)
    drawn |= show_allowed(parts)
    if "trains" in new:
        drawn["step_4"] = gr.Tab(visible=new["trains"], interactive=True)
    if "can" in new:
        drawn |= {name: gr.Button(visible=new["can"][name]) for name in ASKED}
        drawn["download"] = gr.Button(visible=new["can"]["student"])
    if "shares" in new and not touched:
        drawn |= draw_own_shares(run)
    # a visitor is still where the page itself went: at the run's step, or where the run was opened
    if "stage" in new and not touched and int(at) == int(seen.get("stage", seen.get("shown", 1))):
        drawn["walk"] = gr.Tabs(selected=new["stage"])
    sent = sending.PUBLICATIONS.get(run.key)
    live = {parts["state"].value, parts["evaluating"].value} & set(control.LIVE) or sent and not sent.over
    drawn["seen"] = {**seen, **{key: part.mark for key, part in parts.items()}}
    drawn["timer"] = gr.Timer(POLL_SECONDS if live else IDLE_POLL_SECONDS)
    drawn["sent"], drawn["snippet"] = publication_piece(run, parts).value
    return in_order(drawn)


def show_allowed(parts: Mapping[str, run_state.Piece]) -> dict[str, Any]:
    """Let those buttons be pressed whose step of the run is reached; the result says that it is awaited until then."""
    can, evaluating = parts["can"].value, parts["evaluating"].value in control.LIVE
    allowed = dict(zip(LOCKED, (can["compare"], can["compare"], "shares" in parts), strict=True))
    shown: dict[str, Any] = {name: LOCKED[name](interactive=each) for name, each in allowed.items()}
    shown["evaluate"] = gr.Button(interactive=can["student"] and not evaluating)
    shown["stop_evaluating"] = gr.Button(visible=evaluating)
    return {**shown, "awaited": gr.HTML(visible="verdict" not in parts)}


def in_order(drawn: dict[str, Any]) -> list[Any]:
    """Return what is drawn in the order of OUTPUTS; the other parts stay as they are."""
    return [drawn.get(name, gr.skip()) for name in OUTPUTS]


def show_attached(run: Run | None) -> dict[str, Any]:
    """Open every step of a run, the first two to read; without a run, let these choose, and close the others."""
    watching, of_encoder = run is not None, run is not None and run.of_encoder
    shown: dict[str, Any] = {name: gr.Tab(interactive=watching) for name in TABS}
    seen: Any = "hidden" if of_encoder else True
    shown |= {name: gr.Tab(interactive=watching, visible=seen) for name in OF_CAUSAL_TABS}
    shown |= {f"{name}_choice": gr.Column(visible=not watching) for name in ("model", "plan")}
    shown |= {f"{name}_of_run": gr.Column(visible=watching) for name in ("model", "plan")}
    if run is None:
        return {**shown, "run_model": "", "run_plan": ""}
    shown["all"] = gr.Accordion(visible=not of_encoder)
    shown["note"] = show_note(markup.message_box(EXAMPLE_NOTE) if is_example(run) else "")
    if of_encoder:
        from linearizer.encoders.encoder_folder import EncoderRun
        from linearizer.page import encoder_cards

        encoder = EncoderRun(run)
        card = encoder_cards.model_card(encoder.inspection)
        return {**shown, "run_model": card, "run_plan": encoder_cards.plan_card(encoder.plan)}
    decided_by = run.plan.rules.decided_by
    shown["prices_place"] = gr.Column(visible=decided_by == "prices")
    shown["freedoms_place"] = gr.Column(visible=decided_by == "freedoms")
    shown["run_plan"] = plan_cards.plan_card(run.plan)
    if run.has_file("inspection.json"):
        shown |= {"run_model": plan_cards.model_card(run.inspection), "other": slider_of(run)}
    return shown


def show_nothing() -> dict[str, Any]:
    """Empty what shows a run."""
    shown: dict[str, Any] = dict.fromkeys((*PLOTS, "bars")) | dict.fromkeys((*TEXTS, "other_card", "sent"), "")
    shown |= {name: gr.Button(visible=False) for name in (*ASKED, "download")}
    shown |= {name: part(interactive=False) for name, part in LOCKED.items()}
    shown |= {"evaluate": gr.Button(interactive=False), "stop_evaluating": gr.Button(visible=False)}
    for part in PART_VIEWS:
        shown |= {f"{part}_place": gr.Column(visible=False), f"{part}_tables": "", f"{part}_chart": None}
    return {**shown, "seen": {}, "timer": gr.Timer(IDLE_POLL_SECONDS), "snippet": gr.Code(visible=False)}


def slider_of(run: Run) -> gr.Slider:
    """Put the slider at the run's own budget, within its reach."""
    budget = run.plan.budget or DEFAULT_BUDGET
    most = max(2 * MIN_BUDGET, min(MAX_BUDGET, run.positions), budget)
    return gr.Slider(value=budget, minimum=min(MIN_BUDGET, budget), maximum=most)


def draw_own_shares(run: Run) -> dict[str, Any]:
    """Draw what the run itself decided; until it has, what is predicted for its budget."""
    try:
        figure, card = plan_cards.draw_shares(run)
        return {"bars": plot_json(figure), "other_card": card}
    except LinearizerError as error:
        return {"other_card": markup.message_box(str(error), "bad")}


def publication_piece(run: Run, parts: dict[str, run_state.Piece]) -> run_state.Piece:
    """Show the publishing by this server; without it, what the log says was published last."""
    publication, card = sending.PUBLICATIONS.get(run.key), ""
    published = parts["published"].value if "published" in parts else None
    if publication is not None:
        published = asdict(publication.published) if publication.published else None
        card = cards.sending_card(publication.repo_id, publication.progress, publication.error)
    card, snippet = (cards.published_card(published), published.get("snippet", "")) if published else (card, "")
    return run_state.Piece(card, (card, gr.Code(value=snippet, visible=bool(snippet))))
