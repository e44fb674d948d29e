"""Many texts with their states in rows of one pool, read in one call of the kernel in C: each equals the text alone."""

import pytest
import torch

from linearizer.kernels.c.rows import RowReader, pack_texts
from linearizer.vllm_plugin.state_rows import StateRow
from tests.support.kernels import needs_compiler
from tests.support.layers import GROUP, SCALE, assert_same_states, layer, read, text

HELD = [[8, 0, 6, 4], [9, 0], [5, 0, 7, 4, 8], [6, 0, 3, 2, 6], [40, 0, 9, 16, 5], [9, 0, 0, 0, 4]]
ROWS, LENGTH = [5, 1, 3], 70  # of the pool, for three texts; tokens that each reads at most


def read_steps(student, row, steps, given):
    """Read steps of (text, tokens) with all texts of a step in one call; return outputs by text, and the pool."""
    pool, counts, out = torch.zeros(7, row.end, dtype=torch.uint8), [0, 0, 0], [[], [], []]
    like = given[0].unflatten(1, (-1, GROUP))[:1, :, :, :1], given[1][:1, :, :1], given[2][:1, :, :1]
    reader = RowReader.of(student, pool, row.places(), like, SCALE)
    for step in steps:
        parts = [[x[at, :, counts[at] : counts[at] + n].transpose(0, 1) for x in given] for at, n in step]
        q, k, v = (torch.cat(some) for some in zip(*parts, strict=True))
        q, found = q.unflatten(1, (-1, GROUP)), v.new_full((len(q), len(HELD), GROUP, v.shape[-1]), torch.nan)
        firsts = [sum(n for _, n in step[:place]) for place in range(len(step))]
        texts = [(ROWS[at], first, n, counts[at]) for (at, n), first in zip(step, firsts, strict=True)]
        reader.read(q, k, v, pack_texts(texts), found)
        for (at, n), first in zip(step, firsts, strict=True):
            out[at].append(found[first : first + n].flatten(1, 2).transpose(0, 1))
            counts[at] += n
    return [torch.cat(some, 1) for some in out], pool, counts


@needs_compiler
@pytest.mark.parametrize("threads, dtype", [(1, torch.float32), (2, torch.float32), (1, torch.bfloat16)])
def test_texts_of_any_length_equal_each_alone(threads, dtype):
    student, given = layer(HELD, dtype=torch.float32), text(len(HELD), LENGTH, dtype=dtype)
    given = [torch.cat([x, x[:1] * 0.5]) for x in given]
    row = StateRow.of(student, GROUP * len(HELD), (8, 8), dtype, 0)
    steps = [[(0, 20), (1, 1)], [(1, 1), (0, 9), (2, 30)], *[[(2, 1), (0, 1), (1, 1)]] * 20, [(0, 1), (1, 33)]]
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        out, pool, counts = read_steps(student, row, steps, given)
    finally:
        torch.set_num_threads(before)
    for at, (found, count) in enumerate(zip(out, counts, strict=True)):
        expected, memory = read(student, [x[at : at + 1] for x in given], [count])
        assert torch.equal(found[None], expected)
        states = row.read(pool[ROWS[at] : ROWS[at] + 1], torch.tensor([count]))
        assert_same_states(memory, states, rtol=0, atol=0)
    assert not pool[[0, 2, 4, 6]].any()


def test_a_row_holds_what_pytorch_wrote_and_what_it_reads():
    student, given = layer(HELD), text(6, 40)
    row = StateRow.of(student, GROUP * len(HELD), (8, 8), torch.float64, 32)
    expected, _ = read(student, given, [40])
    _, memory = read(student, [x[:, :, :25] for x in given], [25])
    pool = torch.zeros(2, row.end, dtype=torch.uint8)
    row.write(pool, memory)
    found, _ = read(student, [x[:, :, 25:] for x in given], [1, 15], memory=row.read(pool, torch.tensor([25, 25])))
    torch.testing.assert_close(found, expected[:, :, 25:])
    assert not pool[:, :32].any()


def test_heads_that_keep_all_tokens_are_refused():
    with pytest.raises(ValueError, match="--may-grow"):
        StateRow.of(layer(["softmax"]), GROUP, (8, 8), torch.float64, 0)
