"""The choice between Triton's kernels and PyTorch: kernels run once a trial has found them right (trial.py).

Kernels attend with texts to windows, features and slots, and with a token to windows and slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from linearizer.kernels.compiled import is_traced
from linearizer.kernels.features import attend_in_blocks, attend_token
from linearizer.kernels.trial import TrialSizes, TrialText, kernels_accept, passes_trial
from linearizer.student.attention_of_student import working_dtype
from linearizer.student.columns import ABSENT, Columns, FeatureState
from linearizer.student.feature_maps import ScaledMap
from linearizer.student.features_torch import CHUNK, attend_text_with_features

try:
    from linearizer.kernels.triton.text_gradients import FeatureAttention
    from linearizer.kernels.triton.text_slots import launch_text
    from linearizer.kernels.triton.token import launch_token
except ImportError as error:
    if error.name != "triton":
        raise
    FeatureAttention = launch_text = launch_token = None  # type: ignore[assignment, misc]

TRIAL_WINDOW = 16
TRIAL_ENDS = (32, 192)  # ends of the two calls for a text: the second starts from a state and has two segments

Tensor = torch.Tensor


def linear_attention(q: Tensor, k: Tensor, v: Tensor, far: Any, window: int, real: Tensor | None, state: Any) -> Tensor:
    """Attend to window, sinks and features and update the state, by kernels where they are accepted."""
    if q.shape[-2] == 1 and real is None:
        return attend_token(q, k, v, far, window, state)
    fused = hasattr(far, "queries") and kernel_serves_text_features(q, k, v, state)  # a memory by a rule has none
    attend = attend_chunks_by_kernel if fused else attend_in_blocks
    return attend_text_with_features(q, k, v, far, window, real, state, attend=attend)


def kernel_serves_text_features(q: Tensor, k: Tensor, v: Tensor, state: FeatureState) -> bool:
    """Whether kernels may attend with a text to features, with gradients where they are enabled."""
    if FeatureAttention is None or not kernels_accept(q, k, v):
        return False
    sizes = TrialSizes(q.shape[2], q.shape[-1], v.shape[-1], state.sink_k.shape[-2], state.level.shape[-1])
    gradients = torch.is_grad_enabled()

    def compute(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = TrialText.of(q, sizes, TRIAL_ENDS[-1], dtype)
        inputs = [x.requires_grad_(gradients) for x in (text.q, text.k, text.v)]
        state = FeatureState.empty(text.k, text.v, TRIAL_WINDOW, sizes.sinks, sizes.features)
        attend = attend_chunks_by_kernel if by_kernels else attend_in_blocks
        parts = []
        for start, stop in ((0, TRIAL_ENDS[0]), TRIAL_ENDS):
            part_q, part_k, part_v = text.piece(start, stop)
            arguments = text.features, TRIAL_WINDOW, None, state
            parts.append(attend_text_with_features(part_q, part_k, part_v, *arguments, attend=attend).to(dtype))
        results = [torch.cat(parts, -2), state.level, state.mean]
        if gradients:
            results += torch.autograd.grad(sum(x.square().sum() for x in results), inputs)  # type: ignore[arg-type]
        return results

    return passes_trial("attention and its gradients" if gradients else "attention", q, sizes, compute)


def attend_chunks_by_kernel(
    q: Tensor, columns: Columns, features: ScaledMap | None, state: FeatureState, chunk: int = CHUNK
) -> Tensor:
    """Attend with a text to features, all chunks at once."""
    u = w = None
    if features is not None:
        tokens, work, sinks = q.shape[-2], working_dtype(q), state.sink_k.shape[-2]
        leaving = columns.filled(0, tokens) & (columns.place(0, tokens) >= sinks)
        u, w = features.queries(q.to(work)), features.keys(columns.k[:, :, :tokens].to(work))
        u, w = u.to(work), w.to(work).masked_fill(~leaving[:, None, :, None], ABSENT)  # autocast multiplies in bf16
    state_inputs = [state.sink_k, state.sink_v, columns.first, columns.empty, u, w, state.level, state.mean]
    inputs = [None if x is None else x.contiguous() for x in (q, columns.k, columns.v, *state_inputs)]
    out, state.level, state.mean = FeatureAttention.apply(columns.window, *inputs)
    return out


def may_run_in_triton(*tensors: Tensor) -> bool:
    """Whether kernels may read with windows and slots: they compute no gradients."""
    gradients = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return launch_text is not None and not gradients and not is_traced() and kernels_accept(*tensors)
