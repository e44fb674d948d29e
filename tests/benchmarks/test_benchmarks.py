"""The tables of the paper and of the recipes run, and every row is described."""

import json
from dataclasses import replace

import pytest

from linearizer.plan.plan import Plan
from linearizer.teacher import load as teacher_module
from tests.benchmarks import quality
from tests.benchmarks.paper import PUBLISHED, main
from tests.benchmarks.quality_rows import describe_row

SMALL = "--length 16 --texts 2 --samples 48 --steps 1 --judged 2".split()


def test_the_tables_of_the_paper_come_from_our_code(tmp_path, capsys):
    main(["tiny", *SMALL, "--out", str(tmp_path / "found.json")])
    out = capsys.readouterr().out
    tables = json.loads((tmp_path / "found.json").read_text())["tables"]
    for name, table in tables.items():
        assert f"\ntable {name}: " in out
        assert set(table["published"]) <= set(table["ours"]), name
    assert out.count("rank correlation") == 7
    assert sum(tables["1"]["ours"].values()) == pytest.approx(12 * 64, abs=8)
    assert set(tables["7"]["ours"]) == set(PUBLISHED["gpt2"]["table 7"])


def test_quality_judges_by_texts_that_the_positions_of_a_model_hold():
    plan = Plan.of("swa", model="demo", budget=32, length=512)
    teacher = teacher_module.load_teacher_of(plan)
    few = replace(teacher, inspection=replace(teacher.inspection, max_positions=256))
    assert quality.held_out(plan, teacher).shape == (quality.HELD, 512)
    assert quality.held_out(plan, few).shape == (quality.HELD, 256)


def test_every_row_of_the_quality_table_is_described_in_a_line(tmp_path):
    lines = {row: describe_row(row) for row in quality.ROWS}
    assert {*quality.QUICK} <= lines.keys()
    assert all(line and "\n" not in line and len(line) < 200 for line in lines.values())
    assert len({*lines.values()}) == len(lines), "a line says what sets a row apart from every other"
    assert "its whole cache" in lines["best, 8 bits --may-grow"] and "least squares" in lines["best, 100 steps"]
    assert "slots" not in lines["gain-features"]
    table = quality.Table(tmp_path / "table")
    table.records = json.loads((quality.RESULTS / "quality-demo.json").read_text())
    assert {record["row"] for record in table.records} <= quality.ROWS.keys()
    text = table.markdown()
    assert all(f"- `{row}`: " in text for row in {record["row"] for record in table.records if "loss" in record})


def test_records_of_another_table_are_taken_over_in_the_place_of_earlier_ones(tmp_path, capsys):
    records = [r for r in json.loads((quality.RESULTS / "quality-demo.json").read_text()) if r["row"] == "swa"]
    newer = [{**records[0], "kl": 7.0}, {**records[1], "seed": 99}]
    for name, some in (("mine", records), ("theirs", newer)):
        (tmp_path / f"{name}.json").write_text(json.dumps(some))
    quality.main(["--table", "--out", str(tmp_path / "mine"), "--merge", str(tmp_path / "theirs.json")])
    assert "| swa |" in capsys.readouterr().out
    merged = json.loads((tmp_path / "mine.json").read_text())
    assert len(merged) == len(records) + 1 and all(record in merged for record in newer) and records[0] not in merged
