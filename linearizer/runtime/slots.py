"""Attention to a few exact tokens and to slots that all older tokens are merged into, in one softmax.

A slot is a token until it is merged: then it has the mean key and the mean value of several, the weight Σ 1, and the
spread Σ |metric·(k - mean)|² / weight of their keys, metric being such that |metric·x|² is the mean of (q·x)² over
queries. To a query it is one more token, with the logit q·k + log weight + gain · spread: the mean of e^(q·k) over a
slot is more than e^(q·mean) as its keys spread.

Tokens leave the window in blocks, at places that do not depend on how a text was cut into calls: a row at place p sees
as merged the tokens before the first multiple of the block that leaves it at most `window` exact ones, itself among
them. With a block come as many slots too many; the pairs that are cheapest to merge are merged until there are `slots`
again.

Shapes as in linear_attention.py, whose softmax this uses. A token alone is attended to in place (turns.py, and by a
kernel single_slots.py), a text in turns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from .kernel_dispatch_token_slots import fused_slot_step, slot_step_serves
from .kernel_trial import Drawn, Sizes, takes, trusted
from .slots_merging import MOST, WAITING, Merging, rounds
from .slots_torch import Leaving, attend_turns, step
from .state import Columns, SlotState, lay_columns, remember_sinks, remember_window, take

try:
    from .kernel_text_merging import merge as merge_fused
    from .kernel_text_slots import look as look_fused
except ImportError as missing:
    if missing.name != "triton":
        raise
    merge_fused = look_fused = None  # type: ignore[assignment]

GAIN = 0.25  # half of what a Gaussian spread of keys calls for: measured best, since no query sees the mean spread

TOGETHER = 64  # turns whose rows attend at once

Tensor = torch.Tensor


class Merger(nn.Module):
    """How far apart two keys are to the queries of a head, and what their spread adds to a slot's logit."""

    def __init__(self, heads: int, dim: int) -> None:
        super().__init__()
        self.metric = nn.Parameter(torch.zeros(heads, dim, dim), requires_grad=False)
        self.gain = nn.Parameter(torch.zeros(heads), requires_grad=False)

    def reset(self) -> None:
        """Start where all directions count alike."""
        self.metric.data.copy_(torch.eye(self.metric.shape[-1]).expand_as(self.metric))
        self.gain.data.fill_(GAIN)


def slot_attention(q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState) -> Tensor:
    """Attend and bring the state up to date; q is multiplied by the scale of the scores."""
    if q.shape[-2] == 1 and real is None:
        one = fused_slot_step if slot_step_serves(q, k, v, merging, state) else step
        return one(q, k, v, merging, state)
    return attend(q, k, v, merging, real, state, kernels_serve(q, k, v, merging, state))


def attend(
    q: Tensor, k: Tensor, v: Tensor, merging: Merging, real: Tensor | None, state: SlotState, fused: bool
) -> Tensor:
    """The same by kernels, if fused, or in PyTorch."""
    tokens, window, block, order = q.shape[-2], merging.window, merging.block, None
    if real is not None:
        order = real.to(torch.int8).argsort(dim=-1, stable=True)
        q = take(q, order)
    columns = lay_columns(k, v, window, real, state)
    remember_sinks(state, columns)
    first, end = state.count, columns.first + window + tokens
    turn = torch.div(first - window, block, rounding_mode="floor") + 1  # how many blocks are merged for a row's place
    turns = max(1, int((torch.div(end - 1 - window, block, rounding_mode="floor") + 2 - turn).max()))
    turn = turn[:, None] + torch.arange(turns, device=q.device)
    start = window + block * (turn - 1)  # the first place that sees a turn's blocks merged
    begin, rows = (start, block) if tokens > 1 else (first[:, None], 1)
    place = begin[..., None] + torch.arange(rows, device=q.device)
    merges = (turn >= 1) & (start >= first[:, None]) & (start < end[:, None])
    parts = []
    for some in torch.arange(turns, device=q.device).split(TOGETHER):
        leaving = Leaving.of(columns, turn[:, some], merges[:, some], block, state.sink_k.shape[-2])
        asks = take(q, (place[:, some].flatten(1) - end[:, None] + tokens).clamp(0, tokens - 1))
        way = attend_fused if fused else attend_turns
        parts.append(way(asks, place[:, some], turn[:, some] * block, leaving, columns, merging, state))
    state.count = end
    remember_window(state, columns, tokens)
    if tokens == 1:
        return parts[0]
    place = end[:, None] - tokens + torch.arange(tokens, device=q.device)
    out = take(torch.cat(parts, -2), (place - start[:, :1]).clamp_min(0))
    return out if order is None else take(out, order.argsort(-1))


def attend_fused(
    q: Tensor, place: Tensor, merged: Tensor, leaving: Leaving, columns: Columns, merging: Merging, state: SlotState
) -> Tensor:
    """The same by kernels."""
    k, v, slots = columns.k.contiguous(), columns.v.contiguous(), state.slot_k.shape[2]
    held = [state.slot_k, state.slot_v, state.weight, state.spread]
    blocks = leaving.index, leaving.comes, leaving.merges
    count = rounds(slots + merging.block, slots)
    found = merge_fused(k, v, merging.scaled.contiguous(), *blocks, held, count, WAITING, merging.bits)
    state.slot_k, state.slot_v, state.weight, state.spread = (x[:, -1].clone() for x in found)  # not all turns with it
    sinks = state.sink_k.contiguous(), state.sink_v.contiguous()
    merged = merged.clamp_min(0)
    near = place.contiguous(), merged, columns.first, columns.empty
    return look_fused(q.contiguous(), k, v, *sinks, found, merging.gain, *near, columns.window)


def kernels_serve(q: Tensor, k: Tensor, v: Tensor, merging: Merging, state: SlotState) -> bool:
    """Tell whether kernels may attend with such tensors: they give no gradients."""
    slots, block = state.slot_k.shape[2], merging.block
    if merge_fused is None or torch.is_grad_enabled() or slots + block > MOST or not takes(q, k, v, state.slot_k):
        return False
    sizes = Sizes(q.shape[2], q.shape[-1], v.shape[-1], state.sink_k.shape[2], 0)

    def answers(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        text = Drawn.of(q, sizes, sizes.sinks + block + slots + 4 * block, dtype)
        metric = torch.eye(sizes.key_dim, device=q.device, dtype=dtype).expand(2, -1, -1)
        own = Merging(metric, torch.full((2,), GAIN, device=q.device, dtype=dtype), block, block, bits=merging.bits)
        state = SlotState.empty(text.k, text.v, block, sizes.sinks, slots)
        out = attend(text.q, text.k, text.v, own, None, state, by_kernels)
        return [out.to(dtype), state.slot_k, state.slot_v, state.weight]

    with torch.no_grad():
        return trusted("slots", q, (*sizes, slots, block, merging.bits), answers)
