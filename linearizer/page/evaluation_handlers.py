"""The page where a student is evaluated: starting it, stopping it, and showing each part as it is finished."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import gradio as gr

from linearizer.errors import LinearizerError, RequestError
from linearizer.jobs import control
from linearizer.page import actions, evaluation_cards, run_state
from linearizer.page.handlers import Memory, Profile, Token, plot, run_named, telling, who
from linearizer.page.run_state import PART
from linearizer.publish import html
from linearizer.publish.parts import PART_VIEWS

SECONDS = 5.0  # that one measurement of speed may take here: people wait for it


def choices_of(parts: list[str], texts: float, tasks: str, limit: float | None) -> dict[str, Any]:
    """Read what was chosen."""
    if not parts:
        raise RequestError("no part was chosen: choose what to measure")
    named = [name for name in (tasks or "").replace(",", " ").split() if name] if "tasks" in parts else []
    if "tasks" in parts and not named:
        raise RequestError("no task was named: write some of lm_eval's, such as piqa,arc_easy")
    limited = {"tasks": named, "limit": int(limit) if limit else None} if named else {}
    return {"parts": list(parts), "texts": int(texts), "seconds": SECONDS, **limited}


@telling
def evaluate(
    memory: Memory, parts: list[str], texts: float, tasks: str, limit: float | None, profile: Profile, token: Token
) -> Any:
    """Start an evaluation; from here on the page only watches."""
    actions.evaluate(who(memory, profile, token), run_named(memory) or "", choices_of(parts, texts, tasks, limit))
    return gr.Timer(0.2)


@telling
def stop(memory: Memory, profile: Profile, token: Token) -> Any:
    """Stop it; the parts that are finished are kept."""
    control.stop(who(memory, profile, token).find(run_named(memory) or "").evaluating)
    return gr.Timer(0.2)


def foreseen(
    memory: Memory, parts: list[str], texts: float, tasks: str, limit: float | None, profile: Profile, token: Token
) -> str:
    """Say how long the chosen parts will take, where there is a student."""
    name = run_named(memory)
    if name is None:
        return ""
    try:
        someone, choices = who(memory, profile, token), choices_of(parts, texts, tasks, limit)
        if not someone.find(name).checkpoint.is_dir():
            return ""
        return evaluation_cards.times_line(actions.foresee_evaluation(someone, name, choices))
    except LinearizerError as error:
        return html.said(str(error))


def marks(parts: Mapping[str, run_state.Part]) -> dict[str, str]:
    """Say which finding of every part there is."""
    return {part: parts[PART + part].mark for part in PART_VIEWS if PART + part in parts}


def draw(memory: Memory, seen: dict[str, Any], profile: Profile, token: Token) -> list[Any]:
    """Show the parts that are new since this page was last drawn."""
    name = run_named(memory)
    found: Mapping[str, run_state.Part] = {}
    if name is not None:
        try:
            found = run_state.look(who(memory, profile, token).find(name), time.time())
        except LinearizerError:  # it was deleted; the look says so
            name = None
    live = name is not None and found["evaluating"].value in control.LIVE
    student = name is not None and found["can"].value["student"]
    new, before = marks(found), seen.get("marks", {}) if seen.get("run") == name else None
    outputs = [{"run": name, "marks": new}, gr.Button(interactive=student and not live), gr.Button(visible=live)]
    for part, view in PART_VIEWS.items():
        count = 2 * len(view.charts)  # a place and a chart for each
        if part not in new:
            gone = before is None or part in before
            outputs += [gr.Column(visible=False) if gone else gr.skip(), *[gr.skip()] * (1 + count)]
        elif before is not None and before.get(part) == new[part]:
            outputs += [gr.skip()] * (2 + count)
        else:
            tables, figures = found[PART + part].value()  # drawn when it is first shown
            outputs += [gr.Column(visible=True), tables]
            for figure in figures:
                outputs += [gr.Column(visible=figure is not None), plot(figure)]
    return outputs
