"""How all our figures look: a palette for every eye, no background, and lines told apart by more than colour."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import plotly.graph_objects as go

# Okabe and Ito's order of hues, at a lightness that stands out from white and from black by 3:1.
BLUE, ORANGE, GREY, GREEN = "#2a83c4", "#cf6f10", "#7c8796", "#12906f"
DEPTH = ((0.0, "#26355d"), (0.35, "#2a6f97"), (0.65, "#2ea39a"), (1.0, "#b9e8a4"))  # lightness rises all the way
LINES = ((0.0, "#6a5fb5"), (0.5, "#2a83c4"), (1.0, "#17937f"))  # the same, seen as lines on white and on black
FAINT = "rgba(128,138,150,0.22)"
SIDES = {  # name -> what it is, colour, marker, dash
    "teacher": ("teacher", GREY, "circle", "dot"),
    "student": ("student", BLUE, "diamond", "solid"),
    "window": ("window of equal bytes", ORANGE, "square", "dash"),
}


def plain(height: int, **layout: Any) -> go.Figure:
    """Begin a figure without background, title or surplus lines."""
    figure = go.Figure()
    return styled(figure, height, **layout)


def styled(figure: go.Figure, height: int, **layout: Any) -> go.Figure:
    """Give a figure the look that all of ours have."""
    figure.update_layout(
        template="none",
        height=height,
        autosize=True,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        margin={"l": 56, "r": 16, "t": 28, "b": 44},
        hoverlabel={"font": {"family": "system-ui, sans-serif", "size": 12}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        modebar={
            "remove": ["zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale", "resetScale", "toImage"]
        },
        dragmode=False,
        **layout,
    )
    figure.update_xaxes(showgrid=False, zeroline=False, linecolor=FAINT, ticks="", automargin=True)
    figure.update_yaxes(gridcolor=FAINT, zeroline=False, ticks="", automargin=True)
    return figure


def shade(place: int, count: int) -> str:
    """Choose a line's colour between the first layer's and the last's."""
    at = place / max(1, count - 1)
    (low, first), (high, last) = next((a, b) for a, b in pairwise(LINES) if at <= b[0])
    share = (at - low) / (high - low)
    mixed = (
        round(int(a, 16) + share * (int(b, 16) - int(a, 16)))
        for a, b in zip(channels(first), channels(last), strict=True)
    )
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def channels(colour: str) -> tuple[str, ...]:
    return colour[1:3], colour[3:5], colour[5:7]


def side(name: str, hover: str) -> dict[str, Any]:
    """Draw one model of a comparison always alike: its colour, its marker, its dashes."""
    title, colour, symbol, dash = SIDES.get(name, (name, GREEN, "cross", "dashdot"))
    return {
        "name": title,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"symbol": symbol, "size": 9},
        "hovertemplate": hover + f"<extra>{title}</extra>",
    }
