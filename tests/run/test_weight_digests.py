"""A checkpoint whose weights changed since they were written is neither loaded nor published."""

import pytest

from linearizer.errors import FolderError
from linearizer.model.checkpoint import load_student, save
from linearizer.run.folder import Run
from linearizer.run.plan import Plan
from linearizer.run.weight_digests import check_weights, hash_file, read_digests, write_digests
from tests.support.models import student_of, teacher_of


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    save(student_of("llama"), None, run.checkpoint)
    write_digests(run)
    return run


def test_an_intact_checkpoint_loads(run):
    load_student(run)


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_damaged_weights_are_refused(run, damage):
    (path,) = run.checkpoint.glob("*.safetensors")
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.unlink()
    if damage != "remove":
        path.write_bytes(content if damage == "flip" else content[:-100])
    with pytest.raises(FolderError, match="is not as the run wrote it: remove the folder checkpoint, and"):
        load_student(run)


def test_a_linked_file_of_the_hubs_cache_is_not_read_for_its_digest(tmp_path):
    """Its name is its digest; the name of another file is none."""
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    teacher_of("llama").save_pretrained(tmp_path / "teacher")
    file = (tmp_path / "teacher" / "model.safetensors").rename(tmp_path / ("0" * 64))
    save(student_of("llama"), None, run.checkpoint, [file])
    write_digests(run, [file])
    found = read_digests(run)
    assert found["teacher-00001-of-00001.safetensors"] == "0" * 64
    assert found["student.safetensors"] == hash_file(run.checkpoint / "student.safetensors")
    check_weights(run, but=["teacher-00001-of-00001.safetensors"])
    with pytest.raises(FolderError, match="teacher-00001-of-00001.safetensors' is not as the run wrote it"):
        check_weights(run)


def test_a_damaged_config_is_refused_in_a_sentence(run):
    (run.checkpoint / "config.json").write_text("{")
    with pytest.raises(FolderError, match="cannot be loaded"):
        load_student(run)
