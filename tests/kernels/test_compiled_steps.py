"""A token is one step of a graph, by kernels in C or in Triton: the graph has no break, and writes over the state."""

import pytest
import torch

from linearizer.kernels import door
from tests.support.kernels import CLOSE, DEVICE, EXACT, needs_compiler
from tests.support.layers import SCALE, assert_same_states, layer, read, scores, text

HELD = [[8, 0, 6, 4], [9, 0], [5, 0, 7, 4, 8], [9, 0, 0, 0, 4], [4, 5]]
ENDS = (17, 18, 19, 20, 21)  # of calls: blocks leave before two of the tokens
KERNELS = [pytest.param("c", marks=[needs_compiler, pytest.mark.skipif(DEVICE != "cpu", reason="for a CPU")]),
           "triton"]  # fmt: skip


@pytest.fixture
def graphs():
    """A compiler that lists what it compiles, and leaves it as it is."""
    torch.compiler.reset()
    made = []
    yield made
    torch.compiler.reset()


@pytest.mark.filterwarnings("ignore")  # of a compiler, about itself
@pytest.mark.parametrize("altered", [(), scores(len(HELD), 3.0)], ids=["softmax", "with a cap and learned sinks"])
@pytest.mark.parametrize("kernel", KERNELS)
@torch.no_grad()
def test_a_token_is_one_graph_for_all_texts(kernel, altered, graphs, monkeypatch):
    held = HELD[:2] if altered else HELD  # features follow neither caps nor learned sinks
    altered = tuple(x[: 2 * len(held)].to(DEVICE, EXACT) if torch.is_tensor(x) else x for x in altered)
    student, given = layer(held, dtype=EXACT).to(DEVICE), [x.to(DEVICE) for x in text(len(held), ENDS[-1], dtype=EXACT)]
    student.reader = kernel
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: kernel == "triton")
    expected, states = read(student, given, ENDS, altered=altered)
    functional = torch._dynamo.lookup_backend("aot_eager")  # which passes copies of what is written over

    def compiled(graph, inputs):
        graphs.append(graph)
        return functional(graph, inputs)

    step = torch.compile(student, backend=compiled, fullgraph=True)
    for _ in range(2):
        _, memory = read(student, given, ENDS[:2], altered=altered)
        for begin, end in zip(ENDS[1:], ENDS[2:], strict=False):
            out = step(*(x[:, :, begin:end] for x in given), SCALE, None, memory, *altered)
            torch.testing.assert_close(out, expected[:, :, begin:end], rtol=CLOSE, atol=CLOSE)
        assert_same_states(memory, states, rtol=CLOSE, atol=CLOSE)
    assert len(graphs) == 1
