"""Kernels in C are made once, by the machine's compiler."""

import torch

from linearizer.student import kernel_in_c
from linearizer.student.kernel_in_c import load_kernel
from linearizer.student.kernel_layer_in_c import SOURCE
from tests.support.kernels import needs_compiler


@needs_compiler
def test_a_kernel_is_compiled_once(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel("read_heads", SOURCE, torch.float32) is not None
    load_kernel.cache_clear()
    monkeypatch.setattr(kernel_in_c, "COMPILERS", ())
    assert load_kernel("read_heads", SOURCE, torch.float32) is not None
