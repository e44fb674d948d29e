"""A run writes into files of its own folder: a link among them is refused, and what it points to is untouched."""

import shutil
from itertools import cycle

import pytest

from linearizer import pipeline
from linearizer.errors import FaultError, FolderError
from linearizer.plan.plan import Plan
from linearizer.run.files import UNFINISHED, open_in_place, remove, replacing, write_whole
from linearizer.run.folder import FILES_OF_RUN, Run
from linearizer.workers.worker import keep_faults

ASKED = dict(budget=64, texts=2, length=64, steps=0)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """The folder of a run at its beginning."""
    run = pipeline.begin(tmp_path_factory.mktemp("begun") / "run", Plan.of("features", model="demo", **ASKED))
    return run.folder


@pytest.fixture
def run(begun, tmp_path):
    return Run(shutil.copytree(begun, tmp_path / "run"))


@pytest.fixture
def target(tmp_path):
    """A file of somebody else, which stays as it is."""
    path = tmp_path / "target"
    path.write_bytes(b"precious")
    yield path
    assert path.read_bytes() == b"precious" and sorted(p.name for p in tmp_path.iterdir()) == ["run", "target"]


def put_link(path, target):
    remove(path)
    path.symlink_to(target)


NAMES = sorted({*FILES_OF_RUN, "state/x", "events.jsonl"} - {"plan.json", "begun.json"})


@pytest.mark.parametrize("name, kind", [*zip(NAMES, cycle(["file", "loop", "dangling"]), strict=False)])
def test_a_run_with_a_link_is_not_worked_on(run, target, said, name, kind):
    path = run.folder / name
    put_link(path, {"file": target, "loop": path, "dangling": target.with_name("none")}[kind])
    options = [word for name, value in ASKED.items() for word in (f"--{name}", value)]
    code, out, err = said("run", "demo", "--recipe", "features", *options, "--resume", "--out", run.folder)
    assert code == 2 and not out and err.count("\n") == 1, err
    assert f"{str(path)!r} is a link" in err or "cannot be read" in err  # what is read before is refused before


def test_nothing_that_a_run_writes_follows_a_link(run, target):
    """Each by itself: a link may come while the run works."""
    for name in ("events.jsonl", "lock", "stop", "worker.log", f"profile.json{UNFINISHED}"):
        put_link(run.folder / name, target)
    log = run.folder / "worker.log"
    for write in (
        lambda: run.log("started"),
        run.take_lock,
        lambda: Run.make_request(run, "stop"),
        lambda: write_whole(run.folder / "profile.json", "{}"),
        lambda: open(log, "a", opener=open_in_place),
    ):
        with pytest.raises((FolderError, OSError), match="is a link|Too many levels"):
            write()
    assert not run.is_locked
    with pytest.raises(FaultError), keep_faults(run, None, log):
        raise ZeroDivisionError


def test_a_folder_takes_the_place_of_a_link_not_of_its_target(run, target):
    put_link(run.checkpoint.with_name("checkpoint" + UNFINISHED), target.parent)
    put_link(run.checkpoint, target.parent)
    with replacing(run.checkpoint) as unfinished:
        unfinished.mkdir()
        (unfinished / "config.json").write_text("{}")
    assert not run.checkpoint.is_symlink() and (run.checkpoint / "config.json").is_file()
