"""A token of a window by a kernel is a token in PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.student import kernel_token_windows
from linearizer.student.features_torch import attend_token_with_features
from linearizer.student.kernel_dispatch import attend_token_by_kernel
from linearizer.student.kernel_token_table import TokenGroup
from linearizer.student.state import FeatureState, tensors
from tests.support.kernels import CLOSE, ON_GPU, make, relative

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # lanes that are masked afterwards


@pytest.mark.parametrize("window, sinks, group", [(5, 2, 2), (7, 0, 8), (0, 3, 1)])
@torch.no_grad()
def test_steps_are_the_steps_of_pytorch(window, sinks, group, dim=6):
    tokens = window + sinks + 3  # of which three leave the window
    q, k, v, _ = make(tokens, features=0, group=group, dim=dim)
    states = [FeatureState.empty(k, v, window, sinks, 0) for _ in range(2)]
    own, held = TokenGroup([0, 1], states[1], window), tensors(states[1])
    for t in range(tokens):
        token = q[..., t : t + 1, :], k[:, :, t : t + 1], v[:, :, t : t + 1]
        expected = attend_token_with_features(*token, None, window, states[0])
        assert relative(attend_token_by_kernel(*token, own), expected) < CLOSE
    for name, tensor in tensors(states[0]).items():
        assert tensors(states[1])[name] is held[name], "a captured graph would miss an exchanged tensor"
        assert relative(held[name].double(), tensor.double()) < CLOSE


@pytest.mark.skipif(ON_GPU, reason="there it takes wide heads to see this")
def test_dimensions_may_be_multiplied_some_at_a_time(monkeypatch):
    monkeypatch.setattr(kernel_token_windows, "dims_at_once", lambda x: 16)
    test_steps_are_the_steps_of_pytorch(3, 2, 2, dim=20)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@torch.no_grad()
def test_on_a_gpu_a_captured_step_goes_on_with_the_state():
    q, k, v, _ = make(8, dtype=torch.bfloat16, dim=64, value_dim=64, features=0)
    states = [FeatureState.empty(k, v, 4, 1, 0) for _ in range(2)]
    own, token = TokenGroup([0, 1], states[0], 4), [q[..., :1, :].clone(), k[:, :, :1].clone(), v[:, :, :1].clone()]
    expected = attend_token_with_features(*token, None, 4, states[1])
    assert relative(attend_token_by_kernel(*token, own), expected) < 1e-2
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_token_by_kernel(*token, own)
    for t in range(8):
        part = q[..., t : t + 1, :], k[:, :, t : t + 1], v[:, :, t : t + 1]
        for mine, new in zip(token, part, strict=True):
            mine.copy_(new)
        graph.replay()
        assert relative(out.float(), attend_token_with_features(*part, None, 4, states[1]).float()) < 1e-2
