"""The table that a kernel for one token reads: where the parts of every KV head's state lie, and how large they are.

Heads of a layer hold windows and slots of any sizes, in states of several shapes. So that one launch may do all of
them, a table on the device has a row for each: the numbers of COLUMNS, and then the addresses of the tensors of
the state, in the order of its fields, and of what is used with it. States are changed in place, so a table is made once
and kept beside the first of them, until one of its tensors is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .slots_merging import Merging
from .state import tensors

Tensor = torch.Tensor
COLUMNS = ("head", "own", "heads", "ticket", "window", "far", "block")
ALIGNED = 16  # bytes: what kernels take for granted of an address


@dataclass(frozen=True)
class TokenGroup:
    """KV heads that hold the same: their indices in the layer, their state, and how they use it."""

    heads: list[int]
    state: Any
    window: int
    merging: Merging | None = None

    @property
    def bits(self) -> int:
        return 8 if self.state.window_k.dtype == torch.int8 else 16

    def sizes(self) -> tuple[int, int, int]:
        """Window; slots; the tokens of a block."""
        if self.merging is None:
            return self.window, 0, 0
        return self.window, self.state.weight.shape[-1], self.merging.block

    def tensors(self) -> list[Tensor]:
        """Return the tensors that a kernel reads and writes, in the order of the table."""
        merging = self.merging
        used = [] if merging is None else [merging.metric, merging.gain, merging.mean_query]
        return [*tensors(self.state).values(), *used]

    def stamp(self) -> tuple[list[int], ...]:
        """Return all that the table contains about them, and the number of texts."""
        kept = [x.data_ptr() for x in self.tensors()]
        return self.heads, [*self.sizes()], kept, [len(self.state.count)]


@dataclass(frozen=True, slots=True)
class TokenTable:
    stamp: list[tuple]
    rows: Tensor  # (heads, columns)
    tickets: Tensor  # (groups, batch) how many heads of a group are done with a token: the last one counts it


def get_table(groups: Sequence[TokenGroup]) -> TokenTable:
    """Return the table of some groups of one layer; make it where a tensor was exchanged."""
    holder = groups[0].state
    for held in groups:
        for name, x in tensors(held.state).items():
            if not x.is_contiguous() or x.data_ptr() % ALIGNED or x.requires_grad:  # which a backward pass may read
                setattr(held.state, name, x.clone(memory_format=torch.contiguous_format))
    stamp = [held.stamp() for held in groups]
    if holder.token_table is None or holder.token_table.stamp != stamp:
        holder.token_table = make_table(groups, stamp)
    return holder.token_table


def make_table(groups: Sequence[TokenGroup], stamp: list[tuple]) -> TokenTable:
    """Make a table, which takes a copy to the device."""
    count = groups[0].state.count
    if count.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "a CUDA graph cannot capture the first token after a state was made or exchanged: let the model read one "
            "token with this cache, and capture the next"
        )
    rows = []
    for ticket, (heads, sizes, kept, _) in enumerate(stamp):
        rows += [[head, own, len(heads), ticket, *sizes, *kept] for own, head in enumerate(heads)]
    width = max(map(len, rows))
    table = torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.long)
    tickets = torch.zeros(len(groups), len(count), dtype=torch.int32, device=count.device)
    return TokenTable(stamp, table.to(count.device), tickets)
