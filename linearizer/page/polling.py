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

from linearizer.errors import LinearizerError
from linearizer.page import cards, plan_cards, run_state, sending, shares
from linearizer.page.calls import Browser, handler
from linearizer.page.handlers import ASKED, IDLE_POLL_SECONDS, plot_json, show_note, watched_run
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET
from linearizer.page.run_state import PART_PREFIX
from linearizer.page.visitors import is_example
from linearizer.plan.plan import DEFAULT_BUDGET
from linearizer.report import markup
from linearizer.report.parts import PART_VIEWS
from linearizer.run.folder import Run
from linearizer.workers import control

EXAMPLE_NOTE = (
    "This is a finished example that comes with Linearizer: a run of the demo model, as it was measured. Its weights "
    "are left out, so it can be looked at in every step, but neither compared, evaluated further nor published."
)
POLL_SECONDS = 3.0  # between two polls of a run at work
PLOTS = {piece: piece for piece in ("map", "prices", "curves", "frontier")} | {"memory": "memory_plot"}
OUTPUTS = (  # of draw_changes: the names of parts of the page
    "seen", "timer", "walk", "note", *ASKED, *PLOTS.values(), "evaluation", "frontier_place", "prices_place",
    "verdict", "deciding", "bars", "other", "other_card", "branch", "to_distil", "to_compare", "compare", "read", "ask",
    "take_back", "reading", "sent", "snippet", "step_2", "step_3", "step_4", "step_5", "model_choice", "model_of_run",
    "run_model", "plan_choice", "plan_of_run", "run_plan",
)  # fmt: skip
POLLED_PIECES = ("card", "training", "losses", "error", "evaluating card")  # that poll_run sends itself


@handler
def poll_run(browser: Browser) -> tuple[str, str, str, str, str, str]:
    """Return three cards, and the marks of what the page, its curves and its evaluation should show."""
    name = browser.run_name
    if not name:
        return cards.run_card(None, "", 0.0), "", "", "none", "none", "none"
    try:
        run = browser.find_run()
        parts = run_state.read_pieces(run, time.time())
    except LinearizerError as error:
        return markup.message_box(str(error), "bad"), "", "", "gone", "none", "none"
    rest = {
        key: part.mark for key, part in parts.items() if key not in POLLED_PIECES and not key.startswith(PART_PREFIX)
    }
    mark = json.dumps([name, rest, publication_piece(run, parts).mark])
    examined = json.dumps([name, parts["evaluating"].mark, parts["can"].mark, part_marks(parts)])
    shown = (parts[key].value for key in ("card", "training", "evaluating card"))
    return *shown, mark, f"{name} {parts['losses'].mark}", examined


@handler
def draw_curves(browser: Browser) -> tuple[Any, Any]:
    """Draw how training goes."""
    watched = watched_run(browser)
    return (None, None) if watched is None else tuple(plot_json(watched[1][name].value) for name in ("losses", "error"))


@handler
def draw_changes(browser: Browser, seen: dict[str, str], at: float, touched: bool) -> list[Any]:
    """Send the pieces that are new since this page was last drawn."""
    if (watched := watched_run(browser)) is None:
        # where nothing was shown yet, steps stay as the visitor has opened them
        return in_order(show_nothing() | show_attached(None) if seen or browser.run_name else {})
    run, parts = watched
    if seen.get("id") != parts["id"].mark:  # it may have the name of a run that was deleted
        seen = {name: step for name, step in seen.items() if name == "shown"}
    new = {key: part.value for key, part in parts.items() if seen.get(key) != part.mark}
    drawn = show_nothing() | show_attached(run) if "id" in new else {}
    drawn |= {output: plot_json(new[piece]) for piece, output in PLOTS.items() if piece in new}
    drawn |= {piece: new[piece] for piece in ("evaluation", "verdict", "deciding", "reading") if piece in new}
    drawn |= show_allowed(parts)
    if "can" in new:
        drawn |= {name: gr.Button(visible=new["can"][name]) for name in ASKED}
    if "shares" in new and not touched:
        drawn |= draw_own_shares(run)
    # a visitor is still where the page itself went: at the run's step, or where the run was opened
    if "stage" in new and not touched and int(at) == int(seen.get("stage", seen.get("shown", 1))):
        drawn["walk"] = gr.Tabs(selected=new["stage"])
    live = {parts["state"].value, parts["evaluating"].value} & set(control.LIVE) or sending.is_publishing(run)
    drawn["seen"] = {**seen, **{key: part.mark for key, part in parts.items()}}
    drawn["timer"] = gr.Timer(POLL_SECONDS if live else IDLE_POLL_SECONDS)
    drawn["sent"], drawn["snippet"] = publication_piece(run, parts).value
    return in_order(drawn)


def show_allowed(parts: Mapping[str, run_state.Piece]) -> dict[str, Any]:
    """Let those buttons be pressed whose step of the run is reached."""
    student = parts["can"].value["student"]
    asks = student and bool(parts["reading"].value)
    allowed = {"compare": student, "read": student, "ask": asks, "take_back": asks, "branch": "shares" in parts}
    allowed |= {"to_distil": parts["stage"].value > 3, "to_compare": student or "evaluation" in parts}
    return {name: gr.Button(interactive=each) for name, each in allowed.items()}


def in_order(drawn: dict[str, Any]) -> list[Any]:
    """Give what is drawn in the order of OUTPUTS; the other parts stay as they are."""
    return [drawn.get(name, gr.skip()) for name in OUTPUTS]


def show_attached(run: Run | None) -> dict[str, Any]:
    """Open every step of a run, the first two to read; without a run, let these choose, and close the others."""
    watching = run is not None
    shown: dict[str, Any] = {f"step_{step}": gr.Tab(interactive=watching) for step in (2, 3, 4, 5)}
    shown |= {f"{name}_choice": gr.Column(visible=not watching) for name in ("model", "plan")}
    shown |= {f"{name}_of_run": gr.Column(visible=watching) for name in ("model", "plan")}
    if run is None:
        return {**shown, "run_model": "", "run_plan": ""}
    by_prices = gr.Column(visible=run.plan.rules.decided_by == "prices")
    shown |= {"frontier_place": by_prices, "prices_place": by_prices}
    shown["note"] = show_note(markup.message_box(EXAMPLE_NOTE) if is_example(run) else "")
    shown["run_plan"] = plan_cards.plan_card(run.plan)
    if run.has_file("inspection.json"):
        shown |= {"run_model": plan_cards.model_card(run.inspection), "other": slider_of(run)}
    return shown


def show_nothing() -> dict[str, Any]:
    """Empty what shows a run."""
    shown: dict[str, Any] = dict.fromkeys((*PLOTS.values(), "bars"))
    shown |= dict.fromkeys(("evaluation", "verdict", "deciding", "other_card", "reading", "sent"), "")
    shown |= {name: gr.Button(visible=False) for name in ASKED}
    locked = ("compare", "read", "ask", "take_back", "branch", "to_distil", "to_compare")
    shown |= {name: gr.Button(interactive=False) for name in locked}
    return {**shown, "seen": {}, "timer": gr.Timer(IDLE_POLL_SECONDS), "snippet": gr.Code(visible=False)}


def slider_of(run: Run) -> gr.Slider:
    """Put the slider at the run's own budget, within its reach."""
    own = run.plan.budget or DEFAULT_BUDGET
    most = max(2 * MIN_BUDGET, min(MAX_BUDGET, run.positions), own)
    return gr.Slider(value=own, minimum=min(MIN_BUDGET, own), maximum=most)


def draw_own_shares(run: Run) -> dict[str, Any]:
    """Draw what the run itself decided; until it has, what is predicted for its budget."""
    try:
        figure, card = shares.draw_shares(run)
        return {"bars": plot_json(figure), "other_card": card}
    except LinearizerError as error:
        return {"other_card": markup.message_box(str(error), "bad")}


def publication_piece(run: Run, parts: dict[str, run_state.Piece]) -> run_state.Piece:
    """Say how publishing goes; if this server published nothing, what the log says was published last."""
    publication, snippet = sending.latest_publication(run), ""
    published = parts["published"].value if "published" in parts else None
    if publication is not None:
        published = asdict(publication.published) if publication.published else None
    if published is not None:
        card, snippet = cards.published_card(published), published.get("snippet", "")
    elif publication is not None:
        card = cards.sending_card(publication.repo_id, publication.progress, publication.error)
    else:
        card = ""
    return run_state.Piece(card, (card, gr.Code(value=snippet, visible=bool(snippet))))


def part_marks(parts: Mapping[str, run_state.Piece]) -> dict[str, str]:
    """Give the mark of every part that has results."""
    return {part: parts[PART_PREFIX + part].mark for part in PART_VIEWS if PART_PREFIX + part in parts}


@handler
def draw_parts(browser: Browser, seen: dict[str, Any]) -> list[Any]:
    """Show the parts that are new since this page was last drawn."""
    watched = watched_run(browser)
    name, pieces = (None, {}) if watched is None else (browser.run_name, watched[1])
    live = name is not None and pieces["evaluating"].value in control.LIVE
    student = name is not None and pieces["can"].value["student"]
    new, before = part_marks(pieces), seen.get("marks", {}) if seen.get("run") == name else {}
    outputs = [{"run": name, "marks": new}, gr.Button(interactive=student and not live), gr.Button(visible=live)]
    for part, view in PART_VIEWS.items():
        outputs.append(gr.Column(visible=part in new))
        if part not in new or before.get(part) == new[part]:
            outputs += [gr.skip()] * (1 + 2 * len(view.charts))  # a place and a chart for each
            continue
        tables, figures = pieces[PART_PREFIX + part].value()  # drawn when it is first shown
        outputs.append(tables)
        for figure in figures:
            outputs += [gr.Column(visible=figure is not None), plot_json(figure)]
    return outputs
