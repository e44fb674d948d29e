"""Figures of a run: what every KV head needs, costs in KL and holds, and how training goes.

No value is shown by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from linearizer.plan import head_bytes
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.plan.profile import Profile
from linearizer.report import chart_style as style
from linearizer.run.prices import Prices

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

MIN_DRAWN_KL = 1e-6  # nats per token: a smaller kl is drawn there
EXACT, FEATURES, MEMORIES, SLOTS, WHOLE = "exact tokens", "features", "memories", "slots", "whole cache, grows"
LAYER_ENTRY = 56  # pixels of "layer 10", so that a phone has several in a row of the legend
KINDS = {  # of what heads keep -> colour, pattern
    EXACT: (style.ORANGE, "/"),
    FEATURES: (style.BLUE, ""),
    MEMORIES: (style.BLUE, "\\"),
    SLOTS: (style.GREEN, "."),
    WHOLE: (style.GREY, "x"),
}


def draw_freedom_map(profile: Profile, layers: Sequence[Layer]) -> Figure:
    """Draw the degrees of freedom of every KV head at the reference ridge; layers that stay as they are have none."""
    at = profile.settings.at_reference
    freedoms = {index: [at(head.freedoms) for head in layer.heads] for index, layer in enumerate(profile.layers)}
    return draw_head_map(freedoms, *map_size(layers), "degrees of freedom", 0.1)


def priced_alike(prices: Prices, layers: Sequence[Layer], budget: int) -> Head:
    """Choose the option that all heads are compared by: the largest that an equal share of a budget buys."""
    layer = next(layer for layer, row in zip(layers, prices.kl, strict=True) if row)
    share = budget * head_bytes.token_bytes(layer)
    sizes = {
        option: head_bytes.head_bytes(option, layer, prices.sinks, 0) for option in prices.options if not option.softmax
    }
    fitting = [option for option in sizes if sizes[option] <= share] or [min(sizes, key=sizes.__getitem__)]
    return max(fitting, key=sizes.__getitem__)


def draw_price_map(prices: Prices, layers: Sequence[Layer], option: Head) -> Figure:
    """Draw what it costs the model's output if one KV head alone holds an option, head by head."""
    place = prices.options.index(option)
    kl = {index: [1000 * max(row[place], MIN_DRAWN_KL) for row in rows] for index, rows in enumerate(prices.kl)}
    figure = draw_head_map(kl, *map_size(layers), "KL, 10⁻³ nats per token", 1000 * MIN_DRAWN_KL)  # short numbers
    return figure.update_xaxes(title=f"KV head; each alone holds<br>{option.in_brief}")


def map_size(layers: Sequence[Layer]) -> tuple[int, int]:
    """Return the number of layers, and of the KV heads of the layer with most."""
    return len(layers), max((layer.kv_heads for layer in layers), default=1)


def draw_head_map(
    values: Mapping[int, Sequence[float | None]], layers: int, heads: int, unit: str, least: float
) -> Figure:
    """Draw a number of every KV head as a map, layers down, with colours by its logarithm, from `least` on."""
    empty: list[float | None] = [None] * heads
    rows = [[*values.get(index, ()), *empty][:heads] for index in range(layers)]
    logs = [[None if value is None else math.log10(max(value, least)) for value in row] for row in rows]
    known = [log for row in logs for log in row if log is not None] or [0.0, 2.0]
    low, high = min(known), max(known)
    ticks = [low + share * (high - low) for share in (0, 0.25, 0.5, 0.75, 1)]
    bar = {"tickvals": ticks, "ticktext": [f"{10**tick:.2g}" for tick in ticks], "thickness": 10, "outlinewidth": 0}
    x = {"title": "KV head", "dtick": max(1, heads // 16), "range": [-0.5, heads - 0.5]}
    y = {"title": "layer", "dtick": max(1, layers // 24), "range": [layers - 0.5, -0.5], "showgrid": False}
    figure = style.new_figure(max(340, min(22 * layers + 90, 720)), x, y, plot_bgcolor=style.MAP_GROUND)
    return figure.add_heatmap(
        z=logs,
        zmin=low,
        zmax=max(high, low + 0.05),
        text=[["" if value is None else cell_text(value, least) for value in row] for row in rows],
        texttemplate="%{text}" if heads <= style.MAX_LABELLED and layers <= 48 else "",
        colorscale=style.WORSE_COLOURS,
        hovertemplate=f"layer %{{y}}, KV head %{{x}}<br>%{{text}} {unit}<extra></extra>",
        colorbar={"title": {"text": unit, "side": "right"}, **bar},
        **style.MAP_CELLS,
    )


def cell_text(count: float, least: float) -> str:
    """Write a number as briefly as its cell needs; nothing is drawn below the least."""
    return f"≤{least:g}" if count <= least else f"{count:.{2 if count < 1 else 3}g}"


def held_parts(head: Head, layer: Layer, sinks: int) -> dict[str, float]:
    """Count what a head keeps by kind, in tokens of cache; a whole cache grows, and has no size."""
    if head.softmax:
        return {WHOLE: 1.0}
    far = MEMORIES if head.memory else FEATURES if head.features else SLOTS
    far_bytes = head_bytes.head_bytes(replace(head, window=0), layer, 0, 0)
    return {EXACT: float(head.window + sinks), far: far_bytes / head_bytes.token_bytes(layer)}


def all_parts(allocation: Allocation, layers: Sequence[Layer]) -> list[dict[str, float]]:
    """Count what each head keeps, in one list."""
    pairs = head_bytes.pair_with_layers(allocation.heads, layers)
    return [held_parts(head, layer, allocation.sinks) for head, layer in pairs]


def draw_allocation(allocation: Allocation, layers: Sequence[Layer], fix: Allocation | None = None) -> Figure:
    """Draw what every KV head holds, in tokens of cache, compared with Fix; axes have room for any budget."""
    places = [(i, j, head) for i, row in enumerate(allocation.heads) for j, head in enumerate(row)]
    names = [f"layer {i}, KV head {j}: {head.in_brief}" for i, j, head in places]
    held = all_parts(allocation, layers)
    level = [] if fix is None else [sum(parts.values()) for parts in all_parts(fix, layers)]
    top = 1.12 * max((*(sum(parts.values()) for parts in held), *level, 1))
    firsts = [(at, i) for at, (i, j, _) in enumerate(places) if j == 0]
    shown = firsts[:: max(1, len(firsts) // 24)]
    still = {"automargin": False, "ticklabeloverflow": "allow"}
    ticks = {"tickvals": [at for at, _ in shown], "ticktext": [str(i) for _, i in shown]}
    x = {**still, **ticks, "title": "KV heads, by the number of their layer"}
    y = {**still, "title": "tokens of cache", "range": [0, top]}
    margin = {"l": 64, "r": 16, "t": 36, "b": 48}
    figure = style.new_figure(340, x, y, barmode="stack", bargap=0.15, margin=margin)
    figure.add_traces([stack_bars(kind, held, names, top) for kind in KINDS if any(parts.get(kind) for parts in held)])
    if level:
        figure.add_scatter(
            y=level,
            mode="lines",
            line={"color": style.GREY, "width": 2, "dash": "dot", "shape": "hvh"},
            name="the same for every head",
            hovertemplate="the same for every head: %{y:.0f} tokens of cache<extra></extra>",
        )
    return figure


def stack_bars(kind: str, held: Sequence[dict[str, float]], names: Sequence[str], top: float) -> dict[str, Any]:
    """Describe the bars of what every head keeps of a kind; a cache that grows reaches the top."""
    colour, pattern = KINDS[kind]
    shape = {"shape": pattern, "size": 5, "fillmode": "overlay", "fgcolor": "rgba(255,255,255,0.55)"}
    marker = {"color": colour, "line": {"width": 0}, "pattern": shape}
    heights = [top if kind == WHOLE and WHOLE in parts else parts.get(kind, 0.0) for parts in held]
    hover = {"customdata": names, "hovertemplate": "%{customdata}<extra></extra>"}
    return {"type": "bar", "y": heights, "name": kind, "marker": marker, **hover}


def draw_training_losses(events: Sequence[Mapping[str, Any]]) -> Figure:
    """Draw the loss of every layer, above the least possible, over the steps of a training."""
    shown = style.thin_points([event for event in events if event.get("layers")])
    names = sorted({name for event in shown for name in event["layers"]}, key=int)
    few = len(names) <= style.MAX_LABELLED
    unit = "nats" if any(event.get("attention_error") is not None for event in shown) else "in the loss's own unit"
    spacing = 1 if not shown or shown[-1]["done"] < 8 else None  # of ticks, at whole steps
    x = {"title": "steps of training", "rangemode": "tozero", "tickformat": ",d", "dtick": spacing}
    y = {"title": f"loss above the least, {unit}", **style.LOG_AXIS}
    figure = style.new_figure(340, x, y, showlegend=True).update_layout(legend_entrywidth=LAYER_ENTRY)
    for place, name in enumerate(names):
        values = [event["layers"].get(name) for event in shown]
        figure.add_scatter(
            x=[event["done"] for event in shown],
            y=[value if value is not None and value > 0 else None for value in values],
            mode="lines",
            line=style.layer_line(place, len(names)),
            name=f"layer {name}",
            showlegend=few or place in (0, len(names) - 1),
            hovertemplate="%{y:.3g} at step %{x}<extra>layer " + name + "</extra>",
        )
    return figure
