"""Draw what a token costs over the length of the text: python -m tests.benchmarks.speed_chart.

Writes assets/speed.svg from results/speed-cpu.json: time per token read and written, and peak memory, of teacher and
student, one text at a time.
"""

import argparse
import json
import math
from pathlib import Path

from linearizer.amounts import size
from tests.benchmarks.speed import RESULTS

CHART = Path(__file__).parents[2] / "assets" / "speed.svg"
PANELS = (  # title, what is drawn of a row of a subject, how a number is written
    ("time to read a token", lambda own: 1e3 / own["read_rate"], lambda value: f"{value:g} ms"),
    ("time to write a token", lambda own: 1e3 / own["write_rate"], lambda value: f"{value:g} ms"),
    ("peak memory while reading", lambda own: own["peak_bytes"], size),
)
DRAWN = "slots"
COLOURS = {"teacher": "#7c8796", "student": "#2a83c4"}  # stand out from white and from black
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 300, 250, 62, 14, 40, 36  # pixels of a panel, and of its margins
STEPS = (1, 2, 5)


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=CHART)
    arguments = parser.parse_args(arguments)
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    arguments.out.write_text(chart(results), encoding="utf-8")


def chart(results):
    """Draw all panels side by side."""
    rows = [row for row in results["rows"] if row["batch"] == 1 and row["field"] == DRAWN]
    whole = len(PANELS) * WIDTH, HEIGHT
    made = results["made_with"]
    said = f"Teacher and student of the demo model, {made['dtype']}, {made['device']}, over tokens of text."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}" width="{whole[0]}" '
        f'height="{whole[1]}" font-family="sans-serif" font-size="12" fill="#7c8796">',
        f"<title>{said}</title>",
    ]
    for number, (title, value, written) in enumerate(PANELS):
        parts += [f'<g transform="translate({number * WIDTH} 0)">', *panel(rows, title, value, written), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def panel(rows, title, value, written):
    """Draw one panel: both axes are logarithmic, and each subject is a line with its name at its end."""
    lines = {
        name: [(row["length"], number) for row in rows if (number := value_of(row[name], value)) is not None]
        for name in COLOURS
    }
    lengths = [row["length"] for row in rows]
    values = [y for points in lines.values() for _, y in points]
    across = scale(min(lengths), max(lengths), LEFT, WIDTH - RIGHT)
    ticks = round_numbers(min(values), max(values))
    up = scale(ticks[0], ticks[-1], HEIGHT - BOTTOM, TOP)
    yield f'<text x="{LEFT}" y="18" font-weight="bold">{title}</text>'
    for tick in ticks:
        y = up(tick)
        yield f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#7c8796" stroke-opacity=".25"/>'
        yield f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{written(tick)}</text>'
    for length in lengths[:: 1 + len(lengths) // 6]:
        name = f"{length // 1024}k" if length >= 1024 else str(length)
        yield f'<text x="{across(length):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{name}</text>'
    for name, points in lines.items():
        path = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        dashes = ' stroke-dasharray="5 3"' if name == "teacher" else ""
        yield f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dashes}/>'
        yield from (f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="3" fill="{COLOURS[name]}"/>' for x, y in points)
        x, last = points[-1]
        above = last == max(own[-1][1] for own in lines.values())
        ends = [up(y) for _, y in points[-2:]]  # a name is as long as the way between two points
        at = f'x="{across(x):.1f}" y="{min(ends) - 8 if above else max(ends) + 16:.1f}" text-anchor="end"'
        yield f'<text {at} fill="{COLOURS[name]}">{name}</text>'


def value_of(own, value):
    """Return what a row says of a subject, or None where it was not measured."""
    return None if own is None or None in own.values() else value(own)


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


if __name__ == "__main__":
    main()
