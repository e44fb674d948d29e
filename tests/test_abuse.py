"""Whatever a disk or a hand did to files, and whatever is asked for: one sentence, no traceback, no other answer.

`python -m tests.benchmarks.abuse --minutes 60` draws more of the same.
"""

import pytest
from hypothesis import settings

from tests.benchmarks.abuse import ALL_KINDS, KINDS

FEW = settings(ALL_KINDS, max_examples=40, derandomize=True)


@pytest.mark.filterwarnings("ignore")  # of libraries about what they read
@pytest.mark.parametrize("kind", KINDS)
def test_hostile_input_is_served_or_refused_in_a_sentence(kind, quick_run, hub, tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path / "runs"))
    KINDS[kind](FEW, tmp_path / "hostile", quick_run)
