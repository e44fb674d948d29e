"""A checkpoint contains its teacher's files without writing them again."""

import errno
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from linearizer.errors import ModelNotAvailable
from linearizer.hub.weight_files import teacher_files
from linearizer.method.checkpoint import link_or_copy, save
from tests.support.models import MIXED, student_of, teacher_of, tokens

MODEL = "model.safetensors"
ONLY = "teacher-00001-of-00001.safetensors"


def saved(family, tmp_path, heads=MIXED):
    """Save a teacher and around its files its student; give the student, the files and the checkpoint."""
    teacher_of(family).save_pretrained(tmp_path / "teacher", max_shard_size="300KB")
    return around(student_of(family, heads), tmp_path)


def around(student, tmp_path):
    files = sorted((tmp_path / "teacher").glob("*.safetensors"))
    save(student, None, tmp_path / "checkpoint", files)
    return student, files, tmp_path / "checkpoint"


def loads_as(student, checkpoint):
    loaded, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return torch.equal(loaded(tokens(1, 20)).logits, student(tokens(1, 20)).logits)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_bigcode", "mixtral", "qwen3_moe", "gemma3_text"])
@torch.no_grad()
def test_a_student_loads_from_the_files_of_its_teacher_and_one_small_file(family, tmp_path):
    student, files, checkpoint = saved(family, tmp_path)
    own = load_file(checkpoint / "student.safetensors")
    assert own and all(".student." in name for name in own)
    links = sorted(checkpoint.glob("teacher-*.safetensors"))
    assert len(files) == len(links) > 1 or files[0].stat().st_size < 300_000
    assert all(link.samefile(file) for link, file in zip(links, files, strict=True))
    assert not (checkpoint / MODEL).exists()
    assert loads_as(student, checkpoint)


@torch.no_grad()
def test_what_only_the_teachers_class_can_name_is_written_anew(tmp_path):
    student, files, checkpoint = saved("gpt_neox", tmp_path)
    assert "embed_out.weight" in {name for file in files for name in load_file(file)}
    assert [path.name for path in checkpoint.glob("*.safetensors*")] == [MODEL] and loads_as(student, checkpoint)


def across_disks(*paths):
    raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))


def test_a_copy_that_was_broken_off_is_no_file_of_a_checkpoint(tmp_path, monkeypatch):
    def copy_a_part(file, target):
        target.write_bytes(file.read_bytes()[:3])
        raise KeyboardInterrupt

    (tmp_path / "file").write_bytes(b"weights")
    monkeypatch.setattr(os, "link", across_disks)
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(shutil, "copyfile", copy_a_part)
        link_or_copy(tmp_path / "file", tmp_path / MODEL)
    assert not (tmp_path / MODEL).exists()
    link_or_copy(tmp_path / "file", tmp_path / MODEL)
    assert (tmp_path / MODEL).read_bytes() == b"weights" and len(list(tmp_path.iterdir())) == 2


@torch.no_grad()
def test_what_cannot_be_linked_is_copied(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", across_disks)
    student, files, checkpoint = saved("llama", tmp_path)
    links = sorted(checkpoint.glob("teacher-*.safetensors"))
    assert [link.read_bytes() for link in links] == [file.read_bytes() for file in files]
    assert not links[0].samefile(files[0]) and loads_as(student, checkpoint)


def test_a_checkpoint_outlives_the_folder_of_its_teacher_and_leaves_it_as_it_was(tmp_path):
    teacher_of("llama").save_pretrained(tmp_path / "blobs")
    (tmp_path / "teacher").mkdir()
    (tmp_path / "teacher" / MODEL).symlink_to(tmp_path / "blobs" / MODEL)  # as in the Hub's cache
    (tmp_path / "blobs" / MODEL).chmod(0o400)
    student, _, checkpoint = around(student_of("llama"), tmp_path)
    assert (tmp_path / "blobs" / MODEL).stat().st_mode & 0o777 == 0o400
    (tmp_path / "blobs" / MODEL).unlink()
    assert not (checkpoint / ONLY).is_symlink() and loads_as(student, checkpoint)


def test_the_index_names_the_files_that_are_the_teachers(tmp_path):
    _, files, checkpoint = saved("llama", tmp_path)
    index = json.loads((checkpoint / f"{MODEL}.index.json").read_text())
    assert list(index["metadata"]["teacher_files"].values()) == [file.name for file in files]
    sizes = [x.nbytes for path in checkpoint.glob("*.safetensors") for x in load_file(path).values()]
    assert index["metadata"]["total_size"] == sum(sizes)
    (checkpoint / f"{MODEL}.index.json").write_text('{"metadata": true}')
    assert not teacher_files(checkpoint)
    (checkpoint / f"{MODEL}.index.json").write_text("{")
    with pytest.raises(ModelNotAvailable, match="it is not JSON"):
        teacher_files(checkpoint)
