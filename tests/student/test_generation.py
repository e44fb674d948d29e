"""What transformers' GenerationTesterMixin asks of a model, for a student of each kind of memory.

Its tests are in no source distribution. Those of them that cannot hold for a student are listed with their reasons in
test_transformers_suite.py. Contrastive, constrained, group beam and DoLa decoding are no part of transformers 5.
"""

import functools
import inspect

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.student.cache import CACHE, LinearizedCache
from tests.support.models import student_of, tokens

KINDS = {
    "window": [Head(window=5)],
    "slots": [Head(window=4, slots=6)],
    "slots of 4 bits": [Head(window=4, slots=6, bits=4)],
    "features": [Head(window=5, features=16)],
    "memory": [Head(window=4, features=6, memory="gdn")],
    "exact at first": [Head(window=4, slots=6, bits=4)],
}
WAYS = {
    "greedy": {},
    "sampled": dict(do_sample=True),
    "beams": dict(num_beams=3, num_return_sequences=2),
    "sampled beams": dict(num_beams=2, do_sample=True),
    "processors": dict(repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[5]], min_new_tokens=4),
}
PROMPT, NEW = 9, 8

pytestmark = [pytest.mark.filterwarnings("ignore:Using `max_length`'s default"), pytest.mark.parametrize("kind", KINDS)]


@functools.cache
def student_with(kind):
    exact = 12 if kind == "exact at first" else 0  # more than a prompt, and less than what is written after it
    return student_of("llama", KINDS[kind], num_hidden_layers=2, exact_tokens=exact).eval()


@torch.no_grad()
def generate(student, ids=None, **settings):
    torch.manual_seed(0)
    if ids is not None:
        settings.setdefault("attention_mask", torch.ones_like(ids))
    return student.generate(ids, **(dict(max_new_tokens=NEW, do_sample=False, eos_token_id=None) | settings))


@pytest.mark.parametrize("way", WAYS)
def test_what_is_written_does_not_depend_on_the_state_nor_on_what_is_returned(kind, way):
    student, ids = student_with(kind), tokens(2, PROMPT)
    texts = generate(student, ids, **WAYS[way])
    assert texts.shape == (2 * WAYS[way].get("num_return_sequences", 1), PROMPT + NEW)
    assert torch.equal(texts, generate(student, ids, use_cache=False, **WAYS[way]))
    told = generate(
        student, ids, return_dict_in_generate=True, output_scores=True, output_logits=True, output_hidden_states=True,
        **WAYS[way],
    )  # fmt: skip
    assert torch.equal(texts, told.sequences)
    assert isinstance(told.past_key_values if hasattr(told, "past_key_values") else told[CACHE], LinearizedCache)
    assert len(told.scores) == len(told.logits) == len(told.hidden_states) == NEW
    hidden = told.hidden_states
    assert [len(each) for each in hidden] == [student.config.num_hidden_layers + 1] * NEW
    assert {each[-1].shape[1:] for each in hidden[1:]} == {(1, student.config.hidden_size)}
    if way == "greedy":
        assert torch.equal(torch.stack(told.logits, 1).argmax(-1), texts[:, PROMPT:])


def test_it_writes_after_embeddings_what_it_writes_after_their_tokens(kind):
    student, ids = student_with(kind), tokens(2, PROMPT)
    embeds, mask = student.get_input_embeddings()(ids), torch.ones_like(ids)
    texts = generate(student, ids)
    for use_cache in (True, False):
        new = generate(student, inputs_embeds=embeds, attention_mask=mask, use_cache=use_cache)
        assert torch.equal(new, texts[:, PROMPT:])
    assert torch.equal(generate(student, ids, inputs_embeds=embeds), texts)
    assert not torch.equal(generate(student, ids, inputs_embeds=embeds + 1), texts)


def test_it_goes_on_from_a_state_as_if_it_had_not_stopped(kind):
    student, ids = student_with(kind), tokens(2, PROMPT)
    texts = generate(student, ids)
    part = generate(student, ids, max_new_tokens=3, return_dict_in_generate=True)
    cache = part.past_key_values if hasattr(part, "past_key_values") else part[CACHE]
    assert cache.get_seq_length() == PROMPT + 2
    assert torch.equal(generate(student, part.sequences, max_new_tokens=NEW - 3, **{CACHE: cache}), texts)


def test_padding_before_a_prompt_changes_nothing(kind):
    student, ids = student_with(kind), tokens(2, PROMPT)
    padded = torch.cat([torch.zeros(2, 4, dtype=torch.long), ids], 1)
    mask = torch.cat([torch.zeros(2, 4, dtype=torch.long), torch.ones_like(ids)], 1)
    assert torch.equal(generate(student, padded, attention_mask=mask)[:, 4:], generate(student, ids))


def test_it_begins_without_a_prompt_and_stops_where_it_is_told_to(kind):
    student, ids = student_with(kind), tokens(1, PROMPT)
    assert generate(student, bos_token_id=3).shape == (1, 1 + NEW)
    texts = generate(student, ids)
    stop = int(texts[0, PROMPT + 2])
    stopped = generate(student, ids, eos_token_id=stop, pad_token_id=0)
    assert torch.equal(stopped, texts[:, : PROMPT + 1 + texts[0, PROMPT:].tolist().index(stop)])


def test_the_last_logits_alone_are_enough(kind):
    student, ids = student_with(kind), tokens(2, PROMPT)
    with torch.no_grad():
        torch.testing.assert_close(student(ids, logits_to_keep=1).logits, student(ids).logits[:, -1:])
    assert "logits_to_keep" in inspect.signature(student.forward).parameters
    for beams in (1, 2):
        assert torch.equal(
            generate(student, ids, num_beams=beams, logits_to_keep=0), generate(student, ids, num_beams=beams)
        )
