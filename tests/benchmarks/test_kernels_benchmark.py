"""The kernels' benchmark keeps what it has measured, whatever a rival does, and its ratios are what they are called."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from tests.benchmarks.kernels import collected, crossover, describe
from tests.benchmarks.timing import attempt, compiled, own


class CompilerError(Exception):
    """Triton's errors are of no other kind."""


def fail(*_):
    raise CompilerError("out of resource: shared memory")


def test_a_rival_may_fail_in_any_way():
    assert attempt("rival", lambda: [fail]) == {"failed": "rival: CompilerError: out of resource: shared memory"}
    assert attempt("rival", fail)["failed"] and own([fail])["ours"]["failed"]
    assert own([lambda: None], parts=4)["ours"] >= 0


def test_a_table_that_fails_leaves_the_others():
    def broken():
        yield {"op": "first", "ours": 1.0}
        fail()

    rows = list(collected({"first": broken(), "second": iter([{"op": "second", "ours": 2.0}])}))
    assert [row["op"] for row in rows] == ["first", "first", "second"]
    assert any("shared memory" in line for line in describe(rows[1]))


def prefill(tokens, ours, **sdpa):
    rivals = {f"sdpa {name}": {"seconds": x} if isinstance(x, float) else {"failed": x} for name, x in sdpa.items()}
    return {"op": "prefill", "batch": 1, "features": 64, "tokens": tokens, "ours": ours, "rivals": rivals}


@pytest.mark.parametrize(
    "rows, tokens",
    [
        ([prefill(1, 1.0, flash=2.0), prefill(2, 1.0, flash=2.0)], 1),
        ([prefill(1, 1.0, flash=2.0), prefill(2, 3.0, flash=2.0), prefill(4, 1.0, flash=2.0)], 4),
        ([prefill(1, 1.0, flash=2.0), prefill(2, 1.0, flash="out of memory")], 1),
        ([prefill(1, 1.0, flash=2.0), prefill(2, {"failed": "out of memory"}, flash=2.0)], 1),
        ([prefill(1, 1.0, flash=2.0, cudnn=0.5)], None),
    ],
)
def test_ours_is_faster_from_a_length_on_where_no_longer_text_says_otherwise(rows, tokens):
    assert crossover(rows) == {"batch 1, 64 features": tokens}


def test_what_ran_in_a_graph_is_compared_with_what_ran_in_a_graph():
    graph = {"ours in a graph": {"seconds": 0.5}, "sdpa in a graph": {"seconds": 2.0}, "sdpa": {"seconds": 3.0}}
    lines = list(describe({"op": "decode", "ours": 1.0, "floor": 0.25, **graph}))
    for said in (
        "ours 1000.000 ms, 25% of",
        "500.000 ms, 0.50 of ours, 50% of",
        "4.00 of ours in a graph",
        "3.00 of o",
    ):
        assert any(said in line for line in lines), said


def test_every_size_is_compiled_for_itself():
    counter = CompileCounter()
    for size in range(2, 14):
        compiled(torch.exp, backend=counter)(torch.ones(size))
    assert counter.frame_count == 12
