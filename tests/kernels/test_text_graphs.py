"""Texts by graphs are those by calls: a graph reads parts with states of its own, which are copied from and to caches.

Without a GPU a thread calls the step again, and stops where one graph would end and the next begin.
"""

import copy
import threading
from contextlib import AbstractContextManager

import pytest
import torch

from linearizer.kernels import door
from linearizer.kernels.graphs import text_graphs, text_parts
from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.kernels.graphs.text_graphs import TextReader
from linearizer.plan.head_bytes import Head
from linearizer.student.attention_interface import NOT_SERVED
from linearizer.student.cache import CACHE
from tests.support.kernels import DEVICE, EXACT, ON_GPU
from tests.support.models import student_of, tokens
from tests.support.streams import assert_same_states, opened, record_launches, use_streams

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of an interpreter, in empty rows
WINDOWS = [Head(window=5, bits=8), Head(window=7, bits=8)]
SLOTS = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]  # which an interpreter takes long to merge
LARGE, PART, PARTS, LAYERS, MORE = 16, 8, 3, 2, 3
FAR = 60  # positions of the model


class StoredBasis(AbstractContextManager):
    """The begin and the end of a layer's attention, where a thread waits for its next turn."""

    def __init__(self, step):
        self.step = step

    def __enter__(self):
        self.step.wait()

    def __exit__(self, *error):
        self.step.wait()


class RepeatedStep:
    """Calls a step again, piece by piece."""

    def __init__(self, step, cache):
        self.step, self.cache, self.thread = step, cache, None
        self.turn, self.over, self.error = threading.Semaphore(0), threading.Semaphore(0), None
        self.out = step()
        made.append(self)

    def repeat_piece(self):
        if self.thread is None:
            self.thread = threading.Thread(target=self.run)
            self.thread.start()
        self.turn.release()
        self.over.acquire()
        if self.error:
            raise self.error

    @torch.inference_mode()
    def run(self):
        self.turn.acquire()
        try:
            with text_parts.ordered(self.cache, [StoredBasis(self) for _ in self.cache.layers]):
                self.out.logits.copy_(self.step().logits)
        except Exception as error:
            self.error = error
        for layer in self.cache.layers:  # which graphs do not count
            layer.tokens_read -= self.step.args[2].shape[1]
        self.thread = None
        self.over.release()

    def wait(self):
        self.over.release()
        self.turn.acquire()


def call_in_pieces(step, cache, memory):
    repeated, layers = RepeatedStep(step, cache), [*range(len(cache.layers))]
    return memory or object(), [repeated.repeat_piece] * (2 * len(layers) + 1), layers, repeated.out


def capture(*arguments):
    made.append(None)
    return text_graphs.capture_in_pieces(*arguments)


made = []  # the captures of a test


def make_student(monkeypatch, heads):
    """Make a student whose layers are read by Triton's kernels, with graphs after a text, and record launches."""
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    sizes = {"SIZES": (LARGE, PART), "LONG": 2 * LARGE, "FEWEST": 2 * PART}
    for name, value in {**sizes, "TRIAL_PARTS": 2, "BEFORE": 1}.items():
        monkeypatch.setattr(text_graphs, name, value)
    use_streams(monkeypatch, text_graphs)
    sizes = {"num_hidden_layers": LAYERS, "num_key_value_heads": 1, "max_position_embeddings": FAR}
    student = student_of("llama", heads, **sizes).to(DEVICE, EXACT)
    reader_of(student).text_reader = TextReader(capture if ON_GPU else call_in_pieces)
    record_launches(student, "triton", monkeypatch)
    made.clear()
    return student


@pytest.fixture
def student(monkeypatch):
    return make_student(monkeypatch, WINDOWS)


@torch.inference_mode()
def read_by_calls(student, ids, cache=None, mask=None, sizes=(PART,)):
    """Read parts one after the other; return the last logits, and the cache."""
    cache, begin = student.empty_cache() if cache is None else cache, 0
    past = cache.get_seq_length()
    reader_of(student).repeats_texts = False
    for size in [*text_graphs.cut_text(ids.shape[1], sizes), PART]:
        if part := ids[:, begin : begin + size].shape[1]:
            seen, begin = None if mask is None else mask[:, : past + begin + part], begin + part
            out = student(ids[:, begin - part : begin], attention_mask=seen, logits_to_keep=1, **{CACHE: cache})
    reader_of(student).repeats_texts = None
    return out.logits, cache


@torch.inference_mode()
def read_at_once(student, ids, cache=None, mask=None):
    reader_of(student).repeats_texts = False
    result = read(student, ids, cache, attention_mask=mask)
    reader_of(student).repeats_texts = None
    return result


@torch.inference_mode()
def read(student, ids, cache=None, **given):
    cache = student.empty_cache() if cache is None else cache
    return student(ids, logits_to_keep=1, **given, **{CACHE: cache}).logits, cache


def capture_graphs(student):
    """Read texts until graphs are captured; return how many reads that took."""
    for count in range(1, 5):
        read(student, tokens(1, PARTS * PART, count).to(DEVICE))
        if reader_of(student).text_reader.graphs:
            return count


def assert_same(result, expected):
    (logits, cache), (wanted, other) = result, expected
    assert torch.equal(logits, wanted)
    assert_same_states(cache, other)


def test_texts_are_read_by_graphs_as_by_calls(monkeypatch):
    student = make_student(monkeypatch, SLOTS)
    assert capture_graphs(student) == 2 and len(made) == LAYERS  # a part for each stream
    first, second = tokens(1, PARTS * PART + MORE, 7).to(DEVICE), tokens(1, 2 * PART, 8).to(DEVICE)
    logits, cache = read(student, first)
    expected, other = read_by_calls(student, first)
    assert_same((logits, cache), (expected, other))
    kept, copied = copy.deepcopy(cache), copy.deepcopy(other)
    assert_same(read(student, second, cache), read_by_calls(student, second, other))
    assert_same(read(student, tokens(1, 1).to(DEVICE), cache), read(student, tokens(1, 1).to(DEVICE), other))
    assert_same(read(student, first[:, :5], kept), read(student, first[:, :5], copied))
    used = len(opened)
    read(student, tokens(2, PARTS * PART).to(DEVICE))
    assert len(made) == LAYERS and len(opened) == used  # texts of a batch need none


def test_longer_texts_have_large_parts_too_which_share_the_memory_of_a_stream(student):
    capture_graphs(student)
    ids, sizes = tokens(1, 2 * LARGE + PART + MORE, 7).to(DEVICE), (LARGE, PART)
    assert_same(read(student, ids), read_by_calls(student, ids, sizes=sizes))
    parts = reader_of(student).text_reader.graphs.parts
    assert len(made) == 2 * LAYERS and [*parts] == [PART, LARGE]
    assert all(a.memory == b.memory for a, b in zip(*parts.values(), strict=True))


def test_where_memory_does_not_suffice_for_large_parts_there_are_small_ones(student):
    def full(step, cache, memory):
        if step.args[2].shape[1] == LARGE:
            raise torch.OutOfMemoryError
        return usual(step, cache, memory)

    usual, reader_of(student).text_reader.capture = reader_of(student).text_reader.capture, full
    capture_graphs(student)
    ids = tokens(1, 2 * LARGE + PART + MORE, 7).to(DEVICE)
    assert_same(read(student, ids), read_by_calls(student, ids))
    assert reader_of(student).text_reader.graphs and reader_of(student).repeats_texts is None


@pytest.mark.skipif(ON_GPU, reason="the memory of a device is what it is")
@pytest.mark.parametrize("room", [PART, 2 * PART + 1])
def test_graphs_take_a_share_of_the_free_memory(student, monkeypatch, room):
    taken = lambda: sum(step.step.args[2].shape[1] for step in made)  # noqa: E731
    monkeypatch.setattr(text_graphs, "memory_of", lambda device: (taken(), room / text_graphs.SHARE))
    capture_graphs(student)
    ids = tokens(1, 2 * LARGE + PART, 7)
    assert_same(read(student, ids), (read_by_calls if room > PART else read_at_once)(student, ids))
    assert (
        reader_of(student).text_reader.bytes == (2 * PART if room > PART else 0)
        and reader_of(student).repeats_texts is None
    )


@pytest.mark.skipif(ON_GPU, reason="streams of a device record nothing")
def test_a_layer_reads_a_part_after_the_part_before_and_beside_later_layers(student):
    capture_graphs(student)
    read(student, tokens(1, PARTS * PART + MORE))
    before, text = opened[-1].before, len(opened)
    assert len(before) == LAYERS * (PARTS + 1)
    for _, layer, part in before:
        earlier = before[text, layer, part]
        assert (text - 1, LAYERS - 1, PARTS - 1) in earlier  # the last text was read with the same states
        assert part == 0 or (text, layer, part - 1) in earlier
        assert layer == 0 or (text, layer - 1, part) in earlier
        if part % LAYERS:  # parts of the same stream are read one after the other
            assert (text, LAYERS - 1, part - 1) not in before[text, 0, part]


def test_padding_is_read_by_calls_and_positions_after_it_by_graphs_and_packed_rows_are_refused(student):
    capture_graphs(student)
    positions = torch.arange(PART, device=DEVICE).repeat(1, PARTS)
    with pytest.raises(ValueError, match=NOT_SERVED[:40]):
        read(student, tokens(1, PARTS * PART).to(DEVICE), position_ids=positions)
    ids, more = tokens(1, 2 * PART, 7).to(DEVICE), tokens(1, 2 * PART, 8).to(DEVICE)
    mask = torch.ones(1, 4 * PART, dtype=torch.long, device=DEVICE)
    mask[:, :3] = 0
    used = len(opened)
    _, cache = read(student, ids, attention_mask=mask[:, : 2 * PART])
    _, other = read_at_once(student, ids, mask=mask[:, : 2 * PART])
    assert len(opened) == used
    result = read(student, more, cache, attention_mask=mask)
    assert ON_GPU or len(opened) == used + 1
    assert_same(result, read_by_calls(student, more, other, mask))


def test_graphs_are_captured_again_once_weights_have_changed(student):
    capture_graphs(student)
    ids = tokens(1, PARTS * PART, 7).to(DEVICE)
    before, _ = read(student, ids)
    with torch.no_grad():
        student.lm_head.weight.mul_(0.5)
    assert reader_of(student).text_reader.graphs
    assert not copy.deepcopy(reader_of(student).text_reader).graphs, "a copy has weights of its own"
    result = read(student, ids)
    assert not reader_of(student).text_reader.graphs and not torch.equal(result[0], before)
    assert_same(result, read_at_once(student, ids))
    assert capture_graphs(student) == 1
    assert_same(read(student, ids), read_by_calls(student, ids))


def test_a_user_who_watches_a_module_sees_all_calls(student):
    student(tokens(1, 3).to(DEVICE), output_hidden_states=True)  # for which transformers leaves hooks
    assert capture_graphs(student)
    seen, ids = [], tokens(1, PARTS * PART, 7).to(DEVICE)
    handle = student.lm_head.register_forward_hook(lambda *given: seen.append(given))
    read(student, ids)
    handle.remove()
    read(student, ids)
    assert len(seen) == 1


@pytest.mark.parametrize("count", [None, lambda read: 9 * (read > 40)], ids=["no", "far"])
def test_a_model_that_no_graph_can_repeat_is_read_by_calls(student, monkeypatch, count):
    """A graph would repeat the number at which it was captured; some models look at it only far on."""
    fault = "how many tokens" if count else "division by zero"
    before, said = student.read_by_layers, []

    def forward(**given):
        out = before(**given)
        if count:
            out.logits[..., count(given[CACHE].get_seq_length())] += 0.1 * out.logits.abs().max()
        return out

    if not count:
        reader_of(student).text_reader = TextReader(lambda *_: 1 / 0)
    monkeypatch.setattr(student, "read_by_layers", forward)
    monkeypatch.setattr(text_graphs.logger, "warning", said.append)
    for seed in range(3):
        read(student, tokens(1, PARTS * PART, seed).to(DEVICE))
    assert [fault in words for words in said] == [True] and reader_of(student).repeats_texts is False
    ids = tokens(1, PARTS * PART, 7).to(DEVICE)
    monkeypatch.setattr(text_parts, "FEWEST", 2 * PARTS * PART)
    (logits, cache), (expected, other) = read(student, ids), read(student, ids, use_cache=True)
    assert_same((logits, cache), (expected, other))
