"""One browser, one server at one's own machine and one Space for all tests of the page that a worker runs."""

import shutil

import pytest

from tests.support.page_server import SPACE, SPACE_MINUTES, browsing, serving


@pytest.fixture(scope="package")
def browser():
    with browsing() as result:
        yield result


@pytest.fixture(scope="package")
def local(tmp_path_factory):
    """A server at one's own machine, where ann's token is known."""
    with serving(tmp_path_factory.mktemp("local") / "runs", HF_TOKEN="hf_fake_ann") as server:
        yield server


@pytest.fixture(scope="package")
def space(tmp_path_factory):
    limits = {"LINEARIZER_SPACE_MINUTES": str(SPACE_MINUTES)}
    with serving(tmp_path_factory.mktemp("space") / "runs", **SPACE, **limits) as server:
        yield server


@pytest.fixture
def root(tmp_path, monkeypatch):
    """Name the folder of runs at one's own machine, of tests that ask no server."""
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


@pytest.fixture
def on_space(root, monkeypatch):
    """Name the folder of runs on a Space, of tests that ask no server."""
    monkeypatch.setenv("SPACE_ID", "owner/name")
    return root


@pytest.fixture(scope="package")
def done(local, trained_run):
    """Name a run that has a student."""
    shutil.copytree(trained_run, local.runs / "trained")
    return "trained"
