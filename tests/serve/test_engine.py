"""Texts that join and leave a running batch are written as if each were alone."""

import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from dataclasses import replace

import pytest
import torch

from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.plan.head_bytes import Head
from linearizer.serve import engine as engines
from linearizer.serve import prompts
from linearizer.serve.cache_rows import copy_cache, tensors_of
from linearizer.serve.engine import Engine
from linearizer.serve.prompts import KeptStates
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.ram import status_bytes
from tests.support.models import MIXED, student_of, teacher_of, tokens
from tests.support.rows import Letters, alone, row_of, work

ROOM = 2**30
SMALL = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]
SLOTS = [Head(window=4, slots=6), Head(window=5), Head(window=8, features=16)]


@pytest.fixture(
    scope="module",
    params=[
        *(("llama", MIXED, 0), ("llama", MIXED, 21), ("llama", SLOTS, 21), ("gemma3_text", MIXED, 0)),
        *(("gpt2", SLOTS, 0), ("llama", None, 0)),
    ],
    ids=["llama mixed", "llama mixed exact", "llama fixed exact", "gemma3_text mixed", "gpt2 fixed", "teacher"],
)
def model(request):
    family, heads, exact = request.param
    return teacher_of(family) if heads is None else student_of(family, heads, exact_tokens=exact)


def test_rows_of_any_length_that_come_at_any_time_are_written_as_alone(model, monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 16)
    monkeypatch.setattr(prompts, "FEWEST", 4)
    monkeypatch.setattr(engines, "READ_BETWEEN", 12)
    sizes = [(1, 9), (30, 12), (3, 20), (70, 5), (17, 30), (2, 1), (45, 16)]
    rows = [row_of(tokens(1, size, seed)[0].tolist(), count) for seed, (size, count) in enumerate(sizes)]
    engine = Engine(model, ROOM)
    work(engine, {0: rows[:2], 3: rows[2:4], 9: rows[4:6], 14: rows[6:]})
    for row, (_, count) in zip(rows, sizes, strict=True):
        assert row.tokens == alone(model, row.prompt, count)
        assert [delta.finish for delta in row.heard][-1] == "length"
        assert "".join(delta.text for delta in row.heard) == Letters().decode(row.tokens[len(row.prompt) :])
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


@pytest.mark.parametrize(("family", "exact"), [("llama", 21), ("gpt2", 0)])
def test_prompts_of_any_length_are_read_at_once_as_alone(family, exact, monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 16)
    monkeypatch.setattr(prompts, "FEWEST", 4)
    model, read = student_of(family, SLOTS, exact_tokens=exact), []
    engine, read_part = Engine(model, ROOM), prompts.Prompts.read_part
    engine.prompts.several = True
    monkeypatch.setattr(
        prompts.Prompts, "read_part", lambda own, rows, count: (read.append(len(rows)), read_part(own, rows, count))
    )
    texts = [tokens(1, size, size)[0].tolist() for size in (30, 3, 45, 2, 17, 70)]
    rows = [row_of(text, 6) for text in texts]
    same, longer, of_other = row_of(texts[0], 6), row_of([*texts[0], *texts[1]], 6), row_of(texts[0], 6)
    of_other.owner = "another key"
    work(engine, {0: [*rows[:4], same, longer, of_other], 2: rows[4:]})
    for row in (*rows, same, longer, of_other):
        assert row.tokens == alone(model, row.prompt, 6)
    assert max(read) >= 4 and (same.reused, longer.reused, of_other.reused) == (29, 29, 0)


def test_a_gpu_reads_more_of_a_prompt_at_once_the_more_it_has_read(monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 4)
    model, read = student_of("llama", SLOTS), []
    engine, row = Engine(model, ROOM), row_of(tokens(1, 102)[0].tolist(), 3)
    reader_of(model).reads_parts = True
    read_part = prompts.Prompts.read_part
    monkeypatch.setattr(
        prompts.Prompts, "read_part", lambda own, rows, count: (read.append(count), read_part(own, rows, count))
    )
    work(engine, {0: [row]})
    assert read == [4, 4, 8, 16, 32, 32, 5] and row.tokens == alone(model, row.prompt, 3)
    assert sorted(state.tokens for state in engine.kept.states.values()) == [4, 8, 16, 32, 64, 96, 101, 104]


@pytest.mark.parametrize("later", [0, 20], ids=["together", "later"])
def test_rows_that_begin_alike_read_their_beginning_once(model, monkeypatch, later):
    monkeypatch.setattr(prompts, "CHUNK", 16)
    monkeypatch.setattr(engines, "READ_IDLE", 20)
    engine, text = Engine(model, ROOM), tokens(1, 50)[0].tolist()
    first, second = (row_of([*text, *tokens(1, 5, seed)[0].tolist()], 4) for seed in (1, 2))
    other, same = row_of(tokens(1, 41, 3)[0].tolist(), 4), row_of(first.prompt, 4)
    work(engine, {0: [first, second, other, same]} if not later else {0: [first], later: [second, other, same]})
    assert [row.reused for row in (first, second, other, same)] == [0, 48, 0, 54]
    for row in (first, second, other, same):
        assert row.tokens == alone(model, row.prompt, 4)


def test_answers_go_on_while_prompts_are_read(model, monkeypatch):
    monkeypatch.setattr(prompts, "FEWEST", 4)
    monkeypatch.setattr(engines, "READ_BETWEEN", 16)
    read, before = [], model.forward

    def forward(input_ids, **given):
        read.append(tuple(input_ids.shape))
        return before(input_ids=input_ids, **given)

    monkeypatch.setattr(model, "forward", forward)
    engine, first = Engine(model, ROOM), row_of(tokens(1, 9)[0].tolist(), 40)
    work(engine, {0: [first], 2: [row_of(tokens(1, 33, 1)[0].tolist(), 3), row_of(tokens(1, 49, 2)[0].tolist(), 3)]})
    assert read[:3] == [(1, 8), (1, 1), (1, 1)]  # the first alone, at once
    assert [shape for shape in read if shape[1] > 1][1:] == [(1, 16)] * 5
    assert all(a[1] == 1 or b[1] == 1 for a, b in zip(read[3:], read[4:], strict=False))  # a token after each chunk


def test_states_are_kept_within_a_bound_and_the_oldest_goes_first():
    student, texts = student_of("llama", SLOTS), [tokens(1, 12, seed)[0].tolist() for seed in range(4)]

    @torch.no_grad()
    def keep(kept, text):
        cache = fresh_cache(student)
        student(torch.tensor([text]), past_key_values=cache)
        kept.keep(text, cache)

    keep(first := KeptStates(ROOM), texts[0])
    kept, small = KeptStates(3 * first.bytes), KeptStates(first.bytes - 1)
    for text in texts[:3]:
        keep(kept, text)

    def found():
        return [getattr(kept.find_longest(text), "tokens", 0) for text in texts]

    assert kept.find_longest([*texts[0], 5]).tokens == 12  # used: now the second is the oldest
    for _ in range(2):
        keep(kept, texts[3])
        assert found() == [12, 0, 12, 12] and kept.bytes == 3 * first.bytes
    keep(small, texts[0])
    assert not small.states and not small.bytes


def test_of_states_that_are_dropped_nothing_is_left():
    """A teacher's have other shapes for each number of tokens."""
    engine = Engine(teacher_of("llama"), 2**14)
    for size in range(2, 20):
        work(engine, {0: [row_of(tokens(1, size)[0].tolist(), 2)]})
    assert {*engine.kept.shapes} == {state.shapes for state in engine.kept.states.values()}


@pytest.mark.parametrize("heads", [SLOTS, SMALL, None], ids=["16 bits", "8 bits", "teacher"])
def test_what_is_kept_takes_the_memory_that_is_counted(heads):
    """One tensor of bytes, and nothing of the batch that the text was read in."""
    engine = Engine(teacher_of("llama") if heads is None else student_of("llama", heads), ROOM)
    rows = [row_of(tokens(1, size, size)[0].tolist(), 4) for size in (30, 30, 30, 41, 17)]
    work(engine, {0: rows[:3], 2: rows[3:]})
    assert len(engine.kept.states) >= 5
    for kept in engine.kept.states.values():
        held = tensors_of(engine.kept.restore(kept))
        assert kept.packed.untyped_storage().nbytes() == sum(x.untyped_storage().nbytes() for x in held)
        python = sys.getsizeof(kept.shapes) + sum(map(sys.getsizeof, kept.shapes))
        assert kept.bytes >= kept.packed.nbytes + python
    assert engine.kept.bytes == sum(kept.bytes for kept in engine.kept.states.values())
    alike = {id(kept.shapes) for kept in engine.kept.states.values()}
    assert len(alike) == len(engine.kept.shapes)  # few objects, or collections of garbage would stop the server


def test_a_listener_that_leaves_frees_its_row_and_the_others_go_on():
    student, prompts = student_of("llama"), [tokens(1, 12, seed)[0].tolist() for seed in range(4)]
    engine, rows = Engine(student, ROOM), [row_of(prompt, 20) for prompt in prompts]

    def closed(delta):
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


def test_those_who_leave_while_they_wait_make_room_for_others(monkeypatch):
    monkeypatch.setattr(engines, "MAX_WAITING", 2)
    engine, rows = Engine(student_of("llama"), ROOM), [row_of([1, 2, 3], 2) for _ in range(3)]
    assert engine.submit(*rows[:2]) and not engine.submit(rows[2])
    engine.cancel(rows[0])
    assert [*engine.waiting] == [rows[1]] and engine.submit(rows[2])
    work(engine, {})
    assert [row.written for row in rows] == [0, 2, 2]


def test_texts_go_on_where_memory_does_not_suffice_to_keep_a_state(model, monkeypatch):
    engine, rows = (
        Engine(model, ROOM),
        [row_of(tokens(1, 12, seed)[0].tolist(), count) for seed, count in enumerate((9, 2))],
    )
    work(engine, {0: [row_of(tokens(1, 20, 3)[0].tolist(), 2)]})
    kept = len(engine.kept.states)
    monkeypatch.setattr(prompts, "pack", full)
    work(engine, {0: rows})
    assert [row.tokens for row in rows] == [alone(model, row.prompt, row.new_tokens) for row in rows]
    assert kept and not engine.kept.states and not engine.kept.bytes  # they make room for texts


def full(*_):
    raise torch.OutOfMemoryError


def test_small_tensors_of_kept_states_take_no_more_memory_than_their_bytes_by_a_third():
    """In the process: what else it has freed before may only make it less."""
    student = student_of("llama", [Head(window=64, slots=64, bits=8)])
    cache, kept = fresh_cache(student), KeptStates(ROOM)
    with torch.inference_mode():
        student(tokens(1, 200), past_key_values=cache)
        kept.keep([0], cache)
        count, before = 2**26 // kept.bytes, status_bytes("RssAnon")
        for number in range(count):
            kept.keep([1, number], copy_cache(cache, lambda x: x.clone()))
    assert len(kept.states) == count + 1
    assert status_bytes("RssAnon") - before < 1.3 * kept.bytes


def test_a_long_prompt_is_not_read_to_its_end_once_the_engine_closes(monkeypatch):
    monkeypatch.setattr(prompts, "CHUNK", 16)
    student, begun, read = student_of("llama"), threading.Event(), []
    engine, before = Engine(student, ROOM), student.forward

    def forward(**given):
        read.append(1)
        begun.set()
        while not engine.closed:
            time.sleep(0.001)
        return before(**given)

    monkeypatch.setattr(student, "forward", forward)
    with engine:
        assert engine.submit(row_of(tokens(1, 500)[0].tolist(), 20), row_of(tokens(1, 500, 1)[0].tolist(), 20))
        assert begun.wait(60)
    assert len(read) == 1


def test_a_state_that_cannot_be_restored_fails_its_row_alone():
    student = student_of("llama")
    engine, first = Engine(student, ROOM), row_of(tokens(1, 20)[0].tolist(), 3)
    work(engine, {0: [first]})
    for key, kept in engine.kept.states.items():
        engine.kept.states[key] = replace(kept, packed=kept.packed[:-1])
    same, other = row_of(first.prompt, 3), row_of(tokens(1, 20, 1)[0].tolist(), 3)
    work(engine, {0: [same, other]})
    assert "writing failed" in same.heard[-1].error and other.tokens == alone(student, other.prompt, 3)


@pytest.mark.parametrize("fault", ["error", "weights", "infinite weights"])
def test_a_model_that_breaks_ends_its_rows_in_a_sentence_and_serves_the_next(monkeypatch, fault):
    student = student_of("llama")
    engine, broken = Engine(student, ROOM), row_of(tokens(1, 12)[0].tolist(), 20)
    weight = student.get_output_embeddings().weight.data
    before = weight[5:7].clone()
    if fault == "weights":
        weight[5] = float("nan")
    elif fault == "infinite weights":
        weight[5:7, 0] = torch.tensor([1, -1]) * float("inf")  # one of both logits is not negative
    else:
        monkeypatch.setattr(engines, "choose_tokens", lambda *_: 1 / 0)
    work(engine, {0: [broken]})
    assert ("ZeroDivisionError" if fault == "error" else "not finite") in broken.heard[-1].error
    assert broken.written == 0 and broken.cache is None
    weight[5:7] = before
    monkeypatch.undo()
    work(engine, {0: [row := row_of(broken.prompt, 5)]})
    assert row.tokens == alone(student, row.prompt, 5)


def test_an_engine_that_cannot_go_on_ends_its_rows_and_takes_no_more(monkeypatch):
    engine, row = Engine(student_of("llama"), ROOM), row_of(tokens(1, 12)[0].tolist(), 3)
    monkeypatch.setattr(engine, "admit", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with engine:
        assert engine.submit(row)
        engine.thread.join(60)
        assert engine.closed and not engine.submit(row_of(row.prompt, 3))
    assert "ZeroDivisionError" in row.heard[-1].error


def test_a_call_to_an_engine_that_cannot_go_on_is_cancelled(monkeypatch):
    engine = Engine(student_of("llama"), ROOM)
    monkeypatch.setattr(engine, "answer_calls", lambda: 1 / 0)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with engine:
        with pytest.raises(CancelledError):
            engine.call(lambda: 1).result(60)


def test_no_one_waits_for_a_state_in_vain_and_one_who_left_disturbs_nobody(monkeypatch):
    student = student_of("llama")
    engine, rows = Engine(student, ROOM), [row_of(tokens(1, 12, seed)[0].tolist(), 5 + seed) for seed in range(3)]
    for row in rows[:2]:
        row.state = Future()
    rows[0].state.cancel()
    work(engine, {0: rows})
    assert rows[1].state.result(0).get_seq_length() == len(rows[1].tokens)
    assert [row.tokens for row in rows] == [alone(student, row.prompt, row.new_tokens) for row in rows]
    waiting = row_of(rows[0].prompt, 3)
    waiting.state = Future()
    monkeypatch.setattr(engines, "view_row", lambda *_: 1 / 0)
    work(engine, {0: [waiting]})
    assert isinstance(waiting.state.exception(0), ZeroDivisionError)
