"""Gradients of the attention kernels. With p = e^(logit - lse) and δ_i = g_i·y_i, where g is the gradient of the
output y, every logit's gradient is p (g_i·v_j - δ_i).

Backward is the same attention with the roles exchanged: to a key, all rows of later segments are one token per
feature, whose level is log Σ_i e^(u_im - lse_i) and whose value is the mean of g (and of δ).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .kernel_text_features import run
from .kernel_text_gradients_far import far
from .kernel_text_gradients_near import near
from .kernel_text_segments import Problem
from .state import EMPTY

Tensor = torch.Tensor


def sinks(
    q: Tensor, g: Tensor, sink_k: Tensor, sink_v: Tensor, first: Tensor, lse: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients that come through the sinks, which are few: of queries, of the sinks' keys and values."""
    work = lse.dtype
    q, g, k, v = (x.to(work) for x in (q, g, sink_k[:, :, None], sink_v[:, :, None]))
    place = first[:, None] + torch.arange(q.shape[-2], device=q.device)
    gone = torch.arange(sink_k.shape[-2], device=q.device) <= place[..., None]
    p = (q @ k.mT - lse[..., None]).masked_fill(~gone[:, None, None], EMPTY).exp()
    change = p * (g @ v.mT - delta[..., None])
    return change @ k, (change.mT @ q).sum(2), (p.mT @ g).sum(2)


class Attention(torch.autograd.Function):
    """kernels.run, with gradients of all that is real."""

    @staticmethod
    def forward(ctx: Any, window: int, *inputs: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        out, lse, level, mean, kept = run(*inputs, window)  # type: ignore[arg-type, call-arg]
        ctx.save_for_backward(*inputs, out, lse, level, mean, *kept)
        ctx.window = window
        return out, level, mean

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, dlevel: Tensor, dmean: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink_k, sink_v, start, empty, u, w, level0, mean0, out, lse, level, mean, *kept = ctx.saved_tensors
        g = g.to(out.dtype).contiguous()
        delta = (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
        problem = Problem(q, v, sink_k.shape[-2], 0 if u is None else u.shape[-1], ctx.window, True)
        dq, dk, dv = near(problem, q, k, v, g, lse, delta, empty)
        to_q, dsink_k, dsink_v = sinks(q, g, sink_k, sink_v, start, lse, delta)
        du = dw = dlevel0 = dmean0 = None
        if u is not None:
            last = (-level, dmean.contiguous(), (dmean * mean).sum(-1) - dlevel)
            du, dw, far_v, (level1, mean1, delta1) = far(problem, u, w, v, g, lse, delta, kept, last)
            dv[:, :, : far_v.shape[-2]] += far_v
            weight = (level0 + level1).exp()
            dlevel0 = weight * ((mean1 * mean0).sum(-1) - delta1)
            dmean0 = weight[..., None] * mean1
        dq, dk, dv = (dx.to(x.dtype) for dx, x in ((dq + to_q, q), (dk, k), (dv, v)))
        return None, dq, dk, dv, dsink_k.to(k.dtype), dsink_v.to(v.dtype), None, None, du, dw, dlevel0, dmean0
