"""Plotly figures of layers and of training, and the style of all figures.

Colours suit colour-blind eyes, lines differ by more than their colour, and no value is shown by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from linearizer.run.measured import Profile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

T = TypeVar("T")
Options = Mapping[str, Any]  # of plotly
# Okabe and Ito's order of hues, at a lightness whose contrast to white and to black is 3:1.
BLUE, ORANGE, GREY, GREEN = "#2a83c4", "#cf6f10", "#7c8796", "#12906f"
LAYER_COLOURS = [[0.0, "#6a5fb5"], [0.5, "#2a83c4"], [1.0, "#17937f"]]  # similar, visible on white and on black
MAX_POINTS = 300  # of a line: more cannot be seen
LABEL_ROOM = 64  # pixels at the right, for the names of lines
SMOOTHED = 0.03  # of a line: how much of it is averaged for the mean of layers
FAINT = "rgba(128,138,150,0.22)"
FONT = {"family": "system-ui, sans-serif", "size": 12}
BUTTONS = ["zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale", "resetScale", "toImage"]
LAYOUT = {  # no background, title or surplus lines
    "template": "none",
    "autosize": True,
    "paper_bgcolor": "rgba(0,0,0,0)",
    "plot_bgcolor": "rgba(0,0,0,0)",
    "font": {**FONT, "color": GREY},
    "margin": {"l": 56, "r": 16, "t": 20, "b": 44},  # pixels
    "hoverlabel": {"bgcolor": "#1f2430", "bordercolor": "#ffffff", "font": {**FONT, "color": "#ffffff"}},
    "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
    "modebar": {"remove": BUTTONS},
    "dragmode": False,
}
XAXIS = {"showgrid": False, "zeroline": False, "linecolor": FAINT, "ticks": "", "automargin": True}
YAXIS = {"gridcolor": FAINT, "zeroline": False, "ticks": "", "automargin": True}
LOG_AXIS = {"type": "log", "tickformat": ",~r", "nticks": 4}  # g would write some numbers with an exponent
COUNTS_AXIS = {"type": "log", "tickformat": "~s", "nticks": 4}  # of bytes or tokens
SUBJECT_STYLES = {  # name -> legend, colour, marker, dash
    "teacher": ("teacher", GREY, "circle", "dot"),
    "student": ("student", BLUE, "diamond", "solid"),
    "window": ("plain window", ORANGE, "square", "dash"),
}
MIN_DRAWN_KL = 1e-6  # nats per token: a smaller KL is drawn as this


def new_figure(height: int, x: Options, y: Options, **layout: Any) -> Figure:
    """Create a figure with options of its axes; plotly checks a whole layout ten times as fast as its pieces."""
    from plotly.graph_objects import Figure

    figure = Figure(layout={**LAYOUT, "height": height, "xaxis": {**XAXIS, **x}, "yaxis": {**YAXIS, **y}, **layout})
    return figure.update_yaxes(title_standoff=8)  # from the numbers, which are wider on some axes


def thin_points(points: Sequence[T], max_points: int = MAX_POINTS) -> list[T]:
    """Keep at most `max_points` points of a line, the first and the last among them."""
    stride = max(1, -(-len(points) // (max_points - 1)))
    return [*points[:-1:stride], *points[-1:]]


def add_layers(figure: Figure, x: Sequence[float], layers: Mapping[str, Sequence[float | None]], hover: str) -> None:
    """Add a faint line for each layer, a bold one for their mean, and the names of the highest, lowest and mean."""
    from plotly.colors import sample_colorscale

    for place, (name, values) in enumerate(layers.items()):
        colour = str(sample_colorscale(LAYER_COLOURS, place / max(1, len(layers) - 1))[0])
        drawn = [value if value is not None and value > 0 else None for value in values]  # on an axis of factors
        shown = {"hovertemplate": f"{hover}<extra>layer {name}</extra>", "name": f"layer {name}"}
        figure.add_scatter(x=x, y=drawn, mode="lines", line={"color": colour, "width": 1}, opacity=0.6, **shown)
    columns = [[value for value in column if value is not None] for column in zip(*layers.values(), strict=True)]
    means = smoothed([sum(column) / len(column) if column else None for column in columns])
    shown = {"hovertemplate": f"{hover}<extra>mean of the layers</extra>", "name": "mean"}
    figure.add_scatter(x=x, y=means, mode="lines", line={"color": BLUE, "width": 3.5}, **shown)
    ends = {name: values[-1] for name, values in layers.items() if values and values[-1]}
    extremes = {f"layer {pick(ends, key=lambda name: ends[name] or 0)}" for pick in (min, max) if ends}
    for line in figure.data:
        if line.name in extremes | {"mean"}:
            names = [""] * (len(line.x) - 1) + [line.name]
            line.update(mode="lines+text", text=names, textposition="middle right", cliponaxis=False)
    figure.update_layout(showlegend=False, margin_r=LABEL_ROOM)


def smoothed(values: Sequence[float | None]) -> list[float | None]:
    """Average each value with those before it, over a share of the line."""
    keep, running, out = 1 - 1 / max(1, SMOOTHED * len(values)), None, []
    for value in values:
        if value is not None:
            running = value if running is None else keep * running + (1 - keep) * value
        out.append(running)
    return out


def add_subject(figure: Figure, name: str, x: Sequence[int], y: Sequence[float | None], hover: str) -> None:
    """Add the line of a subject: the same colour, marker and dashes in every figure."""
    title, colour, symbol, dash = SUBJECT_STYLES.get(name, (name, GREEN, "cross", "dashdot"))
    line, marker = {"color": colour, "width": 2, "dash": dash}, {"symbol": symbol, "size": 9}
    look = {"mode": "lines+markers", "line": line, "marker": marker}
    figure.add_scatter(x=x, y=y, name=title, hovertemplate=f"{hover}<extra>{title}</extra>", **look)


def draw_training_losses(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw how far the loss of every layer is above the least possible, over the steps of a training."""
    thinned = thin_points([event for event in events if event.get("layers")])
    names = sorted({name for event in thinned for name in event["layers"]}, key=int)
    unit = "nats" if any(event.get("attention_error") is not None for event in thinned) else "in the loss's own unit"
    spacing = 1 if not thinned or thinned[-1]["done"] < 8 else None  # of ticks, at whole steps
    x = {"title": "steps of training", "rangemode": "tozero", "tickformat": ",d", "dtick": spacing}
    figure = new_figure(340, x, {"title": f"loss above the least, {unit}", **LOG_AXIS})
    layers = {name: [event["layers"].get(name) for event in thinned] for name in names}
    add_layers(figure, [event["done"] for event in thinned], layers, "%{y:.3g} at step %{x}")
    return figure


def draw_freedom_curves(profile: Profile) -> Figure:
    """Draw N(λ) of every layer, the mean of its heads, and of the model."""
    ridges = profile.settings.ridges
    layers = {
        str(index): [sum(at) / len(at) for at in zip(*(head.freedoms for head in layer.heads), strict=True)]
        for index, layer in enumerate(profile.layers)
        if layer.heads
    }
    powers = [(ridge, f"2<sup>{math.log2(ridge):.0f}</sup>") for ridge in ridges[::4]]
    x: dict[str, Any] = {"title": "λ, as a share of the kernel", "type": "log", "autorange": "reversed"}
    x |= {"tickvals": [ridge for ridge, _ in powers], "ticktext": [name for _, name in powers]}
    y = {"title": "degrees of freedom, N(λ)", **LOG_AXIS}
    figure = new_figure(340, x, y)
    add_layers(figure, ridges, layers, "%{y:.3g} at λ = %{x:.2g}")
    return figure.add_vline(x=profile.settings.reference, line={"color": GREY, "width": 1, "dash": "dot"})
