"""A token is one step of a graph, by the kernel in C: the graph has no break, and writes over the state."""

import pytest
import torch

from tests.support.kernels import needs_compiler
from tests.support.layers import SCALE, assert_same_states, layer, read, text

HELD = [[8, 0, 6, 4], [9, 0], [5, 0, 7, 4, 8], [9, 0, 0, 0, 4], [4, 5]]
ENDS = (17, 18, 19, 20, 21)  # of calls: blocks leave before two of the tokens


@needs_compiler
@pytest.mark.filterwarnings("ignore")  # of a compiler, about itself
@torch.no_grad()
def test_a_token_is_one_graph_for_all_texts():
    student, given, graphs = layer(HELD), text(len(HELD), ENDS[-1]), []
    expected, states = read(student, given, ENDS)
    functional = torch._dynamo.lookup_backend("aot_eager")  # which passes copies of what is written over

    def compiled(graph, inputs):
        graphs.append(graph)
        return functional(graph, inputs)

    torch.compiler.reset()
    step = torch.compile(student, backend=compiled, fullgraph=True)
    for _ in range(2):
        _, memory = read(student, given, ENDS[:2])
        for begin, end in zip(ENDS[1:], ENDS[2:], strict=False):
            out = step(*(x[:, :, begin:end] for x in given), SCALE, None, memory)
            torch.testing.assert_close(out, expected[:, :, begin:end])
        assert_same_states(memory, states)
    assert len(graphs) == 1
