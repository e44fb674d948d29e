"""Measured speeds stay beside others of the same machine, and are drawn where a reader sees them."""

import json
from types import SimpleNamespace
from xml.etree import ElementTree

from tests.benchmarks import line_chart, speed, speed_chart

SVG = "{http://www.w3.org/2000/svg}"
MADE_WITH = {"dtype": "float32", "device": "cpu"}


def row(length, field="slots", rate=1000.0):
    own = {"read_rate": rate, "write_rate": 50.0, "peak_bytes": 10**7, "state_bytes": 10**6}
    return {"field": field, "length": length, "batch": 1, "teacher": own, "student": {**own, "read_rate": 2 * rate}}


def asked(tmp_path):
    return SimpleNamespace(out=tmp_path / "speed.json", run=None, budget=64, turns=1)


def test_rows_of_one_machine_stay_and_are_measured_anew_one_by_one(tmp_path):
    for one in (row(512), row(256), row(256, "windows"), row(512, rate=3000.0)):
        speed.keep(asked(tmp_path), one, MADE_WITH)
    rows = json.loads(asked(tmp_path).out.read_text())["rows"]
    assert [(one["field"], one["length"]) for one in rows] == [("slots", 256), ("slots", 512), ("windows", 256)]
    assert rows[1]["teacher"]["read_rate"] == 3000.0 and "--fields 'slots' --lengths 512" in rows[1]["command"]
    speed.keep(asked(tmp_path), row(256), {**MADE_WITH, "device": "another"})
    assert len(json.loads(asked(tmp_path).out.read_text())["rows"]) == 1


def test_the_chart_has_a_point_for_every_row_and_the_faster_lies_lower():
    rows = [row(256), row(1024), row(4096), row(256, "windows")]
    drawn = ElementTree.fromstring(speed_chart.chart({"made_with": MADE_WITH, "rows": rows}))
    panels = drawn.findall(f"{SVG}svg")
    assert len(panels) == len(speed_chart.PANELS)
    for panel in panels:
        assert len(panel.findall(f"{SVG}circle")) == 2 * 3
    teacher, student = (
        next(float(dot.get("cy")) for dot in panels[0].iter(f"{SVG}circle") if dot.get("class") == kind)
        for kind in speed_chart.KINDS.values()
    )
    assert student > teacher


def test_round_numbers_enclose_what_is_drawn():
    for low, high in ((0.3, 7.0), (1.0, 1.0), (9e6, 2.6e8), (0.011, 0.9)):
        ticks = line_chart.round_numbers(low, high)
        assert ticks[0] <= low and ticks[-1] >= high and ticks == sorted({*ticks}) and len(ticks) > 1
