"""Charts of lines as SVG: a few kilobytes without a script, for the first page and the list of runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 400, 240  # of a chart, in its own units: it is drawn as wide as its place
LEFT, RIGHT, TOP, BOTTOM = 44, 78, 12, 30  # margins: ticks at the left and below, names of lines at the right
SPACING = 15.0  # between the names of two lines, at least


@dataclass(frozen=True)
class Line:
    """A line by its points, from the left to the right; `kind` is how it looks, a class of the page's style."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str


@dataclass(frozen=True)
class Axis:
    """An axis: the values at its ends, and those that are named."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = True

    @staticmethod
    def around(values: Sequence[float]) -> Axis:
        """Return an axis without ticks on which all values fit."""
        return Axis(min(values), max(max(values), 1.01 * min(values)), ())

    def share(self, value: float) -> float:
        """Return how far along the axis a value is, 0 to 1."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, value))
        return min(1.0, max(0.0, (at - low) / (high - low)))


def draw_lines(about: str, x: Axis, y: Axis, lines: Sequence[Line], marks: bool = True) -> str:
    """Draw lines with their names at their ends, and `marks` at their points; `about` says in words what is seen."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM

    def place(point: tuple[float, float]) -> tuple[float, float]:
        return LEFT + x.share(point[0]) * (right - LEFT), bottom - y.share(point[1]) * (bottom - TOP)

    drawn = []
    for value, name in y.ticks:
        height = place((x.low, value))[1]
        drawn.append(f'<path class="lz-grid" d="M{LEFT} {height:.1f}H{right}"/>')
        drawn.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{escape(name)}</text>')
    for value, name in x.ticks:
        at = place((value, y.low))[0]
        drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>')
    placed = [[place(point) for point in line.points] for line in lines]
    for line, points in zip(lines, placed, strict=True):
        drawn.append(f'<path class="lz-line {line.kind}" d="{path_of(points)}"/>')
        drawn += [f'<circle class="{line.kind}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in points * marks]
    for line, height in zip(lines, spread([points[-1][1] for points in placed], TOP, bottom), strict=True):
        drawn.append(f'<text class="{line.kind}" x="{right + 8}" y="{height + 4:.1f}">{escape(line.name)}</text>')
    label = escape(about, quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def spread(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Move heights apart where they would lie on each other, as little as is needed; their order stays."""
    order, moved, room = sorted(range(len(heights)), key=heights.__getitem__), list(heights), bottom
    for above, below in pairwise(order):
        moved[below] = max(moved[below], moved[above] + SPACING)
    for place in reversed(order):
        moved[place] = max(top, min(moved[place], room))
        room = moved[place] - SPACING
    return moved


def path_of(points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
