"""Kernels in C: made once by the machine's compiler, and vectors that they round and pack as PyTorch does."""

import pytest
import torch

from linearizer.runtime import kernel_in_c
from linearizer.runtime.few_bits import BY_AXIS, codes_by_largest, limits_of_heads, pack_vectors, unpack_vectors
from linearizer.runtime.kernel_in_c import BYTES, codes_in_c, load_kernel
from tests.support.kernels import needs_compiler


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


@needs_compiler
def test_a_kernel_is_compiled_once(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel("round_vectors", BYTES, torch.float32) is not None
    load_kernel.cache_clear()
    monkeypatch.setattr(kernel_in_c, "COMPILERS", ())
    assert load_kernel("round_vectors", BYTES, torch.float32) is not None
