"""A student is used as any model of transformers is: trained, cast, resized, continued, and refused what it cannot."""

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM

from linearizer.plan.head_bytes import Head
from linearizer.serve.saved_state import begin_turn, take_back_turn, write_state
from linearizer.student.cache import CACHE
from tests.support.models import MIXED, student_of, tokens

CLOSE = dict(atol=1e-4, rtol=1e-4)
SMALL = [
    Head(window=5, bits=8),
    Head(window=4, slots=6, bits=8),
    Head(softmax=True, bits=8),
    Head(window=3, features=16),
]
OPTIMIZERS = {
    "fused": lambda p: torch.optim.AdamW(p, 0.05, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, 0.05, foreach=True),
}


def features_of(student):
    return [p for name, p in student.named_parameters() if ".feature_map." in name and p.requires_grad]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("training", [False, True])
def test_what_was_trained_is_what_answers(name, training):
    student, ids = student_of("llama"), tokens(2, 24)
    optimizer = OPTIMIZERS[name](features_of(student))
    for _ in range(2):
        with torch.no_grad():
            student(ids)  # makes features ready that the next step changes
        student.train(training)
        student(ids, labels=ids).loss.backward()
        optimizer.step()
        student.eval()
    with torch.no_grad():
        assert torch.equal(student(ids).logits, copy.deepcopy(student)(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_mask_that_says_more_than_padding_is_refused(family):
    student, ids = student_of(family), tokens(1, 8)
    with pytest.raises(ValueError, match="custom masks are not served"):
        student(ids, attention_mask=torch.ones(8, 8, dtype=torch.bool).tril()[None, None])
    for shape in ((1, 5), (1, 9), (2, 8)):
        with pytest.raises(ValueError, match="of the 8 new tokens, or of all 8"):
            student(ids, attention_mask=torch.ones(shape, dtype=torch.long))


@torch.no_grad()
@pytest.mark.parametrize("exact_tokens", [0, 40])
def test_a_call_with_other_texts_than_its_cache_is_refused_and_goes_on_with_those_that_are_chosen(exact_tokens):
    student, ids = student_of("llama", SMALL, exact_tokens=exact_tokens), tokens(2, 20)
    cache = student(ids[:, :12])[CACHE]
    with pytest.raises(ValueError, match="states of 2 texts, the call 1"):
        student(ids[1:, 12:], **{CACHE: cache})
    with pytest.raises(ValueError, match="states of 1 texts, the call 2"):
        student(ids[:, 12:], **{CACHE: student(ids[:1, :12])[CACHE]})
    chosen = cache.fork()
    chosen.batch_select_indices(torch.tensor([1]))
    expected = student(ids[1:]).logits[:, 12:]
    torch.testing.assert_close(student(ids[1:, 12:], **{CACHE: chosen}).logits, expected, **CLOSE)


@torch.no_grad()
def test_a_cache_that_is_told_to_forget_tokens_refuses_and_keeps_all():
    student, ids = student_of("gemma3_text"), tokens(1, 12)  # whose first layer keeps keys
    cache = student(ids[:, :8])[CACHE]
    with pytest.raises(ValueError, match="cannot forget tokens"):
        cache.crop(-3)
    torch.testing.assert_close(student(ids[:, 8:], **{CACHE: cache}).logits, student(ids).logits[:, 8:], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("heads", [MIXED, SMALL], ids=["16 bits", "8 bits"])
def test_a_call_may_hold_nothing_but_padding(heads):
    student, ids = student_of("llama", heads), tokens(1, 20)
    real = (torch.arange(20) >= 9).long()[None]
    place = (real.cumsum(-1) - 1).clamp_min(0)
    state, out = None, []
    for start in range(0, 20, 4):
        part = slice(start, start + 4)
        given = dict(attention_mask=real[:, : part.stop], position_ids=place[:, part])
        result = student(ids[:, part], past_key_values=state, use_cache=True, **given)
        state = result[CACHE]
        out.append(result.logits)
    torch.testing.assert_close(torch.cat(out, 1)[:, 9:], student(ids[:, 9:]).logits, atol=1e-4, rtol=1e-4)


def test_a_vocabulary_that_grew_is_saved_and_loaded(tmp_path):
    student, ids = student_of("llama"), tokens(1, 12)
    student.resize_token_embeddings(160)
    student.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        out = loaded(ids, labels=ids)
        assert torch.equal(out.logits, student(ids).logits) and out.loss.isfinite()
    assert out.logits.shape[-1] == student.config.vocab_size == student.vocab_size == 160


@pytest.mark.parametrize("heads", [MIXED, SMALL], ids=["16 bits", "8 bits"])
def test_a_text_read_in_inference_goes_on_outside_of_it(heads):
    student, ids = student_of("llama", heads), tokens(1, 20)
    with torch.inference_mode():
        state = student(ids[:, :12])[CACHE]
    with torch.no_grad():
        out = [student(ids[:, t : t + 1], past_key_values=state).logits for t in range(12, 20)]
        torch.testing.assert_close(torch.cat(out, 1), student(ids).logits[:, 12:], atol=1e-4, rtol=1e-4)


def test_gradients_pass_through_single_tokens():
    student, ids = student_of("llama"), tokens(1, 12)
    result = []
    for cuts in ((0, 12), (0, 8, 9, 10, 11, 12)):
        state, loss = None, 0.0
        for start, stop in zip(cuts, cuts[1:], strict=False):
            out = student(ids[:, start:stop], past_key_values=state, use_cache=True)
            state, loss = out[CACHE], loss + out.logits.sin().sum()
        result.append(torch.autograd.grad(loss, features_of(student)))
    for whole, single in zip(*result, strict=True):
        torch.testing.assert_close(single, whole, atol=1e-3, rtol=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gemma3_text", "deepseek_v3"])
@pytest.mark.parametrize("heads", [MIXED, SMALL], ids=["16 bits", "8 bits"])
def test_padding_before_a_text_does_not_matter_without_positions_either(family, heads):
    student, ids = student_of(family, heads), tokens(2, 24)
    ids[0, :9], mask = 0, torch.ones_like(ids)
    mask[0, :9] = 0
    first = student(ids[:, :20], attention_mask=mask[:, :20], use_cache=True)
    last = student(ids[:, 20:], attention_mask=mask, past_key_values=first[CACHE])
    padded = torch.cat([first.logits, last.logits], 1)
    for row, start in ((0, 9), (1, 0)):
        torch.testing.assert_close(padded[row, start:], student(ids[row : row + 1, start:]).logits[0], **CLOSE)


@torch.no_grad()
def test_a_cache_that_an_error_left_half_read_is_refused_and_a_copy_from_before_goes_on(monkeypatch, tmp_path):
    student, ids = student_of("llama"), tokens(1, 20)
    cache = student.empty_cache()
    student(ids[:, :10], **{CACHE: cache})
    before, last = cache.fork(), student.students()[-1]
    begin_turn(cache)
    with monkeypatch.context() as patch, pytest.raises(torch.OutOfMemoryError):
        patch.setattr(last, "attend", fail)
        student(ids[:, 10:], **{CACHE: cache})
    for half_read in (cache, cache.fork()):
        with pytest.raises(ValueError, match="failed in the middle"):
            student(ids[:, 10:], **{CACHE: half_read})
    with pytest.raises(ValueError, match="failed in the middle"):
        write_state(student, cache, tmp_path / "state")
    take_back_turn(cache)
    for whole in (cache, before):
        logits = student(ids[:, 10:], **{CACHE: whole}).logits
        torch.testing.assert_close(logits, student(ids).logits[:, 10:], atol=1e-4, rtol=1e-4)


def fail(*_):
    raise torch.OutOfMemoryError("memory is full")
