"""Passes over a streamed model wait for each other at its blocks, and compute the bits that they compute alone."""

import signal
import threading
import time

import pytest
import torch
from accelerate.utils import OffloadedWeightsLoader

from linearizer.evaluate.language import measure_language
from linearizer.evaluate.recall import RepeatReader
from linearizer.evaluate.subjects import Subject
from linearizer.hub.models import find_model
from linearizer.method.checkpoint import make_layer_students, put_student_into
from linearizer.method.head_prices import measure_prices
from linearizer.method.shared_reads import in_step
from linearizer.method.whole_student import measure_students
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.student.attention_interface import IMPLEMENTATION, attending
from linearizer.teacher import logits as logits_module
from linearizer.teacher import streaming
from linearizer.teacher.load import load_config, load_teacher
from linearizer.teacher.logits import logits_of, vocabulary
from linearizer.teacher.streaming import place_weights
from tests.support.models import allocation_of, layers_of, teacher_of, tokens

OPTIONS = (Head(window=4), Head(window=8), Head(window=3, slots=4))


@pytest.fixture
def pair(monkeypatch, tmp_path):
    """A teacher whose weights are resident, and the same with streamed weights."""
    teacher_of("llama").save_pretrained(tmp_path)
    source = find_model(str(tmp_path))
    whole = load_teacher(source)
    monkeypatch.setattr(streaming, "free_bytes", lambda device: 400_000 / streaming.FILLED)
    return whole, load_teacher(source, places=place_weights(load_config(source), source, torch.float32, "cpu"))


@pytest.fixture
def reads(monkeypatch):
    """List the names of the weights that are read."""
    found, read = [], OffloadedWeightsLoader.__getitem__
    monkeypatch.setattr(
        OffloadedWeightsLoader, "__getitem__", lambda self, name: (found.append(name), read(self, name))[1]
    )
    return found


def begin(student, index):
    student.reset(torch.Generator().manual_seed(index))


def test_many_passes_read_each_weight_once(pair, reads):
    whole, streamed = pair
    texts = [tokens(1, 20, seed) for seed in range(5)]
    logits = in_step(streamed, [lambda ids=ids: logits_of(streamed, ids) for ids in texts])
    assert all(torch.equal(own, logits_of(whole, ids)) for own, ids in zip(logits, texts, strict=True))
    assert len(reads) == len(set(reads)) > 0


def test_what_attends_belongs_to_the_pass_that_put_it_there(pair):
    whole, streamed = pair
    layers, ids = layers_of(whole), tokens(2, 30)
    alike = [allocation_of(layers, [option], 2) for option in (*OPTIONS, Head(softmax=True))]
    kl = [finish(measure_students(model, ids, layers, alike, begin)) for model in pair]
    assert kl[0] == kl[1] and len(set(kl[0])) == 4
    assert streamed.config._attn_implementation == whole.config._attn_implementation
    assert torch.equal(logits_of(streamed, ids), logits_of(whole, ids))


def test_measured_prices_take_one_sweep_for_each_layer(pair, reads):
    layers, ids = layers_of(pair[0]), tokens(2, 30)
    prices = [finish(measure_prices(model, ids, layers, OPTIONS, 2, begin)) for model in pair]
    assert prices[0] == prices[1]
    for index in range(len(layers)):  # once for the teacher, then for each layer whose prices depend on this block
        own = {name for name in reads if f".layers.{index}." in name}
        assert own and {reads.count(name) for name in own} == {1 + index + 1}


def test_passes_within_passes_read_weights_one_after_the_other(pair, reads):
    def pass_of(model, seed):
        return lambda: in_step(
            model, [lambda text=text: logits_of(model, tokens(1, 20, seed + text)) for text in (0, 9)]
        )

    logits = [in_step(model, [pass_of(model, seed) for seed in range(3)]) for model in pair]
    assert all(torch.equal(*both) for rows in zip(*logits, strict=True) for both in zip(*rows, strict=True))
    assert set(map(reads.count, set(reads))) == {2}


def test_judging_reads_each_weight_twice_for_each_subject_whatever_the_number_of_texts(pair, reads, monkeypatch):
    layers, results = layers_of(pair[0]), []
    rows = [allocation_of(layers, [option], 2) for option in OPTIONS]
    monkeypatch.setattr(logits_module, "MAX_LOGITS", 2 * 24 * vocabulary(pair[0]))  # two texts at a time
    for model in pair:
        student = put_student_into(model, layers, rows[0])
        heads = [make_layer_students(student, layers, row) for row in rows]
        others = [Subject(str(place), student, *both) for place, both in enumerate(zip(rows, heads, strict=True))]
        subjects = [Subject("teacher", student.base, softmax=True), *others]
        reader = RepeatReader(subjects, 24, 4)
        given = (subjects, tokens(6, 24), torch.zeros(6, 24, dtype=torch.long), layers)
        language = finish(measure_language(*given, read=reader.read))
        results.append((language, reader.result()))
    assert results[0] == results[1]
    assert set(map(reads.count, set(reads))) == {2 * len(subjects)}  # the texts, and what follows them


def test_an_error_in_a_pass_ends_all_and_leaves_the_model_as_it_was(pair, reads):
    def fail():
        with attending(pair[1], IMPLEMENTATION):
            logits_of(pair[1], tokens(1, 20))
            raise ValueError("no")

    before = threading.active_count()
    with pytest.raises(ValueError, match="no"):
        in_step(pair[1], [lambda: logits_of(pair[1], tokens(1, 20)), fail, fail])
    assert threading.active_count() == before
    assert torch.equal(logits_of(pair[1], tokens(1, 20)), logits_of(pair[0], tokens(1, 20)))


def test_a_request_to_stop_waits_for_the_pass_that_runs(pair):
    def stop():
        signal.raise_signal(signal.SIGINT)  # the main thread waits for this pass
        time.sleep(0.05)
        return logits_of(pair[1], tokens(1, 20))

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        in_step(pair[1], [stop, stop])
    assert threading.active_count() == before
    assert torch.equal(logits_of(pair[1], tokens(1, 20)), logits_of(pair[0], tokens(1, 20)))
