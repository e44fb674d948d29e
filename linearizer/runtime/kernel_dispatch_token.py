"""One token by kernels: which serve, what they are given, and how they come to be trusted.

All heads of a layer that hold windows and features, of whatever sizes, attend in one launch, and all that hold slots
(single_slots.py) in another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .feature_maps_folded import NONE, Folded
from .features_torch import step
from .kernel_dispatch import sizes_of
from .kernel_dispatch_token_slots import can_merge, launch_slots, right_slots
from .kernel_token_table import Held, table_of
from .kernel_trial import Drawn, Sizes, takes, trusted
from .softmax_parts import Features, folded_of
from .state import State, working_dtype
from .state_8bit import pack, rounded

try:
    from .kernel_token_features import run_step
except ImportError as missing:
    if missing.name != "triton":
        raise
    run_step = None  # type: ignore[assignment]

WINDOW, FEATURES = 16, 40  # of trials
GIVEN = -1  # features that are not folded

Tensor = torch.Tensor


def step_serves(q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, state: State) -> bool:
    """Tell whether a kernel may attend with such a token, and change the state in place."""
    if run_step is None or torch.is_grad_enabled() or not takes(q, k, v, state.sink_k):
        return False
    folded = folded_of(feature_map)
    shares = NONE if feature_map is None else GIVEN if folded is None else folded.shares
    return right(q, sizes_of(q, v, state), shares)


def right(q: Tensor, sizes: Sizes, shares: int, scale: float = 1.0, bits: int = 16) -> bool:
    """Try the kernel for such queries; how many features there are makes no other kernel of it."""
    sizes = sizes._replace(features=FEATURES)

    def answers(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        tokens = WINDOW + sizes.sinks + 8
        text = Drawn.of(q, sizes, tokens, dtype, None if shares == GIVEN else shares)
        state, out = State.empty(text.k, text.v, WINDOW, sizes.sinks, FEATURES), []
        text.q = (text.q / scale).to(q.dtype).to(dtype)
        if by_kernels and bits == 8:
            state = pack(state)
        for t in range(tokens):
            one, k, v = text.piece(t, t + 1)
            if by_kernels:
                out.append(fused_step(one, k, v, text.features, WINDOW, state, scale))
            else:
                k, v = (rounded(x) if bits == 8 else x for x in (k, v))
                out.append(step(one * scale, k, v, text.features, WINDOW, state))
        return [torch.cat(out, -2).to(dtype), state.level, state.mean]

    return trusted("single tokens", q, (*sizes, shares, scale, bits), answers)


@torch.no_grad()
def fused_step(
    q: Tensor, k: Tensor, v: Tensor, feature_map: Features | None, window: int, state: State, scale: float = 1.0
) -> Tensor:
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
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    launch(q, k, v, out, [Held(list(range(k.shape[1])), state, window, folded)], scale, u, w)
    return out


@torch.compiler.disable  # which would not see that memory changes behind addresses
def launch(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, groups: list[Held], scale: float,
    u: Tensor | None = None, w: Tensor | None = None,
) -> None:  # fmt: skip
    """Let heads of a layer attend in one launch, for q (batch, heads, group, 1, dim) of the whole layer."""
    state, folded = groups[0].state, [held.folded for held in groups if held.folded is not None]
    shares = GIVEN if u is not None else shares_of(folded)
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    made = folded[0].query.dtype if folded else torch.float32
    run_step(q, k, v, out, table_of(groups), state.sink_k, state.level, shares, scale, u, w, made)


def shares_of(folded: Sequence[Folded]) -> int:
    """How the features of heads that attend together are shared out."""
    return max((it.shares for it in folded), default=NONE)


def step_layer(
    groups: Sequence[Any], memory: list | None, q: Tensor, k: Tensor, v: Tensor, scale: float, real: Tensor | None,
    out: Tensor,
) -> list[int]:  # fmt: skip
    """Attend with a token where one launch can do all heads of a kind; say which groups are done, and in `out`.

    q (batch, heads, group, 1, dim), k, v and out are those of the whole layer, and their heads' states in `memory`.
    """
    if run_step is None or real is not None or q.shape[-2] > 1 or memory is None or len(memory) < len(groups):
        return []
    if torch.is_grad_enabled() or not takes(q, k, v):
        return []
    kinds: dict[tuple[int, bool], dict[int, Held]] = {}
    for index, (group, state) in enumerate(zip(groups, memory, strict=False)):
        held = group.held(scale, state)
        if held is None or held.state.sink_k.dtype not in (k.dtype, torch.int8):
            continue
        if held.state.sink_k.device != k.device:  # PyTorch refuses it; to a kernel it would be addresses
            continue
        if held.merging is None or can_merge(held):
            kinds.setdefault((held.bits, held.merging is None), {})[index] = held
    done: list[int] = []
    for (bits, plain), some in kinds.items():
        first, *_ = states = list(some.values())
        shares = shares_of([held.folded for held in states if held.folded is not None])
        if plain and right(q, sizes_of(q, v, first.state), shares, scale, bits):
            launch(q, k, v, out, states, scale)
        elif not plain and right_slots(q, v, first, scale):
            launch_slots(q, k, v, out, states, scale)
        else:
            continue
        done += some
    return done
