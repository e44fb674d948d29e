"""A cache's tokens by a graph are those without: a graph reads and writes the states where they lie.

Without a GPU the step is called again where a graph would be repeated.
"""

import copy

import pytest
import torch

from linearizer.kernels import door
from linearizer.kernels.graphs import text_parts, token_graph
from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.plan.head_bytes import Head
from linearizer.student.attention_of_student import tensors
from linearizer.student.cache import CACHE
from tests.support.kernels import DEVICE, ON_GPU
from tests.support.models import student_of, tokens

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of an interpreter, in empty rows
HEADS = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]
captured = []  # the graphs of a test: how often each was repeated


def call_again(step):
    out, place = step(), len(captured)
    captured.append(0)

    def repeat():
        captured[place] += 1
        again = step()
        out.logits.copy_(again.logits)
        for layer in again[CACHE].layers:  # which a graph does not count
            layer.tokens_read -= 1

    return repeat, out


@pytest.fixture
def student(monkeypatch):
    """A student whose layer is read by Triton's kernels, with graphs."""
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    monkeypatch.setattr(token_graph, "BEFORE", 3)
    captured.clear()
    if not ON_GPU:
        monkeypatch.setattr(text_parts, "DEVICES", {"cpu"})
        monkeypatch.setattr(token_graph, "capture_on_gpu", call_again)
    student = student_of("llama", HEADS, num_hidden_layers=1).to(DEVICE)
    (layer,) = student.students()
    layer.reader = "triton"
    return student


def without_graphs(student, read):
    reader_of(student).repeats_tokens = False
    result = read()
    reader_of(student).repeats_tokens = None
    return result


def write(student, ids, count, **given):
    """Write tokens by `generate`; return them, and the cache."""
    cache = student.empty_cache()
    written = student.generate(
        ids, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0, **{CACHE: cache}, **given
    )
    return written, cache


def assert_same_states(cache, other):
    for layer, wanted in zip(cache.layers, other.layers, strict=True):
        assert layer.tokens_read == wanted.tokens_read
        for state, expected in zip(layer.memory, wanted.memory, strict=True):
            assert all(torch.equal(x, tensors(expected)[name]) for name, x in tensors(state).items())


def test_generate_writes_by_a_graph_what_it_writes_without(student):
    ids, mask = tokens(2, 9).to(DEVICE), torch.ones(2, 9, dtype=torch.long, device=DEVICE)
    mask[1, :3] = 0
    written, cache = write(student, ids, 9, attention_mask=mask)
    expected, other = without_graphs(student, lambda: write(student, ids, 9, attention_mask=mask))
    assert torch.equal(written, expected)
    assert_same_states(cache, other)
    assert ON_GPU or captured == [1 + 9 - 1 - token_graph.BEFORE]  # one of them in the comparison


@torch.inference_mode()
def test_a_graph_goes_on_after_a_text_and_is_left_by_copies_of_its_cache(student):
    def read(count):
        cache, seen = student.empty_cache(), []
        student(tokens(1, 9).to(DEVICE), **{CACHE: cache})
        for token in tokens(1, 6, 1).to(DEVICE).split(1, 1):
            seen.append(student(token, **{CACHE: cache}).logits)
        fork, copied = cache.fork(), copy.deepcopy(cache)
        for used in (fork, cache, copied, cache):
            seen.append(student(tokens(1, 1, 2).to(DEVICE), **{CACHE: used}).logits)
        student(tokens(1, 7, 3).to(DEVICE), **{CACHE: cache})  # the next turn of a chat
        seen.append(student(tokens(1, 1, 2).to(DEVICE), **{CACHE: cache}).logits)
        cache.batch_repeat_interleave(2)
        seen.append(student(tokens(2, 1, 4).to(DEVICE), **{CACHE: cache}).logits)
        assert (ON_GPU or len(captured) == count) and (fork.token_graph, copied.token_graph) == (None, None)
        return seen, cache

    (seen, cache), (expected, other) = read(1), without_graphs(student, lambda: read(1))
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))
    assert_same_states(cache, other)
    cache.reset()
    student(tokens(1, 9).to(DEVICE), **{CACHE: cache})
    again = student(tokens(1, 1, 1).to(DEVICE), **{CACHE: cache}).logits
    assert cache.token_graph is None and again.shape == seen[0].shape


def test_a_search_with_beams_is_read_without_a_graph(student):
    written, cache = write(student, tokens(1, 9).to(DEVICE), 6, num_beams=2)
    expected, _ = without_graphs(student, lambda: write(student, tokens(1, 9).to(DEVICE), 6, num_beams=2))
    assert torch.equal(written, expected) and cache.token_graph is None and not captured


@pytest.mark.parametrize("fault", ["division by zero", "how many tokens"])
def test_a_model_that_no_graph_can_repeat_is_read_without(student, monkeypatch, fault):
    """A graph would repeat the number at which it was captured."""
    before, said = student.read_by_layers, []

    def forward(**given):
        out = before(**given)
        out.logits[..., given[CACHE].get_seq_length() % 50] += 0.1 * out.logits.abs().max()
        return out

    if fault == "division by zero":
        monkeypatch.setattr(token_graph, "capture_on_gpu", lambda step: 1 / 0)
    monkeypatch.setattr(student, "read_by_layers", forward)
    monkeypatch.setattr(token_graph.logger, "warning", said.append)
    written, cache = write(student, tokens(1, 9).to(DEVICE), 8)
    expected, other = without_graphs(student, lambda: write(student, tokens(1, 9).to(DEVICE), 8))
    assert torch.equal(written, expected) and [fault in words for words in said] == [True]
    assert_same_states(cache, other)


class Unhashable:
    """A hook that can be in no set, as a dataclass."""

    __hash__ = None

    def __call__(self, *_):
        return None


@pytest.mark.parametrize("change", ["moved", "written over", "watched"])
@torch.inference_mode()
def test_a_graph_is_left_once_the_model_is_not_what_it_was(student, change):
    cache, weight = student.empty_cache(), student.get_output_embeddings().weight
    student(tokens(1, 9).to(DEVICE), **{CACHE: cache})
    for token in tokens(1, 6, 1).to(DEVICE).split(1, 1):
        student(token, **{CACHE: cache})
    graph, repeated = cache.token_graph, [*captured]
    assert graph
    if change == "moved":
        weight.data = 2 * weight.data
    elif change == "written over":
        with torch.inference_mode(False), torch.no_grad():
            weight.mul_(2)
    else:
        student.model.layers[0].register_forward_hook(Unhashable())
    student(tokens(1, 1, 2).to(DEVICE), **{CACHE: cache})
    assert captured[: len(repeated)] == repeated and cache.token_graph is not graph
