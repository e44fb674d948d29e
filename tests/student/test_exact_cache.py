"""A text that is no longer than its state is large is read as the teacher reads it, and turns once."""

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.serve.saved_state import read_state, write_state
from linearizer.student.attention_of_student import tensors
from linearizer.teacher.observing import attending_as_teacher
from tests.support.models import MIXED, student_of, tokens

SLOTS = [Head(window=6, slots=10, bits=5), Head(window=5, slots=6)]
MOST, LONG = 12, 30


def read(student, ids, cuts=(), cache=None, mask=None):
    """Read a text in pieces that end at the cuts; return the logits of all tokens, and the cache."""
    cache, parts = student.empty_cache() if cache is None else cache, []
    for begin, end in zip((0, *cuts), (*cuts, ids.shape[1]), strict=True):
        seen = None if mask is None else mask[:, :end]
        with torch.no_grad():
            out = student(ids[:, begin:end], attention_mask=seen, cache=cache, use_cache=True)
        parts.append(out.logits)
    return torch.cat(parts, 1), cache


def states_of(cache, text=slice(None)):
    return [x[text] for layer in cache.layers for state in layer.memory for x in tensors(state).values()]


def as_teacher(student, ids):
    with attending_as_teacher(student), torch.no_grad():
        return student(ids).logits


@pytest.mark.parametrize("heads", [SLOTS, MIXED], ids=["slots", "all kinds"])
@pytest.mark.parametrize("cuts", [(), (5, 11), (12,), (13,), (11, 14, 15, 16)], ids=str)
def test_rows_up_to_the_limit_are_the_teachers_and_all_others_those_of_a_student_that_is_never_exact(heads, cuts):
    student, ids = student_of("llama", heads, exact_tokens=MOST), tokens(2, LONG)
    logits, cache = read(student, ids, cuts)
    torch.testing.assert_close(logits[:, :MOST], as_teacher(student, ids)[:, :MOST])
    never = student_of("llama", heads, exact_tokens=0)
    for layer, other in zip(student.students(), never.students(), strict=True):
        other.load_state_dict(layer.state_dict())
    one_layer = [(a.memory, b.memory) for a, b in zip(cache.layers[:1], read(never, ids)[1].layers[:1], strict=True)]
    for mine, theirs in one_layer:  # later layers see what the first one gave
        for a, b in zip(mine, theirs, strict=True):
            for name, x in tensors(a).items():
                torch.testing.assert_close(x, getattr(b, name), msg=name)


def test_the_state_of_a_text_that_turned_has_the_same_bytes_in_any_cuts():
    student, ids = student_of("llama", SLOTS, exact_tokens=MOST), tokens(1, LONG)
    whole = states_of(read(student, ids)[1])
    for cuts in ((5, 11), (12, 13), (20,)):
        for x, y in zip(states_of(read(student, ids, cuts)[1]), whole, strict=True):
            torch.testing.assert_close(x, y, atol=1e-5, rtol=1e-4)


def test_one_token_at_a_time_agrees_with_one_call():
    student, ids = student_of("llama", SLOTS, exact_tokens=MOST).double(), tokens(2, LONG)  # else few codes may differ
    torch.testing.assert_close(read(student, ids, range(1, LONG))[0], read(student, ids)[0])


@pytest.mark.parametrize("heads", [SLOTS, MIXED], ids=["slots", "all kinds"])
@pytest.mark.parametrize("lengths", [(4, 9, 12), (30, 8, 3), (13, 12, 11), (30, 14, 0)], ids=str)
def test_each_row_of_a_padded_batch_is_exact_or_not_by_itself(heads, lengths):
    student, longest, more = student_of("llama", heads, exact_tokens=MOST), max(lengths), 5
    rows = [tokens(1, length + more, seed=length) for length in lengths]
    mask = torch.ones(len(rows), longest + more, dtype=torch.long)
    ids = torch.zeros(len(rows), longest + more, dtype=torch.long)
    for row, (text, length) in enumerate(zip(rows, lengths, strict=True)):
        mask[row, : longest - length] = 0
        ids[row, longest - length :] = text[0]
    logits, cache = read(student, ids, range(longest, longest + more), mask=mask)
    for row, (text, length) in enumerate(zip(rows, lengths, strict=True)):
        alone, _ = read(student, text)
        torch.testing.assert_close(logits[row, longest - length :], alone[0], atol=1e-4, rtol=1e-4)


def test_rows_can_be_selected_copied_and_read_on_before_and_after_they_turn():
    student, ids = student_of("llama", SLOTS, exact_tokens=MOST), tokens(3, LONG)
    for end in (8, 20):
        _, cache = read(student, ids[:, :end])
        order = torch.tensor([2, 0])
        forked = cache.fork()
        forked.batch_select_indices(order)
        expected = read(student, ids)[0][order, end:]
        logits, _ = read(student, ids[order, end:], cache=forked)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("lengths", [(8,), (20,), (5, 20), (20, 20)], ids=str)
def test_a_state_is_saved_and_loaded_whether_exact_or_not(lengths, tmp_path):
    student, longest = student_of("llama", SLOTS, exact_tokens=MOST), max(lengths)
    ids = tokens(len(lengths), longest)
    mask = (torch.arange(longest) >= longest - torch.tensor(lengths)[:, None]).long()
    _, cache = read(student, ids, mask=mask)
    write_state(student, cache, tmp_path / "state")
    loaded, more = read_state(student, tmp_path / "state"), tokens(len(lengths), 9, seed=1)
    for x, y in zip(states_of(loaded), states_of(cache), strict=True):
        assert torch.equal(x, y)
    assert torch.equal(read(student, more, cache=loaded)[0], read(student, more, cache=cache)[0])


def test_no_state_takes_more_bytes_than_the_teachers_cache_at_the_limit():
    student, ids = student_of("llama", SLOTS, exact_tokens=MOST), tokens(1, LONG)
    sizes = [sum(layer.bytes() for layer in read(student, ids[:, :end])[1].layers) for end in (6, 12, 13, 29)]
    assert sizes[0] == sizes[1] / 2 and sizes[2] == sizes[3]


def test_a_batch_whose_texts_all_turned_keeps_no_exact_cache():
    student, ids = student_of("llama", SLOTS, exact_tokens=MOST), tokens(2, 18)
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[0, :8] = 0
    _, cache = read(student, ids, (15, 17), mask=mask)
    assert any(hasattr(state, "is_exact") for state in cache.layers[0].memory)
    read(student, tokens(2, 4), cache=cache)
    assert not any(hasattr(state, "is_exact") for state in cache.layers[0].memory)
