"""A folder holds one run, however many begin one there."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from linearizer.errors import FolderError
from linearizer.plan.plan import Plan
from linearizer.run.files import remove
from linearizer.run.folder import Run


def test_of_many_that_begin_a_run_in_one_folder_at_once_only_one_does(tmp_path):
    def create(budget):
        try:
            return Run.create(tmp_path / "run", Plan("demo", budget=budget))
        except FolderError as refused:
            return refused

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(create, range(64, 72)))
    runs = [result for result in results if isinstance(result, Run)]
    assert len(runs) == 1 and runs[0].plan.budget == 64 + results.index(runs[0])
    refusals = [str(result) for result in results if result not in runs]
    assert all("holds a run already" in text or "is being written by another process" in text for text in refusals)


def test_a_run_is_resumed_whatever_else_was_put_into_its_folder(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    (run.folder / "notes").mkdir()
    assert Run.is_begun(run.folder, resume=True)


@pytest.mark.parametrize("name", ["checkpoint", "state", "checkpoint.unfinished"])
def test_a_run_does_not_begin_beside_files_of_others_that_it_would_take_for_its_own(name, tmp_path):
    (tmp_path / name).mkdir()
    (tmp_path / name / "model.bin").write_bytes(b"precious")
    with pytest.raises(FolderError, match="holds something else"):
        Run.create(tmp_path, Plan("demo", budget=64))
    assert [*tmp_path.rglob("*")] == [tmp_path / name, tmp_path / name / "model.bin"]


def test_a_run_begins_where_another_was_killed_as_it_began(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    (run.folder / "plan.json").rename(run.folder / "plan.json.unfinished")
    assert Run.create(run.folder, plan := Plan("demo", budget=32)).plan == plan


def test_a_file_that_cannot_be_removed_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(FolderError, match=r"file/x' cannot be removed \(Not a directory\): make its folder writable"):
        remove(tmp_path / "file" / "x")


def test_a_folder_that_may_not_be_listed_is_refused(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(FolderError, match="name a folder that you may write to"):
        Run.is_begun(tmp_path)
