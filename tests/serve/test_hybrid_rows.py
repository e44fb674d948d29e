"""Rows of a hybrid's batch: each reads on as it does alone, with its own recurrent part."""

import pytest
import torch

from linearizer.serve.cache_rows import join_caches, keep_rows, pack, read_on, tensors_of, unpack
from linearizer.student.cache import CACHE
from tests.support.hybrids import student_of
from tests.support.models import MIXED, tokens

CLOSE = dict(atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm3", "falcon_h1"])
def test_rows_of_different_lengths_join_leave_and_are_put_aside_whole(family):
    student, following, lengths = student_of(family, MIXED), tokens(2, 1, 2), torch.tensor([23, 17])
    caches = [student.empty_cache() for _ in lengths]
    for row, (cache, length) in enumerate(zip(caches, lengths.tolist(), strict=True)):
        student(tokens(1, length, row), **{CACHE: cache})
    alone = torch.cat(
        [read_on(student, c.fork(), following[i : i + 1], lengths[i : i + 1]) for i, c in enumerate(caches)]
    )
    joined = join_caches(caches)
    parts = tensors_of(joined)
    aside = unpack(joined, pack(parts), [x.shape for x in parts], 23)
    for batch in (joined, aside):
        assert torch.allclose(read_on(student, batch, following, lengths), alone, **CLOSE)
    keep_rows(joined, [1], 18)
    read_on(student, caches[1], following[1:], lengths[1:])
    again = read_on(student, caches[1], following[:1], lengths[1:] + 1)
    assert torch.allclose(read_on(student, joined, following[:1], lengths[1:] + 1), again, **CLOSE)
