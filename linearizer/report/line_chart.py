"""Line charts as SVG, which needs no script and a few kilobytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise, zip_longest

WIDTH, HEIGHT = 400, 240  # of a chart, in its own units: it fills the width of its place
LEFT, RIGHT, TOP, BOTTOM = 44, 78, 12, 30  # margins: ticks at the left and below, names of lines at the right
SPACING = 15.0  # between the names of two lines, at least
LETTER, APART = 8.0, 8  # the width of a letter of a name, and the gap between a name and its line
UNMARKED = "lz-unmarked"  # an invisible mark that has a note
TITLE = 18  # height of the title of an axis
SUPERSCRIPTS = str.maketrans("-0123456789.", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹·")
MAX_TICKS, STEPS = 6, (1, 2, 5)  # of an axis on a scale of factors
Write = Callable[[Sequence[float]], list[str]]  # the numbers of an axis


def write_short(values: Sequence[float]) -> list[str]:
    """Write round numbers in one notation, in at most five letters, for which the left margin has room."""
    if all(1e-3 <= value < 1e5 for value in values):
        return [f"{value:g}" for value in values]
    return [*map(write_power, values)]


def write_power(value: float) -> str:
    """Write a round number by its power of ten: 10⁻⁴, 2·10⁵."""
    digit, _, power = f"{value:.0e}".partition("e")
    ten = f"10{str(int(power)).translate(SUPERSCRIPTS)}" if int(power) else "1"
    return ten if digit == "1" else f"{digit}·{ten}" if int(power) else digit


@dataclass(frozen=True)
class Line:
    """A line by its points, from left to right; `kind` is its class in the page's style."""

    name: str
    points: Sequence[tuple[float, float]]
    kind: str
    intervals: Sequence[tuple[float, float]] = ()  # of the points, drawn as bars
    notes: Sequence[str] = ()  # of the points, shown under the mouse
    marked: bool = True  # whether there are marks at the points
    named_first: bool = False  # the name stands at the first point, not at the last


@dataclass(frozen=True)
class Axis:
    """An axis: the values at its ends, its ticks, and its title."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = True
    title: str = ""

    @staticmethod
    def around(values: Sequence[float]) -> Axis:
        """Return an axis without ticks on which all values fit."""
        return Axis(min(values), max(max(values), 1.01 * min(values)), ())

    @staticmethod
    def round(values: Iterable[float], title: str = "", write: Write = write_short) -> Axis:
        """Return an axis between round numbers on which all finite values fit, with ticks at round numbers."""
        finite = [value for value in values if math.isfinite(value)] or [1.0]
        named = numbers = round_numbers(min(finite), max(finite))
        if len(numbers) > MAX_TICKS:
            tens = round_numbers(min(finite), max(finite), (1,))
            named = [ten for ten in tens if numbers[0] <= ten <= numbers[-1]][:: 1 + len(tens) // MAX_TICKS]
        return Axis(numbers[0], numbers[-1], list(zip(named, write(named), strict=True)), title=title)

    def share(self, value: float) -> float:
        """Return how far along the axis a value is, 0 to 1; a value outside is at an end."""
        low, high, at = (math.log(x) if self.log else x for x in (self.low, self.high, max(self.low, value)))
        return min(1.0, (at - low) / (high - low))


@dataclass(frozen=True)
class Frame:
    """The place of the lines of a chart between its axes."""

    x: Axis
    y: Axis
    right: float

    def place(self, point: tuple[float, float]) -> tuple[float, float]:
        across, up = self.x.share(point[0]), self.y.share(point[1])
        return LEFT + across * (self.right - LEFT), HEIGHT - BOTTOM - up * (HEIGHT - BOTTOM - TOP)

    def draw_axes(self) -> list[str]:
        """Draw the ticks of both axes, and their titles where they have any."""
        drawn = []
        for value, name in self.y.ticks:
            height = self.place((self.x.low, value))[1]
            drawn.append(f'<path class="lz-grid" d="M{LEFT} {height:.1f}H{self.right:g}"/>')
            drawn.append(f'<text x="{LEFT - 6}" y="{height + 4:.1f}" text-anchor="end">{escape(name)}</text>')
        for value, name in self.x.ticks:
            at = min(self.place((value, self.y.low))[0], WIDTH - LETTER * len(name) / 2)  # else its end is cut off
            drawn.append(f'<text x="{at:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{escape(name)}</text>')
        if self.x.title:
            middle = (LEFT + self.right) / 2
            drawn.append(f'<text x="{middle:g}" y="{HEIGHT + 10}" text-anchor="middle">{escape(self.x.title)}</text>')
        return [*drawn, f'<text y="{TOP - TITLE}">{escape(self.y.title)}</text>'] if self.y.title else drawn

    def draw_line(self, line: Line) -> list[str]:
        """Draw a line, the intervals of its points, and their marks."""
        points = [self.place(point) for point in line.points]
        path = "L".join(f"{across:.1f} {height:.1f}" for across, height in points)
        drawn = [f'<path class="lz-line {line.kind}" d="M{path}"/>']
        for (value, _), ends in zip(line.points, line.intervals, strict=bool(line.intervals)):
            (at, low), (_, high) = (self.place((value, end)) for end in ends)
            bar = f"M{at - 4:.1f} {low:.1f}h8m-4 0V{high:.1f}m-4 0h8"
            drawn.append(f'<path class="lz-bar {line.kind}" d="{bar}"/>')
        for (a, b), note in zip_longest(points * bool(line.marked or line.notes), line.notes):
            circle = f'<circle class="{line.kind if line.marked else UNMARKED}" cx="{a:.1f}" cy="{b:.1f}" r="3"'
            drawn.append(f"{circle}><title>{escape(note)}</title></circle>" if note else f"{circle}/>")
        return drawn


def draw_lines(about: str, x: Axis, y: Axis, lines: Sequence[Line], at_ends: bool = False) -> str:
    """Draw lines with their names; `about` describes the chart in words.

    Names are in the right margin, or with `at_ends` at the ends of their lines, which may be anywhere.
    """
    names = [line.name for line in lines]
    longest = max(map(len, names), default=0)
    frame = Frame(x, y, WIDTH - (2 * APART if at_ends else max(RIGHT, APART + LETTER * longest)))
    drawn = frame.draw_axes() + [part for line in lines for part in frame.draw_line(line)]
    ends = [frame.place(line.points[0 if line.named_first else -1]) for line in lines]
    if not at_ends:
        ends = [(frame.right, height) for _, height in ends]
    for line, (at, height, anchor) in zip(lines, place_names(names, ends), strict=True):
        position = f'x="{at:g}" y="{height + 4:.1f}"{anchor}'
        drawn.append(f'<text class="{line.kind}" {position}>{escape(line.name)}</text>')
    top, bottom = TITLE * bool(y.title), TITLE * bool(x.title)
    box, label = f"0 {-top} {WIDTH} {top + HEIGHT + bottom}", escape(about, quote=True)
    return f'<svg viewBox="{box}" role="img" aria-label="{label}">{"".join(drawn)}</svg>'


def place_names(names: Sequence[str], ends: Sequence[tuple[float, float]]) -> list[tuple[float, float, str]]:
    """Place names right of the ends of their lines, or left if there is no room, and move them apart.

    Each place includes the attribute that anchors its text.
    """
    widths = [LETTER * len(name) for name in names]
    fit = [at + APART + width <= WIDTH for (at, _), width in zip(ends, widths, strict=True)]
    lefts = [at + APART if fits else at - APART - width for (at, _), width, fits in zip(ends, widths, fit, strict=True)]
    columns: list[list[int]] = []  # of names that would overlap, or lie above each other
    for number in sorted(range(len(names)), key=lefts.__getitem__):
        if columns and lefts[number] < max(lefts[placed] + widths[placed] for placed in columns[-1]):
            columns[-1].append(number)
        else:
            columns.append([number])
    places = {}
    for column in columns:
        heights = spread([ends[number][1] for number in column], TOP, HEIGHT - BOTTOM)
        for number, height in zip(column, heights, strict=True):
            at = ends[number][0]
            places[number] = (at + APART, height, "") if fit[number] else (at - APART, height, ' text-anchor="end"')
    return [places[number] for number in range(len(names))]


def spread(heights: Sequence[float], top: float, bottom: float) -> list[float]:
    """Move heights apart where they would overlap, as little as needed, and keep their order."""
    order, moved, room = sorted(range(len(heights)), key=heights.__getitem__), list(heights), bottom
    for upper, lower in pairwise(order):
        moved[lower] = max(moved[lower], moved[upper] + SPACING)
    for place in reversed(order):
        moved[place] = max(top, min(moved[place], room))
        room = moved[place] - SPACING
    return moved


def round_numbers(low: float, high: float, steps: Sequence[int] = STEPS) -> list[float]:
    """List at least two round numbers, which enclose two numbers."""
    powers = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2)
    numbers = [step * 10.0**power for power in powers for step in steps]
    start = max(number for number in numbers if number <= low)
    end = min(number for number in numbers if number >= high and number > start)
    return [number for number in numbers if start <= number <= end]
