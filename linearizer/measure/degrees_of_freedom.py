"""Degrees of freedom of the exponential kernel on a sample, at any exponent.

K(x, y) = exp(x·y) overflows float64 from |x|² = 709 on, so K itself is never formed. With K = D K̃ D, D = exp(|x|²/2),
K̃(x, y) = exp(-|x - y|²/2) in (0, 1], the ridge moves into the logarithm: N(λ) = tr K̃ (K̃ + Λ)⁻¹ with
log Λᵢ = log λ + log scale - |xᵢ|². Scaled to a unit diagonal, K̃ + Λ becomes A = F K̃ F + R, Fᵢ² = 1/(1 + Λᵢ),
R = Λ F², and the leverage of point i is 1 - Rᵢ [A⁻¹]ᵢᵢ.

One factor serves every λ. The eigenvalues β of R^½ A⁻¹ R^½ lie in [0, 1], and at t times the ridge of the factor
N = Σ (1-β) / ((1-β) + tβ). An error δ of β enters N as at most max(t, 1/t) δ, so a ridge within a factor of 2¹² of
the factored one loses four of the sixteen digits, whatever the exponents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from linearizer.errors import FaultError
from linearizer.run.profile import Normalise

JITTERS = (0.0, 1e-15, 1e-14, 1e-13, 1e-12)  # per point; the first that lets the factor exist is taken


@dataclass(frozen=True)
class Spectrum:
    """What the kernel matrix of a sample says about the features it needs."""

    freedoms: torch.Tensor  # (ridges,) N(λ)
    leverage: torch.Tensor  # (points,) share of each point in N(reference): the best density to draw features from


def degrees_of_freedom(
    points: torch.Tensor,  # (points, key_dim), scaled so that K(x, y) = exp(x·y)
    ridges: Sequence[float],
    normalise: Normalise = "trace",
    reference: float = 2**-8,
) -> Spectrum:
    """Give N(λ) at every ridge, and the leverage of every point at the reference ridge."""
    distinct, owner, copies = torch.unique(points.double(), dim=0, return_inverse=True, return_counts=True)
    # m equal points act as one whose kernel row counts m times
    logs = (distinct * distinct).sum(-1) + copies.double().log()
    log_ridge = math.log(reference) + log_scale(logs, len(points), normalise) - logs
    shrunk, leverage = shrinkage(distinct, log_ridge)
    steps = torch.tensor([ridge / reference for ridge in ridges], dtype=shrunk.dtype, device=shrunk.device)
    kept = 1 - shrunk
    freedoms = (kept / (kept + steps[:, None] * shrunk)).sum(-1)
    return Spectrum(freedoms, (leverage / copies)[owner])


def log_scale(logs: torch.Tensor, count: int, normalise: Normalise) -> torch.Tensor:
    """Give the logarithm of what a ridge is a multiple of; logs are those of the diagonal of K."""
    if normalise == "trace":
        return logs.logsumexp(0)
    return logs.new_tensor(math.log(count) if normalise == "J" else 0.0)


def shrinkage(points: torch.Tensor, log_ridge: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the eigenvalues β of R^½ A⁻¹ R^½, that is how far the ridge shrinks each direction, and the leverages."""
    factor, ridge = factored(points, log_ridge)
    scale = ridge.sqrt()
    shrinks = torch.cholesky_inverse(factor).mul_(scale[:, None]).mul_(scale)  # (points, points)
    leverage = (1 - shrinks.diagonal()).clamp(0, 1)
    return torch.linalg.eigvalsh(shrinks).clamp(0, 1), leverage


def factored(points: torch.Tensor, log_ridge: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the Cholesky factor of A, and R with the jitter that the factor took: it is a ridge like any other."""
    scaled = gaussian_kernel(points)
    shrink = (-log_ridge).sigmoid().sqrt()
    scaled.mul_(shrink[:, None]).mul_(shrink)
    for jitter in JITTERS:
        ridge = log_ridge.sigmoid() + jitter * len(points)
        scaled.diagonal().copy_((-log_ridge).sigmoid() + ridge)
        factor, failed = torch.linalg.cholesky_ex(scaled)
        if not failed:
            return factor, ridge
    raise FaultError("a kernel matrix is not positive, even with jitter: the queries or keys are damaged")


def gaussian_kernel(points: torch.Tensor) -> torch.Tensor:
    """Give exp(-|x-y|²/2) between all pairs of points."""
    points = points - points.mean(0)  # distances are left as they are; shorter vectors give them more digits
    half = (points * points).sum(-1) / 2
    return (points @ points.mT).sub_(half[:, None]).sub_(half).clamp_(max=0).exp_()
