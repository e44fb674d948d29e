"""Processes that see other GPUs, or number them otherwise, still agree on which one they mean."""

import pytest

from linearizer.errors import RequestError
from linearizer.model.devices import choose_device, device_name


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
    for asked in ("magic", "cuda:99", "../cpu"):
        with pytest.raises(RequestError, match="is not to be had here"):
            choose_device(asked)
    assert choose_device("cpu") == "cpu" and choose_device("auto") in ("cpu", "cuda")
