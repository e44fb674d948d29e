"""Charts as pictures, for cards, from the same figures: lines with markers, and maps with a number in every cell."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from linearizer.publish.allocation_picture import FAINT, INK, PAPER, write

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

WIDTH, HEIGHT, LEFT, TOP, MARGIN, BELOW = 900, 440, 96, 96, 24, 64  # pixels
CELL, ROW, GAP, PANEL = 76, 34, 3, 56
GRID, MISSING = "#e3e6ea", "#eef0f3"
DASHES = {"dot": (2, 5), "dash": (10, 6), "dashdot": (10, 5, 2, 5), "longdash": (16, 6)}
RADIUS = 6
Place = Callable[[Any], float]


@dataclass(frozen=True)
class Axis:
    """Where values of an axis stand, and its ticks."""

    place: Place
    ticks: tuple[tuple[float, str], ...]


def draw_chart(figure: Any, title: str) -> bytes:
    """Draw a figure of lines, or of maps, as a PNG."""
    found = figure.to_plotly_json()
    traces = [trace for trace in found["data"] if trace["type"] == "heatmap"]
    return draw_maps(found, traces, title) if traces else draw_lines(found, title)


def canvas(width: float, height: float, title: str) -> tuple[Any, ImageDraw]:
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (round(width), round(height)), PAPER)
    pen = ImageDraw.Draw(image)
    write(pen, MARGIN, 24, title, INK, "lm", 20)
    return image, pen


def saved(image: Any) -> bytes:
    out = BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def draw_lines(found: dict[str, Any], title: str) -> bytes:
    """Draw traces over one pair of axes."""
    image, pen = canvas(WIDTH, HEIGHT, title)
    traces, layout = found["data"], found["layout"]
    known = [[pair for pair in zip(trace["x"], trace["y"], strict=True) if math.isfinite(pair[1])] for trace in traces]
    x = axis(layout["xaxis"], [a for pairs in known for a, _ in pairs], LEFT, WIDTH - MARGIN)
    y = axis(layout["yaxis"], [b for pairs in known for _, b in pairs], HEIGHT - BELOW, TOP)
    for at, text in y.ticks:
        pen.line((LEFT, at, WIDTH - MARGIN, at), fill=GRID)
        write(pen, LEFT - 10, at, text, FAINT, "rm", 13)
    for at, text in x.ticks:
        write(pen, at, HEIGHT - BELOW + 16, text, FAINT, size=13)
    write(pen, (LEFT + WIDTH - MARGIN) / 2, HEIGHT - 18, words(layout["xaxis"]), FAINT, size=14)
    write(pen, MARGIN, 50, words(layout["yaxis"]), FAINT, "lm", 14)
    legend = float(MARGIN)
    for trace, pairs in zip(traces, known, strict=True):
        points = [(x.place(a), y.place(b)) for a, b in pairs]
        line(pen, points, trace["line"]["color"], trace["line"].get("dash", "solid"))
        shapes = symbols(trace, len(points))
        for point, shape in zip(points, shapes, strict=False):
            mark(pen, point, shape, trace["line"]["color"])
        if "name" not in trace:
            continue
        line(pen, [(legend, 76), (legend + 34, 76)], trace["line"]["color"], trace["line"].get("dash", "solid"))
        if shapes:
            mark(pen, (legend + 17, 76), shapes[0], trace["line"]["color"])
        write(pen, legend + 42, 76, trace["name"], INK, "lm", 13)
        legend += 42 + 8 * len(trace["name"]) + 18
    return saved(image)


def words(layout: dict[str, Any]) -> str:
    return (layout.get("title") or {}).get("text") or ""


def symbols(trace: dict[str, Any], count: int) -> list[str]:
    """Name the marker of every point; none where only a line is drawn."""
    if "markers" not in trace["mode"]:
        return [""] * count
    given = trace["marker"]["symbol"]
    return [given] * max(count, 1) if isinstance(given, str) else list(given)


def axis(layout: dict[str, Any], values: Sequence[Any], begin: float, end: float) -> Axis:
    """Lay values out between two pixels, with round numbers or the figure's own ticks."""
    if layout.get("type") == "category":
        names = list(dict.fromkeys(values))
        step = (end - begin) / len(names)
        at = {name: begin + step * (number + 0.5) for number, name in enumerate(names)}
        return Axis(lambda value: at[value], tuple((at[name], name) for name in names))
    of: Callable[[float], float] = math.log10 if layout.get("type") == "log" else float
    low, high = min(map(of, values), default=0.0), max(map(of, values), default=1.0)
    room = 0.06 * (high - low) or 0.1
    low, high = low - room, high + room

    def place(value: float) -> float:
        return begin + (of(value) - low) / (high - low) * (end - begin)

    given = layout.get("tickvals")
    powers = [10.0**power for power in range(math.ceil(low), math.floor(high) + 1)]
    rounded = powers if of is math.log10 else list(round_numbers(low, high))
    ticks = list(given) if given is not None else rounded
    named = list(layout.get("ticktext") or [f"{tick:g}" for tick in ticks])
    shown = [(place(tick), text) for tick, text in zip(ticks, named, strict=True) if low <= of(tick) <= high]
    return Axis(place, tuple(shown))


def round_numbers(low: float, high: float) -> Iterator[float]:
    """Give about five round numbers of a linear axis."""
    power = 10 ** math.floor(math.log10((high - low) / 4))
    step = next(power * factor for factor in (1, 2, 5, 10) if (high - low) / (power * factor) <= 6)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield round(number * step, 10)


def line(pen: ImageDraw, points: Sequence[tuple[float, float]], colour: str, dash: str) -> None:
    """Draw a line through points, in dashes that tell it from others."""
    pattern = DASHES.get(dash, (10**6,))
    for a, b in zip(points, points[1:], strict=False):
        length, at, number = math.dist(a, b), 0.0, 0
        while at < length:
            until = min(at + pattern[number % len(pattern)], length)
            if number % 2 == 0:
                ends = [(a[0] + (b[0] - a[0]) * s / length, a[1] + (b[1] - a[1]) * s / length) for s in (at, until)]
                pen.line(ends, fill=colour, width=2)
            at, number = until, number + 1


def mark(pen: ImageDraw, at: tuple[float, float], symbol: str, colour: str) -> None:
    """Draw a marker; an open one is not filled."""
    (x, y), r = at, RADIUS
    fill, shape = (PAPER if symbol.endswith("-open") else colour), symbol.removesuffix("-open")
    if shape == "circle":
        pen.ellipse((x - r, y - r, x + r, y + r), fill, colour, 2)
    elif shape == "square":
        pen.rectangle((x - r, y - r, x + r, y + r), fill, colour, 2)
    elif shape == "diamond":
        pen.polygon([(x, y - r - 1), (x + r + 1, y), (x, y + r + 1), (x - r - 1, y)], fill, colour, 2)
    elif shape:
        t = r / 2.4
        steps = [
            (-t, -r),
            (t, -r),
            (t, -t),
            (r, -t),
            (r, t),
            (t, t),
            (t, r),
            (-t, r),
            (-t, t),
            (-r, t),
            (-r, -t),
            (-t, -t),
        ]
        pen.polygon([(x + a, y + b) for a, b in steps], fill, colour, 1)


def draw_maps(found: dict[str, Any], traces: Sequence[dict[str, Any]], title: str) -> bytes:
    """Draw maps two in a row, a number in every cell."""
    names = [note["text"] for note in found["layout"]["annotations"]]
    down, across = len(traces[0]["y"]), len(traces[0]["x"])
    wide, high = LEFT + across * CELL, PANEL + down * ROW + 26
    image, pen = canvas(MARGIN + min(2, len(traces)) * wide, 48 + -(-len(traces) // 2) * high + 30, title)
    for number, (trace, name) in enumerate(zip(traces, names, strict=True)):
        left, top = LEFT + number % 2 * wide, 48 + number // 2 * high + PANEL
        write(pen, left + across * CELL / 2, top - 16, name, INK)
        for row, depth in enumerate(trace["y"]):
            write(pen, left - 10, top + (row + 0.5) * ROW, depth, FAINT, "rm", 13)
            for column in range(across):
                cell = (left + column * CELL, top + row * ROW)
                share(pen, cell, trace["z"][row][column], trace["text"][row][column], found["layout"]["coloraxis"])
        for column, length in enumerate(trace["x"]):
            write(pen, left + (column + 0.5) * CELL, top + down * ROW + 12, length, FAINT, size=13)
    write(pen, MARGIN, image.height - 18, "depth down, length in tokens across", FAINT, "lm", 13)
    return saved(image)


def share(pen: ImageDraw, at: tuple[float, float], value: float | None, text: str, colours: dict[str, Any]) -> None:
    """Draw one cell."""
    fill = MISSING if value is None else between(colours["colorscale"], value)
    pen.rectangle((*at, at[0] + CELL - GAP, at[1] + ROW - GAP), fill=fill)
    bright = sum(int(fill[i : i + 2], 16) * weight for i, weight in ((1, 0.3), (3, 0.59), (5, 0.11)))
    write(pen, at[0] + CELL / 2, at[1] + ROW / 2 - 1, text, INK if bright > 140 else PAPER, size=14)


def between(scale: Sequence[Sequence[Any]], value: float) -> str:
    """Mix the two colours that a value lies between."""
    for (low, first), (high, last) in zip(scale, scale[1:], strict=False):
        if value <= high:
            part = (value - low) / (high - low)
            mixed = (int(first[i : i + 2], 16) * (1 - part) + int(last[i : i + 2], 16) * part for i in (1, 3, 5))
            return "#" + "".join(f"{round(channel):02x}" for channel in mixed)
    return scale[-1][1]
