"""Linear attention by kernels: what they are given, and what they leave. linear_attention.py says what they compute."""

from __future__ import annotations

import torch

from .chunks import CHUNK
from .parts import Features
from .state import ABSENT, Columns, State, change_tensors, tensors, working_dtype

try:
    from .kernel_gradients import Attention
    from .kernel_step import run_step
except ImportError as missing:
    if missing.name != "triton":
        raise
    Attention = run_step = None  # type: ignore[assignment, misc]

Tensor = torch.Tensor


def attend_fused(q: Tensor, columns: Columns, feature_map: Features | None, state: State, chunk: int = CHUNK) -> Tensor:
    """Attend by kernels, all chunks at once."""
    u = w = None
    if feature_map is not None:
        tokens, work, sinks = q.shape[-2], working_dtype(q), state.sink_k.shape[-2]
        leaving = columns.filled(0, tokens) & (columns.place(0, tokens) >= sinks)
        u, w = feature_map.queries(q.to(work)), feature_map.keys(columns.k[:, :, :tokens].to(work))
        w = w.masked_fill(~leaving[:, None, :, None], ABSENT)
    held = [state.sink_k, state.sink_v, columns.first, columns.empty, u, w, state.level, state.mean]
    inputs = [None if x is None else x.contiguous() for x in (q, columns.k, columns.v, *held)]
    out, state.level, state.mean = Attention.apply(columns.window, *inputs)
    return out


@torch.no_grad()
def fused_step(q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, state: State) -> Tensor:
    """Attend with one token by one kernel; nothing waits for the device, and no tensor of the state is exchanged.

    A feature map whose log-features are affine in x and |x|² says so by `affine()` and is computed inside the kernel.
    """
    u = w = None
    affine = getattr(feature_map, "affine", lambda: None)()
    if feature_map is not None and affine is None:
        work, old = working_dtype(q), k
        if window:
            slot = (state.count % window)[:, None, None, None].expand(*k.shape)
            old = state.window_k.gather(2, slot)
        u, w = feature_map.queries(q.to(work)).contiguous(), feature_map.keys(old.to(work)).contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    change_tensors(state, Tensor.contiguous)
    out = run_step(q, k, v, u, w, affine, **tensors(state))
    state.count += 1
    return out
