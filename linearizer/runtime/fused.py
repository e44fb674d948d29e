"""Linear attention by kernels: whether they serve, what they are given, and what they leave.

linear_attention.py says what they compute, trial.py how they come to be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .chunks import CHUNK, attend_chunks, chunked, step
from .parts import Features, folded_of
from .state import ABSENT, Columns, State, change_tensors, tensors, working_dtype
from .trial import Drawn, Sizes, takes, trusted

try:
    from .kernel_gradients import Attention
    from .kernel_step import run_step
except ImportError as missing:
    if missing.name != "triton":
        raise
    Attention = run_step = None  # type: ignore[assignment, misc]

WINDOW = 16  # of trials

Tensor = torch.Tensor


def attention_serves(q: Tensor, k: Tensor, v: Tensor, state: State) -> bool:
    """Tell whether kernels may attend with such tensors."""
    if Attention is None or not takes(q, k, v):
        return False
    sizes, gradients = sizes_of(q, v, state), torch.is_grad_enabled()

    def answers(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = Drawn.of(q, sizes, 192, dtype)
        inputs = [x.requires_grad_(gradients) for x in (text.q, text.k, text.v)]
        state, features = empty(text, sizes), text.features if sizes.features else None
        attend, out = attend_fused if by_kernels else attend_chunks, []
        for start, stop in ((0, 32), (32, 192)):  # the second takes a state and has two segments
            out.append(chunked(*text.piece(start, stop), features, WINDOW, None, state, attend=attend).to(dtype))
        found = [torch.cat(out, -2), state.level, state.mean]
        if gradients:
            found += torch.autograd.grad([x.square().sum() for x in found], inputs)
        return found

    return trusted("attention and its gradients" if gradients else "attention", q, sizes, answers)


def step_serves(q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, state: State) -> bool:
    """Tell whether a kernel may attend with such a token, and change the state in place."""
    if run_step is None or torch.is_grad_enabled() or not takes(q, k, v):
        return False
    sizes, folded = sizes_of(q, v, state), folded_of(feature_map)
    shares = None if folded is None else folded.shares

    def answers(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        tokens = WINDOW + sizes.sinks + 8
        text = Drawn.of(q, sizes, tokens, dtype, shares)
        state, features = empty(text, sizes), text.features if sizes.features else None
        attend = fused_step if by_kernels else step
        out = [attend(*text.piece(t, t + 1), features, WINDOW, state).to(dtype) for t in range(tokens)]
        return [torch.cat(out, -2), state.level, state.mean]

    return trusted("single tokens", q, (*sizes, shares), answers)


def sizes_of(q: Tensor, v: Tensor, state: State) -> Sizes:
    return Sizes(q.shape[2], q.shape[-1], v.shape[-1], state.sink_k.shape[-2], state.level.shape[-1])


def empty(text: Drawn, sizes: Sizes) -> State:
    return State.empty(text.k, text.v, WINDOW, sizes.sinks, sizes.features)


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

    A feature map that can be folded is computed inside the kernel.
    """
    u = w = None
    folded = folded_of(feature_map)
    if feature_map is not None and folded is None:
        work, old = working_dtype(q), k
        if window:
            slot = (state.count % window)[:, None, None, None].expand(*k.shape)
            old = state.window_k.gather(2, slot)
        u, w = feature_map.queries(q.to(work)).contiguous(), feature_map.keys(old.to(work)).contiguous()
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    change_tensors(state, Tensor.contiguous)
    out = run_step(q, k, v, u, w, folded, **tensors(state))
    state.count += 1
    return out
