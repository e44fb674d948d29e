"""A run reads its texts once: what becomes of their source later changes none of them."""

import pytest
import torch

from linearizer import pipeline
from linearizer.plan.plan import Plan
from linearizer.teacher.load import TEXTS, load_teacher_of, texts_of_run
from tests.support.damage import flip_bit


@pytest.fixture
def begun(tmp_path):
    """A run on a text of one's own, its teacher, and the file of the text."""
    source = tmp_path / "text.txt"
    source.write_text("\n".join(f"line {number} of a text" for number in range(2000)))
    run = pipeline.begin(tmp_path / "run", Plan("demo", budget=64, text=f"file:{source}", texts=2, length=64))
    return run, load_teacher_of(run.plan, None, run.inspection), source


def test_a_source_that_changes_meanwhile_changes_no_text_that_was_read(begun):
    run, teacher, source = begun
    first = texts_of_run(run, teacher, 4, None)
    source.write_text("\n".join(f"another line, {number}" for number in range(2000)))
    assert torch.equal(texts_of_run(run, teacher, 2, None), first[:2])
    eight = texts_of_run(run, teacher, 8, None)
    assert torch.equal(eight[:4], first) and eight.shape == (8, 64)
    source.unlink()
    assert torch.equal(texts_of_run(run, teacher, 8, None), eight)


def test_a_source_that_ended_is_not_read_again(begun):
    run, teacher, source = begun
    first = texts_of_run(run, teacher, 10**6, None, least=3)
    assert 3 < len(first) < 10**6
    source.unlink()
    assert torch.equal(texts_of_run(run, teacher, 10**6, None, least=3), first)


def test_texts_that_are_damaged_are_read_anew(begun):
    run, teacher, _ = begun
    first = texts_of_run(run, teacher, 4, None)
    flip_bit(run.folder / TEXTS)
    assert torch.equal(texts_of_run(run, teacher, 4, None), first)
    assert [event["file"] for event in run.events() if event["event"] == "dropped"] == [TEXTS]
