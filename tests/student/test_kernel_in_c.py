"""Kernels in C are made once, by the machine's compiler."""

import pytest
import torch

from linearizer.student import kernel_in_c
from linearizer.student.kernel_in_c import COMMON, compiled, load_kernel
from linearizer.student.kernel_layer_in_c import SOURCE
from tests.support.kernels import needs_compiler


@needs_compiler
def test_a_kernel_is_compiled_once(uncompiled, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load_kernel("read_heads", SOURCE, torch.float32) is not None
    load_kernel.cache_clear()
    monkeypatch.setattr(kernel_in_c, "COMPILERS", ())
    assert load_kernel("read_heads", SOURCE, torch.float32) is not None


@needs_compiler
@pytest.mark.parametrize("writable", ["folder", "library"])
def test_a_kernel_that_others_may_have_written_is_not_loaded(tmp_path, writable):
    folder = tmp_path / "linearizer"
    compiled(folder, "key", COMMON, ["-shared", "-DREAL=float", "-DWIDE=0"])
    (folder if writable == "folder" else folder / "key.so").chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        compiled(folder, "key", COMMON, [])
