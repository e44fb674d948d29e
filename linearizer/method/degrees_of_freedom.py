"""Degrees of freedom of the exponential kernel on a sample, at any exponent.

K(x, y) = exp(x·y) overflows float64 from |x|² = 709 on, so K itself is never formed. With K = D K̃ D, D = exp(|x|²/2),
K̃(x, y) = exp(-|x - y|²/2) in (0, 1], the ridge moves into the logarithm: N(λ) = tr K̃ (K̃ + Λ)⁻¹ with
log Λᵢ = log λ + log tr K - |xᵢ|². Scaled to a unit diagonal, K̃ + Λ becomes A = F K̃ F + R, Fᵢ² = 1/(1 + Λᵢ),
R = Λ F², and N(λ) = Σ (1 - Rᵢ [A⁻¹]ᵢᵢ).

One factor serves every λ. The eigenvalues β of R^½ A⁻¹ R^½ lie in [0, 1], and at t times the ridge of the factor
N = Σ (1-β) / ((1-β) + tβ). An error δ of β enters N as at most max(t, 1/t) δ, so a ridge within a factor of 2¹² of
the factored one loses four of the sixteen digits, whatever the exponents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from linearizer.errors import FaultError

JITTERS = (0.0, 1e-15, 1e-14, 1e-13, 1e-12)  # per point; the first that lets the factor exist is taken


def degrees_of_freedom(
    points: torch.Tensor,  # (points, key_dim), scaled so that K(x, y) = exp(x·y)
    ridges: Sequence[float],
    reference: float = 2**-8,
) -> torch.Tensor:  # (ridges,)
    """Compute N(λ) at every ridge from one factor at the reference ridge."""
    distinct, copies = torch.unique(points.double(), dim=0, return_counts=True)
    # m equal points act like a single one whose kernel row counts m times
    logs = (distinct * distinct).sum(-1) + copies.double().log()
    log_ridge = math.log(reference) + logs.logsumexp(0) - logs
    shrunk = shrinkage(distinct, log_ridge)
    multiples = torch.tensor([ridge / reference for ridge in ridges], dtype=shrunk.dtype, device=shrunk.device)
    retained = 1 - shrunk
    return (retained / (retained + multiples[:, None] * shrunk)).sum(-1)


def shrinkage(points: torch.Tensor, log_ridge: torch.Tensor) -> torch.Tensor:
    """Compute the eigenvalues β of R^½ A⁻¹ R^½, that is how far the ridge shrinks each direction."""
    factor, ridge = factorise(points, log_ridge)
    scale = ridge.sqrt()
    shrinks = torch.cholesky_inverse(factor).mul_(scale[:, None]).mul_(scale)  # (points, points)
    return torch.linalg.eigvalsh(shrinks).clamp(0, 1)


def factorise(points: torch.Tensor, log_ridge: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute the Cholesky factor of A, and R with the jitter that the factor took, which is a ridge like any other."""
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
    """Compute exp(-|x-y|²/2) between all pairs of points."""
    points = points - points.mean(0)  # distances are left as they are; shorter vectors give them more digits
    half = (points * points).sum(-1) / 2
    return (points @ points.mT).sub_(half[:, None]).sub_(half).clamp_(max=0).exp_()
