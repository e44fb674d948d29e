"""`linearizer evaluate` measures a finished run part by part, and answers bad requests with a sentence."""

import json

import pytest

from linearizer.errors import FolderError
from linearizer.plan import Plan
from linearizer.run import Run

ROW = {"name": "teacher", "state_bytes": None, "language": {"loss": 1.0}, "recall": []}


@pytest.fixture
def begun(tmp_path):
    """A run that has only begun."""
    return Run.begin(tmp_path / "run", Plan("demo", budget=64))


def test_rows_and_parts_stand_in_one_file(begun):
    assert begun.evaluation == [] and begun.evaluation_parts == {}
    begun.keep_found(rows=[ROW])
    begun.keep_found(parts={"needle": {"lengths": [64]}})
    assert begun.evaluation == [ROW] and begun.evaluation_parts == {"needle": {"lengths": [64]}}


def test_a_file_of_rows_alone_still_reads(begun):
    begun.write("evaluation.json", json.dumps([ROW]))
    assert begun.evaluation == [ROW] and begun.evaluation_parts == {}


def test_a_file_that_was_cut_off_is_named(begun):
    begun.write("evaluation.json", '[{"name": "tea')
    with pytest.raises(FolderError, match="evaluation.json' cannot be read"):
        assert begun.evaluation
