"""Runs in processes of their own."""

import pytest

from tests.support.runs import beginning


@pytest.fixture
def begin(tmp_path):
    """Begin runs that are over when the test is."""
    yield from beginning(tmp_path / "runs")
