"""Whatever a disk or a hand did to the files of a run, and whatever a client sends: one sentence, no traceback.

`python -m tests.benchmarks.abuse --minutes 60` draws more of the same.
"""

import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from linearizer.run.folder import Run
from tests.support.abuse import BODIES, damaged, look_at, read_hostile_body

EXAMPLE = Path(__file__).parents[1] / "assets" / "example-run"
FILES = sorted(path.name for path in EXAMPLE.glob("*.json*"))
FEW = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck), database=None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return Run(shutil.copytree(EXAMPLE, tmp_path_factory.mktemp("example") / "run"))


@FEW
@given(data=st.data(), name=st.sampled_from(FILES))
def test_a_damaged_file_of_a_run_is_refused_in_a_sentence(run, data, name):
    whole = (EXAMPLE / name).read_bytes()
    (run.folder / name).write_bytes(data.draw(damaged(whole)))
    try:
        look_at(run)
    finally:
        (run.folder / name).write_bytes(whole)


@FEW
@given(content=BODIES)
def test_a_hostile_body_is_a_request_or_refused_in_a_sentence(content):
    read_hostile_body(content)
