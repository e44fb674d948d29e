"""Figures of how a run goes and what came of it: its training, and what its student remembers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linearizer.amounts import size
from linearizer.plan.state_size import STATED_LENGTHS, StateSize
from linearizer.report.chart_style import (
    BLUE,
    COUNTS_AXIS,
    LOG_AXIS,
    MAX_LABELLED,
    layer_line,
    new_figure,
    subject_line,
    thin_points,
)

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

ERRORS = {"attention_error": "attention error", "kl": "KL to the teacher"}  # by the key in a step's event


def steps_axis(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lay out an axis of steps of training, with ticks at whole steps."""
    few = not events or events[-1]["done"] < 8
    return {"title": "steps of training", "rangemode": "tozero", "tickformat": ",d", "dtick": 1 if few else None}


def draw_training_losses(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the loss of every layer, above the least possible, over the steps of a training."""
    figure = new_figure(340, showlegend=False)
    shown = thin_points([event for event in events if event.get("layers")])
    names = sorted({name for event in shown for name in event["layers"]}, key=int)
    for place, name in enumerate(names):
        values = [event["layers"].get(name) for event in shown]
        few = len(names) <= MAX_LABELLED
        figure.add_scatter(
            x=[event["done"] for event in shown],
            y=[value if value is not None and value > 0 else None for value in values],
            text=[*[""] * (len(values) - 1), name] if few else None,
            textposition="middle right",
            cliponaxis=False,
            mode="lines+text" if few else "lines",
            line=layer_line(place, len(names), 1.5),
            name=f"layer {name}",
            hovertemplate="%{y:.3g} at step %{x}<extra>layer " + name + "</extra>",
        )
    figure.update_xaxes(**steps_axis(shown))
    unit = "nats" if any(event.get("attention_error") is not None for event in shown) else "in the loss's own unit"
    figure.update_yaxes(title=f"loss above the least, {unit}", **LOG_AXIS)
    return figure


def draw_errors(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the error over the steps of a training, for the latest loss that has an error."""
    figure = new_figure(240, showlegend=False)
    name = next((name for event in reversed(events) for name in ERRORS if event.get(name) is not None), "kl")
    shown = thin_points([event for event in events if event.get(name) is not None])
    figure.add_scatter(
        x=[event["done"] for event in shown],
        y=[event[name] for event in shown],
        mode="lines",
        line={"color": BLUE, "width": 2},
        hovertemplate="%{y:.4f} nats at step %{x}<extra></extra>",
    )
    figure.update_xaxes(**steps_axis(shown))
    figure.update_yaxes(title=f"{ERRORS[name]}, nats per token", rangemode="tozero")
    return figure


def draw_state_size(state: StateSize) -> Figure:
    """Draw the bytes of the teacher's cache and of the student's state over the length of a text."""
    figure = new_figure(280)
    lengths = [1 << step for step in range(5, STATED_LENGTHS[-1].bit_length())]
    for name, title, bytes_after in (
        ("teacher", "cache of the teacher", state.teacher_bytes),
        ("student", "state of the student", state.student_bytes),
    ):
        values = [bytes_after(length) for length in lengths]
        line = subject_line(name, "%{customdata} after %{x} tokens") | {"name": title, "mode": "lines"}
        figure.add_scatter(x=lengths, y=values, customdata=[size(value) for value in values], **line)
    begin = state.breakeven
    if begin and lengths[0] <= begin <= lengths[-1]:
        figure.add_scatter(
            x=[begin],
            y=[state.teacher_bytes(begin)],
            text=[f"smaller from {begin:,} tokens on"],
            mode="markers+text",
            marker={"color": BLUE, "symbol": "diamond", "size": 10},
            textposition="bottom right",
            showlegend=False,
            hoverinfo="skip",
        )
    figure.update_xaxes(title="tokens read", **COUNTS_AXIS)
    figure.update_yaxes(title="state or cache, bytes", **COUNTS_AXIS)
    return figure
