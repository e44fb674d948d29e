"""Tokens of the running batch by graphs are those without: a graph works on states that stay where they are.

Without a GPU the step is called again where a graph would be repeated.
"""

import pytest
import torch

from linearizer.kernels import door
from linearizer.kernels.triton.state_pool import pools_of
from linearizer.plan.head_bytes import Head
from linearizer.serve import token_graphs
from linearizer.serve.cache_rows import take_row, tensors_of
from linearizer.serve.engine import Engine
from linearizer.serve.token_graphs import TokenGraphs
from linearizer.student.cache import CACHE
from tests.support.kernels import DEVICE, ON_GPU
from tests.support.models import student_of, teacher_of, tokens
from tests.support.rows import alone, row_of, work

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # of an interpreter, in empty rows
HEADS = [Head(window=5, bits=8), Head(window=4, slots=6, bits=8)]
ROOM = 2**30


def call_again(step):
    out = step()
    return lambda: out.logits.copy_(step().logits), out


@pytest.fixture
def student(monkeypatch):
    """A student whose layer is read by Triton's kernels."""
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    student = student_of("llama", HEADS, num_hidden_layers=1).to(DEVICE)
    (layer,) = student.students()
    layer.reader = "triton"
    return student


@pytest.fixture
def said(monkeypatch):
    """What the graphs' logger warns of."""
    said = []
    monkeypatch.setattr(token_graphs.logger, "warning", lambda *words: said.append(str(words)))
    return said


def engine_of(model, capture=None if ON_GPU else call_again):
    engine = Engine(model, ROOM)
    engine.graphs, engine.prompts.several = TokenGraphs(model, capture), True  # as on a GPU
    return engine


def test_rows_that_come_and_go_are_written_as_alone(student):
    sizes = [(7, 8), (3, 8), (12, 4)]
    rows = [row_of(tokens(1, size, seed)[0].tolist(), count) for seed, (size, count) in enumerate(sizes)]
    work(engine := engine_of(student), {0: rows[:1], 1: rows[1:]})
    again = row_of(rows[2].tokens, 3)  # what is kept of a row is its state when it ended
    work(engine, {0: [again]})
    assert again.reused == len(rows[2].tokens) - 1
    assert sorted(engine.graphs.graphs) == [1, 2, 4]
    student.students()[0].reader = "pytorch"
    for row, count in [*zip(rows, (count for _, count in sizes), strict=True), (again, 3)]:
        assert row.tokens == alone(student, row.prompt, count)


def test_rows_of_a_batch_and_copies_of_a_cache_stay_in_pools(student):
    cache = student.empty_cache()
    with torch.inference_mode():
        student(tokens(3, 9).to(DEVICE), **{CACHE: cache})
    copies = {take_row(cache, 1, 9): [1], cache.fork(2): [0, 0, 1, 1, 2, 2]}
    for copy, rows in copies.items():
        (pool,) = pools_of(copy)
        assert pool.pool.data_ptr() != pools_of(cache)[0].pool.data_ptr() and copy.get_seq_length() == 9
        for x, wanted in zip(tensors_of(copy), tensors_of(cache), strict=True):
            assert torch.equal(x, wanted[rows])


def test_rows_go_on_as_alone_where_a_later_graph_cannot_be_captured(student, said):
    def fail_later(step):
        return call_again(step) if not engine.graphs.graphs else 1 / 0

    rows = [row_of(tokens(1, 9, seed)[0].tolist(), count) for seed, count in enumerate((3, 7))]
    engine = engine_of(student, fail_later)
    work(engine, {0: rows})
    assert [*engine.graphs.graphs] == [2] and ["division by zero" in words for words in said] == [True]
    student.students()[0].reader = "pytorch"
    assert [row.tokens for row in rows] == [alone(student, row.prompt, row.new_tokens) for row in rows]


@pytest.mark.parametrize("heads", [[Head(window=8, features=16)], None], ids=["features", "teacher"])
def test_what_no_graph_serves_is_written_without(heads, said):
    model = teacher_of("llama") if heads is None else student_of("llama", heads)
    row = row_of(tokens(1, 12)[0].tolist(), 5)
    work(engine_of(model, lambda step: 1 / 0), {0: [row]})
    assert row.tokens == alone(model, row.prompt, 5)
    assert ["hold features" in words for words in said] == [True] * (heads is not None)
