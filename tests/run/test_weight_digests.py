"""A checkpoint whose weights changed since they were written is neither loaded nor published."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from linearizer import pipeline
from linearizer.errors import FolderError
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import load_of_run, load_student, save
from linearizer.plan.plan import Plan
from linearizer.run.folder import Run
from linearizer.run.weight_digests import check_weights, hash_file, read_digests, write_digests
from tests.support.damage import cut, flip_bit
from tests.support.models import student_of, teacher_of


@pytest.fixture
def run(tmp_path):
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    save(student_of("llama"), None, run.checkpoint)
    write_digests(run)
    return run


@pytest.mark.parametrize("damage", [flip_bit, cut, Path.unlink], ids=["flip", "cut", "remove"])
def test_damaged_weights_are_refused(run, damage):
    (path,) = run.checkpoint.glob("*.safetensors")
    damage(path)
    with pytest.raises(FolderError, match="is not as the run wrote it: remove the folder checkpoint, and"):
        load_student(run)


def test_a_linked_file_of_the_hubs_cache_is_not_read_for_its_digest(tmp_path):
    """Its name is its digest; the name of another file is none."""
    run = Run.create(tmp_path / "run", Plan("demo", budget=64))
    teacher_of("llama").save_pretrained(tmp_path / "teacher")
    file = (tmp_path / "teacher" / "model.safetensors").rename(tmp_path / ("0" * 64))
    save(student_of("llama"), None, run.checkpoint, [file])
    write_digests(run, [file])
    digests = read_digests(run)
    assert digests["teacher-00001-of-00001.safetensors"] == "0" * 64
    assert digests["student.safetensors"] == hash_file(run.checkpoint / "student.safetensors")
    with pytest.raises(FolderError, match="teacher-00001-of-00001.safetensors' is not as the run wrote it"):
        check_weights(run)


@pytest.fixture
def with_tokenizer(run):
    """A run whose checkpoint has a tokenizer, and whose plan is all that loading asks for."""
    (run.folder / "inspection.json").write_text(pipeline.inspect("demo").to_json())
    save(student_of("llama"), AutoTokenizer.from_pretrained(find_model("demo").folder), run.checkpoint)
    return run


@pytest.mark.parametrize(
    "name, damage",
    [
        *(("tokenizer.json", damage) for damage in (b"", b"null", b"\xff", b'{"model": {"type": "none"}}')),
        *(("tokenizer_config.json", damage) for damage in (b"{", b"[[[", b"null")),
    ],
)
def test_a_damaged_tokenizer_is_refused_in_a_sentence(with_tokenizer, name, damage):
    """Also where it was damaged before its digest was noted."""
    run, path = with_tokenizer, with_tokenizer.checkpoint / name
    write_digests(run)
    content = path.read_bytes()
    path.write_bytes(damage)
    with pytest.raises(FolderError, match=f"{name}' is not as the run wrote it: remove the folder checkpoint"):
        load_of_run(run)
    write_digests(run)
    with pytest.raises(FolderError, match="checkpoint' has no tokenizer that can be loaded"):
        load_of_run(run)
    path.write_bytes(content)
    write_digests(run)
    load_of_run(run)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_a_flipped_bit_of_a_tokenizer_or_config_is_seen(with_tokenizer, name):
    write_digests(with_tokenizer)
    path = with_tokenizer.checkpoint / name
    flip_bit(path, path.stat().st_size // 2)
    with pytest.raises(FolderError, match=f"{name}' is not as the run wrote it"):
        check_weights(with_tokenizer)


@pytest.mark.parametrize(
    "change", [{"layers": [None]}, {"layers": [{"heads": []}] * 3}, {"teacher_type": "no such type"}]
)
def test_a_config_that_was_damaged_before_its_digest_is_refused(with_tokenizer, change):
    path = with_tokenizer.checkpoint / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "linearized": {**config["linearized"], **change}}))
    write_digests(with_tokenizer)
    with pytest.raises(FolderError, match="checkpoint' cannot be loaded"):
        load_of_run(with_tokenizer)


def test_an_index_without_its_map_is_refused(with_tokenizer):
    (weights,) = with_tokenizer.checkpoint.glob("*.safetensors")
    weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    (with_tokenizer.checkpoint / "model.safetensors.index.json").write_text('{"metadata": {}, "weight_map": null}')
    write_digests(with_tokenizer)
    with pytest.raises(FolderError, match="checkpoint' cannot be loaded"):
        load_of_run(with_tokenizer)


def test_a_checkpoint_does_not_tell_where_its_tokenizer_was_read(with_tokenizer):
    settings = json.loads((with_tokenizer.checkpoint / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] and not settings.keys() & {"is_local", "local_files_only"}
