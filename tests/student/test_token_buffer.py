"""Heads of a layer with windows and slots of all sizes read together in PyTorch, and give what each gives alone."""

import copy

import pytest
import torch

from linearizer.student import slots_torch
from linearizer.student.state import change_tensors
from tests.support.layers import GROUP, assert_same_states, layer, read, text

HELD = [[8, 0, 6, 4], [12, 0, 10, 4], [9, 0], [5, 0, 7, 4], "softmax", [9, 0], [6, 0, 3, 2], [4, 5]]
SMALL = [kind if isinstance(kind, str) else [*kind, *[0] * (4 - len(kind)), 8] for kind in HELD]
SMALL[4] = "softmax 8"
MIXED = [  # along axes, beside heads of 8 bits and of 16
    [8, 0, 6, 4, 4], [12, 0, 10, 4, 5], [9, 0, 0, 0, 6], [5, 0, 7, 4, 8], "softmax 4", [9, 0], [6, 0, 3, 2, 4],
    [9, 0, 0, 0, 5],
]  # fmt: skip
LENGTH = 40


@pytest.fixture(autouse=True)
def in_pytorch(monkeypatch):
    """No kernel reads in PyTorch's place."""
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")


@pytest.mark.parametrize("held, dim, value_dim", [(HELD, 4, 4), (HELD, 4, 3), (SMALL, 4, 4), (SMALL, 4, 3),
                                                  (MIXED, 8, 8), (MIXED, 8, 16)])  # fmt: skip
def test_token_by_token_is_the_whole_text(held, dim, value_dim):
    student, given = layer(held, dim, value_dim), text(8, LENGTH, dim, value_dim)
    whole, memory = read(student, given, [LENGTH])
    for edges in (range(1, LENGTH + 1), [10, *range(11, 30), LENGTH]):
        cut, other = read(student, given, edges)
        torch.testing.assert_close(cut, whole)
        assert_same_states(other, memory)


@pytest.mark.parametrize("held", [HELD, SMALL], ids=["16 bits", "8 bits"])
def test_heads_together_are_heads_alone(held):
    together, given = layer(held, 4, 4), text(8, LENGTH, 4, 4)  # of sizes that no head turns
    whole, _ = read(together, given, [20, *range(21, LENGTH + 1)])
    for head, kind in enumerate(held):
        alone = layer([kind], 4, 4)
        own = next((group, group.heads.index(head)) for group in together.groups if head in group.heads)
        for mine, theirs in zip(alone.parameters(), own[0].parameters(), strict=True):
            mine.data.copy_(theirs.data[own[1] : own[1] + 1])
        q, k, v = given
        queries = slice(head * GROUP, head * GROUP + GROUP)
        out, _ = read(alone, (q[:, queries], k[:, head : head + 1], v[:, head : head + 1]), [LENGTH])
        torch.testing.assert_close(out, whole[:, queries])


def test_heads_that_merge_apart_give_what_they_give_together(monkeypatch):
    student, given = layer(HELD), text(8, LENGTH)
    whole, memory = read(student, given, [20, LENGTH])
    monkeypatch.setattr(slots_torch, "MAX_PADDING", -1)
    apart, other = read(student, given, [20, LENGTH])
    torch.testing.assert_close(apart, whole)
    assert_same_states(other, memory)


def reordered(memory):
    for state in memory:
        change_tensors(state, lambda x: x.index_select(0, torch.tensor([0, 1])))
    return memory


@pytest.mark.parametrize("change", [reordered, copy.deepcopy], ids=["reordered", "copied"])
@pytest.mark.parametrize("held", [HELD, SMALL], ids=["16 bits", "8 bits"])
def test_states_that_were_exchanged_go_on(held, change):
    student, given = layer(held), text(8, LENGTH)
    whole, memory = read(student, given, [LENGTH])
    cut, other = read(student, given, [20, *range(21, LENGTH + 1)], change=change)
    torch.testing.assert_close(cut, whole)
    assert_same_states(other, memory)


def test_texts_of_several_lengths_go_on_together():
    student, given = layer(HELD), text(8, LENGTH)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    real[1, [0, 3, 7]] = False
    out, _ = read(student, given, [16, *range(17, LENGTH + 1)], real=real)
    for row in range(2):
        kept = real[row].nonzero()[:, 0]
        alone, _ = read(student, [x[row : row + 1, :, kept] for x in given], [len(kept)])
        torch.testing.assert_close(out[row : row + 1, :, kept], alone)
