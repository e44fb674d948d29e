"""Linear attention by kernels: whether they serve, what they are given, and what they leave.

linear_attention.py says what they compute, trial.py how they come to be trusted.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .features_torch import CHUNK, attend_chunks, chunked
from .kernel_trial import Drawn, Sizes, takes, trusted
from .softmax_parts import Features
from .state import ABSENT, Columns, State, working_dtype

try:
    from .kernel_text_gradients import Attention
except ImportError as missing:
    if missing.name != "triton":
        raise
    Attention = None  # type: ignore[assignment, misc]

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
        u, w = u.to(work), w.to(work).masked_fill(~leaving[:, None, :, None], ABSENT)  # autocast multiplies in bf16
    held = [state.sink_k, state.sink_v, columns.first, columns.empty, u, w, state.level, state.mean]
    inputs = [None if x is None else x.contiguous() for x in (q, columns.k, columns.v, *held)]
    out, state.level, state.mean = Attention.apply(columns.window, *inputs)
    return out
