"""Texts that join and leave a running batch are written as if each were alone."""

import random
import time

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.serve import engine as engines
from linearizer.serve import prompts
from linearizer.serve.engine import Engine
from linearizer.serve.kept_states import KeptStates, memory_of
from linearizer.serve.row import Row, begun_stop, find_stop
from linearizer.serve.sampling import Drawing, choose_tokens
from linearizer.student.state import tensors
from linearizer.teacher.logits import fresh_cache
from tests.support.models import MIXED, student_of, teacher_of, tokens

ROOM = 2**30
SMALL = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]
SLOTS = [Head(window=4, slots=6), Head(window=5), Head(window=8, features=16)]


class Letters:
    """A tokenizer whose tokens are letters."""

    def decode(self, ids, **_):
        return "".join(chr(64 + token) for token in ids)


@pytest.fixture(
    scope="module",
    params=[("llama", MIXED), ("llama", SLOTS), ("gemma3_text", MIXED), ("gpt2", SLOTS), ("llama", None)],
    ids=["llama mixed", "llama fixed", "gemma3_text mixed", "gpt2 fixed", "teacher"],
)
def model(request):
    family, heads = request.param
    return teacher_of(family) if heads is None else student_of(family, heads)


def row_of(ids, count, **how):
    heard = []
    row = Row(ids, heard.append, Letters(), count, **how)
    row.heard = heard
    return row


def alone(model, ids, count):
    """What `generate` writes after a prompt."""
    given = torch.tensor([ids])
    options = dict(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return model.generate(given, attention_mask=torch.ones_like(given), **options)[0].tolist()


@torch.inference_mode()
def work(engine, arrivals, most=400):
    """Step until all is done; `arrivals` says after how many steps which rows come."""
    for step in range(most):
        for row in arrivals.pop(step, []):
            assert engine.submit(row)
        if not (engine.rows or engine.unread or arrivals):
            return
        engine.step()
    raise AssertionError("it does not end")


def test_rows_of_any_length_that_come_at_any_time_are_written_as_alone(model, monkeypatch):
    monkeypatch.setattr(prompts, "PIECE", 16)
    monkeypatch.setattr(prompts, "FEWEST", 4)
    monkeypatch.setattr(engines, "READ_BETWEEN", 12)
    sizes = [(1, 9), (30, 12), (3, 20), (70, 5), (17, 30), (2, 1), (45, 16)]
    rows = [row_of(tokens(1, size, seed)[0].tolist(), count) for seed, (size, count) in enumerate(sizes)]
    engine = Engine(model, ROOM)
    work(engine, {0: rows[:2], 3: rows[2:4], 9: rows[4:6], 14: rows[6:]})
    for row, (_, count) in zip(rows, sizes, strict=True):
        assert row.tokens == alone(model, row.prompt, count)
        assert [piece.finish for piece in row.heard][-1] == "length"
        assert "".join(piece.text for piece in row.heard) == Letters().decode(row.tokens[len(row.prompt) :])
    assert not engine.rows and engine.cache is None


def test_a_next_turn_reads_only_what_is_new(model):
    engine = Engine(model, ROOM)
    first = row_of(tokens(1, 20)[0].tolist(), 8)
    work(engine, {0: [first]})
    options = [*first.tokens, *tokens(1, 6, seed=1)[0].tolist()]
    second, again = row_of(options, 8), row_of(first.prompt, 8)
    work(engine, {0: [second, again]})
    assert second.reused == len(first.tokens) - 1 and again.reused == len(first.prompt) - 1
    assert second.tokens == alone(model, options, 8)
    assert again.tokens == first.tokens


def test_a_long_text_is_read_once_for_many_questions(model, monkeypatch):
    monkeypatch.setattr(prompts, "PIECE", 16)
    engine, text = Engine(model, ROOM), tokens(1, 50)[0].tolist()
    rows = [row_of([*text, *tokens(1, 5, seed)[0].tolist()], 4) for seed in range(3)]
    work(engine, {0: rows[:1], 20: rows[1:]})
    assert [row.reused for row in rows] == [0, 48, 48]
    for row in rows:
        assert row.tokens == alone(model, row.prompt, 4)


def test_rows_that_begin_alike_and_come_together_read_their_beginning_once(model, monkeypatch):
    monkeypatch.setattr(prompts, "PIECE", 16)
    monkeypatch.setattr(engines, "READ_IDLE", 20)
    engine, text = Engine(model, ROOM), tokens(1, 50)[0].tolist()
    rows = [row_of([*text, *tokens(1, 5, seed)[0].tolist()], 4) for seed in (1, 2)]
    other, same = row_of(tokens(1, 41, 3)[0].tolist(), 4), row_of(rows[0].prompt, 4)
    work(engine, {0: [*rows, other, same]})
    assert [row.reused for row in (*rows, other, same)] == [0, 48, 0, 54]
    for row in (*rows, other, same):
        assert row.tokens == alone(model, row.prompt, 4)


def test_prompts_are_read_together_and_answers_go_on_meanwhile(model, monkeypatch):
    monkeypatch.setattr(prompts, "FEWEST", 4)
    monkeypatch.setattr(engines, "READ_BETWEEN", 16)
    read, before = [], model.forward

    def forward(input_ids, **given):
        read.append(tuple(input_ids.shape))
        return before(input_ids=input_ids, **given)

    monkeypatch.setattr(model, "forward", forward)
    engine, first = Engine(model, ROOM), row_of(tokens(1, 9)[0].tolist(), 40)
    rows = [row_of(tokens(1, size, seed)[0].tolist(), 3) for seed, size in enumerate((33, 33, 33, 49), 1)]
    work(engine, {0: [first], 2: rows})
    assert read[:3] == [(1, 8), (1, 1), (1, 1)]  # the first alone, at once
    assert [shape for shape in read if shape[1] > 1][1:] == [(4, 4)] * 8 + [(1, 16)]
    assert all(a[1] == 1 or b[1] == 1 for a, b in zip(read[3:], read[4:], strict=False))  # a token after each piece
    monkeypatch.undo()
    for row, count in ((first, 40), *((row, 3) for row in rows)):
        assert row.tokens == alone(model, row.prompt, count)


@torch.no_grad()
def test_states_are_kept_within_a_bound_and_the_oldest_goes_first():
    student = student_of("llama", SLOTS)

    def cache_of(ids):
        cache = fresh_cache(student)
        student(torch.tensor([ids]), past_key_values=cache)
        return cache

    texts = [tokens(1, 12, seed)[0].tolist() for seed in range(4)]
    size = memory_of(cache_of(texts[0]))
    kept = KeptStates(3 * size)
    for text in texts[:3]:
        kept.keep(text, cache_of(text))
    assert kept.find_longest([*texts[0], 5])[0] == 12  # used: now the second is the oldest
    kept.keep(texts[3], cache_of(texts[3]))
    assert [kept.find_longest(text)[0] for text in texts] == [12, 0, 12, 12]
    assert kept.bytes == 3 * size and kept.find_longest(texts[1])[0] == 0
    kept.keep(texts[3], cache_of(texts[3]))
    assert kept.bytes == 3 * size
    small = KeptStates(size - 1)
    small.keep(texts[0], cache_of(texts[0]))
    assert not small.states and not small.bytes


@pytest.mark.parametrize("heads", [SLOTS, SMALL, None], ids=["16 bits", "8 bits", "teacher"])
def test_what_is_kept_takes_the_memory_that_is_counted(heads):
    """Nothing of the buffers in which a text is read on, nor of the batch that it was read in."""
    engine = Engine(teacher_of("llama") if heads is None else student_of("llama", heads), ROOM)
    rows = [row_of(tokens(1, size, size)[0].tolist(), 4) for size in (30, 30, 30, 41, 17)]
    work(engine, {0: rows[:3], 2: rows[3:]})
    assert len(engine.kept.states) >= 5
    for kept in engine.kept.states.values():
        held = [x for layer in kept.cache.layers for x in tensors_of(layer)]
        assert held and all(x.untyped_storage().nbytes() == x.numel() * x.element_size() for x in held)
        assert all(not vars(state).keys() & {"token_buffer", "layer_in_c"} for state in states_of(kept.cache))
        assert kept.bytes >= sum(x.untyped_storage().nbytes() for x in held) + 400 * len(held)
    assert engine.kept.bytes == sum(kept.bytes for kept in engine.kept.states.values())


def states_of(cache):
    return [state for layer in cache.layers for state in getattr(layer, "memory", None) or []]


def tensors_of(layer):
    states = [tensors(state).values() for state in getattr(layer, "memory", None) or []]
    return [layer.keys, layer.values] if not states else [x for each in states for x in each]


def test_nothing_is_kept_where_no_memory_is_given():
    engine = Engine(student_of("llama", SLOTS), 0)
    work(engine, {0: [row_of(tokens(1, 20)[0].tolist(), 8)]})
    assert not engine.kept.states


def test_a_listener_that_leaves_frees_its_row_and_the_others_go_on():
    student, prompts = student_of("llama"), [tokens(1, 12, seed)[0].tolist() for seed in range(4)]
    engine, rows = Engine(student, ROOM), [row_of(prompt, 20) for prompt in prompts]

    def closed(piece):
        raise RuntimeError("Event loop is closed")

    rows[3].send = closed
    with torch.inference_mode():
        for row in rows:
            engine.submit(row)
        engine.step()
        engine.cancel(rows[0])
        for _ in range(3):
            engine.step()
        assert engine.rows == rows[1:3] and rows[0].written < 20
    work(engine, {})
    for row in rows[1:3]:
        assert row.tokens == alone(student, row.prompt, 20)


def test_a_model_that_breaks_ends_its_rows_in_a_sentence_and_serves_the_next(monkeypatch):
    student = student_of("llama")
    engine, broken = Engine(student, ROOM), row_of(tokens(1, 12)[0].tolist(), 20)
    monkeypatch.setattr(engines, "choose_tokens", lambda *_: 1 / 0)
    work(engine, {0: [broken]})
    assert "ZeroDivisionError" in broken.heard[-1].error
    monkeypatch.undo()
    engine.rows, (row := row_of(broken.prompt, 5)).drawing
    work(engine, {0: [row]})
    assert row.tokens == alone(student, row.prompt, 5)


def test_logits_that_are_no_numbers_end_their_row():
    student = student_of("llama", SLOTS)
    student.base.get_output_embeddings().weight.data[5] = float("nan")
    engine, row = Engine(student, ROOM), row_of(tokens(1, 12)[0].tolist(), 20)
    work(engine, {0: [row]})
    assert "not finite" in row.heard[-1].error and row.written == 0


def test_it_works_in_its_own_thread_until_it_is_closed():
    student = student_of("llama", SLOTS)
    row = row_of(tokens(1, 12)[0].tolist(), 5)
    with Engine(student, ROOM) as engine:
        engine.submit(row)
        last = time.monotonic() + 60
        while not row.done and time.monotonic() < last:
            time.sleep(0.01)
    assert row.tokens == alone(student, row.prompt, 5)
    assert not engine.thread.is_alive() and not engine.submit(row)


def test_a_text_ends_where_it_should():
    ids = tokens(1, 10)[0].tolist()
    row = row_of(ids, 9, stop=("CD",))
    for token in (1, 2, 3, 3):  # A, B, C, C: the last may begin what it stops at
        row.add(token)
    assert "".join(piece.text for piece in row.heard) == "ABC" and not row.done
    row.add(4)
    assert row.done and row.heard[-1].finish == "stop" and "".join(piece.text for piece in row.heard) == "ABC"
    row = row_of(ids, 9, ends=frozenset([7]))
    for token in (1, 7):
        row.add(token)
    assert row.heard[-1].finish == "stop" and "".join(piece.text for piece in row.heard) == "A"
    row = row_of(ids, 2, stop=("BC",))
    for token in (1, 2):
        row.add(token)
    assert row.heard[-1].finish == "length" and "".join(piece.text for piece in row.heard) == "AB"
    assert find_stop("some text", ("text", "e t")) == 3 and begun_stop("abab", ("babc", "x")) == 3


def test_tokens_are_drawn_as_asked():
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(2000, -1)
    generator = random.Random(0)
    drawn = choose_tokens(logits, [Drawing(1.0, 1.0, generator)] * 2000)
    result = torch.tensor(drawn).bincount(minlength=4) / 2000
    assert (result - logits[0].softmax(-1)).abs().max() < 0.04  # 3.5 standard deviations of 2000 draws
    assert set(choose_tokens(logits, [Drawing(1.0, 0.6, generator)] * 2000)) == {2}
    assert set(choose_tokens(logits, [Drawing(1.0, 0.8, generator)] * 2000)) == {1, 2}
    assert set(choose_tokens(logits, [Drawing()] * 2000)) == {2}
    assert set(choose_tokens(logits, [Drawing(1e-30, 1.0, generator)] * 2000)) == {2}
    mixed = [Drawing(), Drawing(1.0, 1.0, random.Random("7 0")), Drawing(1.0, 1.0, random.Random("7 0"))]
    first, second, third = choose_tokens(logits[:3], mixed)
    assert first == 2 and second == third
