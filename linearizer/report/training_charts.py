"""Figures of how a run goes and what came of it: its training, and what its student remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linearizer.amounts import size
from linearizer.plan.allocation import StateSize
from linearizer.report import chart_style as style

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ERRORS = {"attention_error": "attention error", "kl": "KL to the teacher"}  # by the key in a step's event
Steps = Sequence[Mapping[str, Any]]  # events of a training


def steps_axis(events: Steps) -> dict[str, Any]:
    """Lay out an axis of steps of training, with ticks at whole steps."""
    few = not events or events[-1]["done"] < 8
    return {"title": "steps of training", "rangemode": "tozero", "tickformat": ",d", "dtick": 1 if few else None}


def draw_training_losses(events: Steps) -> Figure:
    """Draw the loss of every layer, above the least possible, over the steps of a training."""
    shown = style.thin_points([event for event in events if event.get("layers")])
    names = sorted({name for event in shown for name in event["layers"]}, key=int)
    few = len(names) <= style.MAX_LABELLED
    unit = "nats" if any(event.get("attention_error") is not None for event in shown) else "in the loss's own unit"
    figure = style.new_figure(
        340, steps_axis(shown), {"title": f"loss above the least, {unit}", **style.LOG_AXIS}, showlegend=False
    )
    for place, name in enumerate(names):
        values = [event["layers"].get(name) for event in shown]
        figure.add_scatter(
            x=[event["done"] for event in shown],
            y=[value if value is not None and value > 0 else None for value in values],
            text=[*[""] * (len(values) - 1), name] if few else None,
            textposition="middle right",
            cliponaxis=False,
            mode="lines+text" if few else "lines",
            line=style.layer_line(place, len(names), 1.5),
            name=f"layer {name}",
            hovertemplate="%{y:.3g} at step %{x}<extra>layer " + name + "</extra>",
        )
    return figure


def draw_errors(events: Steps) -> Figure:
    """Draw the error over the steps of a training, for the latest loss that has an error."""
    name = next((name for event in reversed(events) for name in ERRORS if event.get(name) is not None), "kl")
    shown = style.thin_points([event for event in events if event.get(name) is not None])
    y = {"title": f"{ERRORS[name]}, nats per token", "rangemode": "tozero"}
    return style.new_figure(240, steps_axis(shown), y, showlegend=False).add_scatter(
        x=[event["done"] for event in shown],
        y=[event[name] for event in shown],
        mode="lines",
        line={"color": style.BLUE, "width": 2},
        hovertemplate="%{y:.4f} nats at step %{x}<extra></extra>",
    )


def draw_state_size(state: StateSize, positions: int) -> Figure:
    """Draw the bytes of the teacher's cache and of the student's state over the lengths that the teacher reads."""
    counts = style.COUNTS_AXIS
    figure = style.new_figure(280, {"title": "tokens read", **counts}, {"title": "state or cache, bytes", **counts})
    lengths = [*(1 << step for step in range(5, (positions - 1).bit_length())), positions]
    sizes = {"teacher": ("cache of the teacher", state.teacher_bytes)}
    sizes |= {"student": ("state of the student", state.student_bytes)}
    for name, (title, bytes_after) in sizes.items():
        values = [bytes_after(length) for length in lengths]
        line = style.subject_line(name, "%{customdata} after %{x} tokens") | {"name": title, "mode": "lines"}
        figure.add_scatter(x=lengths, y=values, customdata=[size(value) for value in values], **line)
    begin = state.breakeven
    if begin and lengths[0] <= begin <= lengths[-1]:
        figure.add_scatter(
            x=[begin],
            y=[state.teacher_bytes(begin)],
            text=[f"smaller from {begin:,} tokens on"],
            mode="markers+text",
            marker={"color": style.BLUE, "symbol": "diamond", "size": 10},
            textposition="bottom right",
            showlegend=False,
            hoverinfo="skip",
        )
    return figure
