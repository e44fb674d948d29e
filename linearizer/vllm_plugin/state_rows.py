"""A request's states of one layer as a part of a row of bytes, in memory that vLLM owns.

Only this module knows how states lie there. A server without padding counts a request's tokens itself, so a row holds
all tensors of a state but its count. Where they lie is found by reading one token of zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from linearizer.student.attention_of_student import tensors
from linearizer.student.layer_student import LayerStudent
from linearizer.vllm_plugin.refusals import UNSERVED_HEADS

Tensor = torch.Tensor
ALIGNED = 16  # bytes, at whose multiples tensors begin


def aligned(size: int) -> int:
    """Return a number of bytes, rounded up to where the next tensor may begin."""
    return -(-size // ALIGNED) * ALIGNED


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in a row, and what it is for one text."""

    begin: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, rows: Tensor) -> Tensor:
        """Return the tensor of each row (texts, bytes), without a copy."""
        width = self.dtype.itemsize
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        numbers = rows.view(self.dtype)
        begin = numbers.storage_offset() + self.begin // width
        return numbers.as_strided((len(rows), *self.shape), (rows.stride(0) // width, *strides), begin)


@dataclass(frozen=True)
class StateRow:
    """Where the states of a layer's groups lie in a row of bytes, from `begin` to `end`."""

    groups: list[tuple[type, dict[str, Place]]]  # of each group: the class of its state, and its tensors' places
    end: int
    held: int  # bytes of tensors

    @staticmethod
    @torch.no_grad()
    def of(student: LayerStudent, query_heads: int, dims: tuple[int, int], dtype: torch.dtype, begin: int) -> StateRow:
        """Lay out the states of a layer, with vectors of such sizes, from a byte on."""
        device = next((x.device for x in student.parameters()), torch.device("cpu"))
        k, v = (torch.zeros(1, student.kv_heads, 1, dim, dtype=dtype, device=device) for dim in dims)
        states: list = []
        reader, student.reader = student.reader, "pytorch"
        student(k.new_zeros(1, query_heads, 1, dims[0]), k, v, 1.0, None, states)
        student.reader = reader
        groups, end, held = [], begin, 0
        for state in states:
            if not hasattr(state, "count"):
                raise ValueError(UNSERVED_HEADS)
            places = {}
            for name, x in tensors(state).items():
                if name != "count":
                    places[name] = Place(end, x.shape[1:], x.dtype)
                    end += aligned(x.nbytes)
                    held += x.nbytes
            groups.append((type(state), places))
        return StateRow(groups, end, held)

    def places(self) -> dict[int, dict[str, int]]:
        """Return the byte at which each tensor of each group begins."""
        return {
            index: {name: place.begin for name, place in named.items()} for index, (_, named) in enumerate(self.groups)
        }

    def read(self, rows: Tensor, counts: Tensor) -> list[Any]:
        """Return states of texts that have read so many tokens; all other tensors are views of rows."""
        return [
            kind(count=counts.clone(), **{name: place.view(rows) for name, place in places.items()})
            for kind, places in self.groups
        ]

    def read_texts(
        self, student: LayerStudent, pool: Tensor, rows: Tensor, counts: Tensor, least: int, *inputs: Any
    ) -> Tensor:
        """Read equally many tokens of some texts by the student's own code, and change their rows.

        Before, the texts have read `counts` tokens, of which `least` are the fewest: 0 if none has read any.
        """
        copies = pool.index_select(0, rows)
        states = self.read(copies, counts) if least else []
        q, k, v, scale, *scores = inputs
        out = LayerStudent.forward(student, q, k, v, scale, None, states, *scores)
        self.write(copies, states)
        pool.index_copy_(0, rows, copies)
        return out

    def stored(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a row (1, bytes) keeps in its ring: (heads, tokens, dim); all heads have the
        same window."""
        ((_, places),) = self.groups
        return places["window_k"].view(row)[0], places["window_v"].view(row)[0]

    def write(self, rows: Tensor, states: list[Any]) -> None:
        """Copy the tensors of states into rows."""
        for state, (_, places) in zip(states, self.groups, strict=True):
            for name, place in places.items():
                place.view(rows).copy_(getattr(state, name))
