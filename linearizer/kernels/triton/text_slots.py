"""Triton kernels that read texts with heads with windows, alone or with slots; they equal `read` of the definition.

All heads of a layer, whatever their bits, share three launches. Their states are in a pool of bytes (state_pool.py),
which the launches overwrite:

  lay_columns     turn and round new tokens, and put them after those of the rings (text_columns.py)
  merge_text      one program for each head of each text merges the leaving blocks, one after the other, and records
                  the slots of each period; other programs write the rings
  attend_periods  one program for each period: its rows attend to sinks, window and the slots of their period

Few slots change from one period to the next: each changed row is written once, as a version, and a period is a list of
versions. Numbers that change from text to text are not specialised, since kernels would be compiled again for each.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from linearizer.kernels.triton.common import (
    EMPTY,
    add_learned_sink,
    capped,
    count_parts,
    for_chip,
    load_tile,
    on_device_of_first,
    padded,
    precision,
)
from linearizer.kernels.triton.merge_workspace import (
    ROWS_AT_ONCE,
    add_tokens,
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
from linearizer.kernels.triton.merging import merge_rows
from linearizer.kernels.triton.packed_rows import (
    BLOCK,
    HEAD,
    LEVEL,
    MERGER,
    SINK_K,
    SINK_V,
    SLOTS,
    WINDOW,
    PackedConstants,
    call_for_kind,
    count_for_kind,
    kinds_of_rows,
)
from linearizer.kernels.triton.prepare_token import load_tile_at, slots_of, write_merged
from linearizer.kernels.triton.text_columns import (
    columns_of,
    head_of,
    lay_columns,
    load_columns,
    places_of,
    remember_rows,
    tokens_at,
)
from linearizer.student.attention_of_student import working_dtype

Tensor = torch.Tensor
PERIOD_BYTES = 2**28  # of the versions of all periods in one launch
ROWS = {(9, 0): 64, (10, 0): 64, (8, 0): 32, None: 16}  # of a program, by the chip: more do not fit into registers
LEAST_PERIOD = 16  # tokens of a period of a head without slots


@triton.jit
def period_of(first, window, block):
    """Return the period of a place: how many blocks are merged by then; none before 0."""
    before = (window + block - 1) // block  # so that no negative number is divided
    return (first - window + before * block) // block + 1 - before


@triton.jit
def write_versions(work, rows, live, versions, begin, gain, C: tl.constexpr):
    """Write the current contents of rows as versions, and store the numbers of these versions."""
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr = versions
    key_scale_ptr, value_scale_ptr = numbers_of(work, C)[7], numbers_of(work, C)[8]
    od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
    version = begin + tl.arange(0, rows.shape[0])
    target_ptr = code_k_ptr + version[:, None] * C.D + od[None, :]
    codes = load_row_tile(work[2], rows, C.DP).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr, codes, mask=live[:, None] & (od < C.D)[None, :])
    tl.store(scale_k_ptr + version, tl.load(key_scale_ptr + rows), mask=live)
    target_ptr = code_v_ptr + version[:, None] * C.DV + ov[None, :]
    codes = load_row_tile(work[1], rows, C.VP).to(target_ptr.dtype.element_ty)
    tl.store(target_ptr, codes, mask=live[:, None] & (ov < C.DV)[None, :])
    tl.store(scale_v_ptr + version, tl.load(value_scale_ptr + rows), mask=live)
    tl.store(level_ptr + version, levels_of(work, rows, live, gain, C), mask=live)
    tl.store(lists_of(work, C)[2] + rows, version, mask=live)


@triton.jit(noinline=True)  # as merge_rows is
def read_state(work, field_ptr, start_ptr, slots, bits, KIND: tl.constexpr, C: tl.constexpr):
    """Copy the slots of a head into rows, and list all as changed; return how many there are."""
    _, _, state = slots_of(field_ptr, start_ptr, bits, KIND, C)
    return read_slots(work, state, slots, bits, KIND, C)


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS", "FROM", "PERIODS"])
def merge_text(
    pool, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C: tl.constexpr
):
    """Merge the blocks that leave windows while a text is read, and record the slots of each period; other programs
    write the rings; grid (text and head, 1 + parts of a ring)."""
    if tl.program_id(1) == 0:
        merge_blocks(pool, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C)
    else:
        remember_rows(pool, columns, ends, codes_ptr, TOKENS, COLUMNS, tl.program_id(1) - 1, C)


@triton.jit
def merge_blocks(
    pool, merging, columns, ends, workspace, periods, codes_ptr, TOKENS, COLUMNS, FROM, PERIODS, C: tl.constexpr
):
    """Merge the blocks that leave the window of a head in the PERIODS periods from FROM on."""
    SINKS = pool[4]
    metric_ptr, gain_ptr = merging
    float_ptr, list_ptr, _ = workspace
    code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr, period_ptr, ROOM, VERSIONS = periods
    program, text, field_ptr, start_ptr, bits = head_of(pool)
    slots, block = tl.load(field_ptr + SLOTS).to(tl.int32), tl.load(field_ptr + BLOCK).to(tl.int32)
    if block > 0:
        window = tl.load(field_ptr + WINDOW).to(tl.int32)
        first, end = places_of(ends, text, TOKENS, C)
        merger, period = tl.load(field_ptr + MERGER), period_of(first, window, block)
        metric_ptr, gain = metric_ptr + merger * (C.D + 1) * (C.D + 1), tl.load(gain_ptr + merger)
        new_k_ptr, new_v_ptr, new_scale_k_ptr, new_scale_v_ptr = columns_of(columns, program, COLUMNS, C)
        work, base = workspace_of(program, float_ptr, list_ptr, ROOM, C), program * VERSIONS
        versions = (
            code_k_ptr + base * C.D, code_v_ptr + base * C.DV, scale_k_ptr + base, scale_v_ptr + base, level_ptr + base
        )  # fmt: skip
        place_ptr = numbers_of(work, C)[5]
        version_ptr, rows = lists_of(work, C)[2], tl.arange(0, C.RM)
        type_ptr, levels = start_ptr.to(tl.pointer_type(C.KEPT)), 1 << bits
        count = count_for_kind(read_state, (work, field_ptr, start_ptr, slots), bits, C)
        changed, written, are_new = count, ROOM, block * 0 + 1
        for begin in range(0, ROOM, C.BT):
            chunk = begin + tl.arange(0, C.BT)
            live = tl.load(place_ptr + chunk) < float("inf")
            write_versions(work, chunk, live, versions, begin, gain, C)
        for index in range(0, PERIODS):
            leaving = (period + FROM + index - 1) * block
            if (leaving >= 0) & (leaving + window >= first) & (leaving + window < end):
                missing = tl.minimum(tl.maximum(SINKS - leaving, 0), block)
                for begin in range(0, block, C.MP):
                    om = begin + tl.arange(0, C.MP)
                    column, live = leaving + om - end + COLUMNS, (om >= missing) & (om < block)
                    key = load_columns((new_k_ptr, new_scale_k_ptr), column, live, C.D, C.DP, C)
                    value = load_columns((new_v_ptr, new_scale_v_ptr), column, live, C.DV, C.VP, C)
                    tl.debug_barrier()  # until the last period is recorded
                    new_rows = add_tokens(work, key, value, om - missing, live, count, changed, C)
                    write_versions(work, new_rows, live, versions, written, gain, C)
                    written += C.MP
                count, changed = count + block - missing, changed + block - missing
                merged = tl.maximum(count - slots, 0)
                count, changed = merge_rows(work, metric_ptr, bits, levels, count, slots, changed, are_new, type_ptr, C)
                for begin in range(0, merged, C.MP):
                    om = begin + tl.arange(0, C.MP)
                    rows_now = tl.load(work[5] + om, mask=om < merged, other=0)
                    write_versions(work, rows_now, om < merged, versions, written, gain, C)
                    written, are_new = written + C.MP, block * 0
            if leaving + window < end:
                tl.debug_barrier()
                in_use = tl.load(place_ptr + rows, mask=rows < ROOM, other=float("inf")) < float("inf")
                version = tl.load(version_ptr + rows, mask=in_use, other=-1)
                tl.store(period_ptr + (program * PERIODS + index) * ROOM + rows, version, mask=rows < ROOM)
        codes_ptr += program * tl.num_programs(1) * C.BT * (C.DP + C.VP)
        slot_level_ptr = (start_ptr + tl.load(field_ptr + LEVEL)).to(tl.pointer_type(C.SUMS)) + SINKS + window
        arguments = work, field_ptr, start_ptr, slots, count, slot_level_ptr, gain, codes_ptr
        call_for_kind(write_merged, arguments, bits, C)


@triton.jit
def split_terms(x, C: tl.constexpr):
    """Split numbers into two terms of type KEPT; the second is 0 where one suffices."""
    high = x.to(C.KEPT)
    return high, (x - high.to(C.ACC)).to(C.KEPT)


@triton.jit
def multiply(x, matrix, C: tl.constexpr):
    """Return x · matrix, nearly exactly: bf16 takes three products of terms, which need fewer registers than tf32."""
    if C.TWO:
        x_high, x_low = split_terms(x, C)
        matrix_high, matrix_low = split_terms(matrix, C)
        out = tl.dot(x_high, matrix_high, out_dtype=C.ACC)
        out = tl.dot(x_low, matrix_high, acc=out, out_dtype=C.ACC)
        out = tl.dot(x_high, matrix_low, acc=out, out_dtype=C.ACC)
    else:
        out = tl.dot(x, matrix, out_dtype=C.ACC, input_precision=C.PRECISION)
    return out


@triton.jit
def take_queries(row_ptr, live, turns, head, turned, C: tl.constexpr):
    """Load the queries of rows, scaled, and turned where their head turns them."""
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
def logits_of(terms, codes, scales, left_out, cap, C: tl.constexpr):
    """Return products of queries, in one or two terms, with codes and their scales, as the model caps them."""
    q_high, q_low = terms
    out = tl.dot(q_high, tl.trans(codes), out_dtype=C.ACC, input_precision=C.PRECISION)
    if C.TWO:
        out = tl.dot(q_low, tl.trans(codes), acc=out, out_dtype=C.ACC, input_precision=C.PRECISION)
    out *= scales[None, :]
    if C.SCORED:
        out = capped(out, left_out[:, None], cap, C)
    return out


@triton.jit
def add_scaled_values(top, total, acc, logits, live, codes, scales, C: tl.constexpr):
    """Add logits and values, as codes and scales, to the running softmax of rows."""
    logits = tl.where(live, logits, EMPTY)
    new_top = tl.maximum(top, tl.max(logits, 1))
    decay = tl.exp(top - new_top)
    p = tl.where(live, tl.exp(logits - new_top[:, None]), 0.0)
    weights = (p * scales[None, :]).to(codes.dtype)
    acc = tl.dot(weights, codes, acc=acc * decay[:, None], out_dtype=acc.dtype, input_precision=C.PRECISION)
    return new_top, total * decay + tl.sum(p, 1), acc


@triton.jit
def load_sinks(pointer, bits, os, SINKS, WIDTH: tl.constexpr, WP: tl.constexpr, C: tl.constexpr):
    """Load sinks, which heads of few bits store in bf16."""
    ov = tl.arange(0, WP)
    if bits == 16:
        sinks = load_tile(pointer.to(tl.pointer_type(C.KEPT)), os, ov, SINKS, WIDTH).to(C.KEPT)
    else:
        sinks = load_tile(pointer.to(tl.pointer_type(tl.bfloat16)), os, ov, SINKS, WIDTH).to(C.KEPT)
    return sinks


@triton.jit(do_not_specialize=["TOKENS", "COLUMNS", "FROM", "PERIODS", "WIDTH"])
def attend_periods(inputs, pool, turns, columns, ends, periods, TOKENS, COLUMNS, FROM, PERIODS, WIDTH, C: tl.constexpr):
    """Attend with the rows of a period; grid (text and head, period, part of its rows)."""
    SINKS = pool[4]
    q_ptr, q_text, q_head, q_group, q_token, out_ptr, out_text, out_head, out_group, out_token, scored = inputs
    program, text, field_ptr, start_ptr, bits = head_of(pool)
    head, window = tl.load(field_ptr + HEAD), tl.load(field_ptr + WINDOW).to(tl.int32)
    block = tl.load(field_ptr + BLOCK).to(tl.int32)
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
        offset = text * q_text + head * q_head + tl.where(live, token * q_token + group * q_group, 0)
        terms = split_terms(take_queries(q_ptr + offset[:, None], live, turns, head, turned, C), C)
        scored_ptr, cap, scored_text, scored_head, scored_token = scored
        offset = text * scored_text + head * scored_head + tl.where(live, token * scored_token + 2 * group, 0)
        left_out = tl.zeros([C.BT], C.ACC)
        if C.SCORED:
            left_out = tl.load(scored_ptr + offset, mask=live, other=0.0)
        top = tl.full([C.BT], EMPTY, C.ACC)
        total, acc = tl.zeros([C.BT], C.ACC), tl.zeros([C.BT, C.VP], C.ACC)
        if SINKS > 0:
            os = tl.arange(0, C.SP)
            ones = tl.full([C.SP], 1.0, C.ACC)
            k = load_sinks(start_ptr + tl.load(field_ptr + SINK_K), bits, os, SINKS, C.D, C.DP, C)
            v = load_sinks(start_ptr + tl.load(field_ptr + SINK_V), bits, os, SINKS, C.DV, C.VP, C)
            seen = (os < SINKS)[None, :] & (os[None, :] <= place[:, None])
            logits = logits_of(terms, k, ones, left_out, cap, C)
            top, total, acc = add_scaled_values(top, total, acc, logits, seen, v, ones, C)
        new_k_ptr, new_v_ptr, new_scale_k_ptr, new_scale_v_ptr = columns_of(columns, program, COLUMNS, C)
        merged = tl.where(block > 0, period * block, tl.maximum(begin - window + 1, first - window))
        merged = tl.maximum(merged, SINKS)
        oldest = tl.maximum(place - window + 1, merged)
        for start in range(merged, stop, C.BN):
            key_place = start + tl.arange(0, C.BN)
            column, inside = key_place - end + COLUMNS, key_place < stop
            codes, scales = load_columns((new_k_ptr, new_scale_k_ptr), column, inside, C.D, C.DP, C)
            logits = logits_of(terms, codes, scales, left_out, cap, C)
            codes, scales = load_columns((new_v_ptr, new_scale_v_ptr), column, inside, C.DV, C.VP, C)
            seen = (key_place[None, :] >= oldest[:, None]) & (key_place[None, :] <= place[:, None]) & inside[None, :]
            top, total, acc = add_scaled_values(top, total, acc, logits, seen, codes, scales, C)
        code_k_ptr, code_v_ptr, scale_k_ptr, scale_v_ptr, level_ptr, period_ptr, ROOM, VERSIONS = periods
        period_ptr += (program * PERIODS + tl.program_id(1)) * ROOM
        keys = code_k_ptr + program * VERSIONS * C.D, scale_k_ptr + program * VERSIONS
        values = code_v_ptr + program * VERSIONS * C.DV, scale_v_ptr + program * VERSIONS
        for start in range(0, tl.where(block > 0, ROOM, 0), C.BN):
            version = tl.load(period_ptr + start + tl.arange(0, C.BN))
            level = tl.load(level_ptr + program * VERSIONS + version, mask=version >= 0, other=EMPTY)[None, :]
            codes, scales = load_columns(keys, version, version >= 0, C.D, C.DP, C)
            logits = logits_of(terms, codes, scales, left_out, cap, C) + level
            codes, scales = load_columns(values, version, version >= 0, C.DV, C.VP, C)
            top, total, acc = add_scaled_values(top, total, acc, logits, level > EMPTY / 2, codes, scales, C)
        if C.SCORED:
            sink = tl.load(scored_ptr + offset + 1, mask=live, other=EMPTY)
            total, acc = add_learned_sink(top, total, acc, sink)
        acc /= total[:, None]
        offset = text * out_text + head * out_head + tl.where(live, token * out_token + group * out_group, 0)
        row_ptr = out_ptr + offset[:, None]
        if turned:
            turn_back(acc, row_ptr, live, turns, head, WIDTH, C)
        else:
            ov = tl.arange(0, C.VP)
            inside = live[:, None] & (ov < C.DV)[None, :]
            tl.store(row_ptr + ov[None, :], acc.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def turn_back(acc, row_ptr, live, turns, head, WIDTH, C: tl.constexpr):
    """Turn outputs of turned values back, and write them."""
    ov, middle_ptr, matrix_ptr = tl.arange(0, C.VP), turns[2] + head * C.DV, turns[5]
    for d in range(0, WIDTH, C.DS):
        inner = d + tl.arange(0, C.DS)
        matrix = load_tile_at(matrix_ptr, ov, C.DV, C.DV, inner, C.DV).to(C.ACC)
        part = multiply(acc, matrix, C)
        part += tl.load(middle_ptr + inner, mask=inner < C.DV, other=0.0).to(C.ACC)[None, :]
        inside = live[:, None] & (inner < C.DV)[None, :]
        tl.store(row_ptr + inner[None, :], part.to(row_ptr.dtype.element_ty), mask=inside)


@functools.cache  # or a launch would take longer than its kernel
def text_constants(
    dims: tuple[int, int], group: int, sinks: int, length: int, dtype: torch.dtype, least: int, turned: bool,
    ordered: bool, rows: int, scored: bool, capped: bool,
) -> PackedConstants:  # fmt: skip
    """Return the compile-time constants of kernels that write columns and attend with periods of the given length."""
    exact, wide, work = dtype.itemsize > 2, max(map(padded, dims)) > 128, torch.promote_types(dtype, torch.float32)
    at_once = 16 if exact or wide else rows
    return PackedConstants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=min(32, padded(min(dims))), G=group, SP=sinks,
        BT=min(at_once, padded(length * group)), BN=32 if exact or wide else 64, MP=length, TURNED=turned,
        ORDERED=ordered, TWO=not exact, SCORED=scored, CAPPED=capped, **kinds_of_rows(dtype, least), **precision(work),
    )  # fmt: skip


@on_device_of_first
def launch_text(
    q: Tensor, k: Tensor, v: Tensor, scales: list[float], out: Tensor, pool: Tensor, texts: list[Tensor],
    table: Tensor, merging: list[Tensor], turns: list[Tensor], sizes: list[int], scored: Tensor | None = None,
) -> None:  # fmt: skip
    """Read a text with the heads of a pool (state_pool.py), write outputs into `out`, and update the pool's states.

    `texts` as of a token (token.py); where they have padding, also the count of their real tokens, (batch,), and the
    order that puts these last, (batch, tokens). So are `scales` and `scored`.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bytes, heads, work, (scale, cap) = pool.stride(0), len(table), working_dtype(k), scales
    (rows, *ends), (sinks, slots, block, _, least, window, least_block) = texts, sizes
    dims, group, tokens, programs = (q.shape[-1], v.shape[-1]), q.shape[2], q.shape[-2], len(rows) * heads
    length, width, like = block or LEAST_PERIOD, window + tokens, q.new_empty(0, dtype=work)
    layout, is_padded = (pool, table, heads, bytes, sinks, rows), len(ends) > 1
    counts = tuple(ends if is_padded else ends * 3)  # placeholders are not read
    turning = *(turns or [like] * 6), scale, scale**0.5
    form = padded(sinks), length, k.dtype, least, bool(turns), is_padded
    constants = text_constants(dims, group, *form, for_chip(ROWS, q), scored is not None, cap > 0)
    given = (like, cap, 0, 0, 0) if scored is None else (scored, cap, *scored.stride()[:3:2], scored.stride(1))
    columns = rows_for(k, programs * width, dims)
    keys_and_values = k, v, *k.stride()[:3], *v.stride()[:3]
    lay_columns[(programs, count_parts(width, constants.BN.value // 2))](
        keys_and_values, layout, turning, columns, counts, tokens, width, constants, num_warps=8, num_stages=1
    )
    floats, lists, room = make_workspace(programs if merging else 0, slots + block, dims, like)
    merging_size = merging_constants(dims, room, work, k.dtype, least, bool(turns), 1, is_padded)
    periods = (tokens - 2) // (least_block or length) + 2
    at_once = merging_size.MP.value
    changed_rows, row_bytes = 2 * count_parts(block or 1, at_once) * at_once, sum(dims) * k.element_size()
    batch = max(1, min(periods, (PERIOD_BYTES // (programs * row_bytes) - room) // changed_rows))
    room_of_versions = room + batch * changed_rows if merging else 0
    levels, lists_of_periods = like.new_empty(programs * room_of_versions), lists.new_empty(programs * batch * room)
    versioned = *rows_for(k, programs * room_of_versions, dims), levels, lists_of_periods, room, room_of_versions
    rings = 1 + count_parts(window, ROWS_AT_ONCE)
    codes = pool.new_empty(programs * rings * ROWS_AT_ONCE * sum(map(padded, dims)))
    queries_and_out, merged = (q, *q.stride()[:4], out, *out.stride()[:4], given), tuple(merging or [like] * 2)
    for begin in range(0, periods, batch):
        merge_text[(programs, rings)](
            layout, merged, columns, counts, (floats, lists, room), versioned, codes, tokens, width, begin, batch,
            merging_size, **merging_launch(),
        )  # fmt: skip
        attend_periods[(programs, batch, count_parts(length * group, constants.BT.value))](
            queries_and_out, layout, turning, columns, counts, versioned, tokens, width, begin, batch, dims[1],
            constants, num_warps=8, num_stages=1,
        )  # fmt: skip


def rows_for(like: Tensor, count: int, dims: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return memory for rows: the codes of keys and values, and their scales."""
    codes = [like.new_empty(count * dim) for dim in dims]
    return *codes, *(like.new_empty(count, dtype=torch.float32) for _ in dims)
