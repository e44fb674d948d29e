"""A long text that a GPU reads in parts, many at a time, leaves the logits and states of one that it reads at once."""

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.student import text_streams
from tests.support.models import student_of, tokens

HEADS = [Head(window=8, slots=12, bits=4), Head(window=24, bits=6), Head(window=8, slots=20), Head(window=9, bits=8)]
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 256, "max_position_embeddings": 4096}

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


@pytest.fixture
def student():
    return student_of("llama", HEADS, **SIZES).cuda()


@pytest.mark.parametrize("keep", [0, 1, 100])
@torch.inference_mode()
def test_parts_give_what_a_whole_text_gives(student, monkeypatch, keep):
    """Twice, with tokens before: memory that other streams have used is used again."""
    ids = tokens(2, 1700).cuda()
    whole, cache = [], student.empty_cache()
    for begin, end in ((0, 50), (50, 850), (850, 1700)):
        whole.append(student(ids[:, begin:end], past_key_values=cache, logits_to_keep=keep).logits)
    for name in ("PART_TOKENS", "LONGEST_PART"):
        monkeypatch.setattr(text_streams, name, 64)
    monkeypatch.setattr(text_streams, "MOST_STREAMS", 4)
    calls, read = [], text_streams.read_parts
    monkeypatch.setattr(text_streams, "read_parts", lambda *given: calls.append(1) or read(*given))
    for _ in range(3):
        again, parts = student.empty_cache(), []
        for begin, end in ((0, 50), (50, 850), (850, 1700)):
            parts.append(student(ids[:, begin:end], past_key_values=again, logits_to_keep=keep).logits)
        for one, other in zip(whole, parts, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
        assert again.get_seq_length() == cache.get_seq_length() == 1700
        for own, other in zip(again.layers, cache.layers, strict=True):
            assert [state.count.tolist() for state in own.memory] == [state.count.tolist() for state in other.memory]
        ends = [student(ids[:, :1], past_key_values=each.fork()).logits for each in (cache, again)]
        torch.testing.assert_close(*ends, rtol=1e-3, atol=1e-3)
    assert len(calls) == 6
