"""Handlers of an evaluation: start it, stop it, show each part once it is finished."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gradio as gr

from linearizer.errors import LinearizerError, RequestError
from linearizer.page import actions, cards, run_state
from linearizer.page.calls import Browser, handler
from linearizer.page.handlers import SOON_SECONDS, plot_json, watched_run
from linearizer.page.run_state import PART_PREFIX
from linearizer.report import markup
from linearizer.report.parts import PART_VIEWS
from linearizer.workers import control

SPEED_SECONDS = 5.0  # that one measurement of speed may take: visitors wait for it


def read_choices(parts: list[str], texts: float, tasks: str, limit: float | None) -> dict[str, Any]:
    """Read the choices on the page as those of a Request."""
    if not parts:
        raise RequestError("no part was chosen: choose what to measure")
    named = [name for name in (tasks or "").replace(",", " ").split() if name] if "tasks" in parts else []
    if "tasks" in parts and not named:
        raise RequestError("no task was named: write some of lm_eval's, such as piqa,arc_easy")
    limited = {"tasks": named, "limit": int(limit) if limit else None} if named else {}
    return {"parts": list(parts), "texts": int(texts), "seconds": SPEED_SECONDS, **limited}


@handler
def start_evaluation(browser: Browser, parts: list[str], texts: float, tasks: str, limit: float | None) -> Any:
    """Start an evaluation, which goes on without the page."""
    actions.start_evaluation(browser.visitor, browser.run_name, read_choices(parts, texts, tasks, limit))
    return gr.Timer(SOON_SECONDS)


@handler
def stop_evaluation(browser: Browser) -> Any:
    """Stop an evaluation; its finished parts are kept."""
    actions.stop_evaluation(browser.visitor, browser.run_name)
    return gr.Timer(SOON_SECONDS)


@handler
def forecast_evaluation(browser: Browser, parts: list[str], texts: float, tasks: str, limit: float | None) -> str:
    """Say how long the chosen parts will take, where there is a student."""
    try:
        if not browser.run_name or not browser.find_run().checkpoint.is_dir():
            return ""
        choices = read_choices(parts, texts, tasks, limit)
        return cards.times_line(actions.forecast_evaluation(browser.visitor, browser.run_name, choices))
    except LinearizerError as error:
        return markup.message_box(str(error))


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
    new, before = part_marks(pieces), seen.get("marks", {}) if seen.get("run") == name else None
    outputs = [{"run": name, "marks": new}, gr.Button(interactive=student and not live), gr.Button(visible=live)]
    for part, view in PART_VIEWS.items():
        count = 2 * len(view.charts)  # a place and a chart for each
        if part not in new:
            gone = before is None or part in before
            outputs += [gr.Column(visible=False) if gone else gr.skip(), *[gr.skip()] * (1 + count)]
        elif before is not None and before.get(part) == new[part]:
            outputs += [gr.skip()] * (2 + count)
        else:
            tables, figures = pieces[PART_PREFIX + part].value()  # drawn when it is first shown
            outputs += [gr.Column(visible=True), tables]
            for figure in figures:
                outputs += [gr.Column(visible=figure is not None), plot_json(figure)]
    return outputs
