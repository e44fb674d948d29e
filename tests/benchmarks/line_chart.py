"""Draws panels of lines as SVG for the README: both axes logarithmic, each line with its name beside it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

HEIGHT, LEFT, TOP, BOTTOM, APART = 270, 62, 40, 36, 14  # pixels of a panel, of its margins, and between two names
GREY, BLUE = "#7c8796", "#2a83c4"  # stand out from white and from black
STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Line:
    """Points of a line: a length in tokens, and a value."""

    points: Sequence[tuple[int, float]]
    colour: str = GREY
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Lines over the same lengths; `right` is the margin for their names."""

    title: str
    lines: Mapping[str, Line]
    written: Callable[[float], str]  # how a value is written
    width: int = 300
    right: int = 62


def draw(panels: Sequence[Panel], said: str) -> str:
    """Draw panels side by side; `said` describes them to who does not see them."""
    width = sum(panel.width for panel in panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" '
        f'height="{HEIGHT}" font-family="sans-serif" font-size="12" fill="{GREY}">',
        f"<title>{said}</title>",
    ]
    left = 0
    for panel in panels:
        parts += [f'<g transform="translate({left} 0)">', *draw_panel(panel), "</g>"]
        left += panel.width
    return "\n".join([*parts, "</svg>"]) + "\n"


def draw_panel(panel):
    """Draw one panel."""
    lengths = sorted({length for line in panel.lines.values() for length, _ in line.points})
    values = [value for line in panel.lines.values() for _, value in line.points]
    edge = panel.width - panel.right
    across, ticks = scale(min(lengths), max(lengths), LEFT, edge), round_numbers(min(values), max(values))
    up = scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    yield f'<text x="{LEFT}" y="18" font-weight="bold">{panel.title}</text>'
    for tick in ticks:
        y = up(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{edge}" stroke="{GREY}" stroke-opacity=".25"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{panel.written(tick)}</text>'
    for length in lengths[:: 1 + len(lengths) // 6]:
        name = f"{length // 1024}k" if length >= 1024 else str(length)
        yield f'<text x="{across(length):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{name}</text>'
    for line in panel.lines.values():
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in line.points)
        dashes = ' stroke-dasharray="5 3"' if line.dashed else ""
        yield f'<path d="M{path}" fill="none" stroke="{line.colour}" stroke-width="2"{dashes}/>'
        yield from (
            f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{line.colour}"/>' for x, y in line.points
        )
    ends = {name: up(line.points[-1][1]) for name, line in panel.lines.items()}
    for name, y in spread_out(ends).items():
        at = f'x="{edge + 8}" y="{y + 4:.1f}"'
        yield f'<text {at} fill="{panel.lines[name].colour}">{name}</text>'


def spread_out(heights):
    """Move names apart that would lie over each other, the lower ones down; return their heights."""
    names = sorted(heights, key=heights.__getitem__)
    placed = [heights[name] for name in names]
    over = sum(max(0.0, APART - (b - a)) for a, b in pairwise(placed)) / 2
    if placed:
        placed[0] = max(TOP, placed[0] - over)
    for at in range(1, len(placed)):
        placed[at] = max(placed[at], placed[at - 1] + APART)
    return dict(zip(names, placed, strict=True))


def scale(low, high, first, last):
    """Map numbers to pixels by their logarithms."""
    span = math.log(high / low) if high > low else 1.0
    return lambda x: first + (last - first) * math.log(x / low) / span


def round_numbers(low, high):
    """List round numbers from the last that is no larger than `low` to the first that is no smaller than `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    numbers = [step * 10.0**power for power in powers for step in STEPS]
    first = max(number for number in numbers if number <= low)
    last = min(number for number in [*numbers, 10.0 ** (powers[-1] + 1)] if number >= high)
    return [number for number in numbers if first <= number <= last] or [first, last]
