"""Triton kernels that attend with one token to a state in a pool of bytes (state_pool.py).

Every token launches the same three kernels for a layer, so a graph may repeat them. The rows of a head, its ring and
its slots, are cut into parts, so that even few heads use all of a GPU:

  prepare_token  merge the block that leaves a window before the token, if any; turn the token (prepare_token.py)
  attend_part    attend to the rows of one part; the part with the token's row stores the token
  join_parts     take one softmax over all parts, and turn some of its dimensions back

Rows are read in their stored bits: a logit is the product with the codes, times the scale of the row. The new token is
attended to as rounded. Sinks belong to the first part.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from linearizer.kernels.compiled import as_custom_op
from linearizer.kernels.triton.common import (
    EMPTY,
    add_learned_sink,
    capped,
    count_parts,
    load_tile,
    on_device_of_first,
    padded,
    precision,
    update_softmax,
)
from linearizer.kernels.triton.merge_workspace import ROWS_AT_ONCE, make_workspace, merging_constants, merging_launch
from linearizer.kernels.triton.packed_rows import (
    ALIGNED,
    BITS_KEPT,
    FIELDS,
    HEAD,
    KEYS,
    LEVEL,
    SINK_K,
    SINK_V,
    SLOTS,
    VALUES,
    WINDOW,
    PackedConstants,
    call_for_kind,
    kinds_of_rows,
    load_codes,
    store_rows,
)
from linearizer.kernels.triton.prepare_token import load_tile_at, prepare_token, turned_of
from linearizer.student.attention_of_student import working_dtype

Tensor = torch.Tensor
NUMBERS_AT_ONCE = 4096  # of keys, or of values, in registers: more do not fit
LAUNCH = {"num_warps": 8, "num_stages": 2}
PROGRAMS = 264  # of a launch with enough rows: two for each processor of the largest GPUs


@triton.jit
def attend_rows(
    inputs, pool, turned_ptr, part_ptr, codes_ptr, H, SINKS, sizes, scale, bits, KIND: tl.constexpr, C: tl.constexpr
):
    """Attend to the sinks and rows of one part of a head that keeps numbers in the given bits."""
    q_ptr, k_ptr, v_ptr, q_text, q_head, q_group, k_text, k_head, v_text, v_head, scored = inputs
    pool_ptr, count_ptr, table_ptr, row_ptr = pool
    BYTES, EACH = sizes
    TURNED: tl.constexpr = C.TURNED and KIND < 16
    SINKS_TYPE: tl.constexpr = tl.pointer_type(C.KEPT if KIND == 16 else tl.bfloat16)
    program, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    text, field_ptr = program // H, table_ptr + program % H * FIELDS
    start_ptr = pool_ptr + tl.load(row_ptr + text) * BYTES
    head, window = tl.load(field_ptr + HEAD), tl.load(field_ptr + WINDOW)
    place, ROWS = (tl.load(count_ptr + text) % window).to(tl.int32), (window + tl.load(field_ptr + SLOTS)).to(tl.int32)
    keys_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + KEYS), ALIGNED)
    values_ptr = start_ptr + tl.multiple_of(tl.load(field_ptr + VALUES), ALIGNED)
    level_ptr = (start_ptr + tl.load(field_ptr + LEVEL)).to(tl.pointer_type(C.SUMS))
    og, od, ov = tl.arange(0, C.GP), tl.arange(0, C.DP), tl.arange(0, C.VP)
    query_ptr, key_ptr, value_ptr = turned_of(turned_ptr, program, C)
    if TURNED:
        q = load_tile_at(query_ptr, og, C.DP, C.G, od, C.D)
    else:
        q = load_tile_at(q_ptr + text * q_text + head * q_head, og, q_group, C.G, od, C.D).to(C.ACC) * scale
    top = tl.full([C.GP], EMPTY, C.ACC)
    total, acc = tl.zeros([C.GP], C.ACC), tl.zeros([C.GP, C.VP], C.ACC)
    if C.SCORED:
        left_out = tl.load(scored_at(scored, text, head, og), mask=og < C.G, other=0.0)
    if (part == 0) & (SINKS > 0):
        os = tl.arange(0, C.SP)
        sink_k_ptr = (start_ptr + tl.load(field_ptr + SINK_K)).to(SINKS_TYPE)
        sink_v_ptr = (start_ptr + tl.load(field_ptr + SINK_V)).to(SINKS_TYPE)
        k = load_tile(sink_k_ptr, os, od, SINKS, C.D).to(C.ACC)
        v = load_tile(sink_v_ptr, os, ov, SINKS, C.DV).to(C.ACC)
        level = tl.load(level_ptr + os, mask=os < SINKS, other=EMPTY).to(C.ACC)
        logits = tl.dot(q, tl.trans(k), out_dtype=C.ACC, input_precision=C.PRECISION)
        if C.SCORED:
            logits = capped(logits, left_out[:, None], scored[1], C)
        logits += level[None, :]
        top, total, acc = update_softmax(top, total, acc, logits, (level > EMPTY / 2)[None, :], v, C)
    level_ptr += SINKS
    begin = part * EACH
    end = tl.minimum(begin + EACH, ROWS)
    for start in range(begin, end, C.BN):
        rows = start + tl.arange(0, C.BN)
        inside = rows < end  # empty rows are read, too: finding them first would take longer
        level = tl.load(level_ptr + rows, mask=inside & (rows != place), other=EMPTY).to(C.ACC)
        live = level > EMPTY / 2
        codes, scales = load_codes(keys_ptr, rows, inside, bits, C.D, C.DP, KIND, C)
        logits = tl.dot(q, tl.trans(codes), out_dtype=C.ACC, input_precision=C.PRECISION) * scales[None, :]
        if C.SCORED:
            logits = capped(logits, left_out[:, None], scored[1], C)
        codes, scales = load_codes(values_ptr, rows, inside, bits, C.DV, C.VP, KIND, C)
        logits += level[None, :]
        top, total, acc = update_softmax(top, total, acc, logits, live[None, :], codes * scales[:, None], C)
    if (begin <= place) & (place < end):
        if TURNED:
            k, v = tl.load(key_ptr + od), tl.load(value_ptr + ov)
        else:
            k = tl.load(k_ptr + text * k_text + head * k_head + od, mask=od < C.D, other=0.0).to(C.ACC)
            v = tl.load(v_ptr + text * v_text + head * v_head + ov, mask=ov < C.DV, other=0.0).to(C.ACC)
        row, codes_ptr = place + tl.zeros([1], tl.int32), codes_ptr + program * (C.DP + C.VP)
        key = store_rows(keys_ptr, row, row >= 0, k[None, :], bits, codes_ptr, C.D, C.DP, KIND, C)
        value = store_rows(values_ptr, row, row >= 0, v[None, :], bits, codes_ptr + C.DP, C.DV, C.VP, KIND, C)
        tl.store(level_ptr + place, 0.0)
        logit = tl.sum(q * key, 1)
        if C.SCORED:
            logit = capped(logit, left_out, scored[1], C)
        new_top = tl.maximum(top, logit)
        decay, weight = tl.exp(top - new_top), tl.exp(logit - new_top)
        acc = acc * decay[:, None] + weight[:, None] * value
        top, total = new_top, total * decay + weight
    part_ptr += (program * tl.num_programs(1) + part) * C.GP * (C.VP + 2)
    tl.store(part_ptr + og[:, None] * (C.VP + 2) + ov[None, :], acc)
    tl.store(part_ptr + og * (C.VP + 2) + C.VP, top)
    tl.store(part_ptr + og * (C.VP + 2) + C.VP + 1, total)


@triton.jit
def scored_at(scored, text, head, og):
    """Return the address of what a head's queries leave out; that of their learned sinks is behind it."""
    pointer, _, of_text, of_head = scored
    return pointer + text * of_text + head * of_head + 2 * og


@triton.jit(do_not_specialize=["H", "SINKS"])
def attend_part(inputs, pool, turned_ptr, part_ptr, codes_ptr, H, SINKS, sizes, scale, C: tl.constexpr):
    """Attend to the sinks and rows of one part; grid (text and head, part)."""
    bits = tl.load(pool[2] + tl.program_id(0) % H * FIELDS + BITS_KEPT).to(tl.int32)
    call_for_kind(attend_rows, (inputs, pool, turned_ptr, part_ptr, codes_ptr, H, SINKS, sizes, scale), bits, C)


@triton.jit
def store_tile_at(pointer, rows, stride, columns, x, C: tl.constexpr):
    """Write the outputs of the queries of a head."""
    inside = (rows < C.G)[:, None] & (columns < C.DV)[None, :]
    tl.store(pointer + rows[:, None] * stride + columns[None, :], x.to(pointer.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["H", "PARTS"])
def join_parts(part_ptr, out, table_ptr, value_middle_ptr, matrix_ptr, scored, H, PARTS, C: tl.constexpr):
    """Take one softmax over the parts of a head, and turn its result back; grid (text and head, part of a value)."""
    out_ptr, out_text, out_head, out_group = out
    program = tl.program_id(0).to(tl.int64)
    field_ptr = table_ptr + program % H * FIELDS
    head, bits = tl.load(field_ptr + HEAD), tl.load(field_ptr + BITS_KEPT)
    out_ptr += (program // H) * out_text + head * out_head
    og, ov = tl.arange(0, C.GP), tl.arange(0, C.VP)
    top = tl.full([C.GP], EMPTY, C.ACC)
    total, acc = tl.zeros([C.GP], C.ACC), tl.zeros([C.GP, C.VP], C.ACC)
    for part in range(0, PARTS):
        row_ptr = part_ptr + (program * PARTS + part) * C.GP * (C.VP + 2) + og * (C.VP + 2)
        part_top = tl.load(row_ptr + C.VP)
        new_top = tl.maximum(top, part_top)
        decay, factor = tl.exp(top - new_top), tl.exp(part_top - new_top)
        acc = acc * decay[:, None] + tl.load(row_ptr[:, None] + ov[None, :]) * factor[:, None]
        top, total = new_top, total * decay + tl.load(row_ptr + C.VP + 1) * factor
    if C.SCORED:
        sink = tl.load(scored_at(scored, program // H, head, og) + 1, mask=og < C.G, other=EMPTY)
        total, acc = add_learned_sink(top, total, acc, sink)
    acc /= total[:, None]
    if (bits == 16) | (not C.TURNED):
        if tl.program_id(1) == 0:
            store_tile_at(out_ptr, og, out_group, ov, acc, C)
    else:
        od = tl.program_id(1) * C.DS + tl.arange(0, C.DS)
        matrix = load_tile_at(matrix_ptr, ov, C.DV, C.DV, od, C.DV).to(C.ACC)
        turned = tl.dot(acc, matrix, out_dtype=C.ACC, input_precision=C.PRECISION)
        turned += tl.load(value_middle_ptr + head * C.DV + od, mask=od < C.DV, other=0.0).to(C.ACC)[None, :]
        store_tile_at(out_ptr, og, out_group, od, turned, C)


@as_custom_op(
    "(Tensor q, Tensor k, Tensor v, float[] scales, Tensor(a!) out, Tensor(b!) pool, Tensor[] texts, Tensor table, "
    "Tensor[] merging, Tensor[] turns, int[] sizes, Tensor? scored=None) -> ()"
)
@on_device_of_first
def launch_token(
    q: Tensor, k: Tensor, v: Tensor, scales: list[float], out: Tensor, pool: Tensor, texts: list[Tensor], table: Tensor,
    merging: list[Tensor], turns: list[Tensor], sizes: list[int], scored: Tensor | None = None,
) -> None:  # fmt: skip
    """Store a token in the pool of a layer (state_pool.py), attend with it, and write the results into `out`.

    A block that leaves a window is merged first. The device decides this, so every token has the same launches.
    `texts` has their rows in the pool, and how many tokens each has read, (batch,). `scales` has that of scores and
    their cap, or 0; `scored` is what `scored_rows` of state_pool.py makes.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bytes, heads, work, (scale, cap) = pool.stride(0), len(table), working_dtype(k), scales
    (rows, count), (sinks, slots, block, most, least) = texts, sizes
    dims, group, programs = (q.shape[-1], v.shape[-1]), q.shape[2], len(rows) * heads
    layout = pool, count, table, rows
    inputs = q, k, v, *q.stride()[:3], *k.stride()[:2], *v.stride()[:2]
    widths, like = sum(map(padded, dims)), q.new_empty(0, dtype=work)
    turned = like
    if merging or turns:
        floats, lists, room = make_workspace(programs if merging else 0, slots + block, dims, like)
        codes = pool.new_empty(programs * ROWS_AT_ONCE * widths)
        constants = merging_constants(dims, room, work, k.dtype, least, bool(turns), group)
        shares = 1
        if turns:
            turned = like.new_empty(programs * (padded(group) * padded(dims[0]) + widths))
            shares += count_parts(max(dims), constants.DS.value)
        turning, merged = tuple(turns or [like] * 6), tuple(merging or [like] * 2)  # placeholders are not read
        prepare_token[(programs, shares)](
            inputs, layout, merged, turning, turned, (floats, lists, room), codes, heads, bytes, sinks,
            (scale, scale**0.5), constants, **merging_launch(),
        )  # fmt: skip
    rows_at_once = max(16, NUMBERS_AT_ONCE // padded(max(dims)))
    parts = max(1, min(count_parts(most, rows_at_once), PROGRAMS // programs))
    rows_of_part = count_parts(count_parts(most, parts), rows_at_once) * rows_at_once
    parts = count_parts(most, rows_of_part)
    form = padded(sinks), work, k.dtype, least, bool(turns), scored is not None, cap > 0
    constants = token_constants(dims, group, rows_at_once, *form)
    given = (like, cap, 0, 0) if scored is None else (scored, cap, *scored.stride()[:3:2])
    scratch = like.new_empty(programs * parts * padded(group) * (padded(dims[1]) + 2))
    codes = pool.new_empty(programs * widths)
    attend_part[(programs, parts)](
        (*inputs, given),
        layout,
        turned,
        scratch,
        codes,
        heads,
        sinks,
        (bytes, rows_of_part),
        scale,
        constants,
        **LAUNCH,
    )
    middle, matrix = (turns[2], turns[5]) if turns else (like, like)
    join_parts[(programs, count_parts(dims[1], constants.DS.value) if turns else 1)](
        scratch, (out, *out.stride()[:3]), table, middle, matrix, given, heads, parts, constants, **LAUNCH
    )


@functools.cache  # or a launch would take longer than its kernel
def token_constants(
    dims: tuple[int, int], group: int, rows: int, sinks: int, work: torch.dtype, row_type: torch.dtype, least: int,
    turned: bool, scored: bool, capped: bool,
) -> PackedConstants:  # fmt: skip
    """Return the compile-time constants of kernels that attend with a token to `rows` rows at a time."""
    return PackedConstants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=min(32, rows), G=group, GP=padded(group),
        SP=sinks, BN=rows, TURNED=turned, SCORED=scored, CAPPED=capped, **kinds_of_rows(row_type, least),
        **precision(work),
    )  # fmt: skip
