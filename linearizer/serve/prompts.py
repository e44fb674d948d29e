"""Prompts that are read before they join the running batch: in chunks of tokens, several prompts together.

Prompts that are read together read equally many tokens, so that nothing is padded; prompts that have
read nothing are not mixed with others. The cache of a row that is kept for later requests is not written over.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from linearizer.serve.cache_rows import copy_cache, join_caches, read_on, take_row
from linearizer.serve.kept_states import KeptStates
from linearizer.serve.row import Row, fail_rows
from linearizer.teacher.logits import fresh_cache

CHUNK = 512  # states are kept at multiples of this number of tokens
FEWEST = 64  # tokens that a prompt reads at once, if it has as many: fewer take hardly less time


class Prompts:
    """Reads prompts but for their last tokens, which are read in the batch."""

    def __init__(self, model: PreTrainedModel, kept: KeptStates) -> None:
        self.model, self.kept = model, kept
        self.rows: list[Row] = []  # in the order in which they came

    def add(self, row: Row) -> None:
        """Let a row wait until its prompt is read."""
        self.look_up(row)
        self.rows.append(row)

    def look_up(self, row: Row) -> None:
        """Let a row go on from the kept state that has read the most of its prompt."""
        tokens, cache = self.kept.find_longest(row.prompt[:-1])
        if tokens > row.read:
            row.reused += tokens - row.read
            row.read, row.cache, row.cache_is_kept = tokens, cache, True

    def read(self, most: int) -> list[Row]:
        """Read about the given number of tokens; return the rows whose prompts are read, and no longer wait."""
        while most > 0 and (group := self.choose_group(most)):
            rows, count = group
            try:
                self.read_group(rows, count)
            except Exception as error:  # a device may fail in many ways, and other requests are served after it
                fail_rows(rows, error)
            most -= max(FEWEST, count * len(rows))
        read = [row for row in self.rows if not (row.left or row.done or row.abandoned)]
        self.rows = [row for row in self.rows if row.left and not (row.done or row.abandoned)]
        return read

    def choose_group(self, most: int) -> tuple[list[Row], int] | None:
        """Choose rows that read equally many tokens next, the first row among them; return them and that number."""
        if not (waiting := list(self.unlike_rows())):
            return None
        first = waiting[0]
        count = self.tokens_to_boundary(first)
        alike = [row for row in waiting if (row.cache is None) == (first.cache is None)]
        rows = [row for row in alike if self.tokens_to_boundary(row) >= count]
        count = min(count, max(FEWEST, most // len(rows)))
        return rows[: max(1, most // count)], count

    def unlike_rows(self) -> Iterator[Row]:
        """Yield the rows that are not read; where several begin alike, the first one, whose state is kept for all."""
        begun: set[tuple[int, ...]] = set()
        for row in self.rows:
            if row.behind:
                self.look_up(row)
            if row.left and not (row.done or row.abandoned):
                beginning = tuple(row.prompt[: row.read + self.tokens_to_boundary(row)])
                row.behind = beginning in begun and self.kept.max_bytes > 0
                begun.add(beginning)
                if not row.behind:
                    yield row

    def tokens_to_boundary(self, row: Row) -> int:
        """Count the tokens that a row may read before its state is kept."""
        return min(CHUNK - row.read % CHUNK, row.left)

    @torch.inference_mode()
    def read_group(self, rows: list[Row], count: int) -> None:
        """Read the next tokens of several rows."""
        device, first = self.model.device, rows[0]
        if first.cache is None:
            cache = fresh_cache(self.model)
        elif len(rows) == 1 and not first.cache_is_kept:
            cache = first.cache
        else:
            cache = join_caches([row.cache for row in rows])
        read = torch.tensor([row.read for row in rows], device=device)
        ids = torch.tensor([row.prompt[row.read : row.read + count] for row in rows], device=device)
        read_on(self.model, cache, ids, read)
        for index, row in enumerate(rows):
            row.read += count
            row.cache = take_row(cache, index, row.read) if len(rows) > 1 else cache
            row.cache_is_kept = False
            if self.kept.max_bytes and (row.read % CHUNK == 0 or not row.left):  # a copy: what reads on has buffers
                self.kept.keep(row.prompt[: row.read], copy_cache(row.cache))
