"""One token of heads with slots by a kernel: whether it serves, and what it is given."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .kernel_token_table import Held, table_of
from .kernel_trial import Drawn, Sizes, takes, trusted
from .slots_merging import MOST, Merging
from .slots_torch import step
from .state import SlotState
from .state_8bit import pack, rounded, unpacked

try:
    from .kernel_token_slots import run_slot_step
except ImportError as missing:
    if missing.name != "triton":
        raise
    run_slot_step = None  # type: ignore[assignment]

WINDOW, SLOTS, BLOCK = 8, 28, 8  # of trials

Tensor = torch.Tensor


def slot_step_serves(q: Tensor, k: Tensor, v: Tensor, merging: Merging, state: SlotState) -> bool:
    """Tell whether a kernel may attend with such a token, and change the state in place."""
    if run_slot_step is None or torch.is_grad_enabled() or not takes(q, k, v, state.sink_k):
        return False
    held = Held([], state, merging.window, merging=merging)
    return can_merge(held) and right_slots(q, v, held)


def can_merge(held: Held) -> bool:
    """Tell whether a block lies in the window, and all that it is merged with in one program."""
    window, slots, block, _ = held.sizes()
    merging = held.merging
    if merging is None or merging.bits != held.bits:  # numbers that are rounded and not kept as bytes
        return False
    whole = merging.metric.is_contiguous() and merging.gain.is_contiguous()
    return whole and 0 < block <= window and slots + block <= MOST


def right_slots(q: Tensor, v: Tensor, held: Held, scale: float = 1.0) -> bool:
    """Try the kernel for such queries; how many slots there are makes no other kernel of it."""
    assert held.merging is not None
    root, bits, made = held.merging.root, held.bits, held.merging.metric.dtype
    sizes = Sizes(q.shape[2], q.shape[-1], v.shape[-1], held.state.sink_k.shape[2], 0)

    def answers(by_kernels: bool, dtype: torch.dtype) -> Sequence[Tensor]:
        tokens = sizes.sinks + WINDOW + SLOTS + 2 * BLOCK
        text = Drawn.of(q, sizes, tokens, dtype)
        text.q = (text.q / scale).to(q.dtype).to(dtype)
        metric = torch.eye(sizes.key_dim, device=q.device, dtype=made).repeat(2, 1, 1) / root
        own = Merging(metric, torch.full_like(metric[:, 0, 0], 0.25), WINDOW, BLOCK, root, bits)
        state, out = SlotState.empty(text.k, text.v, WINDOW, sizes.sinks, SLOTS), []
        if by_kernels and bits == 8:
            state = pack(state)
        for t in range(tokens):
            one, k, v = text.piece(t, t + 1)
            if by_kernels:
                out.append(fused_slot_step(one, k, v, own, state, scale))
            else:
                k, v = (rounded(x) if bits == 8 else x for x in (k, v))
                out.append(step(one * scale, k, v, own, state))
        slots = (unpacked(x, dtype) if x.dtype == torch.int8 else x for x in (state.slot_k, state.slot_v))
        return [torch.cat(out, -2).to(dtype), *slots, state.weight]

    with torch.no_grad():
        return trusted("single tokens and slots", q, (*sizes, scale, root, bits), answers)


@torch.no_grad()
def fused_slot_step(q: Tensor, k: Tensor, v: Tensor, merging: Merging, state: SlotState, scale: float = 1.0) -> Tensor:
    """Attend with one token by one kernel; nothing waits for the device, and no tensor of the state is exchanged."""
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=v.dtype, device=v.device)
    launch_slots(q, k, v, out, [Held(list(range(k.shape[1])), state, merging.window, merging=merging)], scale)
    return out


@torch.compiler.disable
def launch_slots(q: Tensor, k: Tensor, v: Tensor, out: Tensor, groups: list[Held], scale: float) -> None:
    """Let heads of a layer attend in one launch, for q (batch, heads, group, 1, dim) of the whole layer."""
    state, merging = groups[0].state, groups[0].merging
    assert merging is not None
    room = max(slots + block for _, slots, block, _ in (held.sizes() for held in groups))
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    table = table_of(groups)
    run_slot_step(q, k, v, out, table, state.sink_k, state.weight, room, merging.metric.dtype, merging.root, scale)
