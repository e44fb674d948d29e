"""Parts of an evaluation are read back as the dataclasses that were written."""

import json

import pytest

from linearizer.errors import FolderError
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.results import RESULTS, Language, read_part
from tests.support.evaluation_results import STORED


@pytest.mark.parametrize("name", RESULTS)
def test_a_part_is_read_as_it_was_written(name):
    part = read_part(name, STORED[name])
    assert type(part.result) is RESULTS[name] and (part.read is None) == ("text" not in STORED[name])
    assert json.loads(json.dumps(part.to_plain())) == STORED[name]


def test_a_run_gives_its_parts_typed(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    run.write_evaluation(parts={"language": STORED["language"], "unknown": {}})
    assert list(run.results) == ["language"] and isinstance(run.results["language"].result, Language)
    run.write_evaluation(parts={"language": {**STORED["language"], "edges": "none"}})
    with pytest.raises(FolderError, match="edges"):
        assert run.results
