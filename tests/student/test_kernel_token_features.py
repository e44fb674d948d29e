"""A token by kernels is a token in PyTorch, whatever makes its features."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.student import kernel_token_features
from linearizer.student.features_torch import attend_token_with_features
from linearizer.student.kernel_dispatch import attend_token_with_features_by_kernel
from linearizer.student.layer_student import ScaledMap
from linearizer.student.state import FeatureState, tensors
from tests.support.kernels import CLOSE, ON_GPU, make, mutate, relative, vary

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # lanes that are masked afterwards

STEPS = [  # kind, window, sinks, features, group; the features of mlp are given to the kernel, others made in it
    ("prf", 5, 2, 20, 2),
    ("prf", 0, 0, 37, 1),
    ("prf", 7, 0, 0, 8),
    ("mlp", 5, 2, 20, 2),
    ("mlp", 0, 3, 4, 4),
    ("clusters", 5, 2, 37, 2),
    ("codebook", 0, 3, 36, 1),
    ("hedgehog", 3, 0, 74, 2),
]


@pytest.mark.parametrize("kind, window, sinks, features, group", STEPS)
@torch.no_grad()
def test_steps_are_the_steps_of_pytorch(kind, window, sinks, features, group, dim=6):
    tokens = window + sinks + 3  # of which three leave the window
    both = 2 if features == 20 else 1  # texts and heads: the interpreter takes its time for each
    sizes = dict(features=features, group=group, dim=dim, batch=both, heads=both)
    q, k, v, feature_map = make(tokens, kind=kind, **sizes)
    if features:
        vary(feature_map)
        feature_map = ScaledMap(feature_map, 0.3)
        assert (feature_map.folded() is None) == (kind == "mlp")
    states = [FeatureState.empty(k, v, window, sinks, features) for _ in range(2)]
    held = tensors(states[1])
    for t in range(tokens):
        token = q[..., t : t + 1, :], k[:, :, t : t + 1], v[:, :, t : t + 1]
        expected = attend_token_with_features(*token, feature_map, window, states[0])
        assert relative(attend_token_with_features_by_kernel(*token, feature_map, window, states[1]), expected) < CLOSE
    for name, tensor in tensors(states[0]).items():
        assert tensors(states[1])[name] is held[name], "a captured graph would miss an exchanged tensor"
        assert relative(held[name].double(), tensor.double()) < CLOSE


@pytest.mark.skipif(ON_GPU, reason="there it takes wide heads to see this")
def test_dimensions_may_be_multiplied_some_at_a_time(monkeypatch):
    monkeypatch.setattr(kernel_token_features, "dims_at_once", lambda x: 16)
    test_steps_are_the_steps_of_pytorch("clusters", 3, 2, 5, 2, dim=20)


@pytest.mark.skipif(ON_GPU, reason="the interpreter shows it as well")
@pytest.mark.parametrize(
    "kind, line, mutation",
    [
        ("prf", "w -= k_square", "w -= 0 * k_square"),
        ("clusters", "tl.where(om < HALF, first, beyond)", "0.0"),
        ("codebook", "om == nearest", "om == nearest + 1"),
        ("hedgehog", "tl.where(om < HALF, first, beyond)", "first"),
        ("hedgehog", "q_first[:, None], q_beyond[:, None]", "q_beyond[:, None], q_first[:, None]"),
    ],
)
def test_a_mutated_step_fails(kind, line, mutation, tmp_path, monkeypatch):
    mutate(kernel_token_features, line, mutation, tmp_path, monkeypatch)
    with pytest.raises(AssertionError):
        test_steps_are_the_steps_of_pytorch(*next(case for case in STEPS if case[0] == kind))


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@torch.no_grad()
def test_on_a_gpu_a_captured_step_goes_on_with_the_state():
    q, k, v, feature_map = make(8, dtype=torch.bfloat16, dim=64, value_dim=64, features=32)
    feature_map.float()
    states = [FeatureState.empty(k, v, 4, 1, 32) for _ in range(2)]
    token = [q[..., :1, :].clone(), k[:, :, :1].clone(), v[:, :, :1].clone()]
    assert (
        relative(
            attend_token_with_features_by_kernel(*token, feature_map, 4, states[0]),
            attend_token_with_features(*token, feature_map, 4, states[1]),
        )
        < 1e-2
    )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend_token_with_features_by_kernel(*token, feature_map, 4, states[0])
    for t in range(8):
        part = q[..., t : t + 1, :], k[:, :, t : t + 1], v[:, :, t : t + 1]
        for mine, new in zip(token, part, strict=True):
            mine.copy_(new)
        graph.replay()
        assert relative(out.float(), attend_token_with_features(*part, feature_map, 4, states[1]).float()) < 1e-2
