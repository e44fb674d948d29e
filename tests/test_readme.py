"""The README's table of measured results has the shape that its benchmark would give it."""

import re

import pytest

from tests.benchmarks.readme import BEGIN, COLUMNS, END, README, ROWS, main


def table_of(text):
    """The cells between the markers, and what is noted below them."""
    _, _, rest = text.partition(BEGIN)
    inside, end, _ = rest.partition(END)
    assert end, "both markers are there"
    lines = inside.strip().split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows, " ".join(line for line in lines if not line.startswith("|"))


def test_the_table_has_the_rows_and_columns_that_are_measured():
    rows, note = table_of(README.read_text(encoding="utf-8"))
    assert tuple(rows[0]) == COLUMNS and set(rows[1]) == {"---"}
    assert tuple(row[0] for row in rows[2:]) == ROWS
    for row in rows[2:]:
        assert len(row) == len(COLUMNS)
        assert all(re.match(r"[\d.]+( [kMG]?B|%)?( ± [\d.]+)?$", cell) for cell in row[1:]), row
    for word in ("held out from training", "seed", "torch", "transformers"):
        assert word in note


def test_a_readme_without_markers_is_left_as_it_is(tmp_path, capsys):
    (tmp_path / "README.md").write_text("# Words\n")
    with pytest.raises(SystemExit):
        main(["--readme", str(tmp_path / "README.md")])
    assert "lacks the markers" in capsys.readouterr().err
    assert (tmp_path / "README.md").read_text() == "# Words\n"
