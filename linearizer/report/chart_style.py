"""How all figures look: colours for every eye, no background, and lines that differ by more than their colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

T = TypeVar("T")
Options = Mapping[str, Any]  # of plotly
NO_OPTIONS: Options = {}
# Okabe and Ito's order of hues, at a lightness that stands out from white and from black by 3:1.
BLUE, ORANGE, GREY, GREEN, PURPLE = "#2a83c4", "#cf6f10", "#7c8796", "#12906f", "#b0639a"
MAP_COLOURS = ((0.0, "#5b8fc9"), (0.35, "#5fb3c4"), (0.65, "#86cfa8"), (1.0, "#d8f3b8"))  # lightness rises all the way
WORSE_COLOURS = [[1 - at, colour] for at, colour in reversed(MAP_COLOURS)]  # dark cells cost more, or miss more
MAP_INK = "#000000"  # can be read on all of them
LAYER_COLOURS = [[0.0, "#6a5fb5"], [0.5, "#2a83c4"], [1.0, "#17937f"]]  # the same, seen as lines on white and on black
LAYER_DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 300  # of a line: more cannot be seen
MAX_LABELLED = 16  # lines, or heads of a layer, beside which numbers can be read
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
LOG_AXIS = {"type": "log", "tickformat": ",~g", "nticks": 4}
COUNTS_AXIS = {"type": "log", "tickformat": "~s", "nticks": 4}  # of bytes or tokens
SUBJECT_STYLES = {  # name -> legend, colour, marker, dash
    "teacher": ("teacher", GREY, "circle", "dot"),
    "student": ("student", BLUE, "diamond", "solid"),
    "window": ("plain window", ORANGE, "square", "dash"),
    "untrained": ("untrained student", GREEN, "cross", "dashdot"),
    "cache, 2 bits": ("cache, 2 bits", PURPLE, "triangle-down", "longdash"),
    "cache, 3 bits": ("cache, 3 bits", PURPLE, "star", "longdashdot"),
    "cache, 4 bits": ("cache, 4 bits", PURPLE, "triangle-up", "2px,5px"),
}
MAP_CELLS = {"xgap": 2, "ygap": 2, "hoverongaps": False, "textfont": {"size": 11, "color": MAP_INK}}
MAP_GROUND = "rgba(128,138,150,0.10)"


def new_figure(height: int, x: Options = NO_OPTIONS, y: Options = NO_OPTIONS, **layout: Any) -> Figure:
    """Create a figure with options of its axes, in one piece, which plotly checks ten times as fast as many."""
    from plotly.graph_objects import Figure

    figure = Figure(layout={**LAYOUT, "height": height, "xaxis": {**XAXIS, **x}, "yaxis": {**YAXIS, **y}, **layout})
    return figure.update_yaxes(title_standoff=8)  # from its numbers, which are wider on some axes


def thin_points(points: Sequence[T], most: int = MAX_POINTS) -> list[T]:
    """Keep some of the points of a line, the first and the last among them."""
    every = max(1, -(-len(points) // (most - 1)))
    return [*points[:-1:every], *points[-1:]]


def layer_line(number: int, count: int) -> dict[str, Any]:
    """Describe the line of a layer: colours go from the first to the last, and neighbours differ by dashes, too."""
    from plotly.colors import sample_colorscale

    colour = str(sample_colorscale(LAYER_COLOURS, number / max(1, count - 1))[0])
    return {"color": colour, "width": 1.5, "dash": LAYER_DASHES[number % len(LAYER_DASHES)]}


def subject_line(name: str, hover: str) -> dict[str, Any]:
    """Describe the line of a subject: the same colour, marker and dashes in every figure."""
    title, colour, symbol, dash = SUBJECT_STYLES.get(name, (name, GREEN, "cross", "dashdot"))
    return {
        "name": title,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2, "dash": dash},
        "marker": {"symbol": symbol, "size": 9},
        "hovertemplate": hover + f"<extra>{title}</extra>",
    }
