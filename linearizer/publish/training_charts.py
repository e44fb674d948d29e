"""Figures of how a run goes and what came of it: its training, and what its student remembers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from linearizer.amounts import size
from linearizer.publish.chart_style import BLUE, LABELLED, dash, plain, shade, side
from linearizer.run import head_bytes
from linearizer.run.head_bytes import Layer

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

SHOWN = 300  # steps drawn of a training; more cannot be told apart


def thinned(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Keep at most so many events as can be told apart, the newest among them."""
    every = -(-len(events) // SHOWN) or 1
    return list(events[(len(events) - 1) % every :: every])


def loss_lines(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the loss of every layer, above the least it can have, over the steps of a training."""
    figure = plain(340, showlegend=False)
    shown = thinned([event for event in events if event.get("layers")])
    names = sorted({name for event in shown for name in event["layers"]}, key=int)
    for place, name in enumerate(names):
        values = [event["layers"].get(name) for event in shown]
        figure.add_scatter(
            x=[event["done"] for event in shown],
            y=[value if value is not None and value > 0 else None for value in values],
            mode="lines",
            line={"color": shade(place, len(names)), "width": 1.5, "dash": dash(place)},
            name=f"layer {name}",
            hovertemplate="%{y:.3g} at step %{x}<extra>layer " + name + "</extra>",
        )
        if len(names) <= LABELLED and values[-1] is not None and values[-1] > 0:
            figure.add_annotation(
                x=shown[-1]["done"], y=math.log10(values[-1]), text=name, showarrow=False, xanchor="left", xshift=4
            )
    figure.update_xaxes(title="step", rangemode="tozero")
    figure.update_yaxes(title="loss of each layer", type="log", exponentformat="power")
    return figure


def kl_line(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the divergence from the teacher over the steps of a training, where the loss tells it."""
    figure = plain(240, showlegend=False)
    shown = thinned([event for event in events if event.get("kl") is not None])
    figure.add_scatter(
        x=[event["done"] for event in shown],
        y=[event["kl"] for event in shown],
        mode="lines",
        line={"color": BLUE, "width": 2},
        hovertemplate="%{y:.4f} nats at step %{x}<extra></extra>",
    )
    figure.update_xaxes(title="step", rangemode="tozero")
    figure.update_yaxes(title="KL to the teacher", rangemode="tozero")
    return figure


def memory_lines(layers: Sequence[Layer], fixed: int, growth: int = 0, longest: int = 131072) -> Figure:
    """Draw what teacher and student remember over the length of a text; `growth` bytes a token are left softmax."""
    figure = plain(280)
    lengths = [1 << step for step in range(5, longest.bit_length())]
    caches = [head_bytes.cache_bytes(layers, length) for length in lengths]
    states = [fixed + growth * length for length in lengths]
    for name, values in (("teacher", caches), ("student", states)):
        title = "cache of the teacher" if name == "teacher" else "state of the student"
        look = side(name, "%{customdata} after %{x} tokens") | {"name": title, "mode": "lines"}
        figure.add_scatter(x=lengths, y=values, customdata=[size(value) for value in values], **look)
    begin = head_bytes.meeting(fixed, head_bytes.cache_bytes(layers, 1) - growth)
    if begin and lengths[0] <= begin <= lengths[-1]:
        figure.add_scatter(
            x=[begin],
            y=[head_bytes.cache_bytes(layers, begin)],
            mode="markers",
            marker={"color": BLUE, "symbol": "diamond", "size": 10},
            showlegend=False,
            hoverinfo="skip",
        )
        at = {"x": math.log10(begin), "y": math.log10(head_bytes.cache_bytes(layers, begin))}
        label = f"smaller from {begin:,} tokens on"
        figure.add_annotation(**at, text=label, showarrow=False, xanchor="left", yanchor="top", xshift=6, yshift=-4)
    ticks = [length for length in lengths if length.bit_length() % 3 == 0]
    figure.update_xaxes(title="tokens read", type="log", tickvals=ticks, ticktext=[short(tick) for tick in ticks])
    powers = [
        1000**n * m for n in range(1, 5) for m in (1, 10, 100) if min(states + caches) <= 1000**n * m <= max(caches)
    ]
    figure.update_yaxes(type="log", tickvals=powers, ticktext=[size(power) for power in powers])
    return figure


def short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)
