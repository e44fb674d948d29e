"""Models in one conversation say what each would say alone, and what they hold is counted as it is."""

from dataclasses import replace

import pytest
import torch

from linearizer.errors import FaultError, RequestError
from linearizer.evaluate.side_by_side import (
    Reader,
    find_difference,
    hide_word,
    read_in_turns,
    repeat_passage,
    write_in_turns,
)
from linearizer.evaluate.subjects import Subject
from linearizer.plan.head_bytes import cache_bytes
from linearizer.student.cache import CACHE
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.token_loop import generate_tokens
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of


class Tokens:
    """A tokenizer whose tokens are numbers."""

    def decode(self, ids, skip_special_tokens):
        return " ".join(str(int(token)) for token in ids)


@pytest.fixture(scope="module")
def pair():
    return teacher_of("llama"), student_of("llama")


def readers(pair):
    return [Reader.of(Subject(name, model)) for name, model in zip(("teacher", "student"), pair, strict=True)]


def last_of(values):
    *_, last = values
    return last


def test_the_first_token_that_differs_is_found():
    assert find_difference(Tokens(), [1, 2, 3], [1, 2, 3]) is None
    assert find_difference(Tokens(), [1, 2, 3], [1, 2]) is None  # one of them ended
    difference = find_difference(Tokens(), [1, 2, 3, 9], [1, 2, 4, 9])
    assert difference.place == 2 and difference.alike == "1 2" and (difference.teacher, difference.own) == (" 3", " 4")
    at_once = find_difference(Tokens(), [5, 2], [6, 2])
    assert at_once.place == 0 and at_once.alike == "" and (at_once.teacher, at_once.own) == ("5", "6")


@pytest.mark.parametrize("sample", [False, True])
def test_all_write_what_they_write_alone_and_are_counted_in_the_units_of_every_other_size(pair, sample):
    ids = torch.tensor([[5, 6, 7, 8]])
    alone = [list(generate_tokens(model, ids, fresh_cache(model), 12, 3, sample)) for model in pair]
    last = last_of(write_in_turns(readers(pair), Tokens(), "", [5, 6, 7, 8], 12, seed=3, sample=sample))
    for side, written in zip((last.teacher, last.student), alone, strict=True):
        assert side.text == Tokens().decode(written, True)
        assert (side.tokens, side.tokens_read) == (12, 15)  # the last token is not read
    parted, chances = find_difference(Tokens(), *alone), last.student.difference.chances
    assert replace(last.student.difference, chances=None) == parted and last.teacher.difference is None
    read = torch.tensor([[5, 6, 7, 8, *alone[0][: parted.place]]])
    for model, given in zip(pair, chances, strict=True):  # by the model itself, however tokens were drawn
        logits = model(read, use_cache=True, **{CACHE: fresh_cache(model)}).logits[0, -1]
        expected = logits.softmax(-1)[[written[parted.place] for written in alone]]
        assert torch.allclose(torch.tensor(given), expected, atol=1e-4)
    layers = layers_of(pair[0])
    assert last.teacher.state_bytes == cache_bytes(layers, 15)
    assert last.student.state_bytes == allocation_of(layers, MIXED, 2).state_bytes(layers, 15)


def test_a_conversation_that_goes_on_says_what_a_reader_of_all_of_it_says(pair):
    talking = readers(pair)
    course = list(read_in_turns(talking, [range(3, 90)] * 2))
    assert [each.tokens for each in course] == [32, 64, 87]
    layers = layers_of(pair[0])
    for each in course:
        sizes = cache_bytes(layers, each.tokens), allocation_of(layers, MIXED, 2).state_bytes(layers, each.tokens)
        assert tuple(each.bytes.values()) == sizes
    copies = [reader.fork() for reader in talking]
    list(write_in_turns(copies, Tokens(), "", [7, 8], 6))
    assert all(reader.heard == [*range(3, 90)] for reader in talking)  # a copy leaves the state as it was
    for _ in range(2):
        before = [reader.heard for reader in talking]
        list(read_in_turns(talking, [reader.unread for reader in talking]))
        last = last_of(write_in_turns(talking, Tokens(), "", [9, 4], 6))
        fresh = [reader.restart() for reader in talking]
        list(read_in_turns(fresh, before))
        again = last_of(write_in_turns(fresh, Tokens(), "", [9, 4], 6))
        assert (last.teacher.text, last.student.text) == (again.teacher.text, again.student.text)
        assert [reader.heard for reader in talking] == [reader.heard for reader in fresh]


def test_a_reader_that_has_read_something_else_begins_anew(pair):
    reader = readers(pair)[1]
    reader.read([5, 6, 7])
    assert reader.before([5, 6, 7, 8]) is reader is reader.before([5, 6, 7])
    for ids in ([5, 6], [5, 7, 7, 8], []):
        assert reader.before(ids).tokens == []


def test_a_penalty_of_repetitions_counts_what_was_read_before():
    teacher = teacher_of("llama")
    teacher.generation_config.repetition_penalty = 1.8
    ids = torch.arange(3, 40)[None]
    alone = list(generate_tokens(teacher, ids, fresh_cache(teacher), 12, 0, False))
    last = last_of(write_in_turns(readers([teacher, teacher]), Tokens(), "", ids[0].tolist(), 12))
    assert last.teacher.text == last.student.text == Tokens().decode(alone, True)


@pytest.mark.parametrize("make", [hide_word, repeat_passage])
def test_a_prompt_that_needs_memory_goes_on_with_what_stands_as_far_back_as_was_asked(make, tokenizer):
    prompt = make(tokenizer, 256)
    asked_from = prompt.text.rindex(prompt.answer)
    distance = len(tokenizer(prompt.text[asked_from:])["input_ids"])
    assert prompt.distance == 256 and 0.8 * 256 < distance < 1.1 * 256


def test_a_model_that_breaks_is_told_of(pair, monkeypatch):
    monkeypatch.setattr(pair[1], "forward", lambda **_: 1 / 0)
    with pytest.raises(FaultError, match="ZeroDivisionError"):
        list(write_in_turns(readers(pair), Tokens(), "", [5, 6], 4))


@pytest.mark.parametrize(("prompt", "tokens"), [([], 4), ([5], 0)])
def test_nothing_to_write_is_said(pair, prompt, tokens):
    with pytest.raises(RequestError, match="nothing to compare"):
        list(write_in_turns(readers(pair), Tokens(), "", prompt, tokens))
