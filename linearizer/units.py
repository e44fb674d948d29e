"""Amounts as people write them."""

from __future__ import annotations


def number(count: int) -> str:
    """Parameters of a model: 7 million, 1.24 billion."""
    for unit, name in ((10**9, "billion"), (10**6, "million")):
        if count >= unit:
            return f"{count / unit:.3g} {name}"
    return f"{count:,}"


def duration(seconds: float) -> str:
    """A time, coarsely: 40 s, 12 min, 3.5 h."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def ago(moment: float, now: float) -> str:
    """How long ago something was, so coarsely that it need not be said again every second."""
    past = max(0.0, now - moment)
    if past < 5:
        return "just now"
    return f"{duration(past - past % 5 if past < 90 else past)} ago"
