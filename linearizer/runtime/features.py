"""Attention to a few exact tokens and to a far field of features, all in one softmax.

Row i attends to a key j ≤ i in one of two ways:
  exactly, with the logit q_i·k_j, if j is a sink (one of the first `sinks` tokens) or i - j < window;
  through features otherwise, with the logit log Σ_m exp(u_im + w_jm), where a feature map gives u and w.
Far keys enter a row only as sums, so a feature keeps two things about all keys that have left the window:
  level_m = log Σ_j exp(w_jm)    and    mean_m = Σ_j exp(w_jm - level_m) v_j.
To a query the feature is then one more token, with the logit u_m + level_m and the value mean_m. Everything that is
exponentiated is at most zero, so nothing overflows; a feature that has seen nothing has level EMPTY.

The same attention is written four times: `reference` below (clear, quadratic); for a text and for a token in PyTorch
(features_torch.py: linear in time and memory, with a state); and both by kernels (kernel_text_features.py,
kernel_token_features.py). `linear_attention` is what callers use; kernel_dispatch.py chooses.

Shapes: q (batch, heads, group, tokens, key_dim), already multiplied by the scale of the scores; k, v (batch, heads,
tokens, dim). Heads are KV heads, a group is the query heads that share one. real (batch, tokens) is false at padding,
which may stand anywhere; None means that every token is real. A token's place is its rank among the real ones.
"""

from __future__ import annotations

import torch

from .features_torch import attend_chunks, attend_text_with_features, attend_token_with_features
from .kernel_dispatch import (
    attend_chunks_by_kernel,
    attend_token_with_features_by_kernel,
    kernel_serves_text_features,
    kernel_serves_token_features,
)
from .softmax_parts import Features, far_logits_exactly
from .state import EMPTY, FeatureState

Tensor = torch.Tensor


def linear_attention(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, real: Tensor | None, state: FeatureState
) -> Tensor:
    """Attend and update the state, by kernels where they serve."""
    if q.shape[-2] == 1 and real is None:
        attend = (
            attend_token_with_features_by_kernel
            if kernel_serves_token_features(q, k, v, feature_map, state)
            else attend_token_with_features
        )
        return attend(q, k, v, feature_map, window, state)
    fused = kernel_serves_text_features(q, k, v, state)
    return attend_text_with_features(
        q, k, v, feature_map, window, real, state, attend=attend_chunks_by_kernel if fused else attend_chunks
    )


def reference(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, sinks: int, real: Tensor | None = None
) -> Tensor:
    """softmax over j ≤ i of (q_i·k_j where j is near, log Σ_m exp(u_im + w_jm) elsewhere), times v."""
    tokens = q.shape[-2]
    real = torch.ones(q.shape[0], tokens, dtype=torch.bool, device=q.device) if real is None else real
    place = real.cumsum(-1) - 1
    near = (place[:, None, :] < sinks) | (place[:, :, None] - place[:, None, :] < window)
    seen = real[:, None, :] & torch.ones(tokens, tokens, dtype=torch.bool, device=q.device).tril()
    logits = q @ k[:, :, None].mT
    if feature_map is None:
        seen = seen & near
    else:
        logits = torch.where(
            near[:, None, None], logits, far_logits_exactly(feature_map.queries(q), feature_map.keys(k))
        )
    return logits.masked_fill(~seen[:, None, None], EMPTY).softmax(-1) @ v[:, :, None]
