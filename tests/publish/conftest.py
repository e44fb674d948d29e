"""A finished run to publish."""

import pytest

from tests.support.publishing import copy_run


@pytest.fixture(scope="module")
def run(quick_run, tmp_path_factory):
    """A finished run of the demo model, which no test may change but for its log."""
    return copy_run(quick_run, tmp_path_factory.mktemp("run") / "demo")
