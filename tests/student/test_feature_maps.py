"""Each feature map is what its name says."""

import pytest
import torch

from linearizer.method.untrained import cosine_transform, orthogonal
from linearizer.method.untrained import draw as draw_map
from linearizer.student.feature_maps import FEATURE_MAPS

DIM = 8


def make(kind, features, heads=2, seed=0):
    feature_map = FEATURE_MAPS[kind](heads, DIM, features).double().eval()
    draw_map(feature_map, torch.Generator().manual_seed(seed))
    return feature_map


def draw(*shape, size=0.5, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size


def kernel(feature_map, q, k):  # (batch, heads, group, rows, dim), (batch, heads, columns, dim)
    u, w = feature_map.queries(q), feature_map.keys(k)
    return (u[..., :, None, :] + w[:, :, None, None]).exp().sum(-1)


@pytest.mark.parametrize("kind", ["prf", "performer", "mlp"])
def test_random_features_estimate_the_kernel_without_bias(kind):
    q, k = draw(1, 2, 2, 5, DIM, size=0.2), draw(1, 2, 6, DIM, size=0.2, seed=2)
    exact = (q @ k[:, :, None].mT).exp()
    assert (kernel(make(kind, 100_000), q, k) / exact - 1).abs().max() < 0.04


def test_cosine_features_beat_gaussian_ones_at_equal_number():
    q, k = draw(1, 2, 2, 20, DIM), draw(1, 2, 20, DIM, seed=2)
    exact = (q @ k[:, :, None].mT).exp()

    def error(kind):
        return sum((kernel(make(kind, 64, seed=s), q, k) / exact - 1).square().mean() for s in range(10))

    assert error("dijiang") < error("prf")
    assert error("performer") < error("prf")


@pytest.mark.parametrize("draw_directions", [orthogonal, cosine_transform])
def test_directions_are_orthogonal_within_a_block(draw_directions):
    z = draw_directions(2 * DIM, DIM, torch.Generator().manual_seed(0))
    for block in z.split(DIM):
        unit = block / block.norm(dim=-1, keepdim=True)
        torch.testing.assert_close(unit @ unit.T, torch.eye(DIM), atol=1e-5, rtol=0)


def test_hedgehog_is_the_softmax_of_both_signs():
    feature_map, k = make("hedgehog", 12), draw(1, 2, 6, DIM)
    x = k @ feature_map.key_weight.mT
    expected = torch.cat([x.softmax(-1), (-x).softmax(-1)], -1)
    torch.testing.assert_close(feature_map.keys(k).exp(), expected)


def test_mlp_starts_as_prf():
    mlp, prf = make("mlp", 16), make("prf", 16)
    prf.z.data.copy_(mlp.query_side.z)
    q, k = draw(1, 2, 2, 5, DIM), draw(1, 2, 6, DIM, seed=2)
    torch.testing.assert_close(mlp.queries(q), prf.queries(q))
    torch.testing.assert_close(mlp.keys(k), prf.keys(k))


def test_clusters_that_are_sharp_and_hold_every_key_are_exact():
    q, k = draw(1, 2, 2, 5, DIM), draw(1, 2, 6, DIM, seed=2)
    clusters = make("clusters", 6)
    clusters.centres.data.copy_(k[0])
    clusters.query_centres.data.copy_(k[0])
    clusters.log_sharpness.data.fill_(9.0)
    torch.testing.assert_close(kernel(clusters, q, k), (q @ k[:, :, None].mT).exp())


@pytest.mark.parametrize("kind", FEATURE_MAPS)
def test_the_same_seed_draws_the_same_features(kind):
    first, second, other = make(kind, 16), make(kind, 16), make(kind, 16, seed=5)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    if kind != "hedgehog" or 16 // 2 > DIM:  # a hedgehog within the head size starts at the identity
        assert any(not torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("kind, learned", [("performer", 0), ("dijiang", 1), ("prf", 2)])
def test_what_is_fixed_by_its_authors_stays_fixed(kind, learned):
    assert sum(p.requires_grad for p in make(kind, 16).parameters()) == learned
