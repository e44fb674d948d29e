"""The HTML of the page's evaluation: its state and progress, and how long its parts will take."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from linearizer.amounts import duration
from linearizer.jobs.control import LIVE, Status
from linearizer.page import cards
from linearizer.publish import html
from linearizer.publish.parts import PART_VIEWS

if TYPE_CHECKING:
    from linearizer.jobs.forecast import EvaluationForecast

ENDED_SENTENCES = {
    "stopped": "Stopped; the parts that were finished are kept. Press Evaluate to go on.",
    "lost": "Its process is gone; the parts that were finished are kept. Press Evaluate to go on.",
}


def evaluation_card(status: Status | None) -> str:
    """Say how far an evaluation is, or how it ended."""
    if status is None:
        return ""
    if status.state in LIVE:
        state = cards.state_sentence(status)
        loud = html.announcement(f"Evaluation: {state}")
        line = f'<p class="lz-state lz-{status.state}"{loud}>{cards.state_sign(status.state)} {escape(state)}</p>'
        return line + ("" if status.step is None or status.state == "queued" else progress_bar(status.step))
    if status.state == "failed":
        return html.message_box(status.error or "it failed", "bad")
    if status.state == "done":
        return html.message_box("Evaluated. The card of the student holds it, too, once it is published.", "good")
    why = f"{status.error}. " if status.state == "stopped" and status.error else ""
    return html.message_box(why + ENDED_SENTENCES[status.state])


def progress_bar(step: Mapping[str, Any]) -> str:
    """Draw how far the parts are, and the newest one."""
    done, total = int(step["done"]), max(1, int(step["total"]))
    place, parts = int(step.get("place", 1)), max(1, int(step.get("parts", 1)))
    part = str(step.get("part"))
    title = PART_VIEWS[part].title if part in PART_VIEWS else str(step["event"])
    share = (place - 1 + min(1.0, done / total)) / parts
    text = f"part {place} of {parts}: {done:,} of {total:,} {step.get('unit', '')}"
    return (
        f'<p class="lz-step">{escape(title)}</p><progress aria-label="evaluation" value="{share:.3f}" max="1">'
        f'</progress><p class="lz-faint">{escape(text)}</p>'
    )


def times_line(forecast: EvaluationForecast) -> str:
    """Say how long the chosen parts will take, and from what that is estimated; nothing where it is unknown."""
    if not forecast.seconds:
        return ""
    pairs = [(PART_VIEWS[part].title, f"about {duration(took)}") for part, took in forecast.seconds.items()]
    facts = html.values_list([*pairs, ("in all", f"about {duration(sum(forecast.seconds.values()))}")], "lz-wide")
    device = f", on {html.without_folders(forecast.device)}" if forecast.device else ""
    return f'{facts}<p class="lz-faint">Estimated from the time that judging this student took{escape(device)}.</p>'
