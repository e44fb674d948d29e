"""Triton's kernels for the tokens of many texts, whose states are rows of bytes of one pool, read and written in place.

A server keeps such a pool, and names the row of each text. A layer's states lie in a part of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from linearizer.kernels.triton.state_pool import PoolLayout, StatePool, find_groups, scored_rows, turning
from linearizer.student.attention_of_student import Scores, working_dtype

Tensor = torch.Tensor


@dataclass
class PoolRow:
    """Where the states of a layer lie in a row, from byte `begin` to `end`."""

    layout: PoolLayout
    begin: int
    dtype: torch.dtype  # of keys and values
    dims: tuple[int, int]  # of both
    learned: tuple | None = None  # a scale, and what depends on it and on the student's weights

    @staticmethod
    def of(student: Any, like: Sequence[Tensor], begin: int) -> PoolRow | None:
        """Lay out all groups of a layer; `like` is a key and a value of the layer. None: some are not served."""
        k, v = like
        served = find_groups(student.groups, [None] * len(student.groups), k, 1.0, ())
        if len(served) < len(student.groups):
            return None
        return PoolRow(PoolLayout.of(served, (), k, v), begin, k.dtype, (k.shape[-1], v.shape[-1]))

    @property
    def end(self) -> int:
        return self.begin + self.layout.row_bytes

    @property
    def held(self) -> int:
        """The bytes of tensors."""
        return sum(
            len(self.layout.groups[index].heads) * shape.numel() * dtype.itemsize
            for (index, _), (_, _, shape, dtype) in self.layout.places.items()
        )

    def forget_weights(self) -> None:
        """Compute what depends on the student's weights anew: they have changed."""
        self.learned = None

    def read_texts(
        self, student: Any, pool: Tensor, rows: Tensor, counts: Tensor, least: int, q: Tensor, k: Tensor, v: Tensor,
        scale: float, cap: float | None = None, sink: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Read equally many tokens of some texts, and change their rows; return (texts, query heads, tokens, dim).

        Before, the texts have read `counts` tokens, of which `least` are the fewest: 0 if none has read any.
        """
        if self.learned is None or self.learned[0] != scale:
            work, layout = working_dtype(k), self.layout
            layout.learned = []
            turns = [] if student.turns is None else turning(student.turns, work)
            self.learned = scale, layout.find_merging(scale, work), turns
        part, q = pool[:, self.begin : self.end], q.unflatten(1, (k.shape[1], -1))
        if not least:
            part.index_fill_(0, rows, 0)
        _, merging, turns = self.learned
        missing = max(self.layout.first_tokens - least, 0)
        texts = StatePool(
            part, rows, counts.clone(), self.layout, merging, turns, self.dtype, self.dims, {}, {}, missing
        )
        out = v.new_empty(len(q), q.shape[3], *q.shape[1:3], v.shape[-1]).permute(0, 2, 3, 1, 4)
        of_scores: tuple = ()
        if cap is not None or sink is not None:
            scores = Scores(cap, None if sink is None else sink.view(k.shape[1], -1))
            of_scores = scored_rows(student, scores, q, scale), cap or 0.0
        texts.attend(q, k, v, scale, None, out, *of_scores)
        return out.flatten(1, 2)

    def stored(self, row: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values that a row (1, bytes) keeps in its ring: (heads, tokens, dim); all heads have the
        same window."""
        (views,) = self.layout.views(row[:, self.begin : self.end]).values()
        return views["k"][0], views["v"][0]
