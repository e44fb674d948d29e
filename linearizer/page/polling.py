"""The page as a watcher of one run: a light look every few seconds, and a drawing of what has changed since.

Gradio takes a millisecond for every output of an answer, used or not: so the look has few, and tells by two marks
whether there is something to draw.
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
from linearizer.page.handlers import Memory, Profile, Token, plot, run_named, shares, who
from linearizer.page.layout import LEAST, MOST
from linearizer.publish import html
from linearizer.run.folder import Run

LOOKS = 3.0  # seconds between two looks at a run at work
RARELY = 5.0  # seconds between two looks where nothing is at work
PLOTS = ("map", "curves", "positions", "recall", "memory")
BUTTONS = ("stop", "resume", "use")
OFTEN = ("card", "training", "losses", "kl", "evaluating card")  # parts that are told without a drawing of all


def look(memory: Memory, profile: Profile, token: Token) -> tuple[str, str, str, str, str, str]:
    """Say how the run and its evaluation are, and by marks what the page, its curves, and its parts should show."""
    name = run_named(memory)
    if name is None:
        return cards.run_card(None, "", 0.0), "", "", "none", "none", "none"
    try:
        run = who(memory, profile, token).find(name)
        parts = run_state.look(run, time.time())
    except LinearizerError as error:
        return html.said(str(error), "bad"), "", "", "gone", "none", "none"
    rest = {key: part.mark for key, part in parts.items() if key not in OFTEN and not key.startswith(run_state.PART)}
    mark = json.dumps([name, rest, sent_part(run, parts).mark])
    found = json.dumps([name, parts["evaluating"].mark, parts["can"].mark, evaluation_handlers.marks(parts)])
    told = (parts[key].value for key in ("card", "training", "evaluating card"))
    return *told, mark, f"{name} {parts['losses'].mark}", found


def curves(memory: Memory, profile: Profile, token: Token) -> tuple[Any, Any]:
    """Draw how training goes."""
    name = run_named(memory)
    if name is None:
        return None, None
    try:
        parts = run_state.look(who(memory, profile, token).find(name), time.time())
    except LinearizerError:  # it was deleted; the look says so
        return None, None
    return plot(parts["losses"].value), plot(parts["kl"].value)


def draw(memory: Memory, seen: dict[str, str], at: float, touched: bool, profile: Profile, token: Token) -> list[Any]:
    """Send what is new of the run that this page watches."""
    name = run_named(memory)
    if name is None:
        return nothing()
    try:
        run = who(memory, profile, token).find(name)
        parts = run_state.look(run, time.time())
    except LinearizerError:  # it was deleted; the look says so
        return nothing()
    new = {key: part.value for key, part in parts.items() if seen.get(key) != part.mark}
    sent, can = sent_part(run, parts), new.get("can")
    live = {parts["state"].value, parts["evaluating"].value} & set(control.LIVE) or sending.busy(run)
    measured = "measured" in new and not touched
    bars, other_card = first_shares(run) if measured else (gr.skip(), gr.skip())
    stage = step_to_show(parts["stage"].value, seen, at, touched) if "stage" in new else None
    return [
        {**seen, **{key: part.mark for key, part in parts.items()}},
        gr.Timer(LOOKS if live else RARELY),
        new.get("evaluation", gr.skip()),
        *(plot(new[key]) if key in new else gr.skip() for key in PLOTS),
        *(gr.Button(visible=can[key]) if can else gr.skip() for key in BUTTONS),
        gr.Button(interactive=can["student"]) if can else gr.skip(),
        gr.Button(interactive=True) if "measured" in new else gr.skip(),
        gr.Slider(value=budget_of(run), maximum=longest(run)) if measured else gr.skip(),
        bars,
        other_card,
        gr.Walkthrough(selected=stage) if stage else gr.skip(),
        *sent.value,
    ]


def nothing() -> list[Any]:
    """Show no run."""
    closed = [*[gr.Button(visible=False)] * len(BUTTONS), *[gr.Button(interactive=False)] * 2]
    return [
        {},
        gr.Timer(RARELY),
        "",
        *[None] * len(PLOTS),
        *closed,
        gr.skip(),
        None,
        "",
        gr.skip(),
        "",
        gr.Code(visible=False),
    ]


def step_to_show(stage: int, seen: dict[str, str], at: float, touched: bool) -> int | None:
    """Turn the page with the run, but not away from where someone is reading."""
    if "stage" not in seen or (int(at) == int(seen["stage"]) and not touched):
        return stage
    return None


def budget_of(run: Run) -> int:
    return run.plan.budget or LEAST * 8


def longest(run: Run) -> int:
    return max(2 * LEAST, min(MOST, run.positions))


def first_shares(run: Run) -> tuple[Any, Any]:
    """Share out the budget of the run itself."""
    try:
        figure, card = shares(run, budget_of(run))
        return plot(figure), card
    except LinearizerError as error:
        return gr.skip(), html.said(str(error), "bad")


def sent_part(run: Run, parts: dict[str, run_state.Part]) -> run_state.Part:
    """Say how publishing goes; where nothing is being sent, what the run's log says was published last."""
    publication, before = sending.latest(run), parts.get("published")
    if publication is not None and publication.published is not None:
        card, snippet = cards.published_card(asdict(publication.published)), publication.published.snippet
    elif publication is not None:
        card, snippet = cards.sending_card(publication.repo_id, publication.progress, publication.error), ""
    elif before is not None:
        card, snippet = cards.published_card(before.value), before.value.get("snippet", "")
    else:
        card, snippet = "", ""
    return run_state.Part(card, (card, gr.Code(value=snippet, visible=bool(snippet))))
