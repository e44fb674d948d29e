"""How far a student's attention is from its teacher's, row by row, without a tokens × tokens matrix.

The teacher's row i is p_ij = softmax over j ≤ i of S_ij = q_i·k_j. The student's row p̂ has the same logits where a key
is near (one of the first `sinks` tokens, or i - j < window) and log A_ij elsewhere, A_ij = Σ_m exp(u_im + w_jm).
  softmax  cross-entropy of p against p̂, mean over rows; its least value is the teacher's entropy
  l2       (e^S - A)² e^{-2 max S}, mean over the pairs j ≤ i; its least value is 0; the maximum is a KV head's
Gradients come with the loss: with ∂loss/∂log A_ij = p̂_ij - p_ij and G = (p̂ - p) / A they are ∂/∂u = Fq ∘ (G Fk) and
∂/∂w = Fk ∘ (Gᵀ Fq), where Fq = e^u and Fk = e^w up to stabilisers that cancel.

Shapes are those of student/features_torch.py: u, q (batch, heads, group, tokens, …); w, k (batch, heads, tokens, …).
Within a block they are those of one text: (heads, group, rows, …) and (heads, keys, …).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from linearizer.student.kernel_trial import TrialSizes, TrialText, kernels_accept, passes_trial
from linearizer.student.softmax_parts import exp_without_underflow
from linearizer.student.state import EMPTY, HEADROOM, working_dtype

try:
    from linearizer.train import attention_loss_kernels as loss_kernels
except ImportError as missing:
    if missing.name != "triton":
        raise
    loss_kernels = None  # type: ignore[assignment]

Tensor = torch.Tensor
Pair = tuple[torch.Tensor, torch.Tensor]
TRIAL_TOKENS = 192
MAX_LOST_MASS = 1e-7  # of the teacher's attention in a row
ROWS = 128
BLOCK = 2**19  # elements of one block of rows × columns: a few of them fit into a core's cache
PAIRS = 2**14  # pairs that are computed feature by feature at once
LOST = 1.0  # a product below this may have lost terms to underflow: HEADROOM below the row's bound
MIN_PRODUCT = 1e-13  # a smaller product hardly matters, or is lost: this keeps p / product finite

Compute = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, bool, bool, float], tuple[Tensor, Pair | None]]


class Loss(NamedTuple):
    value: Tensor  # scalar, differentiable in u and w
    least: Tensor  # the loss of a student whose rows are the teacher's: for softmax `value - least` is a KL divergence


def attention_loss(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, kind: str = "softmax", scale: float = 1.0
) -> Loss:
    """Compare the student's rows with the teacher's; scores are q·k times the scale."""
    if kind not in ("softmax", "l2"):
        raise ValueError(f"kind={kind!r} is none of softmax, l2")
    compute = fused if kernels_serve(u, q, k, kind == "l2") else blocked
    return Loss(*RowLoss.apply(compute, u, w, q, k, window, sinks, kind == "l2", scale))


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
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, gradients = compute(u, w, q, k, window, sinks, squared, any(ctx.needs_input_grad), scale)
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
        return None, u * scale, w * scale, None, None, None, None, None, None


def fused(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool, differentiate: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute loss and least, summed, and gradients: by kernels; in PyTorch the heads that lost pairs to underflow."""
    loss, least, lost, *gradients = loss_kernels.losses(u.float(), w.float(), q, k, window, sinks, squared, scale)
    total = torch.stack([loss.sum((2, 3)), least.sum((2, 3))])
    for b, h in (lost.amax((2, 3)) > MAX_LOST_MASS).nonzero().tolist():
        here = slice(b, b + 1), slice(h, h + 1)
        total[:, b, h], exact = blocked(
            u[here], w[here], q[here], k[here], window, sinks, squared, differentiate, scale
        )
        if exact is not None:
            gradients[0][here], gradients[1][here] = exact
    return total.sum((1, 2)), (gradients[0], gradients[1]) if differentiate else None


def blocked(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, squared: bool, differentiate: bool,
    scale: float = 1.0,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute the same in PyTorch, in blocks of some heads of one text and some of its rows."""
    work, group, tokens = working_dtype(u), *u.shape[2:4]
    u, w, q, k = u.to(work), w.to(work), q.to(work) * scale, k.to(work)
    gradients = (torch.zeros_like(u), torch.zeros_like(w)) if differentiate else None
    largest = largest_scores(q, k) if squared else None
    total = torch.zeros(2, dtype=work, device=u.device)
    together = max(1, BLOCK // (group * rows_at_once(group, tokens) * tokens))
    for b in range(u.shape[0]):
        for h in range(0, u.shape[1], together):
            here = b, slice(h, h + together)
            own = None if gradients is None else (gradients[0][here], gradients[1][here])
            shift = None if largest is None else largest[here[1], None, None, None]
            total += heads_loss(u[here], w[here], q[here], k[here], window, sinks, shift, own)
    return total, gradients


def heads_loss(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, shift: Tensor | None, gradients: Pair | None
) -> Tensor:  # (2,)
    """Compute loss and least of some heads of one text, and add to the gradients, if there are any."""
    whole_query, whole_key, whole_bound = stabilised(u, w, window, sinks)
    tokens, size, total = u.shape[2], rows_at_once(*u.shape[1:3]), u.new_zeros(2)
    for start in range(0, tokens, size):
        stop = min(start + size, tokens)
        rows, far = (..., slice(start, stop), slice(None)), (..., slice(sinks, max(sinks, stop - window)), slice(None))
        row, column = torch.arange(start, stop, device=u.device)[:, None], torch.arange(stop, device=u.device)
        scores = by_key(q[rows], k[:, :stop]).masked_fill_(column > row, EMPTY)
        is_near = column[far[1]] > row - window
        query, key, bound = whole_query[rows], whole_key[far], whole_bound[rows]
        own = None if gradients is None else (gradients[0][rows], gradients[1][far])
        if shift is None:
            sums, weight = cross_entropy(scores, far[1], is_near, query, key, bound, u[rows], w[far], own)
        else:
            query, key = query * (bound + HEADROOM - shift).exp(), key * math.exp(-HEADROOM)
            sums, weight = squared_error(scores[..., far[1]] - shift, is_near, query, key)
        total += sums
        if own is not None:  # of Σ weight (query · key)
            weight = weight.flatten(1, 2)
            own[0].addcmul_((weight @ key).view_as(query), query)
            own[1].addcmul_(weight.mT @ query.flatten(1, 2), key)
    return total


def stabilised(u: Tensor, w: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute e^(u + ceiling - bound), at most 1, e^(w - ceiling + HEADROOM), and log A less that of their product.

    The weights of a row do not depend on the ceiling. Near keys may lie above it; they are not used.
    """
    far = w[:, sinks : max(sinks, w.shape[1] - window)]
    ceiling = far.amax(1, keepdim=True) if far.shape[1] else torch.zeros_like(w[:, :1])
    query = u + ceiling[:, None]
    bound = query.amax(-1, keepdim=True)
    key = (w - ceiling).clamp_(max=0).add_(HEADROOM)
    return exp_without_underflow(query.sub_(bound)), exp_without_underflow(key), bound - HEADROOM


def cross_entropy(
    scores: Tensor, far: slice, is_near: Tensor, query: Tensor, key: Tensor, bound: Tensor, u: Tensor, w: Tensor,
    gradients: Pair | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute cross-entropy and entropy of some rows, and the gradient of each product; add that of lost products."""
    p = scores.softmax(-1)
    lse = scores.amax(-1, keepdim=True) - p.amax(-1, keepdim=True).log()
    product = by_key(query, key).masked_fill_(is_near, LOST)
    lost = product < LOST if product.numel() and product.amin() < LOST else None
    log_a = torch.where(is_near, scores[..., far], product.clamp_min_(MIN_PRODUCT).log().add_(bound))
    student = torch.cat([scores[..., : far.start], log_a, scores[..., far.stop :]], -1)
    if lost is not None:
        in_lost_row = student.amax(-1, keepdim=True) < bound + math.log(LOST)
        pairs = (lost & ((p[..., far] > torch.finfo(p.dtype).eps / 10) | in_lost_row)).nonzero(as_tuple=True)
        student[..., far][pairs] = torch.cat([features.logsumexp(-1) for _, features in some_at_a_time(pairs, u, w)])
    own = student.log_softmax(-1)
    entropy = (lse - (p * scores).sum(-1, keepdim=True)).sum()
    kl = (p * (scores - lse - own)).sum()
    weight = own[..., far].exp_().sub_(p[..., far]).masked_fill_(is_near, 0)  # p̂ - p: the gradient at log A
    if lost is not None and gradients is not None:
        for (h, g, i, j), features in some_at_a_time(pairs, u, w):
            each = features.softmax(-1) * weight[h, g, i, j, None]
            gradients[0].index_put_((h, g, i), each, accumulate=True)
            gradients[1].index_put_((h, j), each, accumulate=True)
        weight[pairs] = 0
    return torch.stack([entropy + kl, entropy]), weight.div_(product)


def some_at_a_time(pairs: tuple[Tensor, ...], u: Tensor, w: Tensor) -> Iterator[tuple[tuple[Tensor, ...], Tensor]]:
    """List places of pairs (head, member of the group, row, key) with their u_im + w_jm: right at any magnitude."""
    for h, g, i, j in zip(*(index.split(PAIRS) for index in pairs), strict=True):
        yield (h, g, i, j), u[h, g, i] + w[h, j]


def squared_error(scores: Tensor, is_near: Tensor, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the squared errors of far pairs, summed, and 0, and the gradient of each product."""
    error = exp_without_underflow(scores).sub_(by_key(query, key)).masked_fill_(is_near, 0)
    square = error.square().sum()
    return torch.stack([square, torch.zeros_like(square)]), error.mul_(-2)


def rows_at_once(group: int, tokens: int) -> int:
    return max(16, min(ROWS, BLOCK // (group * tokens), tokens))


def by_key(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply rows (heads, group, rows, dim) and columns (heads, columns, dim): (heads, group, rows, columns)."""
    return (rows.flatten(1, 2) @ columns.mT).unflatten(1, rows.shape[1:3])


def largest_scores(q: Tensor, k: Tensor) -> Tensor:
    """Compute max S over the pairs j ≤ i of a KV head in all texts: (heads,)."""
    largest = q.new_full((q.shape[1],), EMPTY)
    for b in range(q.shape[0]):
        for start in range(0, q.shape[-2], ROWS):
            rows = q[b, :, :, start : start + ROWS]
            scores = by_key(rows, k[b, :, : start + rows.shape[2]])
            later = torch.ones(rows.shape[2], scores.shape[-1], dtype=torch.bool, device=q.device).triu(start + 1)
            largest = torch.maximum(largest, scores.masked_fill_(later, EMPTY).amax((1, 2, 3)))
    return largest
