"""Kernels in C: made once by the machine's compiler; without one, or where they are kept off, PyTorch does the work."""

import copy

import pytest
import torch

from linearizer.runtime import kernel_in_c
from linearizer.runtime.few_bits import BY_AXIS, codes_by_largest, limits_of_heads, pack_vectors, unpack_vectors
from linearizer.runtime.kernel_in_c import BYTES, codes_in_c, find_compiler, load_kernel
from linearizer.runtime.layer_student import LayerStudent
from linearizer.runtime.state import tensors

HELD = [[8, 0, 6, 4, 5], [9, 0, 0, 0, 8], [5, 0, 7, 4, 8], [8, 0, 6, 4], [9, 0, 0, 0, 4], [6, 0, 3, 2, 6]]
LENGTH, DIM, SCALE = 40, 8, 0.5

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="no C compiler here")


@pytest.fixture
def uncompiled():
    """Forget which kernels there are, before and after."""
    load_kernel.cache_clear()
    yield
    load_kernel.cache_clear()


def text(value_dim=DIM, held=HELD):
    generator, heads = torch.Generator().manual_seed(0), len(held)
    shapes = (2 * heads, LENGTH, DIM), (heads, LENGTH, DIM), (heads, LENGTH, value_dim)
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64) for shape in shapes]


@torch.no_grad()
def read(student, given, memory, begin=0, end=LENGTH):
    """Read token by token."""
    parts = [student(*(x[:, :, t : t + 1] for x in given), SCALE, None, memory) for t in range(begin, end)]
    return torch.cat(parts, -2)


def layer(value_dim=DIM, held=HELD):
    student = LayerStudent(held, 1, DIM, "prf", value_dim).double().eval()
    student.reset(torch.Generator().manual_seed(0))
    return student


def in_c(memory):
    """Count the buffers in which a kernel attends."""
    buffers = [state.token_buffer for state in memory if state.token_buffer is not None]
    return sum(buffer.in_c is not None for buffer in buffers)


@needs_compiler
@pytest.mark.parametrize("value_dim", [DIM, 16])
def test_a_token_attends_as_in_pytorch(value_dim, monkeypatch):
    student, given, memory, other = layer(value_dim), text(value_dim), [], []
    found = read(student, given, memory)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected = read(student, given, other)
    assert in_c(memory) == 3 and in_c(other) == 0
    torch.testing.assert_close(found, expected)
    for mine, theirs in zip(memory, other, strict=True):
        for name, x in tensors(mine).items():
            torch.testing.assert_close(x, tensors(theirs)[name], msg=name)


@needs_compiler
def test_a_copied_state_leaves_the_first_alone():
    student, given, memory = layer(), text(), []
    read(student, given, memory, end=20)
    copied = copy.deepcopy(memory)
    torch.testing.assert_close(read(student, given, copied, 20), read(student, given, memory, 20))


@needs_compiler
def test_a_token_of_another_type_attends_in_pytorch(monkeypatch):
    held = [kind for kind in HELD if len(kind) > 4]
    student, given = layer(held=held).float(), [x.float() for x in text(held=held)]
    memory, other = [], []
    read(student, given, memory, end=20)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    read(student, given, other, end=20)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, expected = (read(student, given, states, 20, 24) for states in (memory, other))
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_vectors_are_rounded_as_in_pytorch(dtype):
    x = torch.randn(2, 3, 50, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, 0, :2] = torch.tensor([[0.0], [1e-40]])
    for bits in ((4, 5, 6), (5,)):
        limits = limits_of_heads(bits, 24, dtype, x.device)
        for mine, other in zip(codes_in_c(x, limits), codes_by_largest(x, limits), strict=True):
            assert torch.equal(mine, other)


@needs_compiler
@pytest.mark.parametrize("bits", BY_AXIS)
def test_bytes_are_those_of_pytorch(bits, monkeypatch):
    x = torch.randn(2, 3, 5, 24, generator=torch.Generator().manual_seed(0))
    codes = pack_vectors(x, bits)
    numbers = unpack_vectors(codes, x.dtype, bits)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    assert torch.equal(codes, pack_vectors(x, bits)) and torch.equal(numbers, unpack_vectors(codes, x.dtype, bits))


def test_without_a_compiler_pytorch_does_the_work(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setattr(kernel_in_c, "COMPILERS", ("no-such-compiler",))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kernel_in_c.tempfile, "gettempdir", lambda: str(tmp_path))
    assert load_kernel("round_vectors", BYTES, torch.float32) is None
    student, memory = layer(), []
    read(student, text(), memory, end=12)
    assert in_c(memory) == 0


@needs_compiler
def test_a_kernel_is_compiled_once(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel("round_vectors", BYTES, torch.float32) is not None
    load_kernel.cache_clear()
    monkeypatch.setattr(kernel_in_c, "COMPILERS", ())
    assert load_kernel("round_vectors", BYTES, torch.float32) is not None
