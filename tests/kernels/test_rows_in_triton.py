"""Many texts with their states in rows of one pool, read by Triton's kernels in place: each equals the text alone."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.kernels import door
from linearizer.kernels.triton.rows import PoolRow
from tests.support.kernels import CLOSE, DEVICE, EXACT
from tests.support.layers import SCALE, layer, read, scores, text

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that hold nothing
HELD, FORMER, BEGIN = [[7, 0, 5, 4, 5], [9, 0], [5, 0, 7, 4, 8]], 255, 32  # FORMER: bytes of an earlier text
ROWS = [5, 1, 3]  # of three texts in the pool
STEPS = [[(0, 16)], [(1, 1)], [(1, 1), (2, 1)], [(0, 1), (1, 1), (2, 1)], [(2, 14)], [(2, 1), (0, 1)]]


@pytest.mark.parametrize("cap", [None, 3.0])
def test_texts_of_any_length_equal_each_alone(cap, monkeypatch):
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: False)
    student, given = layer(HELD).to(DEVICE, EXACT), [x.to(DEVICE) for x in text(len(HELD), 24, dtype=EXACT)]
    given = [torch.cat([x, x[:1] * 0.5]) for x in given]
    altered = () if cap is None else scores(len(HELD), cap)
    row = PoolRow.of(student, [x[:1, :, :1] for x in given[1:]], BEGIN)
    pool = torch.full((7, row.end + BEGIN), FORMER, dtype=torch.uint8, device=DEVICE)
    read_before, out = [0, 0, 0], [[], [], []]
    for step in STEPS:
        tokens = step[0][1]
        parts = [[x[at, :, read_before[at] : read_before[at] + tokens] for at, _ in step] for x in given]
        before = [read_before[at] for at, _ in step]
        texts = torch.tensor([[ROWS[at] for at, _ in step], before], device=DEVICE)
        for fresh in (True, False):
            some = [place for place, count in enumerate(before) if (count == 0) == fresh]
            if some:
                inputs = [torch.stack(x)[some] for x in parts]
                least = min(before[place] for place in some)
                found = row.read_texts(student, pool, *texts[:, some], least, *inputs, SCALE, *altered)
                for place, of_text in zip(some, found, strict=True):
                    out[step[place][0]].append(of_text)
        for at, _ in step:
            read_before[at] += tokens
    for at, count in enumerate(read_before):
        expected, memory = read(student, [x[at : at + 1] for x in given], [count], altered=altered)
        torch.testing.assert_close(torch.cat(out[at], 1)[None], expected, rtol=CLOSE, atol=CLOSE)
        views = row.layout.views(pool[ROWS[at] : ROWS[at] + 1, BEGIN : row.end])
        for state, named in zip(memory, views.values(), strict=True):
            known = min(count, state.window_k.shape[2])
            torch.testing.assert_close(named["k"][:, :, :known], state.window_k[:, :, :known])
            torch.testing.assert_close(named["weight"], state.weight)
    assert (pool[[0, 2, 4, 6]] == FORMER).all() and (pool[:, :BEGIN] == FORMER).all()
    assert (pool[:, row.end :] == FORMER).all()


def test_a_row_keeps_all_keys_and_values_of_a_text_within_its_window():
    student, given = layer([{"window": 12}] * 2, dtype=torch.float32).to(DEVICE), text(2, 12, dtype=torch.float32)
    student.sinks = 0
    q, k, v = (x[:1].to(DEVICE) for x in given)
    row = PoolRow.of(student, (k[:, :, :1], v[:, :, :1]), 0)
    pool, zero = (
        torch.zeros(1, row.end, dtype=torch.uint8, device=DEVICE),
        torch.zeros(1, dtype=torch.long, device=DEVICE),
    )
    row.read_texts(student, pool, zero, zero, 0, q[:, :, :9], k[:, :, :9], v[:, :, :9], SCALE)
    for x, stored in zip((k, v), row.stored(pool), strict=True):
        torch.testing.assert_close(stored[:, :9], x[0, :, :9], rtol=0, atol=0)


def test_heads_that_kernels_do_not_serve_have_no_rows():
    student, (_, k, v) = layer(["softmax", [9, 0]]), text(2, 1)
    assert PoolRow.of(student, (k, v), 0) is None
