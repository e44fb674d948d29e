"""A token by kernels gives what PyTorch gives, and leaves the same state, in every number of bits."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.student import kernel_token, token_buffer
from tests.support.kernels import CLOSE, DEVICE, EXACT, ON_GPU
from tests.support.layers import assert_same_states, layer, read, text

LENGTH = 24
ROWS = {  # what KV heads hold, and the sizes of keys and values
    "16 bits": ([[8, 0, 6, 4], [9, 0], [5, 0, 7, 4]], 4, 4),
    "16 bits, other values": ([[8, 0, 6, 4], [9, 0]], 4, 3),
    "8 bits": ([[8, 0, 6, 4, 8], [9, 0, 0, 0, 8]], 4, 4),
    "8 bits, turned": ([[8, 0, 6, 4, 8], [9, 0, 0, 0, 8]], 8, 16),
    "6 bits": ([[8, 0, 6, 4, 6], [9, 0, 0, 0, 6]], 8, 8),
    "5 bits": ([[8, 0, 6, 4, 5], [9, 0, 0, 0, 5]], 8, 8),
    "4 bits": ([[8, 0, 6, 4, 4], [9, 0, 0, 0, 4]], 24, 16),
    "all kinds in a layer": (
        [[9, 0, 0, 0, 4], [8, 0, 6, 4, 8], "softmax", [5, 0, 7, 4, 4], [6, 0, 3, 2], [4, 5]],
        8,
        8,
    ),
    "several parts": ([[70, 0, 6, 4, 8], [9, 0, 80, 2, 8]], 8, 8),
}


def read_rows(name, by_kernel, monkeypatch):
    """Read a text, then tokens; return what they saw, and the states."""
    held, dim, value_dim = ROWS[name]
    student = layer(held, dim, value_dim, EXACT).to(DEVICE)
    if student.turns is not None:
        for turned in student.turns.parameters():
            turned.data += torch.rand(turned.shape, generator=torch.Generator().manual_seed(1)).to(turned)
    student.in_c = False
    monkeypatch.setattr(token_buffer, "kernel_serves_token", lambda *_: by_kernel)
    given = [x.to(DEVICE) for x in text(len(held), LENGTH, dim, value_dim, EXACT)]
    return read(student, given, [10, *range(11, LENGTH + 1)])


@pytest.mark.parametrize("name", ROWS)
def test_tokens_by_kernels_are_those_of_pytorch(name, monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(kernel_token, "NUMBERS_AT_ONCE", 256)
    expected, states = read_rows(name, False, monkeypatch)
    out, mine = read_rows(name, True, monkeypatch)
    torch.testing.assert_close(out, expected, rtol=CLOSE, atol=CLOSE)
    assert_same_states(mine, states, rtol=CLOSE, atol=CLOSE)
