"""Plotly figures of what every KV head needs, costs in KL and holds, of training, and the style of all figures.

Colours suit colour-blind eyes, lines differ by more than their colour, and no value is shown by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.run.measured import Prices, Profile

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

T = TypeVar("T")
Options = Mapping[str, Any]  # of plotly
# Okabe and Ito's order of hues, at a lightness whose contrast to white and to black is 3:1.
BLUE, ORANGE, GREY, GREEN, PURPLE = "#2a83c4", "#cf6f10", "#7c8796", "#12906f", "#b0639a"
MAP_COLOURS = ((0.0, "#5b8fc9"), (0.35, "#5fb3c4"), (0.65, "#86cfa8"), (1.0, "#d8f3b8"))  # lightness rises all the way
WORSE_COLOURS = [[1 - at, colour] for at, colour in reversed(MAP_COLOURS)]  # dark cells cost more, or miss more
MAP_INK = "#000000"  # legible on all of them
LAYER_COLOURS = [[0.0, "#6a5fb5"], [0.5, "#2a83c4"], [1.0, "#17937f"]]  # similar, visible on white and on black
LAYER_DASHES = ("solid", "dash", "dot", "dashdot")
MAX_POINTS = 300  # of a line: more cannot be seen
MAX_LABELLED = 16  # lines, or heads of a layer: labels of more are not legible
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
    "cache, 2 bits": ("cache, 2 bits", PURPLE, "triangle-down", "longdash"),
    "cache, 3 bits": ("cache, 3 bits", PURPLE, "star", "longdashdot"),
    "cache, 4 bits": ("cache, 4 bits", PURPLE, "triangle-up", "2px,5px"),
}
MAP_CELLS = {"xgap": 2, "ygap": 2, "hoverongaps": False, "textfont": {"size": 11, "color": MAP_INK}}
MAP_GROUND = "rgba(128,138,150,0.10)"
MIN_DRAWN_KL = 1e-6  # nats per token: a smaller KL is drawn as this
EXACT, FEATURES, MEMORIES, SLOTS, WHOLE = "exact tokens", "features", "memories", "slots", "whole cache, grows"
LAYER_ENTRY = 56  # pixels of "layer 10", so that a phone has several in a row of the legend
KINDS = {  # what heads keep -> colour, pattern
    EXACT: (ORANGE, "/"),
    FEATURES: (BLUE, ""),
    MEMORIES: (BLUE, "\\"),
    SLOTS: (GREEN, "."),
    WHOLE: (GREY, "x"),
}


def new_figure(height: int, x: Options, y: Options, **layout: Any) -> Figure:
    """Create a figure with options of its axes; plotly checks a whole layout ten times as fast as its pieces."""
    from plotly.graph_objects import Figure

    figure = Figure(layout={**LAYOUT, "height": height, "xaxis": {**XAXIS, **x}, "yaxis": {**YAXIS, **y}, **layout})
    return figure.update_yaxes(title_standoff=8)  # from the numbers, which are wider on some axes


def thin_points(points: Sequence[T], max_points: int = MAX_POINTS) -> list[T]:
    """Keep at most `max_points` points of a line, the first and the last among them."""
    stride = max(1, -(-len(points) // (max_points - 1)))
    return [*points[:-1:stride], *points[-1:]]


def layer_line(number: int, count: int) -> dict[str, Any]:
    """Describe the line of a layer: the colour shows its place, and neighbours also differ by their dashes."""
    from plotly.colors import sample_colorscale

    colour = str(sample_colorscale(LAYER_COLOURS, number / max(1, count - 1))[0])
    return {"color": colour, "width": 1.5, "dash": LAYER_DASHES[number % len(LAYER_DASHES)]}


def add_subject(figure: Figure, name: str, x: Sequence[int], y: Sequence[float | None], hover: str) -> None:
    """Add the line of a subject: the same colour, marker and dashes in every figure."""
    title, colour, symbol, dash = SUBJECT_STYLES.get(name, (name, GREEN, "cross", "dashdot"))
    line, marker = {"color": colour, "width": 2, "dash": dash}, {"symbol": symbol, "size": 9}
    look = {"mode": "lines+markers", "line": line, "marker": marker}
    figure.add_scatter(x=x, y=y, name=title, hovertemplate=f"{hover}<extra>{title}</extra>", **look)


def draw_freedom_map(profile: Profile, layers: Sequence[Layer]) -> Figure:
    """Draw the degrees of freedom of every KV head at the reference ridge; unchanged layers have none."""
    at = profile.settings.at_reference
    freedoms = {index: [at(head.freedoms) for head in layer.heads] for index, layer in enumerate(profile.layers)}
    return draw_head_map(freedoms, *map_size(layers), "degrees of freedom", 0.1)


def priced_alike(prices: Prices, layers: Sequence[Layer], budget: int) -> Head:
    """Choose the option by which all heads are compared: the largest that an equal share of a budget buys."""
    layer = next(layer for layer, row in zip(layers, prices.kl, strict=True) if row)
    share = budget * head_bytes.token_bytes(layer)
    sizes = {
        option: head_bytes.head_bytes(option, layer, prices.sinks, 0) for option in prices.options if not option.softmax
    }
    fitting = [option for option in sizes if sizes[option] <= share] or [min(sizes, key=sizes.__getitem__)]
    return max(fitting, key=sizes.__getitem__)


def draw_price_map(prices: Prices, layers: Sequence[Layer], option: Head) -> Figure:
    """Draw, for each KV head, the KL of the model's output if this head alone holds an option."""
    place = prices.options.index(option)
    kl = {index: [1000 * max(row[place], MIN_DRAWN_KL) for row in rows] for index, rows in enumerate(prices.kl)}
    figure = draw_head_map(kl, *map_size(layers), "KL, 10⁻³ nats per token", 1000 * MIN_DRAWN_KL)  # short numbers
    return figure.update_xaxes(title=f"KV head; each alone holds<br>{option.in_brief}")


def map_size(layers: Sequence[Layer]) -> tuple[int, int]:
    """Return the number of layers, and the largest number of KV heads in a layer."""
    return len(layers), max((layer.kv_heads for layer in layers), default=1)


def draw_head_map(
    values: Mapping[int, Sequence[float | None]], layers: int, heads: int, unit: str, least: float
) -> Figure:
    """Draw a number of every KV head as a map, layers down, coloured by its logarithm; `least` is the smallest."""
    empty: list[float | None] = [None] * heads
    rows = [[*values.get(index, ()), *empty][:heads] for index in range(layers)]
    logs = [[None if value is None else math.log10(max(value, least)) for value in row] for row in rows]
    finite = [log for row in logs for log in row if log is not None] or [0.0, 2.0]
    low, high = min(finite), max(finite)
    ticks = [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
    bar = {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks], "thickness": 10, "outlinewidth": 0}
    x = {"title": "KV head", "dtick": max(1, heads // 16), "range": [-0.5, heads - 0.5]}
    y = {"title": "layer", "dtick": max(1, layers // 24), "range": [layers - 0.5, -0.5], "showgrid": False}
    figure = new_figure(max(340, min(22 * layers + 90, 720)), x, y, plot_bgcolor=MAP_GROUND)
    return figure.add_heatmap(
        z=logs,
        zmin=low,
        zmax=max(high, low + 0.05),
        text=[["" if value is None else cell_text(value, least) for value in row] for row in rows],
        texttemplate="%{text}" if heads <= MAX_LABELLED and layers <= 48 else "",
        colorscale=WORSE_COLOURS,
        hovertemplate=f"layer %{{y}}, KV head %{{x}}<br>%{{text}} {unit}<extra></extra>",
        colorbar={"title": {"text": unit, "side": "right"}, **bar},
        **MAP_CELLS,
    )


def cell_text(count: float, least: float) -> str:
    """Write a number as short as its cell needs; nothing is drawn below the least."""
    return f"≤{least:g}" if count <= least else f"{count:.{2 if count < 1 else 3}g}"


def held_parts(head: Head, layer: Layer, sinks: int) -> dict[str, float]:
    """Count what a head keeps by kind, in tokens of cache; a whole cache grows, and has no size."""
    if head.softmax:
        return {WHOLE: 1.0}
    far_kind = MEMORIES if head.memory else FEATURES if head.features else SLOTS
    far_bytes = head_bytes.head_bytes(replace(head, window=0), layer, 0, 0)
    return {EXACT: float(head.window + sinks), far_kind: far_bytes / head_bytes.token_bytes(layer)}


def all_parts(allocation: Allocation, layers: Sequence[Layer]) -> list[dict[str, float]]:
    """Count what each head keeps, in one list."""
    pairs = head_bytes.pair_with_layers(allocation.heads, layers)
    return [held_parts(head, layer, allocation.sinks) for head, layer in pairs]


def draw_allocation(allocation: Allocation, layers: Sequence[Layer], fix: Allocation | None = None) -> Figure:
    """Draw what every KV head holds, in tokens of cache, and what equal shares hold; axes have room for any budget."""
    places = [(i, j, head) for i, row in enumerate(allocation.heads) for j, head in enumerate(row)]
    names = [f"layer {i}, KV head {j}: {head.in_brief}" for i, j, head in places]
    heads = all_parts(allocation, layers)
    level = [] if fix is None else [sum(parts.values()) for parts in all_parts(fix, layers)]
    top = 1.12 * max((*(sum(parts.values()) for parts in heads), *level, 1))
    firsts = [(at, i) for at, (i, j, _) in enumerate(places) if j == 0]
    labelled = firsts[:: max(1, len(firsts) // 24)]
    fixed = {"automargin": False, "ticklabeloverflow": "allow"}
    ticks = {"tickvals": [at for at, _ in labelled], "ticktext": [str(i) for _, i in labelled]}
    x = {**fixed, **ticks, "title": "KV heads, by the number of their layer"}
    y = {**fixed, "title": "tokens of cache", "range": [0, top]}
    margin = {"l": 64, "r": 16, "t": 36, "b": 48}
    figure = new_figure(340, x, y, barmode="stack", bargap=0.15, margin=margin)
    present = [kind for kind in KINDS if any(parts.get(kind) for parts in heads)]
    figure.add_traces([stack_bars(kind, heads, names, top) for kind in present])
    if level:
        figure.add_scatter(
            y=level,
            mode="lines",
            line={"color": GREY, "width": 2, "dash": "dot", "shape": "hvh"},
            name="the same for every head",
            hovertemplate="the same for every head: %{y:.0f} tokens of cache<extra></extra>",
        )
    return figure


def stack_bars(kind: str, heads: Sequence[dict[str, float]], names: Sequence[str], top: float) -> dict[str, Any]:
    """Describe the bars of one kind of memory, head by head; a cache that grows reaches the top."""
    colour, pattern = KINDS[kind]
    shape = {"shape": pattern, "size": 5, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)"}
    marker = {"color": colour, "line": {"width": 0}, "pattern": shape}
    heights = [top if kind == WHOLE and WHOLE in parts else parts.get(kind, 0.0) for parts in heads]
    hover = {"customdata": names, "hovertemplate": "%{customdata}<extra></extra>"}
    return {"type": "bar", "y": heights, "name": kind, "marker": marker, **hover}


def draw_training_losses(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw how far the loss of every layer is above the least possible, over the steps of a training."""
    thinned = thin_points([event for event in events if event.get("layers")])
    names = sorted({name for event in thinned for name in event["layers"]}, key=int)
    all_labelled = len(names) <= MAX_LABELLED
    unit = "nats" if any(event.get("attention_error") is not None for event in thinned) else "in the loss's own unit"
    spacing = 1 if not thinned or thinned[-1]["done"] < 8 else None  # of ticks, at whole steps
    x = {"title": "steps of training", "rangemode": "tozero", "tickformat": ",d", "dtick": spacing}
    y = {"title": f"loss above the least, {unit}", **LOG_AXIS}
    figure = new_figure(340, x, y, showlegend=True).update_layout(legend_entrywidth=LAYER_ENTRY)
    for place, name in enumerate(names):
        values = [event["layers"].get(name) for event in thinned]
        figure.add_scatter(
            x=[event["done"] for event in thinned],
            y=[value if value is not None and value > 0 else None for value in values],
            mode="lines",
            line=layer_line(place, len(names)),
            name=f"layer {name}",
            showlegend=all_labelled or place in (0, len(names) - 1),
            hovertemplate="%{y:.3g} at step %{x}<extra>layer " + name + "</extra>",
        )
    return figure
