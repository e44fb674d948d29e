"""Attention by kernels, its gradients and the state that it leaves are those of PyTorch."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.kernels.triton import common, text_features, text_gradients
from linearizer.kernels.triton.dispatch import attend_chunks_by_kernel
from linearizer.student import columns
from linearizer.student.columns import FeatureState
from linearizer.student.features_torch import attend_text_with_features
from tests.support.compiling import attention_and_gradients, attention_inputs
from tests.support.kernels import CLOSE, DEVICE, ON_GPU, make, relative
from tests.support.log_features import extreme, far_of, reference

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # lanes that are masked afterwards


@pytest.fixture(autouse=True)
def short_segments(monkeypatch):
    monkeypatch.setattr(text_features, "SEGMENT", 64 if ON_GPU else 32)


def fused(q, k, v, feature_map, window, sinks, real=None, cuts=()):
    """The whole text by kernels, in pieces that end at the cuts: outputs and the last state."""
    state = FeatureState.empty(k, v, window, sinks, feature_map.features if feature_map else 0)
    out, edges = [], [0, *cuts, q.shape[-2]]
    for a, b in zip(edges, edges[1:], strict=False):
        piece = None if real is None else real[:, a:b]
        part = q[..., a:b, :], k[:, :, a:b], v[:, :, a:b]
        out.append(
            attend_text_with_features(*part, far_of(feature_map), window, piece, state, attend=attend_chunks_by_kernel)
        )
    return torch.cat(out, -2), state


def gradients(out, inputs, seed=0):
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.autograd.grad((out * weight.to(out)).sum(), inputs, allow_unused=True)


ALONE = dict(heads=1, batch=1)  # one text and head: the interpreter takes its time for every program
SHAPES = {
    "features alone": (70, dict(window=0, sinks=0), dict(features=37, **ALONE), {}),
    "window, sinks and features": (40, dict(window=5, sinks=2), {}, {}),
    "no features": (45, dict(window=9, sinks=3), dict(features=0, heads=1), {}),
    "a window over several blocks": (50, dict(window=40, sinks=1), dict(features=16, **ALONE), {}),
    "a window beyond the text": (20, dict(window=64, sinks=0), ALONE, {}),
    "one query head": (37, dict(window=3, sinks=0), dict(group=1, dim=20, value_dim=17, batch=1), {}),
    "four query heads": (33, dict(window=0, sinks=1), dict(group=4, features=8, **ALONE), {}),
    "eight query heads": (33, dict(window=2, sinks=0), dict(group=8, features=8, **ALONE), {}),
    "in pieces": (75, dict(window=5, sinks=2), ALONE, dict(cuts=[1, 40, 41])),
    "in pieces, features alone": (75, dict(window=0, sinks=0), ALONE, dict(cuts=[34])),
    "padded": (40, dict(window=4, sinks=2), dict(heads=1), dict(padded=True, cuts=[17])),
    "small, in pieces": (37, dict(window=5, sinks=2), ALONE, dict(cuts=[1, 35])),  # 2 segments in one
}


@pytest.mark.parametrize("name", SHAPES)
def test_attention_and_every_gradient_are_the_reference_s(name):
    tokens, near, sizes, more = SHAPES[name]
    q, k, v, feature_map = make(tokens, **sizes)
    inputs = [x.requires_grad_() for x in (q, k, v)] + list(feature_map.parameters() if feature_map else ())
    real = None
    if more.get("padded"):
        real = (torch.rand(2, tokens, generator=torch.Generator().manual_seed(0)) < 0.7).to(DEVICE)
    out, _ = fused(q, k, v, feature_map, *near.values(), real, more.get("cuts", ()))
    expected = reference(q, k, v, feature_map, *near.values(), real)
    if real is not None:
        out, expected = (x * real[:, None, None, :, None] for x in (out, expected))
    assert relative(out, expected) < CLOSE
    for mine, theirs in zip(gradients(out, inputs), gradients(expected, inputs), strict=True):
        assert relative(mine, theirs) < CLOSE


def test_a_state_passes_gradients_back_to_the_text_before():
    q, k, v, feature_map = make(60, **ALONE)
    k.requires_grad_(), v.requires_grad_()
    states = []
    for run in (fused, lambda *args: (None, chunked_state(*args))):
        states.append(run(q, k, v, feature_map, 3, 1)[1])
    ours, theirs = (gradients(torch.cat([state.level[..., None], state.mean], -1), (k, v), seed=1) for state in states)
    assert all(relative(a, b) < CLOSE for a, b in zip(ours, theirs, strict=True))


def chunked_state(q, k, v, feature_map, window, sinks):
    state = FeatureState.empty(k, v, window, sinks, feature_map.features)
    attend_text_with_features(q, k, v, far_of(feature_map), window, None, state, 16)
    return state


@pytest.mark.parametrize("window, sinks", [(0, 0), (3, 2)])
@pytest.mark.parametrize(
    "case", ["a first key of norm 60", "all keys of norm 60", "a later key of norm 60", "logits of ±80"]
)
def test_extreme_texts_are_right(case, window, sinks):
    q, k, v, feature_map = extreme(case, tokens=34, batch=1)
    q, k, v, feature_map = q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), feature_map.to(DEVICE)
    rounded = [x.float().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    right = reference(*exact, feature_map, window, sinks)
    plain = reference(*rounded, feature_map, window, sinks)
    out, _ = fused(*rounded, feature_map, window, sinks)
    assert out.isfinite().all()
    assert (out - right).abs().max() <= 4 * (plain - right).abs().max() + 1e-5
    ours, theirs, best = gradients(out, rounded), gradients(plain, rounded), gradients(right, exact)
    rounding = feature_map.keys(exact[1]).abs().max().item() * 2**-24  # of log-features, and so of log-sum-exps
    for mine, other, true in zip(ours, theirs, best, strict=True):
        assert relative(mine, true) <= 4 * relative(other, true) + 4 * rounding + 1e-5


@pytest.mark.parametrize("kind", ["prf", "hedgehog", "clusters"])
@torch.no_grad()
def test_under_autocast_features_in_bf16_leave_a_state_in_fp32(kind):
    q, k, v, feature_map = make(34, kind=kind, heads=1, dtype=torch.float32)
    exact = reference(q, k, v, feature_map, 3, 1)
    with torch.autocast(DEVICE, torch.bfloat16):
        out, state = fused(q, k, v, feature_map, 3, 1)
    assert state.level.dtype == state.mean.dtype == torch.float32
    assert relative(out, exact) < 0.05


def test_the_same_bits_twice():
    q, k, v, feature_map = make(40, dtype=torch.float32, **ALONE)
    q.requires_grad_(), k.requires_grad_()
    first, second = (fused(q, k, v, feature_map, 3, 1)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert all(torch.equal(a, b) for a, b in zip(*(gradients(x, (q, k)) for x in (first, second)), strict=True))


@pytest.mark.skipif(ON_GPU, reason="there it takes wide heads to see this")
def test_dimensions_may_be_multiplied_some_at_a_time(monkeypatch):
    for module in (text_features, text_gradients):
        monkeypatch.setattr(module, "dims_at_once", lambda *_: 16)
    test_attention_and_every_gradient_are_the_reference_s("one query head")


@pytest.mark.parametrize("batch, tokens", [(2**14, 70), (1, 2**20)])
def test_no_batch_and_no_text_is_too_large_for_a_grid(batch, tokens, monkeypatch):
    grids = []
    monkeypatch.setattr(
        type(text_features.text_features_kernel), "run", lambda kernel, *args, grid, **kwargs: grids.append(grid)
    )
    inputs = attention_inputs(batch, 8, 4, tokens, 64, 64, torch.bfloat16, 8, 4)
    attention_and_gradients(inputs, 8)
    assert len(grids) == 10 and all(max(grid[1:]) < 2**16 for grid in grids)


def test_constants_are_those_of_pytorch():
    for name in ("EMPTY", "ABSENT", "HEADROOM"):
        assert getattr(common, name).value == getattr(columns, name)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [64, 182])
def test_on_a_gpu_kernels_err_at_most_twice_as_much_as_pytorch(dtype, features, monkeypatch):
    monkeypatch.setattr(text_features, "SEGMENT", 128)
    q, k, v, feature_map = make(300, features=features, group=4, dim=64, value_dim=64)
    q, k, v = (x.to(dtype) for x in (q / 8**0.5, k / 8**0.5, v))
    exact = reference(q.double(), k.double(), v.double(), feature_map.double(), 16, 4)
    feature_map.float()
    plain = attend_text_with_features(
        q, k, v, far_of(feature_map), 16, None, FeatureState.empty(k, v, 16, 4, features)
    ).to(dtype)
    out, _ = fused(q, k, v, feature_map, 16, 4)
    assert relative(out.double(), exact) <= 2 * relative(plain.double(), exact) + 1e-6
