"""One picture of need, price and purchase: layers across, KV heads up, a bar of bought memory in every cell."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any

from linearizer.report.head_needs import HeadNeed, HeadNeeds, power_of_two, write_freedoms
from linearizer.report.line_chart import Axis
from linearizer.report.plotly_charts import MIN_DRAWN_KL, new_figure

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

LEAST_FREEDOMS = 0.1  # that is drawn
COLOURS = "Viridis"  # lightness rises all the way, from nearly black to yellow
UNMEASURED = "rgba(128,138,150,0.16)"
GAP = 2  # pixels between cells
BAR, FOOT, TALL = 0.32, 0.42, 0.84  # of a cell: width of a bar, its distance below the middle, its height at most
INKS = {"exact tokens": ("#ffffff", "#000000"), "older tokens": ("#000000", "#ffffff")}  # of bars: fill, outline
ROW, LEAST_ROW, TALLEST = 64, 20, 720  # pixels of a row of heads, and of the picture


def draw_needs(needs: HeadNeeds) -> Figure:
    """Draw what every head needs, costs and holds; a switch of the page shows one of the first two as colour."""
    rows = max((head.head for head in needs.heads), default=0) + 1
    height = 96 + max(LEAST_ROW * rows, min(ROW * rows, TALLEST))
    x = {"title": "layer", "dtick": max(1, needs.layers // 24), "range": [-0.5, needs.layers - 0.5]}
    y = {"title": "KV head", "dtick": max(1, rows // 16), "range": [-0.5, rows - 0.5], "showgrid": False}
    figure = new_figure(height, x, y, plot_bgcolor=UNMEASURED, barmode="overlay", showlegend=True)
    figure.update_layout(meta={"csv": write_csv(needs)}, legend={"title": {"text": "memory bought, as height"}})
    add_colours(figure, needs, rows, "freedoms", "degrees of freedom", LEAST_FREEDOMS)
    if any(head.price is not None for head in needs.heads):
        add_colours(figure, needs, rows, "price", "price: KL, 10⁻³ nats", MIN_DRAWN_KL, 1000)
        figure.data[1].visible = False
    for place, (name, inks) in enumerate(INKS.items()):
        figure.add_bar(**describe_bars(needs, name, inks, is_far=bool(place)))
    return figure


def add_colours(
    figure: Figure, needs: HeadNeeds, rows: int, field: str, title: str, least: float, unit: float = 1.0
) -> None:
    """Colour the cells by the logarithm of a number of their heads."""
    logs: list[list[float | None]] = [[None] * needs.layers for _ in range(rows)]
    texts = [[""] * needs.layers for _ in range(rows)]
    for head in needs.heads:
        texts[head.head][head.layer] = describe_head(needs, head)
        if (value := getattr(head, field)) is not None:
            logs[head.head][head.layer] = math.log10(unit * max(value, least))
    finite = [log for row in logs for log in row if log is not None] or [0.0, 2.0]
    axis = Axis.round(10**log for log in finite)
    ticks, names = [math.log10(tick) for tick, _ in axis.ticks], [name for _, name in axis.ticks]
    bar = {"tickvals": ticks, "ticktext": names, "thickness": 10, "outlinewidth": 0}
    figure.add_heatmap(
        z=logs,
        zmin=math.log10(axis.low),
        zmax=math.log10(axis.high),
        text=texts,
        hovertemplate="%{text}<extra></extra>",
        colorscale=COLOURS,
        colorbar={"title": {"text": title, "side": "right"}, **bar},
        name=title,
        xgap=GAP,
        ygap=GAP,
        hoverongaps=False,
    )


def describe_head(needs: HeadNeeds, head: HeadNeed) -> str:
    """Describe a head in a few lines."""
    lines = [f"<b>{head.name}</b>"]
    if head.freedoms is not None:
        lines.append(f"needs {write_freedoms(head)} degrees of freedom at λ = {power_of_two(needs.ridge)}")
    if head.at_budget is not None and needs.budget_ridge is not None:
        lines.append(f"and {head.at_budget:.0f} at λ = {power_of_two(needs.budget_ridge)}, which the budget reaches")
    if head.price is not None:
        alone = f", alone with {needs.option.in_brief}" if needs.option else ""
        lines.append(f"costs {head.price:.2g} nats per token{alone}")
    if head.held is not None:
        lines.append(f"holds {head.held.in_brief}: {head.tokens:.0f} tokens of cache; the mean: {needs.share:.0f}")
    return "<br>".join(lines)


def describe_bars(needs: HeadNeeds, name: str, inks: tuple[str, str], is_far: bool) -> dict[str, Any]:
    """Describe the bars of what heads keep exactly, or of all that they keep, which stand behind these."""
    held = [head for head in needs.heads if head.held is not None]
    tops = [bar_height(head.tokens, needs) for head in held]
    near = [top * min(1.0, head.exact / max(head.tokens, 1e-9)) for top, head in zip(tops, held, strict=True)]
    heights = [top - low for top, low in zip(tops, near, strict=True)] if is_far else near
    bases = [head.head - FOOT + (low if is_far else 0.0) for head, low in zip(held, near, strict=True)]
    fill, outline = inks
    return {
        "x": [head.layer for head in held],
        "y": heights,
        "base": bases,
        "width": BAR,
        "name": name,
        "marker": {"color": fill, "line": {"color": outline, "width": 1}},
        "hoverinfo": "skip",
    }


def bar_height(tokens: float, needs: HeadNeeds) -> float:
    """Return the height of a bar: the square root, so that small ones can be seen; a whole text is the full height."""
    return TALL * math.sqrt(min(1.0, tokens / needs.length))


def write_csv(needs: HeadNeeds) -> str:
    """Write a row for each head, with numbers as numbers."""
    written = io.StringIO()
    table = csv.writer(written, lineterminator="\n")
    at_budget = f"N at {needs.budget_ridge:.3g}" if needs.budget_ridge else "N at the budget"
    titles = ["layer", "head", f"N at {needs.ridge:.3g}", "95% from", "to", at_budget, "KL in nats"]
    table.writerow([*titles, "tokens of cache held", "of these exact", "held"])
    for head in needs.heads:
        numbers = head.freedoms, *(head.interval or (None, None)), head.at_budget, head.price, head.tokens, head.exact
        cells = ["" if number is None else f"{number:.6g}" for number in numbers]
        table.writerow([head.layer, head.head, *cells, head.held.in_brief if head.held else ""])
    return written.getvalue()
