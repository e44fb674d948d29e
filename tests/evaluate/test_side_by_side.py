"""Two models that write at the same time write what they would write one after the other."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from linearizer.errors import FaultError, RequestError
from linearizer.evaluate import side_by_side
from linearizer.evaluate.side_by_side import Writer, find_difference, hide_word, repeat_passage, write_in_turns
from linearizer.evaluate.subjects import Subject
from linearizer.hub.models import find_model
from linearizer.plan.head_bytes import cache_bytes
from linearizer.plan.state_size import StateSize
from linearizer.teacher.load import load_tokenizer
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of


class Tokens:
    """A tokenizer whose tokens are numbers."""

    def __call__(self, text, return_tensors):
        return {"input_ids": torch.tensor([[int(word) for word in text.split()]], dtype=torch.long).reshape(1, -1)}

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)


@pytest.fixture(scope="module")
def pair():
    return teacher_of("llama"), student_of("llama")


@pytest.fixture(scope="module")
def state(pair):
    layers = layers_of(pair[0])
    return StateSize.of(allocation_of(layers, MIXED, 2), layers)


def test_the_first_token_that_differs_is_found():
    assert find_difference(Tokens(), [1, 2, 3], [1, 2, 3]) is None
    assert find_difference(Tokens(), [1, 2, 3], [1, 2]) is None  # one of them ended
    apart = find_difference(Tokens(), [1, 2, 3, 9], [1, 2, 4, 9])
    assert apart.place == 2 and apart.alike == "1 2" and (apart.teacher, apart.student) == (" 3", " 4")
    at_once = find_difference(Tokens(), [5, 2], [6, 2])
    assert at_once.place == 0 and at_once.alike == "" and (at_once.teacher, at_once.student) == ("5", "6")


@pytest.mark.parametrize("sample", [False, True])
def test_both_write_what_they_write_alone_and_are_counted_in_the_units_of_every_other_size(pair, state, sample):
    alone = []
    for model, size in zip(pair, (state.teacher_bytes, state.student_bytes), strict=True):
        writer = Writer(Subject("", model), Tokens(), size, torch.tensor([[5, 6, 7, 8]]), 12, 3, sample)
        while writer.write_token():
            pass
        alone.append(writer.written)
    *_, last = write_in_turns(*pair, Tokens(), state, "5 6 7 8", 12, seed=3, sample=sample)
    for side, written in zip((last.teacher, last.student), alone, strict=True):
        assert side.text == Tokens().decode(written, True)
        assert (side.tokens, side.tokens_read) == (12, 15)  # the last token is not read
    assert last.difference == find_difference(Tokens(), *alone)
    layers = layers_of(pair[0])
    assert last.teacher.state_bytes == cache_bytes(layers, 15)
    assert last.student.state_bytes == allocation_of(layers, MIXED, 2).state_bytes(layers, 15)


@pytest.mark.parametrize("make", [hide_word, repeat_passage])
def test_a_prompt_that_needs_memory_goes_on_with_what_stands_as_far_back_as_was_asked(make):
    tokenizer = load_tokenizer(find_model("demo"))
    prompt = make(tokenizer, 256)
    asked_from = prompt.text.rindex(prompt.answer)
    back = len(tokenizer(prompt.text[asked_from:])["input_ids"])
    assert prompt.distance == 256 and 0.8 * 256 < back < 1.1 * 256


def test_what_is_told_grows_every_quarter_of_a_second(pair, state, monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 10, perf_counter=time.perf_counter)
    monkeypatch.setattr(side_by_side, "time", clock)  # whatever the speed of the machine
    texts = [both.student.text for both in write_in_turns(*pair, Tokens(), state, "5 6", 60)]
    assert len(texts) == 60 // 3 + 1  # a tenth of a second a token; the last is of all
    assert all(later.startswith(earlier) for earlier, later in zip(texts, texts[1:], strict=False))


def test_a_writer_that_breaks_is_told_of_and_does_not_hold_up_the_other(pair, state, monkeypatch):
    monkeypatch.setattr(pair[1], "empty_cache", lambda: 1 / 0)
    with pytest.raises(FaultError, match="ZeroDivisionError"):
        list(write_in_turns(*pair, Tokens(), state, "5 6", 4))


@pytest.mark.parametrize(("prompt", "tokens"), [("", 4), ("5", 0)])
def test_nothing_to_write_is_said(pair, state, prompt, tokens):
    with pytest.raises(RequestError, match="nothing to compare"):
        list(write_in_turns(*pair, Tokens(), state, prompt, tokens))
