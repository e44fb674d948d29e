"""Processes that see other GPUs, or number them otherwise, still agree on which one they mean."""

import os
import platform
import subprocess
import sys

import pytest
import torch

from linearizer.errors import RequestError
from linearizer.kernels import trial
from linearizer.kernels.c.compiler import find_compiler
from linearizer.kernels.triton.dispatch import launch_token
from linearizer.teacher.devices import choose_device, describe_kernels, device_name


@pytest.mark.parametrize(
    "visible, device, name",
    [
        (None, "cpu", "cpu"),
        (None, "cpu:0", "cpu"),
        (None, "cuda", "cuda:0"),
        (None, "cuda:1", "cuda:1"),
        ("", "cuda", "cuda:0"),
        ("3", "cuda", "cuda:3"),
        ("2, 3", "cuda:1", "cuda:3"),
        ("2", "cuda:5", "cuda:5"),
        ("MIG-GPU-1/2/0", "cuda", "cuda:MIG-GPU-1-2-0"),
    ],
)
def test_a_device_has_one_name(visible, device, name, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert device_name(device) == name


def test_a_device_that_is_not_here_is_refused():
    for options in ("magic", "cuda:99", "../cpu", "cpu:0", "cpu:1"):
        with pytest.raises(RequestError, match="is not available here"):
            choose_device(options)
    assert choose_device("cpu") == "cpu" and choose_device("auto") in ("cpu", "cuda")


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="a weaker CPU is imitated on x86 alone")
def test_a_cpu_that_computes_small_types_slowly_computes_in_float32():
    code = (
        "import torch; from linearizer.teacher.devices import choose_dtype\n"
        "print(*(choose_dtype('auto', kind, 'cpu') for kind in (torch.bfloat16, torch.float16, torch.float32)))"
    )
    weaker = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
    options = subprocess.run([sys.executable, "-c", code], env={**os.environ, **weaker}, capture_output=True, text=True)
    assert options.stdout.split() == ["float32", "float32", "auto"], options.stderr


def test_kernels_are_named_by_what_reads_on_a_device(monkeypatch):
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    monkeypatch.setattr(trial, "_verdicts", {})
    assert describe_kernels(cpu) == ("C" if find_compiler() else "none: PyTorch")
    trial._verdicts[("texts with windows and slots", gpu, torch.float32, (1, 8, 8, 4, 8))] = True
    assert describe_kernels(gpu) == ("Triton, 1 compiled" if launch_token else "none: PyTorch")
    trial._verdicts[("heads in C", cpu)] = False  # it was wrong there
    assert describe_kernels(cpu) == "none: PyTorch"
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    assert describe_kernels(gpu) == "none: PyTorch"
