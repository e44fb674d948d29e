"""Rows of a hybrid's batch: each reads on as it does alone, with its own recurrent part."""

import pytest
import torch

from linearizer.cli.text import describe_reading
from linearizer.serve.cache_rows import join_caches, keep_rows, pack, read_on, tensors_of, unpack
from linearizer.serve.kept_state import measure
from linearizer.student.cache import CACHE
from linearizer.teacher.inspect_model import inspect_model
from linearizer.teacher.logits import bytes_held
from tests.support.hybrids import SOURCE, student_of, tiny_hybrid
from tests.support.models import MIXED, tokens

NO_SHIFT = torch.zeros(1, dtype=torch.long)
CLOSE = dict(atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm3", "falcon_h1", "gemma4_text"])
def test_rows_of_different_lengths_join_leave_and_are_put_aside_whole(family):
    student, following, lengths = student_of(family, MIXED), tokens(2, 1, 2), torch.tensor([23, 17])
    caches = [student.empty_cache() for _ in lengths]
    for row, (cache, length) in enumerate(zip(caches, lengths.tolist(), strict=True)):
        student(tokens(1, length, row), **{CACHE: cache})
    alone = torch.cat(
        [read_on(student, c.fork(), following[i : i + 1], lengths[i : i + 1], NO_SHIFT) for i, c in enumerate(caches)]
    )
    joined = join_caches(caches)
    parts = tensors_of(joined)
    aside = unpack(joined, pack(parts), [x.shape for x in parts], 23)
    for batch in (joined, aside):
        assert torch.allclose(read_on(student, batch, following, lengths, NO_SHIFT), alone, **CLOSE)
    keep_rows(joined, [1], 18)
    read_on(student, caches[1], following[1:], lengths[1:], NO_SHIFT)
    again = read_on(student, caches[1], following[:1], lengths[1:] + 1, NO_SHIFT)
    assert torch.allclose(read_on(student, joined, following[:1], lengths[1:] + 1, NO_SHIFT), again, **CLOSE)


@torch.no_grad()
def test_the_size_of_a_reading_names_what_recurrent_layers_keep(tmp_path):
    student, inspection = student_of("qwen3_5_text", MIXED), inspect_model(SOURCE, tiny_hybrid("qwen3_5_text"))
    cache = student.empty_cache()
    student(tokens(1, 12), **{CACHE: cache})
    reading = measure(student, inspection.layers, cache)
    assert 0 < reading.recurrent_bytes == inspection.recurrent_bytes
    assert bytes_held(cache) == reading.state_bytes + reading.recurrent_bytes
    assert "of recurrent layers beside either" in describe_reading(reading, "run", tmp_path)
