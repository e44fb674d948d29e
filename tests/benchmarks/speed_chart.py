"""Draw what a token costs over the length of the text: python -m tests.benchmarks.speed_chart.

Writes assets/speed.svg from results/speed-cpu.json: time per token read and written, and peak memory, of teacher and
student, one text at a time.
"""

import argparse
import json
from pathlib import Path

from linearizer.amounts import size
from linearizer.report.line_chart import Line
from tests.benchmarks.line_chart import Panel, draw
from tests.benchmarks.speed import RESULTS

CHART = Path(__file__).parents[2] / "assets" / "speed.svg"
PANELS = (  # title, what is drawn of a row of a subject, how a number is written
    ("time to read a token", lambda own: 1e3 / own["read_rate"], lambda value: f"{value:g} ms"),
    ("time to write a token", lambda own: 1e3 / own["write_rate"], lambda value: f"{value:g} ms"),
    ("peak memory while reading", lambda own: own["peak_bytes"], size),
)
DRAWN = "slots"
KINDS = {"teacher": "lz-dashed", "student": "lz-student"}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=CHART)
    arguments = parser.parse_args(arguments)
    results = json.loads(arguments.results.read_text(encoding="utf-8"))
    arguments.out.write_text(chart(results), encoding="utf-8")


def chart(results):
    """Draw a panel for each cost, with a line for teacher and student."""
    rows = [row for row in results["rows"] if row["batch"] == 1 and row["field"] == DRAWN]
    made = results["made_with"]
    said = f"Teacher and student of the demo model, {made['dtype']}, {made['device']}, over tokens of text."
    panels = []
    for title, value, written in PANELS:
        points = {
            name: [(row["length"], value(own)) for row in rows if (own := row[name]) and None not in own.values()]
            for name in KINDS
        }
        panels.append(Panel(title, [Line(name, own, KINDS[name]) for name, own in points.items() if own], written))
    return draw(panels, said)


if __name__ == "__main__":
    main()
