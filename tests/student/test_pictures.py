"""The student of a model that reads pictures is the whole model: a picture's tokens enter its state like others.

Such students load without this package in tests/teacher/test_hybrids.py, with others in one process.
"""

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.serve.saved_state import begin_turn, read_state, take_back_turn, write_state
from linearizer.student.cache import CACHE
from linearizer.teacher.logits import bytes_held
from tests.support.models import tokens
from tests.support.whole_models import PICTURE, PICTURED, inputs_of, pictured_model, pictured_student

CLOSE, ROUNDED = 1e-4, 2e-3  # of the logits' spread: what is computed alike; recurrences in another order
HEADS = [Head(window=4, slots=6), Head(window=3)]  # of which few hold a picture of four tokens exactly
AFTER = tokens(1, 24)
every_family = pytest.mark.parametrize("family", PICTURED)


def distance(logits, expected):
    return float((logits - expected).abs().max() / expected.std())


def go_on(student, cache, ids, size):
    return torch.cat([student(part, use_cache=True, **{CACHE: cache}).logits for part in ids.split(size, 1)], 1)


@torch.no_grad()
@every_family
def test_a_budget_that_holds_text_and_picture_gives_the_teachers_logits(family):
    teacher, student, inputs = pictured_model(family), pictured_student(family, [Head(window=64)]), inputs_of(family)
    assert distance(student(**inputs).logits, teacher(**inputs).logits) < CLOSE
    other = teacher(**inputs_of(family, seed=1)).logits
    assert distance(student(**inputs).logits, other) > 0.01  # it depends on the picture
    asked = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(student.generate(**inputs, **asked), teacher.generate(**inputs, **asked))


@torch.no_grad()
@every_family
def test_a_text_after_a_picture_may_be_read_at_once_in_parts_or_by_tokens(family):
    """Whatever else the model reads in between: a picture changes the positions of its own text alone."""
    student, inputs = pictured_student(family, HEADS), inputs_of(family)
    whole = inputs_of(family, after=(8, 9, 10, 11, *AFTER[0].tolist()))
    at_once = student(**whole).logits[:, -AFTER.shape[1] :]
    for size in (AFTER.shape[1], 7, 1):
        cache = student.empty_cache()
        student(**inputs, use_cache=True, **{CACHE: cache})
        student(AFTER)
        assert distance(go_on(student, cache, AFTER, size), at_once) < ROUNDED
    begun, cache = inputs["input_ids"][:, :2], student.empty_cache()
    student(begun, use_cache=True, **{CACHE: cache})
    later = {name: x[:, 2:] if name in ("input_ids", "mm_token_type_ids") else x for name, x in inputs.items()}
    student(**later, use_cache=True, **{CACHE: cache})
    assert distance(go_on(student, cache, AFTER, 7), at_once) < ROUNDED


@torch.no_grad()
@every_family
def test_a_row_with_padding_at_the_left_is_the_row_alone(family):
    student, inputs, space = pictured_student(family, HEADS), inputs_of(family), 3
    ids = inputs.pop("input_ids")
    alone = student(ids, **inputs).logits
    padded = torch.nn.functional.pad(ids, (space, 0), value=0)
    if "mm_token_type_ids" in inputs:
        inputs["mm_token_type_ids"] = (padded == PICTURE).long()
    out = student(padded, **inputs, attention_mask=(padded != 0).long())
    assert distance(out.logits[:, space:], alone) < ROUNDED
    mask = torch.cat([(padded != 0).long(), torch.ones_like(AFTER)], 1)
    expected = student.empty_cache()
    student(**inputs_of(family), use_cache=True, **{CACHE: expected})
    later = student(AFTER, attention_mask=mask, use_cache=True, **{CACHE: out[CACHE]}).logits
    assert distance(later, student(AFTER, use_cache=True, **{CACHE: expected}).logits) < ROUNDED


@torch.no_grad()
@every_family
def test_a_state_is_kept_forked_and_taken_back_with_its_picture(family, tmp_path):
    student = pictured_student(family, HEADS)
    cache = student.empty_cache()
    student(**inputs_of(family), use_cache=True, **{CACHE: cache})
    write_state(student, cache, tmp_path / "state")
    fork, kept, turned, twice = cache.fork(), read_state(student, tmp_path / "state"), cache.fork(), cache.fork(2)
    begin_turn(turned)
    student(**inputs_of(family, seed=1), use_cache=True, **{CACHE: turned})
    take_back_turn(turned)
    expected = go_on(student, cache, AFTER, 5)
    for state in (fork, kept, turned):
        assert torch.equal(go_on(student, state, AFTER, 5), expected)
    twice.batch_select_indices(torch.tensor([1]))
    assert distance(go_on(student, twice, AFTER, 5), expected) < CLOSE


@torch.no_grad()
def test_more_pictures_take_no_more_bytes():
    student = pictured_student("qwen2_5_vl", HEADS)
    cache, sizes = student.empty_cache(), []
    for seed in range(4):
        student(**inputs_of("qwen2_5_vl", seed=seed), use_cache=True, **{CACHE: cache})
        sizes.append(bytes_held(cache))
    assert sizes[-1] == sizes[1] > 0 and cache.get_seq_length() == 44
