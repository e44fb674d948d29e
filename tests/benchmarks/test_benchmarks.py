"""The table of recipes judges by the texts that a model reads, and describes every row; a record is a file."""

import json
from dataclasses import replace

import pytest

from linearizer.plan.plan import Plan
from linearizer.teacher import load as teacher_module
from tests.benchmarks import golden, quality, speed
from tests.benchmarks.quality_rows import FORMER, describe_row


def test_quality_judges_by_texts_that_the_positions_of_a_model_hold():
    plan = Plan.of("swa", model="demo", budget=32, length=512)
    teacher = teacher_module.load_teacher_of(plan)
    few = replace(teacher, inspection=replace(teacher.inspection, max_positions=256))
    assert quality.held_out(plan, teacher).shape == (quality.HELD, 512)
    assert quality.held_out(plan, few).shape == (quality.HELD, 256)


def test_every_row_of_the_quality_table_is_described_in_a_line(tmp_path):
    lines = {row: describe_row(row) for row in (*quality.ROWS, *FORMER)}
    assert {*quality.QUICK} <= lines.keys()
    assert all(line and "\n" not in line and len(line) < 200 for line in lines.values())
    assert len({*lines.values()}) == len(lines), "a line says what sets a row apart from every other"
    assert "its whole cache" in lines["best, 8 bits --may-grow"]
    table = quality.Table(tmp_path / "table")
    table.records = json.loads((quality.RESULTS / "quality-demo.json").read_text())
    assert {record["row"] for record in table.records} <= lines.keys()
    text = table.markdown()
    assert all(f"- `{row}`: " in text for row in {record["row"] for record in table.records if "loss" in record})


@pytest.mark.parametrize("words", [["--help"], ["--record"], []], ids=" ".join)
def test_a_record_is_named_by_no_option(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(golden, "RUNS", {})
    with pytest.raises(SystemExit):
        golden.main(words)
    assert not [*tmp_path.iterdir()]


def test_layers_of_a_hybrid_are_timed_beside_its_teachers(monkeypatch, capsys):
    for name, small in (("KINDS", {"lfm2": ("lfm2", {})}), ("LARGER", {}), ("READ", 16), ("WRITTEN", 2)):
        monkeypatch.setattr(speed, name, small)
    speed.time_layers(1)
    _, softmax, recurrent = capsys.readouterr().out.splitlines()
    assert softmax.startswith("lfm2, softmax") and recurrent.startswith("lfm2, recurrent")
    assert all(float(number) > 0 for row in (softmax, recurrent) for number in row.split()[2:])
