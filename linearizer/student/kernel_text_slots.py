"""Texts read by heads with windows and slots, as Triton kernels. The reference is slots_torch.py.

  merge_text      one program for each head of each text: merge the blocks that leave, one after the other, and write
                  down what the slots are in each period
  attend_periods  one program for each period: its rows attend to sinks, window and the slots of their period

Few slots change from one period to the next. Each row that changed is written once, as a version, and a period is a
list of versions.

Numbers that change from text to text are not specialised: a kernel would be compiled anew for many of them.

Heads of a layer may hold windows and slots of all sizes, and still take one launch: where the tensors of a head lie is
in a table, as an offset from tensors that the launch is given.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch

try:  # as in kernel_common.py
    import triton
    import triton.language as tl
except ImportError:
    raise

from .kernel_common import (
    EMPTY,
    Constants,
    chip,
    count_parts,
    dims_at_once,
    load_tile,
    on_device_of_first,
    padded,
    precision,
    scores,
    update_softmax,
)
from .kernel_merging import merge_rows
from .kernel_slot_rows import (
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
    write_slots,
)
from .slots_torch import SlotText

Tensor = torch.Tensor
PERIOD_BYTES = 2**28  # of the versions of all periods that attend at once
FIELDS = tl.constexpr(16)  # of a head of a text, in the order of table_of


@triton.jit
def head_of(table_ptr, own, first_ptr, end_ptr, texts):
    """Where the tensors of a head of a text lie, the place of its first new token, that behind its last, its sizes, and
    its first period.

    Periods are numbered by how many blocks are merged then; those before 0 have none, either.
    """
    field_ptr = table_ptr + own * FIELDS
    first, end = tl.load(first_ptr + own % texts).to(tl.int32), tl.load(end_ptr + own % texts).to(tl.int32)
    window, block = tl.load(field_ptr).to(tl.int32), tl.load(field_ptr + 1).to(tl.int32)
    before = (window + block - 1) // block  # so that no negative number is divided
    period = (first - window + before * block) // block + 1 - before
    return field_ptr + 4, first, end, window, block, period


@triton.jit
def write_versions(work, rows, live, versions, begin, gain, C: tl.constexpr):
    """Write what rows hold now as versions, and keep their numbers."""
    slot_k_ptr, slot_v_ptr, level_ptr = versions
    od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
    at = begin + tl.arange(0, rows.shape[0])
    k, v = load_row_tile(work[2], rows, C.DP), load_row_tile(work[1], rows, C.VP)
    to_ptr = slot_k_ptr + at[:, None] * C.D + od[None, :]
    tl.store(to_ptr, k.to(to_ptr.dtype.element_ty), mask=live[:, None] & (od < C.D)[None, :])
    to_ptr = slot_v_ptr + at[:, None] * C.DV + ov[None, :]
    tl.store(to_ptr, v.to(to_ptr.dtype.element_ty), mask=live[:, None] & (ov < C.DV)[None, :])
    tl.store(level_ptr + at, levels_of(work, rows, live, gain, C), mask=live)
    tl.store(lists_of(work)[4] + rows, at, mask=live)
    tl.debug_barrier()


@triton.jit(do_not_specialize=["SINKS", "TEXTS", "TOKENS", "FROM", "PERIODS"])
def merge_text(
    tensors, table_ptr, ends, workspace, periods, SINKS, TEXTS, TOKENS, FROM, PERIODS, C: tl.constexpr
):  # fmt: skip
    """Merge what leaves windows while a text is read, and keep the slots of each period; grid (head and text,)."""
    base_ptr, number_ptr = tensors
    first_ptr, end_ptr = ends
    float_ptr, list_ptr, ROOM = workspace
    slot_k_ptr, slot_v_ptr, level_ptr, period_ptr, VERSIONS = periods
    own = tl.program_id(0).to(tl.int64)
    field_ptr, first, end, window, block, period = head_of(table_ptr, own, first_ptr, end_ptr, TEXTS)
    slots, bits = tl.load(field_ptr - 2).to(tl.int32), tl.load(field_ptr - 1).to(tl.int32)
    state = (
        base_ptr + tl.load(field_ptr + 6), base_ptr + tl.load(field_ptr + 7), number_ptr + tl.load(field_ptr + 8),
        number_ptr + tl.load(field_ptr + 9),
    )  # fmt: skip
    columns = base_ptr + tl.load(field_ptr + 2), base_ptr + tl.load(field_ptr + 3)
    metric_ptr, gain = number_ptr + tl.load(field_ptr + 10), tl.load(number_ptr + tl.load(field_ptr + 11))
    work, at = workspace_of(own, float_ptr, list_ptr, ROOM, C), own * VERSIONS
    versions = slot_k_ptr + at * C.D, slot_v_ptr + at * C.DV, level_ptr + at
    place_ptr, om = numbers_of(work)[5], tl.arange(0, C.MP)
    free_ptr, _, _, _, version_ptr = lists_of(work)
    count, changed = read_slots(work, state, slots, 16, 16, C)
    lost, written = 0, ROOM
    for begin in range(0, ROOM, C.BT):
        rows = begin + tl.arange(0, C.BT)
        write_versions(work, rows, tl.load(place_ptr + rows) < float("inf"), versions, begin, gain, C)
    for index in range(0, PERIODS):
        leaves = (period + FROM + index - 1) * block
        if (leaves >= 0) & (leaves + window >= first) & (leaves + window < end):
            tokens, missing = leaves + om - (end - window - TOKENS), tl.minimum(tl.maximum(SINKS - leaves, 0), block)
            had = count
            count, changed = add_block(work, columns, tokens, missing, block, count, changed, 16, 16, C)
            new = count - had
            gone = tl.maximum(count - slots, 0)
            count, changed, lost = merge_rows(
                work, metric_ptr, bits, 1 << bits, count, slots, changed, lost, base_ptr, False, C
            )
            live = om < new
            write_versions(work, tl.load(free_ptr + om, mask=live, other=0), live, versions, written, gain, C)
            live, written = om < gone, written + C.MP
            write_versions(work, tl.load(work[5] + om, mask=live, other=0), live, versions, written, gain, C)
            written += C.MP
        for begin in range(0, tl.where(leaves + window < end, ROOM, 0), C.BN):
            rows = begin + tl.arange(0, C.BN)
            version = tl.where(tl.load(place_ptr + rows) < float("inf"), tl.load(version_ptr + rows), -1)
            tl.store(period_ptr + (own * PERIODS + index) * ROOM + rows, version)
    write_slots(work, state, slots, count, numbers_of(work)[6], gain, 16, list_ptr, 16, C)


@triton.jit(do_not_specialize=["SINKS", "TEXTS", "TOKENS", "FROM", "PERIODS"])
def attend_periods(base_ptr, table_ptr, ends, ROOM, periods, SINKS, TEXTS, TOKENS, FROM, PERIODS, C: tl.constexpr):
    """Attend with the rows of a period; grid (head and text, period, part of its rows)."""
    slot_k_ptr, slot_v_ptr, level_ptr, period_ptr, VERSIONS = periods
    first_ptr, end_ptr = ends
    own = tl.program_id(0).to(tl.int64)
    field_ptr, first, end, window, block, period = head_of(table_ptr, own, first_ptr, end_ptr, TEXTS)
    period += FROM + tl.program_id(1)
    row = tl.program_id(2) * C.BT + tl.arange(0, C.BT)
    inside, place = row < block * C.G, window + (period - 1) * block + row // C.G
    inside = inside & (place >= first) & (place < end)
    begin = tl.maximum(window + (period - 1) * block, first)
    if (begin < end) & (begin < window + period * block):
        od, ov = tl.arange(0, C.DP), tl.arange(0, C.VP)
        rows = row % C.G * TOKENS + place - (end - TOKENS)
        rows = tl.where(inside, rows, -1)
        q_ptr, stop, columns = base_ptr + tl.load(field_ptr), C.G * TOKENS, window + TOKENS
        q = load_tile(q_ptr, rows, od, stop, C.D)
        merged = tl.maximum(period * block, 0)
        top = tl.full([C.BT], EMPTY, C.ACC)
        total, acc = tl.zeros([C.BT], C.ACC), tl.zeros([C.BT, C.VP], C.ACC)
        if SINKS > 0:
            os = tl.arange(0, C.SP)
            logits = scores(q, q_ptr, base_ptr + tl.load(field_ptr + 4), rows, os, stop, SINKS, C.D, C.DP, C)
            sink_v = load_tile(base_ptr + tl.load(field_ptr + 5), os, ov, SINKS, C.DV)
            live = ((os < SINKS) & (os < merged))[None, :]
            top, total, acc = update_softmax(top, total, acc, logits, live, sink_v, C)
        k_ptr, v_ptr = base_ptr + tl.load(field_ptr + 2), base_ptr + tl.load(field_ptr + 3)
        before = end - columns  # the place of the first column
        last = tl.minimum(window + period * block, end) - before
        for start in range(merged - before, last, C.BN):
            column = start + tl.arange(0, C.BN)
            near = scores(q, q_ptr, k_ptr, rows, column, stop, last, C.D, C.DP, C)
            seen = (column < last)[None, :] & ((column + before)[None, :] <= place[:, None])
            v = load_tile(v_ptr, column, ov, last, C.DV)
            top, total, acc = update_softmax(top, total, acc, near, seen, v, C)
        period_ptr += (own * PERIODS + tl.program_id(1)) * ROOM
        slot_k_ptr, slot_v_ptr = slot_k_ptr + own * VERSIONS * C.D, slot_v_ptr + own * VERSIONS * C.DV
        level_ptr += own * VERSIONS
        for start in range(0, ROOM, C.BN):
            slot = tl.load(period_ptr + start + tl.arange(0, C.BN))
            level = tl.load(level_ptr + slot, mask=slot >= 0, other=EMPTY)[None, :]
            far = scores(q, q_ptr, slot_k_ptr, rows, slot, stop, VERSIONS, C.D, C.DP, C) + level
            v = load_tile(slot_v_ptr, slot, ov, VERSIONS, C.DV)
            top, total, acc = update_softmax(top, total, acc, far, level > EMPTY / 2, v, C)
        out_ptr = base_ptr + tl.load(field_ptr + 1) + rows[:, None] * C.DV + ov[None, :]
        out = (acc / total[:, None]).to(base_ptr.dtype.element_ty)
        tl.store(out_ptr, out, mask=inside[:, None] & (ov < C.DV)[None, :])


def table_of(texts: Sequence[SlotText], outputs: Sequence[Tensor], parameters: Sequence[tuple]) -> list[list[int]]:
    """List the sizes of each head of each text, and where its tensors lie: as offsets from the first queries, or from
    the first weights."""
    table, vectors, numbers = [], texts[0].q, texts[0].state.weight
    for text, out, own in zip(texts, outputs, parameters, strict=True):
        state, columns = text.state, text.columns
        sizes = [text.merging.window, text.merging.block, state.weight.shape[-1], text.merging.bits]
        given = text.q, out, columns.k, columns.v, state.sink_k, state.sink_v, state.slot_k, state.slot_v
        offsets = [(x, (x.data_ptr() - vectors.data_ptr()) // x.element_size()) for x in given]
        rest = state.weight, state.spread, *(x[None].expand(len(text.q), *x.shape) for x in own)
        offsets += [(x, (x.data_ptr() - numbers.data_ptr()) // x.element_size()) for x in rest]
        for head in range(text.q.shape[1]):
            for row in range(len(text.q)):
                table.append([*sizes, *(at + row * x.stride(0) + head * x.stride(1) for x, at in offsets)])
    return table


@functools.cache  # or the host would take longer to launch a kernel than it runs
def attending_constants(
    dtype: torch.dtype, chip: tuple[int, int] | None, dims: tuple[int, int], group: int, sinks: int, block: int
) -> Constants:
    """Return what a kernel is compiled for that attends to periods of such a block."""
    exact, wide = dtype.itemsize > 2, max(map(padded, dims)) > 128
    at_once = 16 if exact else 64 if chip == (9, 0) and not wide else 32  # more would not fit into registers
    return Constants(
        D=dims[0], DV=dims[1], DP=padded(dims[0]), VP=padded(dims[1]), DS=dims_at_once(dims[0], dtype), G=group,
        SP=sinks, BT=min(at_once, padded(block * group)), BN=32 if exact or wide else 64, **precision(dtype),
    )  # fmt: skip


@on_device_of_first
def launch_texts(count: Tensor, texts: Sequence[SlotText]) -> list[Tensor]:
    """Merge and attend with the heads of a layer whose queries are of one type; return what all their tokens see.

    `count` (batch,) tokens were read before; the states take what slots are at last.
    """
    first, work = texts[0], texts[0].state.weight.dtype
    (batch, _, group, tokens, dim), value_dim = first.q.shape, first.columns.v.shape[-1]
    sinks = first.state.sink_k.shape[2]
    outputs, parameters = [], []
    for text in texts:
        for holder, names in ((text, ("q",)), (text.columns, ("k", "v")), (text.state, ("sink_k", "sink_v"))):
            for name in names:
                setattr(holder, name, getattr(holder, name).contiguous())
        for name in ("slot_k", "slot_v", "weight", "spread"):  # which are written over
            setattr(text.state, name, getattr(text.state, name).clone(memory_format=torch.contiguous_format))
        outputs.append(text.q.new_zeros(*text.q.shape[:-1], value_dim))
        parameters.append(tuple(x.to(work).contiguous() for x in (text.merging.rows, text.merging.gain)))
    table = torch.tensor(table_of(texts, outputs, parameters), pin_memory=count.is_cuda)
    table = table.to(count.device, non_blocking=True)  # or the host would wait until all before is done
    programs, most = len(table), max(text.merging.block for text in texts)
    rows = max(text.state.weight.shape[-1] + text.merging.block for text in texts)
    floats, lists, room = make_workspace(programs, rows, (dim, value_dim), first.state.weight)
    periods = (tokens - 2) // min(text.merging.block for text in texts) + 2
    merging = merging_constants((dim, value_dim), most, room, work, first.q.dtype)
    changing, row_bytes = 2 * merging.MP.value, (dim + value_dim) * first.q.element_size()
    together = max(1, min(periods, (PERIOD_BYTES // (programs * row_bytes) - room) // changing))
    versions = room + together * changing
    kept = [first.q.new_empty(programs * versions * size) for size in (dim, value_dim)]
    slots = *kept, floats.new_empty(programs * versions), lists.new_empty(programs * together * room), versions
    constants = attending_constants(first.q.dtype, chip(first.q), (dim, value_dim), group, padded(sinks), most)
    grid = programs, together, count_parts(most * group, constants.BT.value)
    ends, bases = (count, count + first.new), (first.q, first.state.weight)
    for begin in range(0, periods, together):
        sizes = sinks, batch, tokens, begin, together
        merge_text[(programs,)](bases, table, ends, (floats, lists, room), slots, *sizes, merging, **merging_launch())
        attend_periods[grid](first.q, table, ends, room, slots, *sizes, constants, num_warps=8, num_stages=1)
    return outputs
