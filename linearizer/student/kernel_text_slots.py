"""Texts read by heads with windows, alone or with slots, as Triton kernels. The reference is slots_torch.py.

All heads of a layer, in all numbers of bits, take the same three launches; their states lie in a pool of bytes
(state_pool.py), which is written over:

  lay_columns     turn and round what is new, behind what the rings hold (kernel_text_columns.py)
  merge_text      one program for each head of each text: merge the blocks that leave, one after the other, and write
                  down what the slots are in each period; others write the rings
  attend_periods  one program for each period: its rows attend to sinks, window and the slots of their period

Few slots change from one period to the next: each row that changed is written once, as a version, and a period is a
list of versions. Numbers that change from text to text are not specialised: kernels would be compiled anew.
"""

from __future__ import annotations

import functools

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import EMPTY, count_parts, for_chip, load_tile, on_device_of_first, padded, precision
from .kernel_leaving import load_tile_at, slots_of, write_merged
from .kernel_merging import merge_rows
from .kernel_packed_rows import (
    BLOCK,
    FEW,
    HEAD,
    LEVEL,
    MERGER,
    SINK_K,
    SINK_V,
    SLOTS,
    WINDOW,
    PackedConstants,
    for_kind,
    kinds_of_rows,
)
from .kernel_slot_rows import (
    ROWS_AT_ONCE,
    add_block,
    levels_of,
    lists_of,
    load_row_tile,
    make_workspace,
    merging_constants,
    merging_launch,
    numbers_of,
    read_slots,
    workspace_of,
)
from .kernel_text_columns import (
    columns_of,
    head_of,
    lay_columns,
    load_columns,
    places_of,
    remember_rows,
    tokens_at,
)
from .state import working_dtype

Tensor = torch.Tensor
PERIOD_BYTES = 2**28  # of the versions of all periods that attend at once
ROWS = {(9, 0): 64, (10, 0): 64, (8, 0): 32, None: 16}  # that attend at once, by the chip: registers hold no more
LEAST_PERIOD = 16  # tokens of a period of a head without slots


@triton.jit
def period_of(first, window, block):
    """The period of a place: how many blocks are merged then; those before 0 have none, either."""
    before = (window + block - 1) // block  # so that no negative number is divided
    return (first - window + before * block) // block + 1 - before


@triton.jit
def write_versions(work, rows, live, versions, begin, gain, C: tl.constexpr):
    """Write what rows hold now as versions, and keep their numbers."""
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr = versions
    key_scale_ptr, value_scale_ptr = numbers_of(work, C)[7], numbers_of(work, C)[8]
    od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
    at = begin + tl.arange(0, rows.shape[0])
    to_ptr = code_k_ptr + at[:, None] * C.D + od[None, :]
    codes = load_row_tile(work[2], rows, C.DP).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, codes, mask=live[:, None] & (od < C.D)[None, :])
    tl.store(scale_k_ptr + at, tl.load(key_scale_ptr + rows), mask=live)
    to_ptr = code_v_ptr + at[:, None] * C.DV + ov[None, :]
    codes = load_row_tile(work[1], rows, C.VP).to(to_ptr.dtype.element_ty)
    tl.store(to_ptr, codes, mask=live[:, None] & (ov < C.DV)[None, :])
    tl.store(scale_v_ptr + at, tl.load(value_scale_ptr + rows), mask=live)
    tl.store(level_ptr + at, levels_of(work, rows, live, gain, C), mask=live)
    tl.store(lists_of(work, C)[2] + rows, at, mask=live)


@triton.jit(noinline=True)  # as merge_rows is
def read_state(work, at_ptr, start_ptr, slots, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the slots of a head into rows; return how many there are, and how many are listed as changed."""
    _, _, state = slots_of(at_ptr, start_ptr, bits, KIND, C)
    return read_slots(work, state, slots, bits, KIND, C)


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS", "FROM", "PERIODS"])
def merge_text(
    kept, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C: tl.constexpr
):
    """Merge what leaves windows while a text is read, and keep the slots of each period; with other programs write the
    rings; grid (text and head, 1 + parts of a ring)."""
    if tl.program_id(1) == 0:
        merge_blocks(kept, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C)
    else:
        remember_rows(kept, columns, ends, codes_ptr, TOKENS, COLUMNS, tl.program_id(1) - 1, C)


@triton.jit
def merge_blocks(
    kept, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C: tl.constexpr
):
    """Merge the blocks that leave the window of a head in some periods."""
    SINKS = kept[4]
    metric_ptr, gain_ptr = merging
    float_ptr, list_ptr, _ = workspace
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr, period_ptr, ROOM, VERSIONS = periods
    own, text, at_ptr, start_ptr, bits = head_of(kept)
    slots, block = tl.load(at_ptr + SLOTS).to(tl.int32), tl.load(at_ptr + BLOCK).to(tl.int32)
    if block > 0:
        window = tl.load(at_ptr + WINDOW).to(tl.int32)
        first, end = places_of(ends, text, TOKENS, C)
        merger, period = tl.load(at_ptr + MERGER), period_of(first, window, block)
        metric_ptr, gain = metric_ptr + merger * (C.D + 1) * (C.D + 1), tl.load(gain_ptr + merger)
        new_k_ptr, new_v_ptr, new_scale_k_ptr, new_scale_v_ptr = columns_of(columns, own, COLUMNS, C)
        work, at = workspace_of(own, float_ptr, list_ptr, ROOM, C), own * VERSIONS
        versions = (
            code_k_ptr + at * C.D, code_v_ptr + at * C.DV, scale_k_ptr + at, scale_v_ptr + at, level_ptr + at
        )  # fmt: skip
        place_ptr, om = numbers_of(work, C)[5], tl.arange(0, C.MP)
        version_ptr, rows = lists_of(work, C)[2], tl.arange(0, C.RM)
        kept_ptr, levels = start_ptr.to(tl.pointer_type(C.KEPT)), 1 << bits
        count, changed = block * 0, block * 0
        if bits == 16:
            count, changed = read_state(work, at_ptr, start_ptr, slots, bits, 16, C)
        if C.LEAST <= 8:
            if bits == 8:
                count, changed = read_state(work, at_ptr, start_ptr, slots, bits, 8, C)
        if C.LEAST < 8:
            if bits < 8:
                count, changed = read_state(work, at_ptr, start_ptr, slots, bits, FEW, C)
        written = ROOM
        for begin in range(0, ROOM, C.BT):
            held = begin + tl.arange(0, C.BT)
            live = tl.load(place_ptr + held) < float("inf")
            write_versions(work, held, live, versions, begin, gain, C)
        for index in range(0, PERIODS):
            leaves = (period + FROM + index - 1) * block
            if (leaves >= 0) & (leaves + window >= first) & (leaves + window < end):
                column, missing = leaves + om - end + COLUMNS, tl.minimum(tl.maximum(SINKS - leaves, 0), block)
                live = (om >= missing) & (om < block)
                key = load_columns((new_k_ptr, new_scale_k_ptr), column, live, C.D, C.DP, C)
                value = load_columns((new_v_ptr, new_scale_v_ptr), column, live, C.DV, C.VP, C)
                tl.debug_barrier()  # the last period is written down
                count, changed, new = add_block(work, key, value, missing, block, count, changed, C)
                write_versions(work, new, live, versions, written, gain, C)
                gone = tl.maximum(count - slots, 0)
                count, changed = merge_rows(work, metric_ptr, bits, levels, count, slots, changed, kept_ptr, False, C)
                live, written = om < gone, written + C.MP
                write_versions(work, tl.load(work[5] + om, mask=live, other=0), live, versions, written, gain, C)
                written += C.MP
            if leaves + window < end:
                tl.debug_barrier()
                held = tl.load(place_ptr + rows, mask=rows < ROOM, other=float("inf")) < float("inf")
                version = tl.load(version_ptr + rows, mask=held, other=-1)
                tl.store(period_ptr + (own * PERIODS + index) * ROOM + rows, version, mask=rows < ROOM)
        codes_ptr += own * tl.num_programs(1) * C.BT * (C.DP + C.VP)
        slot_level_ptr = (start_ptr + tl.load(at_ptr + LEVEL)).to(tl.pointer_type(C.SUMS)) + SINKS + window
        into = work, at_ptr, start_ptr, slots, count, slot_level_ptr, gain, codes_ptr
        for_kind(write_merged, into, bits, C)


@triton.jit
def in_terms(x, C: tl.constexpr):
    """Numbers as two terms of the type of what is kept, the second of which is 0 where one suffices."""
    first = x.to(C.KEPT)
    return first, (x - first.to(C.ACC)).to(C.KEPT)


@triton.jit
def multiply(x, matrix, C: tl.constexpr):
    """x · matrix, nearly exactly: in bf16 of three products of terms, which take fewer registers than those of tf32."""
    if C.TWO:
        first, rest = in_terms(x, C)
        own, other = in_terms(matrix, C)
        out = tl.dot(first, own, out_dtype=C.ACC)
        out = tl.dot(rest, own, acc=out, out_dtype=C.ACC)
        out = tl.dot(first, other, acc=out, out_dtype=C.ACC)
    else:
        out = tl.dot(x, matrix, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def take_queries(row_ptr, live, turns, head, turned, C: tl.constexpr):
    """The queries of some rows, as their head looks with them."""
    step_ptr, matrix_ptr, scale, root = turns[0] + head * C.D, turns[4], turns[6], turns[7]
    od, q = tl.arange(0, C.DP), tl.zeros([live.shape[0], C.DP], C.ACC)
    if turned:
        for d in range(0, C.DP, C.DS):
            inner = d + tl.arange(0, C.DS)
            inside = live[:, None] & (inner < C.D)[None, :]
            part = tl.load(row_ptr + inner[None, :], mask=inside, other=0.0).to(C.ACC) * scale
            part *= tl.load(step_ptr + inner, mask=inner < C.D, other=0.0).to(C.ACC)[None, :] / root
            matrix = load_tile_at(matrix_ptr, inner, C.D, C.D, od, C.D).to(C.ACC)
            q += multiply(part, matrix, C)
    else:
        inside = live[:, None] & (od < C.D)[None, :]
        q = tl.load(row_ptr + od[None, :], mask=inside, other=0.0).to(C.ACC) * scale
    return q


@triton.jit
def logits_of(parts, codes, scales, C: tl.constexpr):
    """Products of queries, as one or two terms of a type, with codes and their scales."""
    q, rest = parts
    out = tl.dot(q, tl.trans(codes), out_dtype=C.ACC, input_precision=C.PRECISION)
    if C.TWO:
        out = tl.dot(rest, tl.trans(codes), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out * scales[None, :]


@triton.jit
def see(top, total, acc, logits, live, codes, scales, C: tl.constexpr):
    """Add logits and values, which are codes and scales, to the running softmax of rows."""
    logits = tl.where(live, logits, EMPTY)
    new = tl.maximum(top, tl.max(logits, 1))
    kept = tl.exp(top - new)
    p = tl.where(live, tl.exp(logits - new[:, None]), 0.0)
    shares = (p * scales[None, :]).to(codes.dtype)
    acc = tl.dot(shares, codes, acc=acc * kept[:, None], out_dtype=acc.dtype, input_precision=C.PRECISION)
    return new, total * kept + tl.sum(p, 1), acc


@triton.jit
def load_sinks(pointer, bits, os, SINKS, WIDTH: tl.constexpr, WP: tl.constexpr, C: tl.constexpr):
    """Sinks, which heads of few bits keep in bf16."""
    ov = tl.arange(0, WP)
    if bits == 16:
        sinks = load_tile(pointer.to(tl.pointer_type(C.KEPT)), os, ov, SINKS, WIDTH).to(C.KEPT)
    else:
        sinks = load_tile(pointer.to(tl.pointer_type(tl.bfloat16)), os, ov, SINKS, WIDTH).to(C.KEPT)
    return sinks


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS", "FROM", "PERIODS", "WIDTH"])
def attend_periods(given, kept, turns, columns, ends, periods, TOKENS, COLUMNS, FROM, PERIODS, WIDTH, C: tl.constexpr):
    """Attend with the rows of a period; grid (text and head, period, part of its rows)."""
    SINKS = kept[4]
    q_ptr, q_text, q_head, q_group, q_token, out_ptr, out_text, out_head, out_group, out_token = given
    own, text, at_ptr, start_ptr, bits = head_of(kept)
    head, window = tl.load(at_ptr + HEAD), tl.load(at_ptr + WINDOW).to(tl.int32)
    block = tl.load(at_ptr + BLOCK).to(tl.int32)
    length = tl.where(block > 0, block, C.MP)
    first, end = places_of(ends, text, TOKENS, C)
    period = period_of(first, window, length) + FROM + tl.program_id(1)
    row = tl.program_id(2) * C.BT + tl.arange(0, C.BT)
    begin, stop = window + (period - 1) * length, tl.minimum(window + period * length, end)
    place = begin + row // C.G
    live = (row < length * C.G) & (place >= first) & (place < stop)
    if (tl.maximum(begin, first) < stop) & (tl.program_id(2) * C.BT < length * C.G):
        turned = C.TURNED & (bits < 16)
        token, group = tokens_at(ends, text, place, live, end, TOKENS, C), row % C.G
        at = text * q_text + head * q_head + tl.where(live, token * q_token + group * q_group, 0)
        parts = in_terms(take_queries(q_ptr + at[:, None], live, turns, head, turned, C), C)
        top = tl.full([C.BT], EMPTY, C.ACC)
        total, acc = tl.zeros([C.BT], C.ACC), tl.zeros([C.BT, C.VP], C.ACC)
        if SINKS > 0:
            os = tl.arange(0, C.SP)
            ones = tl.full([C.SP], 1.0, C.ACC)
            k = load_sinks(start_ptr + tl.load(at_ptr + SINK_K), bits, os, SINKS, C.D, C.DP, C)
            v = load_sinks(start_ptr + tl.load(at_ptr + SINK_V), bits, os, SINKS, C.DV, C.VP, C)
            seen = (os < SINKS)[None, :] & (os[None, :] <= place[:, None])
            top, total, acc = see(top, total, acc, logits_of(parts, k, ones, C), seen, v, ones, C)
        new_k_ptr, new_v_ptr, new_scale_k_ptr, new_scale_v_ptr = columns_of(columns, own, COLUMNS, C)
        merged = tl.where(block > 0, period * block, tl.maximum(begin - window + 1, first - window))
        merged = tl.maximum(merged, SINKS)
        oldest = tl.maximum(place - window + 1, merged)
        for start in range(merged, stop, C.BN):
            near = start + tl.arange(0, C.BN)
            column, inside = near - end + COLUMNS, near < stop
            codes, scales = load_columns((new_k_ptr, new_scale_k_ptr), column, inside, C.D, C.DP, C)
            logits = logits_of(parts, codes, scales, C)
            codes, scales = load_columns((new_v_ptr, new_scale_v_ptr), column, inside, C.DV, C.VP, C)
            seen = (near[None, :] >= oldest[:, None]) & (near[None, :] <= place[:, None]) & inside[None, :]
            top, total, acc = see(top, total, acc, logits, seen, codes, scales, C)
        code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr, period_ptr, ROOM, VERSIONS = periods
        period_ptr += (own * PERIODS + tl.program_id(1)) * ROOM
        keys = code_k_ptr + own * VERSIONS * C.D, scale_k_ptr + own * VERSIONS
        values = code_v_ptr + own * VERSIONS * C.DV, scale_v_ptr + own * VERSIONS
        for start in range(0, tl.where(block > 0, ROOM, 0), C.BN):
            slot = tl.load(period_ptr + start + tl.arange(0, C.BN))
            level = tl.load(level_ptr + own * VERSIONS + slot, mask=slot >= 0, other=EMPTY)[None, :]
            codes, scales = load_columns(keys, slot, slot >= 0, C.D, C.DP, C)
            logits = logits_of(parts, codes, scales, C) + level
            codes, scales = load_columns(values, slot, slot >= 0, C.DV, C.VP, C)
            top, total, acc = see(top, total, acc, logits, level > EMPTY / 2, codes, scales, C)
        acc /= total[:, None]
        at = text * out_text + head * out_head + tl.where(live, token * out_token + group * out_group, 0)
        row_ptr = out_ptr + at[:, None]
        if turned:
            turn_back(acc, row_ptr, live, turns, head, WIDTH, C)
        else:
            ov = tl.arange(0, C.VP)
            inside = live[:, None] & (ov < C.DV)[None, :]
            tl.store(row_ptr + ov[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def turn_back(acc, row_ptr, live, turns, head, WIDTH, C: tl.constexpr):
    """Write what turned values gave, turned back."""
    ov, middle_ptr, matrix_ptr = tl.arange(0, C.VP), turns[2] + head * C.DV, turns[5]
    for d in range(0, WIDTH, C.DS):
        inner = d + tl.arange(0, C.DS)
        matrix = load_tile_at(matrix_ptr, ov, C.DV, C.DV, inner, C.DV).to(C.ACC)
        part = multiply(acc, matrix, C)
        part += tl.load(middle_ptr + inner, mask=inner < C.DV, other=0.0).to(C.ACC)[None, :]
        inside = live[:, None] & (inner < C.DV)[None, :]
        tl.store(row_ptr + inner[None, :], part.to(row_ptr.dtype.element_ty), mask=inside)


@functools.cache  # or the host would take longer to launch a kernel than it runs
def text_constants(
    dims: tuple[int, int], group: int, sinks: int, length: int, kept: torch.dtype, least: int, turned: bool,
    ordered: bool, rows: int,
) -> PackedConstants:  # fmt: skip
    """Return what kernels are compiled for that lay columns, and attend to periods of such a length."""
    exact, wide, work = kept.itemsize > 2, max(map(padded, dims)) > 128, torch.promote_types(kept, torch.float32)
    at_once = 16 if exact or wide else rows
    return PackedConstants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=min(32, padded(min(dims))), G=group, SP=sinks,
        BT=min(at_once, padded(length * group)), BN=32 if exact or wide else 64, MP=length, TURNED=turned,
        ORDERED=ordered, TWO=not exact, **kinds_of_rows(kept, least), **precision(work),
    )  # fmt: skip


@on_device_of_first
def launch_text(
    q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, pool: Tensor, count: Tensor, table: Tensor,
    merging: list[Tensor], turns: list[Tensor], sizes: list[int], order: tuple[Tensor, Tensor] | None,
) -> None:  # fmt: skip
    """Read a text with the heads of a pool, into `out` (state_pool.py), and leave their states there.

    Where some tokens are no real ones, `order` says how many are, (batch,), and lists those last, (batch, tokens).
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    (texts, bytes), heads, work = pool.shape, len(table), working_dtype(k)
    sinks, slots, most, _, least, window, shortest = sizes
    dims, group, tokens, programs = (q.shape[-1], v.shape[-1]), q.shape[2], q.shape[-2], texts * heads
    length, width, like = most or LEAST_PERIOD, window + tokens, q.new_empty(0, dtype=work)
    kept, ends = (pool, table, heads, bytes, sinks), (count, *(order or (count, count)))  # others are not read
    turning = *(turns or [like] * 6), scale, scale**0.5
    form = padded(sinks), length, k.dtype, least, bool(turns), order is not None
    constants = text_constants(dims, group, *form, for_chip(ROWS, q))
    columns = rows_for(k, programs * width, dims)
    given = k, v, *k.stride()[:3], *v.stride()[:3]
    lay_columns[(programs, count_parts(width, constants.BN.value // 2))](
        given, kept, turning, columns, ends, tokens, width, constants, num_warps=8, num_stages=1
    )
    floats, lists, room = make_workspace(programs if merging else 0, slots + most, dims, like)
    merging_size = merging_constants(dims, most or 1, room, work, k.dtype, least, bool(turns), 1, order is not None)
    periods = (tokens - 2) // (shortest or length) + 2
    changing, row_bytes = 2 * merging_size.MP.value, sum(dims) * k.element_size()
    together = max(1, min(periods, (PERIOD_BYTES // (programs * row_bytes) - room) // changing))
    versions = room + together * changing if merging else 0
    levels, lists_of_periods = like.new_empty(programs * versions), lists.new_empty(programs * together * room)
    states = *rows_for(k, programs * versions, dims), levels, lists_of_periods, room, versions
    rings = 1 + count_parts(window, ROWS_AT_ONCE)
    codes = pool.new_empty(programs * rings * ROWS_AT_ONCE * sum(map(padded, dims)))
    asked, merged = (q, *q.stride()[:4], out, *out.stride()[:4]), tuple(merging or [like] * 2)
    for begin in range(0, periods, together):
        merge_text[(programs, rings)](
            kept, merged, columns, ends, (floats, lists, room), states, codes, tokens, width, begin, together,
            merging_size, **merging_launch(),
        )  # fmt: skip
        attend_periods[(programs, together, count_parts(length * group, constants.BT.value))](
            asked, kept, turning, columns, ends, states, tokens, width, begin, together, dims[1], constants,
            num_warps=8, num_stages=1,
        )  # fmt: skip


def rows_for(like: Tensor, count: int, dims: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return room for rows: the codes of keys and values, and their scales."""
    codes = [like.new_empty(count * dim) for dim in dims]
    return *codes, *(like.new_empty(count, dtype=torch.float32) for _ in dims)
