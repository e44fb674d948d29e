"""What a page keeps in memory of a run is of that run alone, not of the next run in a folder of the same name."""

import io
import os
import shutil
import zipfile
from types import SimpleNamespace

import pytest

from linearizer import pipeline
from linearizer.errors import FolderError, RequestError
from linearizer.page import actions, calls, run_state, run_steps, sending
from linearizer.page.chat import chats
from linearizer.page.visitors import find_visitor
from linearizer.plan.plan import Plan
from linearizer.publish import push
from linearizer.run.folder import Run
from linearizer.workers import control
from tests.support.runs import wait_until

PLAN = Plan("demo", strategy="window", budget=64, texts=2, length=64)


@pytest.fixture
def someone(tmp_path, monkeypatch):
    monkeypatch.setenv("LINEARIZER_RUNS", str(tmp_path))
    monkeypatch.setattr(chats, "LOADED", [])
    return find_visitor()


def published(run, repo_id, **how):
    """Publish nothing, at once."""
    yield from ()
    return SimpleNamespace(repo_id=repo_id)


def test_a_run_that_is_named_as_a_deleted_one_was_shows_and_compares_its_own(
    someone, tmp_path, quick_run, trained_run, monkeypatch
):
    monkeypatch.setattr(push, "publish", published)
    run = Run(shutil.copytree(quick_run, tmp_path / "demo-64"))
    with chats.lent_models(run, someone) as models:
        first = models
    sending.begin_publication(run, "me/first", True, None)
    wait_until(lambda: sending.PUBLICATIONS[run.key].is_over)
    seen = {name: part.mark for name, part in run_state.read_pieces(run, 60.0).items()}
    with chats.lent_models(run, someone) as models:
        assert models is first and "verdict" in seen

    control.delete(run)
    run = pipeline.begin(tmp_path / "demo-64", PLAN)
    assert run.key not in sending.PUBLICATIONS
    new = run_state.read_pieces(run, 60.0)
    assert "verdict" not in new and "curves" not in new and new["id"].mark != seen["id"]
    monkeypatch.setattr(calls, "identify_visitor", lambda *_: someone)
    drawn = run_steps.draw_changes({"run": "demo-64"}, None, None, seen, 3.0, False, False)
    assert set(drawn[run_steps.OUTPUTS.index("seen")]) == set(new)  # nothing of the first is taken as shown

    control.delete(run)
    run = Run(shutil.copytree(trained_run, tmp_path / "demo-64"))
    with chats.lent_models(run, someone) as models:
        assert models is not first


def test_only_a_page_that_leaves_a_run_closes_the_steps_behind_the_first():
    step = run_steps.OUTPUTS.index("step_2")
    fresh, left = (
        run_steps.draw_changes({"run": None}, None, None, seen, 2, False, False) for seen in ({}, {"shown": "1"})
    )
    assert "interactive" not in fresh[step] and left[step].interactive is False


def test_a_run_that_cannot_take_over_measurements_leaves_no_folder_behind(someone, tmp_path, quick_run):
    old = Run(shutil.copytree(quick_run, tmp_path / "demo-64"))
    (samples := old.folder / "state" / "samples.safetensors").unlink(missing_ok=True)
    samples.mkdir()  # is copied after the profile, and cannot be
    with pytest.raises(FolderError, match="cannot be written"):
        actions.branch_run(someone, "demo-64", 96)
    assert [path.name for path in tmp_path.iterdir()] == ["demo-64"]


def test_a_run_that_is_being_published_is_not_deleted(someone, tmp_path):
    run = Run.create(tmp_path / "run", PLAN)
    sending.PUBLICATIONS[run.key] = sending.Publication(run, "me/student")
    with pytest.raises(RequestError, match="is being published to 'me/student': wait until that is done"):
        actions.delete_run(someone, "run")
    sending.PUBLICATIONS.pop(run.key).error = "it was interrupted"
    assert actions.delete_run(someone, "run") == "run" and not run.folder.exists()


def test_a_student_with_files_from_before_1980_is_packed(tmp_path):
    (tmp_path / "weights").write_bytes(b"x")
    os.utime(tmp_path / "weights", (0, 0))
    packed = zipfile.ZipFile(io.BytesIO(b"".join(sending.zip_folder(tmp_path, "student"))))
    assert packed.read("student/weights") == b"x"


def test_only_the_newest_publications_are_kept_in_memory(someone, tmp_path, monkeypatch):
    monkeypatch.setattr(push, "publish", published)
    runs = [Run.create(tmp_path / f"run-{number}", PLAN) for number in range(sending.MAX_KEPT + 5)]
    for run in runs:
        sending.begin_publication(run, "me/student", True, None)
        wait_until(lambda run=run: sending.PUBLICATIONS[run.key].is_over)
    assert len(sending.PUBLICATIONS) == sending.MAX_KEPT
    assert runs[0].key not in sending.PUBLICATIONS and sending.PUBLICATIONS[runs[-1].key].published
