"""The kernel in C for the tokens of many texts, whose states are rows of bytes of one pool: one call for a layer.

A server keeps such a pool, and names the row of each text. The kernel reads and writes rows in place.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linearizer.kernels.c.compiler import addresses_of, load_kernel, pack_numbers
from linearizer.kernels.c.layer import (
    CALL_TENSORS,
    MERGING,
    PROCESS,
    STORED,
    STRIDES,
    KindOfTexts,
    ServedHeads,
    as_read,
    begin_in_openmp,
    kinds_of,
    steps_and_middles,
)
from linearizer.student.attention_of_student import working_dtype

Tensor = torch.Tensor
Places = Mapping[str, int]  # of the tensors of a group's state, in bytes from the begin of a row
LAYER_SIZES, GROUP_SIZES, STORED_BF16 = 25, 8, 2  # as in the kernel
TEXT = 4  # numbers of a text: its row, its first token in the inputs, its tokens, and those it has read


def pack_texts(texts: Sequence[tuple[int, int, int, int]]) -> Any:
    """Pack what the kernel has to know of texts; those with one token come first."""
    return pack_numbers(*[number for text in texts for number in text])


@dataclass
class RowReader:
    """The kernel's arguments for one layer whose states lie in a pool."""

    kernel: Any
    sizes: Any
    addresses: Any
    work: torch.dtype
    row_bytes: int
    held: list[Tensor | None]  # the tensors at the addresses
    call: Any  # what the threads of one call share

    @staticmethod
    def of(
        student: Any, pool: Tensor, places: Mapping[int, Places], like: tuple, scale: float, cap: float | None = None
    ) -> RowReader | None:
        """Prepare all groups of a layer; `like` is a query, a key and a value of the layer. None: some are not served.

        pool (rows, bytes); `places` says where the states of each group lie in a row.
        """
        q, k, v = like
        sizes = q.shape[2], True, k.shape[-1], v.shape[-1], scale, True, cap or 0.0
        served = ServedHeads.of(student.groups, KindOfTexts(kinds_of(student), 1, k.dtype, *sizes), q, k, v)
        in_two_bytes = k.dtype != working_dtype(k) and any(group.bits == 16 for group in student.groups)
        if served is None or len(served.layouts) < len(student.groups) or (in_two_bytes and k.dtype != torch.bfloat16):
            return None
        numbers = [*served.numbers]
        for at, group in zip(range(LAYER_SIZES, len(numbers), GROUP_SIZES), student.groups, strict=True):
            if in_two_bytes and group.bits == 16:
                numbers[at + GROUP_SIZES - 1] = STORED_BF16
        kernel: Any = load_kernel("read_rows", served.work, served.wide)
        turns = [None] * 3 if student.turns is None else steps_and_middles(student.turns, served.work)
        held: list[Tensor | None] = [served.factors, *[None] * 8, *turns]
        state_at: dict[int, int] = {}
        for heads, index in zip(served.heads, served.layouts, strict=True):
            merging, named = student.groups[index].merging(scale), {}
            if merging is not None:
                named = {name: getattr(merging, name).detach().to(served.work).contiguous() for name in MERGING}
            held += [heads, *(named.get(name) for name in MERGING), *[None] * len(STORED)]
            state_at |= {len(held) - len(STORED) + i: places[index][name] for i, name in enumerate(STORED)}
        addresses = addresses_of(*held)
        for place, begin in state_at.items():
            addresses[place] = pool.data_ptr() + begin
        threads, openmp = torch.get_num_threads(), begin_in_openmp() if os.getpid() == PROCESS else 0
        call = (ctypes.c_int64 * (8 * threads + 8))(threads, openmp) if threads > 1 and openmp else None
        return RowReader(kernel, pack_numbers(*numbers), addresses, served.work, pool.stride(0), [*held, pool], call)

    def read(
        self, q: Tensor, k: Tensor, v: Tensor, texts: Any, out: Tensor, learned_sinks: Tensor | None = None
    ) -> None:
        """Read the tokens of all texts into `out`, and change their rows.

        q and out (tokens, heads, group, dim), k and v (tokens, heads, dim); `texts` as `pack_texts` makes it.
        """
        if not q.dtype == k.dtype == v.dtype == self.work:
            q, k, v = (x.to(self.work) for x in (q, k, v))
        inputs = [*(x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v)), out.to(self.work)]
        (q0, q1, q2, _), (k0, k1, _), (v0, v1, _), (o0, o1, o2, _) = (x.stride() for x in inputs)
        self.sizes[STRIDES] = [0, q1, q2, q0, 0, k1, 0, k0, 0, v1, 0, v0, 0, o1, o2, o0]
        learned_sinks = as_read(learned_sinks, self.work)
        *pointers, sinks_at = [None if x is None else x.data_ptr() for x in (*inputs, learned_sinks)]
        self.addresses[CALL_TENSORS] = [
            *pointers, None, None, None if self.call is None else ctypes.addressof(self.call), sinks_at
        ]  # fmt: skip
        count = ctypes.c_int64(len(texts) // TEXT)
        if not self.kernel(self.sizes, self.addresses, texts, count, ctypes.c_int64(self.row_bytes)):
            raise MemoryError("no memory to attend in")
        if out.dtype != self.work:
            out.copy_(inputs[3])
