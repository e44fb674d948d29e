"""Degrees of freedom against arithmetic of many digits, and their properties."""

import math

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearizer.method.degrees_of_freedom import degrees_of_freedom
from linearizer.run.measured import Curve

RIDGES = tuple(2.0**-exponent for exponent in range(0, 21, 4))


def vectors(count, norm, spread, duplicates=0, size=6, seed=0):
    """Points around one of a given norm: near enough to each other that the answer is not their number."""
    generator = torch.Generator().manual_seed(seed)
    centre, *points = torch.randn(count + 1, size, generator=generator, dtype=torch.float64)
    points = centre / centre.norm() * norm + spread * torch.stack(points)
    points[count - duplicates :] = points[:duplicates]
    return points


def exact(points, ridges):
    """N(λ) = tr K (K + λ·tr K)⁻¹, as it is written."""
    mpmath.mp.dps = 60 + int(points.square().sum(-1).max())  # twice the digits that exp(|x|²) has
    points = [[mpmath.mpf(value) for value in point] for point in points.tolist()]
    kernel = mpmath.matrix([[mpmath.exp(mpmath.fdot(x, y)) for y in points] for x in points])
    count = len(points)
    scale = mpmath.fsum(kernel[i, i] for i in range(count))
    inverses = [(kernel + ridge * scale * mpmath.eye(count)) ** -1 for ridge in ridges]
    return [
        float(count - ridge * scale * mpmath.fsum(inverse[i, i] for i in range(count)))
        for ridge, inverse in zip(ridges, inverses, strict=True)
    ]


@pytest.mark.parametrize("duplicates", [0, 3])
@pytest.mark.parametrize(("norm", "spread"), [(1, 0.3), (9, 0.8), (44, 0.25), (44, 2.0)])
def test_freedoms_are_right_to_a_millionth_at_any_exponent(norm, spread, duplicates):
    points = vectors(8, norm, spread, duplicates)
    points *= min(1, 2000**0.5 / points.norm(dim=-1).max())
    result = degrees_of_freedom(points, RIDGES)
    assert result.tolist() == pytest.approx(exact(points, RIDGES), abs=1e-6, rel=0)


@pytest.mark.parametrize("norm", [2.0, 12.0, 40.0])
def test_whole_curve_from_one_factor_equals_a_factor_for_every_ridge(norm):
    points = vectors(200, norm, 0.7, duplicates=10, size=16)
    result = degrees_of_freedom(points, RIDGES)
    each = [degrees_of_freedom(points, (ridge,), reference=ridge).item() for ridge in RIDGES]
    assert result.tolist() == pytest.approx(each, abs=1e-7, rel=0)


@settings(max_examples=40)
@given(count=st.integers(2, 40), norm=st.floats(0, 44), spread=st.floats(0.01, 3), seed=st.integers(0, 99))
def test_freedoms_grow_as_ridges_fall_up_to_the_rank_in_any_order_of_points(count, norm, spread, seed):
    points = vectors(count, norm, spread, duplicates=count // 3, seed=seed)
    result = degrees_of_freedom(points, RIDGES)
    rank = count - count // 3
    assert (result.diff() >= -1e-9).all()  # ridges fall
    assert result.max() <= rank + 1e-9
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    permuted = degrees_of_freedom(points[order], RIDGES)
    assert permuted.tolist() == pytest.approx(result.tolist(), abs=1e-6)


def test_nearly_equal_points_count_as_equal_ones():
    points = vectors(20, 5, 1.0)
    near = torch.cat([points, points + 1e-12])
    result = degrees_of_freedom(near, RIDGES)
    assert result.tolist() == pytest.approx(degrees_of_freedom(torch.cat([points] * 2), RIDGES).tolist(), abs=1e-5)


def test_curve_meets_its_points_and_never_falls():
    freedoms, ridges = (0.5, 3.0, 3.0, 40.0), (1.0, 0.5, 0.25, 0.125)
    curve = Curve.through(freedoms, ridges)
    assert [curve.at(-math.log(ridge)) for ridge in ridges] == pytest.approx(freedoms)
    read = [curve.at(step / 50) for step in range(-200, 400)]
    assert read == sorted(read)
    assert curve.at(-math.log(0.0625)) == pytest.approx(80)  # beyond the grid: in proportion to 1/λ
