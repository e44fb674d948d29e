"""Attention to a few exact tokens and to slots that all older tokens are merged into, in one softmax.

A slot is a token until it is merged: then it has the mean key and the mean value of several, the weight Σ 1, and the
spread Σ |metric·(k - mean)|² / weight of their keys, metric being such that |metric·x|² is the mean of (q·x)² over
queries. To a query it is one more token, with the logit q·k + log weight + gain · spread: the mean of e^(q·k) over a
slot is more than e^(q·mean) as its keys spread.

Tokens leave the window in blocks, at places that do not depend on how a text was cut into calls: to a row at place p,
all tokens before the first multiple of the block that leaves at most `window` exact tokens, itself included, are in
slots. A block adds as many slots as it has tokens; then as many as are too many go, each into one that stays
(slots_merging.py). The places whose rows see the same slots are a period.

The same attention is written several times: `reference` below (token by token); for a text (many periods at once) and
for a token in PyTorch (slots_torch.py; token_buffer.py for all heads of a layer); and both by kernels
(kernel_text_slots.py, kernel_token_slots.py). Callers use `slot_attention` for heads that hold the same, and
layer_student.py for those of a layer; kernel_dispatch.py chooses. Shapes as in features_torch.py.
"""

from __future__ import annotations

import torch
from torch import nn

from .kernel_dispatch import (
    attend_periods_by_kernel,
    attend_token_with_slots_by_kernel,
    kernel_serves_text_slots,
    kernel_serves_token_slots,
)
from .slots_merging import Merging, Slots, merge_block
from .slots_torch import attend_periods, attend_text_with_slots, attend_token_with_slots
from .state import SlotState

GAIN = 0.25  # half of what a Gaussian spread of keys calls for: measured best, since no query sees the mean spread

Tensor = torch.Tensor


class Merger(nn.Module):
    """How far apart two keys are to the queries of a head, and what their spread adds to a slot's logit."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return metric and gain: what offloads parameters brings them for a forward."""
        return self.metric, self.gain

    def reset(self, generator: torch.Generator | None = None) -> None:
        """Start where all directions count alike."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)


def slot_attention(q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> Tensor:
    """Attend and update the state, by kernels where they serve; q is multiplied by the scale of the scores."""
    if q.shape[-2] == 1 and real is None:
        attend = (
            attend_token_with_slots_by_kernel
            if kernel_serves_token_slots(q, k, v, merging, state)
            else attend_token_with_slots
        )
        return attend(q, k, v, merging, state)
    fused = kernel_serves_text_slots(q, k, v, merging, state)
    return attend_text_with_slots(q, k, v, merging, real, state, attend_periods_by_kernel if fused else attend_periods)


def reference(
    q: Tensor, k: Tensor, v: Tensor, merging: Merging, slots: int, sinks: int, real: Tensor | None = None
) -> Tensor:
    """Attend text by text and token by token: the plainest form, against which the others are tested."""
    out = v.new_zeros(*q.shape[:-1], v.shape[-1])
    for text in range(len(q)):
        tokens = torch.arange(q.shape[-2]) if real is None else real[text].nonzero()[:, 0]
        kept = SlotState.empty(k[:1], v[:1], 0, 0, slots)
        held = Slots(kept.slot_k, kept.slot_v, kept.weight, kept.spread)
        for place, token in enumerate(tokens.tolist()):
            merged = max(0, (place - merging.window) // merging.block + 1) * merging.block
            if merged and place == merged - merging.block + merging.window:  # a block leaves the window
                leaving = torch.arange(merged - merging.block, merged)
                block_k, block_v = (x[text : text + 1, :, tokens[leaving]] for x in (k, v))
                held = merge_block(held, block_k, block_v, (leaving >= sinks)[None], merging)
            exact = torch.cat([tokens[: min(sinks, merged)], tokens[merged : place + 1]])
            level = held.weight[0].log() + merging.gain[:, None] * held.spread[0]  # -∞ where a slot is empty
            keys, values = (torch.cat([x[text, :, exact], y[0]], 1) for x, y in ((k, held.k), (v, held.v)))
            logits = q[text, :, :, token] @ keys.mT  # (heads, group, exact tokens and slots)
            logits[..., len(exact) :] += level[:, None]
            out[text, :, :, token] = logits.softmax(-1) @ values
    return out
