"""How far a student's attention is from its teacher's, row by row, without a tokens × tokens matrix.

The teacher's row i is p_ij = softmax over j ≤ i of S_ij = q_i·k_j. The student's row p̂ has the same logits where a key
is near (one of the first `sinks` tokens, or i - j < window) and log A_ij elsewhere, A_ij = Σ_m exp(u_im + w_jm).
  softmax  cross-entropy of p against p̂, mean over rows; its least value is the teacher's entropy
  l2       (e^S - A)² e^{-2 max S}, mean over the pairs j ≤ i; its least value is 0; the maximum is a KV head's, or an
           argument, so that all parts of a batch have the same
Gradients are written by hand and come with the loss: with ∂loss/∂log A_ij = p̂_ij - p_ij and G = (p̂ - p) / A they are
∂/∂u = Fq ∘ (G Fk) and ∂/∂w = Fk ∘ (Gᵀ Fq), where Fq = e^u and Fk = e^w up to stabilisers that cancel.

Shapes are those of student/features_torch.py: u, q (batch, heads, group, tokens, …); w, k (batch, heads, tokens, …).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from linearizer.student.kernel_trial import TrialSizes, TrialText, kernels_accept, passes_trial
from linearizer.student.state import working_dtype
from linearizer.train.attention_loss_blocks import BLOCK, Heads, Pair, largest_scores, rows_at_once

try:
    from linearizer.train import attention_loss_kernels as loss_kernels
except ImportError as missing:
    if missing.name != "triton":
        raise
    loss_kernels = None  # type: ignore[assignment]

Tensor = torch.Tensor
TRIAL_TOKENS = 192
MAX_LOST_MASS = 1e-7  # of the teacher's attention in a row

Compute = Callable[
    [Tensor, Tensor, Tensor, Tensor, int, int, bool, bool, float, Tensor | None], tuple[Tensor, Pair | None]
]


class Loss(NamedTuple):
    value: Tensor  # scalar, differentiable in u and w
    least: Tensor  # the loss of a student whose rows are the teacher's: for softmax `value - least` is a KL divergence


def attention_loss(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, kind: str = "softmax", scale: float = 1.0,
    largest: Tensor | None = None,
) -> Loss:  # fmt: skip
    """Compare the student's rows with the teacher's; scores are q·k times the scale, `largest` is max S (heads,)."""
    if kind not in ("softmax", "l2"):
        raise ValueError(f"kind={kind!r} is none of softmax, l2")
    compute = fused if kernels_serve(u, q, k, kind == "l2") else blocked
    return Loss(*RowLoss.apply(compute, u, w, q, k, window, sinks, kind == "l2", scale, largest))


def kernels_serve(u: Tensor, q: Tensor, k: Tensor, squared: bool) -> bool:
    """Tell whether kernels can be trusted with such tensors."""
    if loss_kernels is None or not kernels_accept(q, k):
        return False

    sizes = TrialSizes(q.shape[2], q.shape[-1], 1, 0, u.shape[-1])

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = TrialText.of(q, sizes, TRIAL_TOKENS, dtype)
        work = working_dtype(text.q)
        tensors = text.features.queries(text.q.to(work)), text.features.keys(text.k.to(work)), text.q, text.k
        total, gradients = (fused if by_kernels else blocked)(*tensors, 16, 4, squared, True)
        return [total, *(gradients or ())]

    return passes_trial("losses of attention rows", q, (*sizes, squared), compute)


class RowLoss(torch.autograd.Function):
    """The gradients are computed along with the loss, and only scaled by backward."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool,
        scale: float, largest: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, gradients = compute(u, w, q, k, window, sinks, squared, any(ctx.needs_input_grad), scale, largest)
        rows = u[..., 0].numel()
        count = rows * (u.shape[-2] + 1) / 2 if squared else rows
        if gradients is not None:
            ctx.save_for_backward(gradients[0].div_(count).to(u.dtype), gradients[1].div_(count).to(w.dtype))
        loss, least = (total / count).unbind()
        ctx.mark_non_differentiable(least)
        return loss, least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple:
        u, w = ctx.saved_tensors
        return None, u * scale, w * scale, None, None, None, None, None, None, None


def blocked(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool, differentiate: bool,
    scale: float = 1.0, largest: Tensor | None = None,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute loss and least, summed, and gradients: in PyTorch, in blocks of rows."""
    work, group, tokens = working_dtype(u), *u.shape[2:4]
    q, k = q.to(work) * scale, k.to(work)
    gradients = (torch.zeros_like(u, dtype=work), torch.zeros_like(w, dtype=work)) if differentiate else None
    shift = (largest_scores(q, k) if largest is None else largest) if squared else None
    total = torch.zeros(2, dtype=work, device=u.device)
    together = max(1, BLOCK // (group * rows_at_once(group, tokens) * tokens))
    for b in range(u.shape[0]):
        for h in range(0, u.shape[1], together):
            part = slice(h, h + together)
            heads = Heads.of(u[b, part].to(work), w[b, part].to(work), q[b, part], k[b, part], window, sinks)
            own = None if gradients is None else (gradients[0][b, part], gradients[1][b, part])
            total += heads.softmax(own) if shift is None else heads.squared(shift[part], own)
    return total, gradients


def fused(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool, differentiate: bool,
    scale: float = 1.0, largest: Tensor | None = None,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute the same by kernels, and in PyTorch the heads in which kernels lost pairs to underflow."""
    loss, least, lost, *gradients = loss_kernels.losses(
        u.float(), w.float(), q, k, window, sinks, squared, scale, largest
    )
    total = torch.stack([loss.sum((2, 3)), least.sum((2, 3))])
    for b, h in (lost.amax((2, 3)) > MAX_LOST_MASS).nonzero().tolist():
        here = slice(b, b + 1), slice(h, h + 1)
        head = u[here], w[here], q[here], k[here], window, sinks, squared, differentiate, scale
        total[:, b, h], exact = blocked(*head, None if largest is None else largest[here[1]])
        if exact is not None:
            gradients[0][here], gradients[1][here] = exact
    return total.sum((1, 2)), (gradients[0], gradients[1]) if differentiate else None
