"""How far a student's attention is from its teacher's, row by row, without a tokens × tokens matrix.

The teacher's row i is p_ij = softmax over j ≤ i of S_ij = q_i·k_j. The student's row p̂ has the same logits where a key
is near (one of the first `sinks` tokens, or i - j < window) and log A_ij elsewhere, A_ij = Σ_m exp(u_im + w_jm).
The loss is the cross-entropy of p against p̂, mean over rows; its least value is the teacher's entropy. Gradients are
computed with the loss, block by block, so that only one block of rows × columns is in memory.

Shapes are those of student/features_torch.py: u, q (batch, heads, group, tokens, …); w, k (batch, heads, tokens, …).
Within a block they are those of one text: (heads, group, rows, …) and (heads, keys, …).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from linearizer.kernels.trial import TrialSizes, TrialText, kernels_accept, passes_trial
from linearizer.student.attention_of_student import working_dtype
from linearizer.student.columns import EMPTY, HEADROOM
from linearizer.student.features_torch import exp_without_underflow

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
MIN_PRODUCT = 1e-13  # a smaller product hardly matters, or is lost: this keeps its logarithm finite

Compute = Callable[[Tensor, Tensor, Tensor, Tensor, int, int, bool, float], tuple[Tensor, Pair | None]]


class Loss(NamedTuple):
    value: Tensor  # scalar, differentiable in u and w
    least: Tensor  # the loss of a student whose rows are the teacher's: `value - least` is a KL divergence


def attention_loss(u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, scale: float = 1.0) -> Loss:
    """Compare the student's rows with the teacher's; scores are q·k times the scale."""
    compute = fused if kernels_serve(u, q, k) else blocked
    return Loss(*RowLoss.apply(compute, u, w, q, k, window, sinks, scale))


def kernels_serve(u: Tensor, q: Tensor, k: Tensor) -> bool:
    """Whether kernels serve tensors of this kind correctly."""
    if loss_kernels is None or not kernels_accept(q, k):
        return False

    sizes = TrialSizes(q.shape[2], q.shape[-1], 1, 0, u.shape[-1])

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = TrialText.of(q, sizes, TRIAL_TOKENS, dtype)
        work = working_dtype(text.q)
        tensors = text.features.queries(text.q.to(work)), text.features.keys(text.k.to(work)), text.q, text.k
        total, gradients = (fused if by_kernels else blocked)(*tensors, 16, 4, True)
        return [total, *(gradients or ())]

    return passes_trial("losses of attention rows", q, sizes, compute)


class RowLoss(torch.autograd.Function):
    """The gradients are computed along with the loss, and only scaled by backward."""

    @staticmethod
    def forward(
        ctx: Any, compute: Compute, u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        total, gradients = compute(u, w, q, k, window, sinks, any(ctx.needs_input_grad), scale)
        count = u[..., 0].numel()
        if gradients is not None:
            ctx.save_for_backward(gradients[0].div_(count).to(u.dtype), gradients[1].div_(count).to(w.dtype))
        loss, least = (total / count).unbind()
        ctx.mark_non_differentiable(least)
        return loss, least

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, scale: Tensor, _: Tensor) -> tuple:
        u, w = ctx.saved_tensors
        return None, u * scale, w * scale, None, None, None, None, None


def fused(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, differentiate: bool, scale: float = 1.0,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute loss and least, summed, and gradients by kernels; in PyTorch for heads that lost pairs to underflow."""
    loss, least, lost, *gradients = loss_kernels.losses(u.float(), w.float(), q, k, window, sinks, scale)
    total = torch.stack([loss.sum((2, 3)), least.sum((2, 3))])
    for b, h in (lost.amax((2, 3)) > MAX_LOST_MASS).nonzero().tolist():
        place = slice(b, b + 1), slice(h, h + 1)
        total[:, b, h], exact = blocked(u[place], w[place], q[place], k[place], window, sinks, differentiate, scale)
        if exact is not None:
            gradients[0][place], gradients[1][place] = exact
    return total.sum((1, 2)), (gradients[0], gradients[1]) if differentiate else None


def blocked(
    u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int, differentiate: bool, scale: float = 1.0,
) -> tuple[Tensor, Pair | None]:  # fmt: skip
    """Compute the same in PyTorch, in blocks of a few heads and rows of one text."""
    work, group, tokens = working_dtype(u), *u.shape[2:4]
    u, w, q, k = u.to(work), w.to(work), q.to(work) * scale, k.to(work)
    by_row, by_key, total = torch.zeros_like(u), torch.zeros_like(w), u.new_zeros(2)
    size = max(16, min(ROWS, BLOCK // (group * tokens), tokens))
    heads = max(1, BLOCK // (group * size * tokens))
    for b, h, start in product(range(u.shape[0]), range(0, u.shape[1], heads), range(0, tokens, size)):
        head_slice, rows, stop = slice(h, h + heads), slice(start, start + size), min(start + size, tokens)
        queries, keys = (b, head_slice, slice(None), rows), (b, head_slice, slice(sinks, max(sinks, stop - window)))
        with torch.set_grad_enabled(differentiate):
            leaves = tuple(x.detach().requires_grad_(differentiate) for x in (u[queries], w[keys]))
            sums = block_loss(leaves[0], leaves[1], q[queries], k[b, head_slice, :stop], window, sinks)
            if differentiate:
                of_rows, of_keys = torch.autograd.grad(sums[0], leaves)
                by_row[queries] = of_rows
                by_key[keys] += of_keys
        total += sums.detach()
    return total, (by_row, by_key) if differentiate else None


def block_loss(u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int) -> Tensor:  # (2,)
    """Compute loss and least of the last rows that k reaches to; w belongs to keys that are far for some of them."""
    column, far = torch.arange(k.shape[1], device=k.device), slice(sinks, sinks + w.shape[1])
    row = column[-q.shape[2] :, None]
    scores = multiply(q, k).masked_fill(column > row, EMPTY)
    is_near, (products, bound) = column[far] > row - window, products_of_features(u, w)
    teacher, near = scores.log_softmax(-1), (scores[..., : far.start], scores[..., far.stop :])
    log_a = torch.where(is_near, scores[..., far], products.clamp_min(MIN_PRODUCT).log() + bound)
    lost = (products < LOST) & ~is_near
    if lost.any():
        in_lost_row = torch.cat([*near, log_a], -1).amax(-1, keepdim=True) < bound + math.log(LOST)
        matters = teacher[..., far] > math.log(torch.finfo(u.dtype).eps / 10)
        log_a = replace_lost(log_a, (lost & (matters | in_lost_row)).nonzero(as_tuple=True), u, w)
    student = torch.cat([near[0], log_a, near[1]], -1).log_softmax(-1)
    return -torch.stack([(teacher.exp() * logs).sum() for logs in (student, teacher)])


def products_of_features(u: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply stabilised features; also return log A minus the logarithm of the products.

    Stabilisers of queries and keys cancel, so they count as constants.
    """
    ceiling = w.detach().amax(1, keepdim=True) if w.shape[1] else torch.zeros_like(u[:, 0, :1])
    query = u + ceiling[:, None]
    bound = query.detach().amax(-1, keepdim=True)
    products = multiply(exp_without_underflow(query - bound), exp_without_underflow(w - ceiling + HEADROOM))
    return products, bound - HEADROOM


def replace_lost(log_a: Tensor, pairs: tuple[Tensor, ...], u: Tensor, w: Tensor) -> Tensor:
    """Compute log A of pairs (head, member of the group, row, key) from their features: right at any magnitude."""
    pieces = zip(*(index.split(PAIRS) for index in pairs), strict=True)
    exact = [checkpoint(log_a_of_pairs, u, w, *piece, use_reentrant=False) for piece in pieces]
    return log_a.index_put(pairs, torch.cat(exact))


def log_a_of_pairs(u: Tensor, w: Tensor, h: Tensor, g: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (u[h, g, i] + w[h, j]).logsumexp(-1)


def multiply(rows: Tensor, columns: Tensor) -> Tensor:
    """Multiply rows (heads, group, rows, dim) and columns (heads, columns, dim): (heads, group, rows, columns)."""
    return (rows.flatten(1, 2) @ columns.mT).unflatten(1, rows.shape[1:3])
