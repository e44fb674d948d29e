"""A pair hidden in text is asked for where it was put, and one that looks it up finds it."""

import pytest
import torch

from linearizer.errors import RequestError
from linearizer.evaluate.recall import DEPTHS, KEY, MIN_NEEDLE_TOKENS, PAIRS, VALUE, hide_pairs, measure_needle
from linearizer.progress import finish
from linearizer.teacher.ram import PeakMemory, run_if_it_fits
from tests.support.looking_up import looking_up

PAIR = KEY + VALUE


def text(texts, length):
    """No three tokens of it come twice."""
    return torch.stack([torch.randperm(4096)[:length] for _ in range(texts)])


@pytest.mark.parametrize("depth", DEPTHS)
def test_texts_keep_their_length_and_hold_what_is_asked_for(depth):
    hidden = hide_pairs(text(3, 400), depth, seed=1)
    assert hidden.ids.shape == (3, 400)
    assert torch.equal(hidden.ids[:, hidden.place : hidden.place + PAIR], hidden.ids[:, -PAIR:])
    assert abs(hidden.place - depth * 400) < PAIRS * PAIR + 20
    assert torch.equal(hide_pairs(text(1, 400)[:, :400] * 0 + 7, depth, 1).ids, torch.full((1, 400), 7))


def test_one_that_looks_back_a_little_finds_what_is_near():
    (grid,) = finish(measure_needle([looking_up(reach=150)], text(1, 600), [600], 512)).subjects
    assert grid.correct[0][-1] == 1 and grid.correct[0][0] == 0


def test_one_that_looks_up_finds_everything_and_a_row_ends_where_memory_does():
    subjects = [looking_up(most=300), looking_up()]
    result = finish(measure_needle(subjects, text(1, 400), [400, 200], 4096))
    assert result.lengths == (200, 400)
    assert result.subjects[0].correct == ((1.0,) * len(DEPTHS), (None,) * len(DEPTHS))
    grid = result.subjects[1]
    assert grid.correct == ((1.0,) * len(DEPTHS),) * 2
    assert all(loss < 0.01 for row in grid.loss for loss in row)
    assert all(loss > 5 for row in grid.surprise for loss in row)


def test_a_text_too_short_for_pairs_is_refused():
    with pytest.raises(RequestError, match=f"ask for lengths from {MIN_NEEDLE_TOKENS} on"):
        hide_pairs(text(1, MIN_NEEDLE_TOKENS - 1), 0.5, 0)


def test_only_what_memory_refuses_is_forgiven():
    assert run_if_it_fits(lambda: 3) == 3
    assert run_if_it_fits(lambda: torch.empty(2**55)) is None
    with pytest.raises(RuntimeError, match="shape"):
        run_if_it_fits(lambda: torch.ones(2) @ torch.ones(3, 2) + torch.zeros(2).view(7))


def test_the_peak_is_what_was_taken_at_once():
    peak = PeakMemory(torch.device("cpu"))
    if peak.taken() is None:
        pytest.skip("this system does not tell")
    for _ in range(4):
        torch.ones(2**24)  # 64 MB, and gone
    assert 2**25 < peak.taken() < 2**27
