"""How the page polls its run: a light question every few seconds, and a drawing of what has changed.

Gradio takes a millisecond for every output of an answer, used or not. So `poll_run` has few outputs, and marks among
them say whether there is something to draw.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from typing import Any

import gradio as gr

from linearizer.errors import LinearizerError
from linearizer.jobs import control
from linearizer.page import cards, evaluation_handlers, run_state, sending
from linearizer.page.calls import Profile, Token
from linearizer.page.handlers import IDLE_POLL_SECONDS, Memory, draw_shares, plot_json, read_visitor, run_name
from linearizer.page.layout import MAX_BUDGET, MIN_BUDGET
from linearizer.publish import html
from linearizer.run.folder import Run
from linearizer.run.plan import DEFAULT_BUDGET

ATTACHED_OUTPUTS = 10  # of show_attached
POLL_SECONDS = 3.0  # between two polls of a run at work
PLOTS = ("map", "prices", "curves", "positions", "recall", "memory", "frontier")
BUTTONS = ("stop", "resume", "use")
POLLED_PIECES = (
    "card",
    "training",
    "losses",
    "error",
    "evaluating card",
)  # that poll_run sends itself


def poll_run(memory: Memory, profile: Profile, token: Token) -> tuple[str, str, str, str, str, str]:
    """Return three cards, and the marks of what the page, its curves and its evaluation should show."""
    name = run_name(memory)
    if name is None:
        return cards.run_card(None, "", 0.0), "", "", "none", "none", "none"
    try:
        run = read_visitor(memory, profile, token).find_run(name)
        parts = run_state.read_pieces(run, time.time())
    except LinearizerError as error:
        return html.message_box(str(error), "bad"), "", "", "gone", "none", "none"
    rest = {
        key: part.mark
        for key, part in parts.items()
        if key not in POLLED_PIECES and not key.startswith(run_state.PART_PREFIX)
    }
    mark = json.dumps([name, rest, publication_piece(run, parts).mark])
    examined = json.dumps([name, parts["evaluating"].mark, parts["can"].mark, evaluation_handlers.part_marks(parts)])
    shown = (parts[key].value for key in ("card", "training", "evaluating card"))
    return *shown, mark, f"{name} {parts['losses'].mark}", examined


def draw_curves(memory: Memory, profile: Profile, token: Token) -> tuple[Any, Any]:
    """Draw how training goes."""
    name = run_name(memory)
    if name is None:
        return None, None
    try:
        parts = run_state.read_pieces(read_visitor(memory, profile, token).find_run(name), time.time())
    except LinearizerError:  # it was deleted; poll_run says so
        return None, None
    return plot_json(parts["losses"].value), plot_json(parts["error"].value)


def draw_changes(
    memory: Memory, seen: dict[str, str], at: float, touched: bool, profile: Profile, token: Token
) -> list[Any]:
    """Send the pieces that are new since this page was last drawn."""
    name = run_name(memory)
    if name is None:
        return show_no_run()
    try:
        run = read_visitor(memory, profile, token).find_run(name)
        parts = run_state.read_pieces(run, time.time())
    except LinearizerError:  # it was deleted; poll_run says so
        return show_no_run()
    if seen.get("id") != parts["id"].mark:  # it may have the name of a run that was deleted
        seen = {}
    new = {key: part.value for key, part in parts.items() if seen.get(key) != part.mark}
    sent, can = publication_piece(run, parts), new.get("can")
    live = {parts["state"].value, parts["evaluating"].value} & set(control.LIVE) or sending.is_publishing(run)
    decided = "shares" in new and not touched
    bars, other_card = draw_own_shares(run) if decided else (gr.skip(), gr.skip())
    stage = choose_step(parts["stage"].value, seen, at, touched) if "stage" in new else None
    return [
        {**seen, **{key: part.mark for key, part in parts.items()}},
        gr.Timer(POLL_SECONDS if live else IDLE_POLL_SECONDS),
        new.get("evaluation", gr.skip()),
        *(plot_json(new[key]) if key in new else gr.skip() for key in PLOTS),
        gr.Column(visible=run.plan.rules.decided_by == "prices") if "id" in new else gr.skip(),
        new.get("verdict", gr.skip()),
        *(gr.Button(visible=can[key]) if can else gr.skip() for key in BUTTONS),
        gr.Button(interactive=can["student"]) if can else gr.skip(),
        gr.Button(interactive=True) if "measured" in new else gr.skip(),
        slider_of(run) if "id" in new and run.has_file("inspection.json") else gr.skip(),
        new.get("deciding", gr.skip()),
        gr.Column(visible=run.plan.rules.decided_by == "prices") if "id" in new else gr.skip(),
        bars,
        other_card,
        gr.Tabs(selected=stage) if stage else gr.skip(),
        *sent.value,
        *(show_attached(run) if "id" in new else [gr.skip()] * ATTACHED_OUTPUTS),
    ]


def show_attached(run: Run | None) -> list[Any]:
    """Open every step of a run, the first two to read; without a run, let these choose, and close the others."""
    watching = run is not None
    tabs = [gr.skip() if not watching else gr.Tab(interactive=True)] + [gr.Tab(interactive=watching)] * 3
    choice, own = gr.Column(visible=not watching), gr.Column(visible=watching)
    if run is None:
        return [*tabs, choice, own, "", choice, own, ""]
    model = cards.model_card(run.inspection) if run.has_file("inspection.json") else ""
    return [*tabs, choice, own, model, choice, own, cards.plan_card(run.plan)]


def show_no_run() -> list[Any]:
    """Show no run."""
    closed = [*[gr.Button(visible=False)] * len(BUTTONS), *[gr.Button(interactive=False)] * 2]
    return [
        {},
        gr.Timer(IDLE_POLL_SECONDS),
        "",
        *[None] * len(PLOTS),
        gr.skip(),
        "",
        *closed,
        gr.skip(),
        "",
        gr.skip(),
        None,
        "",
        gr.skip(),
        "",
        gr.Code(visible=False),
        *show_attached(None),
    ]


def choose_step(stage: int, seen: dict[str, str], at: float, touched: bool) -> int | None:
    """Follow the run to its step, unless the visitor looks at another."""
    if "stage" not in seen or (int(at) == int(seen["stage"]) and not touched):
        return stage
    return None


def slider_of(run: Run) -> gr.Slider:
    """Put the slider at the run's own budget, within its reach."""
    own = run.plan.budget or DEFAULT_BUDGET
    most = max(2 * MIN_BUDGET, min(MAX_BUDGET, run.positions), own)
    return gr.Slider(value=own, minimum=min(MIN_BUDGET, own), maximum=most)


def draw_own_shares(run: Run) -> tuple[Any, Any]:
    """Draw what the run itself decided; until it has, what is predicted for its budget."""
    try:
        figure, card = draw_shares(run)
        return plot_json(figure), card
    except LinearizerError as error:
        return gr.skip(), html.message_box(str(error), "bad")


def publication_piece(run: Run, parts: dict[str, run_state.Piece]) -> run_state.Piece:
    """Say how publishing goes; if this server published nothing, what the log says was published last."""
    publication, before = sending.latest_publication(run), parts.get("published")
    if publication is not None and publication.published is not None:
        card, snippet = cards.published_card(asdict(publication.published)), publication.published.snippet
    elif publication is not None:
        card, snippet = cards.sending_card(publication.repo_id, publication.progress, publication.error), ""
    elif before is not None:
        card, snippet = cards.published_card(before.value), before.value.get("snippet", "")
    else:
        card, snippet = "", ""
    return run_state.Piece(card, (card, gr.Code(value=snippet, visible=bool(snippet))))
