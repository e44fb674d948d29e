"""How all our figures look: a palette for every eye, no background, and lines told apart by more than colour."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

# Okabe and Ito's order of hues, at a lightness that stands out from white and from black by 3:1.
BLUE, ORANGE, GREY, GREEN = "#2a83c4", "#cf6f10", "#7c8796", "#12906f"
DEPTH = ((0.0, "#26355d"), (0.35, "#2a6f97"), (0.65, "#2ea39a"), (1.0, "#b9e8a4"))  # lightness rises all the way
LINES = ((0.0, "#6a5fb5"), (0.5, "#2a83c4"), (1.0, "#17937f"))  # the same, seen as lines on white and on black
DASHES = ("solid", "dash", "dot", "dashdot")
LABELLED = 16  # lines, or heads of a layer, beside which numbers can be read
FAINT = "rgba(128,138,150,0.22)"
XAXIS = {"showgrid": False, "zeroline": False, "linecolor": FAINT, "ticks": "", "automargin": True}
YAXIS = {"gridcolor": FAINT, "zeroline": False, "ticks": "", "automargin": True}
SIDES = {  # name -> what it is, colour, marker, dash
    "teacher": ("teacher", GREY, "circle", "dot"),
    "student": ("student", BLUE, "diamond", "solid"),
    "window": ("window of equal bytes", ORANGE, "square", "dash"),
    "untrained": ("untrained student", GREEN, "cross", "dashdot"),
}
PATTERNS = {"teacher": "", "student": "/", "window": ".", "untrained": "x"}


def plain(height: int, **layout: Any) -> Figure:
    """Begin a figure without background, title or surplus lines."""
    from plotly.graph_objects import Figure

    return Figure(layout=look(height, xaxis=XAXIS, yaxis=YAXIS, **layout))


def plain_grid(height: int, titles: Sequence[str], columns: int, coloraxis: dict[str, Any], **spacing: float) -> Figure:
    """Begin a figure of several pairs of axes that share one scale of colours."""
    from plotly.subplots import make_subplots

    rows = -(-len(titles) // columns)
    figure = make_subplots(rows, columns, subplot_titles=titles, shared_yaxes=True, **spacing)
    figure.update_layout(look(height, coloraxis=coloraxis))
    figure.update_xaxes(XAXIS)
    figure.update_yaxes(YAXIS)
    return figure


def look(height: int, **layout: Any) -> dict[str, Any]:
    """Give the layout that all figures begin with, as one piece: plotly checks that ten times as fast as many."""
    return {
        "template": "none",
        "height": height,
        "autosize": True,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": GREY},
        "margin": {"l": 56, "r": 16, "t": 20, "b": 44},
        "hoverlabel": {"font": {"family": "system-ui, sans-serif", "size": 12}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        "modebar": {
            "remove": ["zoom", "pan", "select", "lasso", "zoomIn", "zoomOut", "autoScale", "resetScale", "toImage"]
        },
        "dragmode": False,
        **layout,
    }


def shade(place: int, count: int) -> str:
    """Choose a line's colour between the first layer's and the last's."""
    return blend(LINES, place / max(1, count - 1))


def dash(place: int) -> str:
    """Choose a line's dashes, so that neighbours differ by more than their colour."""
    return DASHES[place % len(DASHES)]


def blend(stops: Sequence[tuple[float, str]], at: float) -> str:
    """Mix the colours of a scale at a share of it."""
    (low, first), (high, last) = next((a, b) for a, b in pairwise(stops) if at <= b[0])
    share = (at - low) / (high - low)
    mixed = (round(a + share * (b - a)) for a, b in zip(channels(first), channels(last), strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def channels(colour: str) -> tuple[int, ...]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def contrast(one: str, other: str) -> float:
    """Give the contrast of two colours as WCAG 2 defines it: 4.5 is the least that text may have."""
    lights = sorted(luminance(colour) + 0.05 for colour in (one, other))
    return lights[1] / lights[0]


def luminance(colour: str) -> float:
    parts = (channel / 255 for channel in channels(colour))
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink(ground: str) -> str:
    """Choose what can be read on a colour: black or white."""
    return max(("#ffffff", "#000000"), key=lambda colour: contrast(colour, ground))


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


def bars(name: str, labels: Sequence[str], values: Sequence[float], form: str) -> dict[str, Any]:
    """Draw one subject's bars always alike: its colour and its pattern, with the numbers on them."""
    look = side(name, "")
    pattern = {"shape": PATTERNS.get(name, "\\"), "size": 5, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)"}
    return {
        "name": look["name"],
        "offsetgroup": name,
        "x": list(labels),
        "y": list(values),
        "marker": {"color": look["line"]["color"], "line": {"width": 0}, "pattern": pattern},
        "hovertemplate": f"%{{x}}: %{{y:{form}}}<extra>{look['name']}</extra>",
    }


def numbers(name: str, labels: Sequence[str], values: Sequence[float], heights: Sequence[float]) -> dict[str, Any]:
    """Write the numbers of one subject's bars, in percent, above them and above what else stands there."""
    return {
        "offsetgroup": name,
        "x": list(labels),
        "y": list(heights),
        "mode": "text",
        "text": [f"{100 * value:.0f}" for value in values],
        "textposition": "top center",
        "textfont": {"size": 9},
        "cliponaxis": False,
        "showlegend": False,
        "hoverinfo": "skip",
    }


def round_ticks(low: float, high: float) -> list[float]:
    """Choose round numbers on a logarithmic axis: 1, 2, 5, 10, … where there is room for them, else powers of ten."""
    wide = high > 200 * low
    ticks = [factor * 10.0**power for power in range(-9, 13) for factor in ((1,) if wide else (1, 2, 5))]
    return [tick for tick in ticks if low / 1.5 <= tick <= high * 1.5]


def opened(look: dict[str, Any], open_ones: Sequence[bool]) -> dict[str, Any]:
    """Leave the markers open of what was not measured."""
    symbol = look["marker"]["symbol"]
    edge = {"width": 2, "color": look["line"]["color"]}
    symbols = [f"{symbol}-open" if beyond else symbol for beyond in open_ones]
    return look | {"marker": look["marker"] | {"symbol": symbols, "line": edge}}


def spaced(values: Sequence[int]) -> list[int]:
    """Leave out marks that would stand upon each other on a logarithmic axis."""
    kept: list[int] = []
    for value in sorted(values):
        if not kept or value >= 1.45 * kept[-1]:
            kept.append(value)
    return kept


def texts(values: Sequence[int]) -> list[str]:
    return [f"{value // 1024}k" if value >= 1024 and value % 1024 == 0 else str(value) for value in values]
