"""One token for heads with a window alone in one launch: state and output, the state in place.

Nothing is read back from the device, so that a token can be captured in a CUDA graph. features_torch.py is the
reference.
"""

from __future__ import annotations

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    COUNT,
    HEAD,
    HEADS,
    OWN,
    TYPES,
    WINDOW,
    Constants,
    address,
    attend_near,
    dims_at_once,
    load_new,
    new_exponent,
    on_device_of_first,
    padded,
    precision,
    store_token,
)
from .kernel_token_table import TokenTable
from .state import ExactState, FeatureState

Tensor = torch.Tensor


@triton.jit
def token_windows_kernel(table, token, layout, out_ptr, C: tl.constexpr):
    """Grid (rows of the table, batch)."""
    table_ptr, ticket_ptr, COLUMNS = table
    q_ptr, k_ptr, v_ptr = token
    KV, q_batch, q_head, q_stride, k_batch, k_head, v_batch, v_head = layout
    row_ptr, batch = table_ptr + tl.program_id(0) * COLUMNS, tl.program_id(1).to(tl.int64)
    head, own, heads = tl.load(row_ptr + HEAD), tl.load(row_ptr + OWN), tl.load(row_ptr + HEADS)
    WIDTH, at = tl.load(row_ptr + WINDOW).to(tl.int32), batch * heads + own
    place = tl.load(address(row_ptr, COUNT, tl.int64) + batch).to(tl.int32)
    og, ov = tl.arange(0, C.GP), tl.arange(0, C.VP)
    q = q_ptr + batch * q_batch + head * q_head
    k, v = k_ptr + batch * k_batch + head * k_head, v_ptr + batch * v_batch + head * v_head
    k_exponent, v_exponent = new_exponent(k, C.D, C.DP, C), new_exponent(v, C.DV, C.VP, C)
    new_v = load_new(v, ov, v_exponent, C.DV, C)
    merged = tl.maximum(place - WIDTH + 1, 0)
    top, total, acc = attend_near(row_ptr, at, q, q_stride, (k, k_exponent, v, new_v), place, merged, WIDTH, og, C)
    tl.store(out_ptr + ((batch * KV + head) * C.G + og[:, None]) * C.DV + ov[None, :],
             (acc / total[:, None]).to(out_ptr.dtype.element_ty),
             mask=(og < C.G)[:, None] & (ov < C.DV)[None, :])  # fmt: skip
    store_token(row_ptr, at, k, k_exponent, v, v_exponent, place, WIDTH, ticket_ptr, C)


def token_layout(q: Tensor, k: Tensor, v: Tensor, state: ExactState) -> tuple[tuple, dict]:
    """Say how the heads of a layer lie, q (batch, heads, group, 1, dim), k, v (batch, heads, 1, dim), and their sizes.

    `state` is any of the states.
    """
    layout = q.shape[1], *q.stride()[:3], *k.stride()[:2], *v.stride()[:2]
    (group, _, dim), value_dim, sinks = q.shape[2:], v.shape[-1], state.sink_k.shape[-2]
    small, wide = state.window_k.dtype == torch.int8, dims_at_once(q) < padded(dim) or padded(value_dim) > 128
    return layout, {
        **{"G": group, "GP": padded(group), "D": dim, "DP": padded(dim), "DS": dims_at_once(q)},
        **{"DV": value_dim, "VP": padded(value_dim), "S": sinks, "SP": padded(sinks)},
        **{"BITS": 8 if small else 16, "KEPT": TYPES[state.window_k.dtype], "SINK": TYPES[state.sink_k.dtype]},
        "BN": 16 if small or wide else 32,  # bytes lie unaligned
    }


@on_device_of_first
def run_token_windows(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, table: TokenTable, state: FeatureState, scale: float = 1.0
) -> None:
    """Attend with one token to what some heads of a layer hold, and bring all of it up to date in place.

    `state` is any of the states.
    """
    layout, sizes = token_layout(q, k, v, state)
    token_windows_kernel[table.rows.shape[0], q.shape[0]](
        (table.rows, table.tickets, table.rows.shape[1]),
        (q, k, v),
        layout,
        out,
        Constants(**sizes, SCALE=scale, **precision(state.level)),
        num_warps=8,
        num_stages=1,
    )
