"""Chunked and step agree with the reference, whatever the sizes, splits, paddings and magnitudes."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearizer.kernels.triton.dispatch import linear_attention
from linearizer.student.columns import FeatureState
from linearizer.student.feature_maps import FEATURE_MAPS
from linearizer.student.features_torch import attend_text_with_features
from tests.support.log_features import VALUE_DIM, extreme, far_of, make, reference

READERS = {"the package": linear_attention, "a checkpoint alone": attend_text_with_features}


def run(q, k, v, feature_map, window, sinks, real=None, cuts=(), attend=linear_attention):
    """The whole text, in pieces that end at the cuts."""
    state = FeatureState.empty(k, v, window, sinks, feature_map.features if feature_map else 0)
    edges = [0, *cuts, q.shape[-2]]
    out = []
    for a, b in zip(edges, edges[1:], strict=False):
        piece = None if real is None else real[:, a:b]
        out.append(attend(q[..., a:b, :], k[:, :, a:b], v[:, :, a:b], far_of(feature_map), window, piece, state))
    return torch.cat(out, -2), state


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 40),
    window=st.sampled_from([0, 1, 3, 8, 50]),
    sinks=st.sampled_from([0, 1, 4]),
    features=st.sampled_from([1, 4]),
    group=st.sampled_from([1, 2, 4]),
    cuts=st.lists(st.integers(1, 39), max_size=4),
    padded=st.booleans(),
    seed=st.integers(0, 99),
    reader=st.sampled_from([*READERS]),
)
def test_pieces_of_any_length_give_the_reference(tokens, window, sinks, features, group, cuts, padded, seed, reader):
    q, k, v, feature_map = make(tokens, group=group, features=features, seed=seed)
    real = None
    if padded:
        real = torch.rand(2, tokens, generator=torch.Generator().manual_seed(seed)) < 0.7
    cuts = sorted({cut for cut in cuts if cut < tokens})
    out, _ = run(q, k, v, feature_map, window, sinks, real, cuts, READERS[reader])
    expected = reference(q, k, v, feature_map, window, sinks, real)
    rows = torch.ones(2, tokens, dtype=torch.bool) if real is None else real
    difference = (out - expected).abs().amax((1, 2, 4))[rows]
    assert difference.numel() == 0 or difference.max() < 1e-10


@pytest.mark.parametrize("kind", FEATURE_MAPS)
@pytest.mark.parametrize("window, sinks", [(0, 0), (5, 2)])
def test_chunks_and_steps_agree_for_every_feature_map(kind, window, sinks):
    q, k, v, feature_map = make(37, kind=kind)
    expected = reference(q, k, v, feature_map, window, sinks)
    for chunk in (1, 7, 16, 64):
        state = FeatureState.empty(k, v, window, sinks, 4)
        assert (
            attend_text_with_features(q, k, v, far_of(feature_map), window, None, state, chunk) - expected
        ).abs().max() < 1e-10
    for attend in READERS.values():
        stepped, _ = run(q, k, v, feature_map, window, sinks, cuts=range(1, 37), attend=attend)
        assert (stepped - expected).abs().max() < 1e-10


@pytest.mark.parametrize("window, sinks", [(0, 0), (3, 2)])
@pytest.mark.parametrize(
    "case", ["a first key of norm 60", "all keys of norm 60", "a later key of norm 60", "logits of ±80"]
)
def test_extreme_texts_are_finite_and_right(case, window, sinks):
    q, k, v, feature_map = extreme(case)
    exact = reference(q, k, v, feature_map, window, sinks)
    plain = reference(q.float(), k.float(), v.float(), feature_map, window, sinks)
    for cuts, attend in product(((), range(1, 48)), READERS.values()):
        out, _ = run(q.float(), k.float(), v.float(), feature_map, window, sinks, cuts=cuts, attend=attend)
        assert out.isfinite().all()
        # Log-features of -450 hold their 2^-24 only to 3e-5: what fp32 allows is what the fp32 reference reaches.
        assert (out - exact).abs().max() <= 4 * (plain - exact).abs().max() + 1e-5


@pytest.mark.parametrize("cuts", [(), range(1, 48)])
def test_bf16_costs_no_more_than_rounding_its_inputs(cuts):
    q, k, v, feature_map = extreme("a first key of norm 60")
    rounded = [x.bfloat16() for x in (q, k, v)]
    exact = reference(*(x.double() for x in rounded), feature_map, 3, 2)
    out, _ = run(*rounded, feature_map, 3, 2, cuts=cuts)
    assert (out.double() - exact).abs().max() < 1e-4


def test_gradients_agree_with_the_reference():
    q, k, v, feature_map = make(30)
    inputs = [x.requires_grad_() for x in (q, k, v)] + [p for p in feature_map.parameters()]
    weight = torch.randn(2, 2, 2, 30, VALUE_DIM, dtype=torch.float64)
    state = FeatureState.empty(k, v, 5, 2, 4)
    ours = torch.autograd.grad(
        (attend_text_with_features(q, k, v, far_of(feature_map), 5, None, state, 7) * weight).sum(), inputs
    )
    theirs = torch.autograd.grad((reference(q, k, v, feature_map, 5, 2) * weight).sum(), inputs)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
