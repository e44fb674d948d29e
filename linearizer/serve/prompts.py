"""Prompts that are read before they join the running batch, and states that are kept between requests.

A prompt is read in chunks, after the longest kept state that it begins with: the next turn of a conversation reads only
what is new. On a GPU, which is idle for most of the time of one text, students of a fixed size read several at once.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.serve.cache_rows import copy_cache, join_caches, pack, read_on, take_row, tensors_of, unpack
from linearizer.serve.row import Row, fail_rows
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.ram import trim_heaps

CHUNK = 512  # tokens that are read at once on a CPU; states are kept at multiples of it
TIMES_ON_GPU = 4  # as many tokens at once: few take a host as long to launch
FEWEST = 64  # tokens that a prompt reads at once, if it has as many: fewer take hardly less time
KEPT_BYTES, SHAPE_BYTES = 1024, 128  # of memory that a state, and the shape of each of its tensors, take besides
TRIMMED_SHARE = 1 / 8  # of the bytes that may be kept: after as many more, freed memory goes back to the system


@dataclass(frozen=True)
class Kept:
    tokens: int
    bytes: int
    packed: torch.Tensor  # all numbers of its cache
    shapes: tuple[torch.Size, ...]


class KeptStates:
    """States by the tokens that they have read; the least recently used is forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes, self.untrimmed = max_bytes, 0, 0
        self.states: OrderedDict[bytes, Kept] = OrderedDict()
        self.form: Cache | None = None  # a cache without numbers
        self.shapes: dict[tuple[torch.Size, ...], tuple[torch.Size, ...]] = {}  # one object for all states alike

    def keep(self, tokens: Sequence[int], cache: Cache) -> None:
        """Keep a copy of a cache that has read these tokens, where there is room for it."""
        held = tensors_of(cache)
        size = KEPT_BYTES + sum(SHAPE_BYTES + x.nbytes for x in held)
        if size > self.max_bytes:
            return
        if self.form is None:
            self.form = copy_cache(cache, lambda name, x: x[:0].clone())
        key = next(hashes(tokens, [len(tokens)]))
        if key in self.states:
            self.bytes -= self.states.pop(key).bytes
        shapes = tuple(x.shape for x in held)
        self.states[key] = Kept(len(tokens), size, pack(held), self.shapes.setdefault(shapes, shapes))
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self.states.popitem(last=False)[1].bytes
        self.untrimmed += size
        if self.untrimmed > self.max_bytes * TRIMMED_SHARE:  # between what stays, other tensors leave holes
            self.untrimmed = 0
            trim_heaps()

    def find_longest(self, tokens: Sequence[int]) -> Kept | None:
        """Find the state that has read the most of these tokens, from the first one on."""
        lengths = sorted({kept.tokens for kept in self.states.values() if kept.tokens <= len(tokens)})
        if not (found := [key for key in hashes(tokens, lengths) if key in self.states]):
            return None
        self.states.move_to_end(found[-1])
        return self.states[found[-1]]

    def restore(self, kept: Kept) -> Cache:
        """Make a cache of a kept state; what it reads does not change the state."""
        assert self.form is not None
        return unpack(self.form, kept.packed, kept.shapes, kept.tokens)


def hashes(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the hash of the first tokens for each length; lengths grow."""
    hashed, done = hashlib.sha256(), 0
    for length in lengths:
        hashed.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield hashed.digest()


class Prompts:
    """Reads prompts in the order in which they came, but for their last tokens, which are read in the batch."""

    def __init__(self, model: PreTrainedModel, kept: KeptStates) -> None:
        self.model, self.kept = model, kept
        on_gpu = model.device.type == "cuda"
        self.times = TIMES_ON_GPU if on_gpu else 1
        self.chunk = CHUNK * self.times
        self.several = on_gpu and has_fixed_states(model)  # whether several prompts are read at once
        self.rows: list[Row] = []  # in the order in which they came

    def read(self, most: int) -> list[Row]:
        """Read about the given number of tokens; return the rows whose prompts are read, and no longer wait."""
        read: list[Row] = []
        while self.rows:
            row = self.rows[0]
            if not self.prepare(row):
                self.rows.pop(0)
            elif not row.left:
                read.append(self.rows.pop(0))
            elif most > 0:
                rows = self.rows_beside(row, most) if self.several else [row]
                count = min(max(map(self.next_part, rows)), max(FEWEST, most))
                most -= max(FEWEST, count) * len(rows)
                try:
                    self.read_part(rows, count)
                except Exception as error:  # a device may fail in many ways, and other requests are served after it
                    fail_rows(rows, error)
            else:
                break
        return read

    def prepare(self, row: Row) -> bool:
        """Let a row go on from the longest kept state; return whether the row still waits."""
        if not (row.done or row.abandoned):
            try:
                self.look_up(row)
            except Exception as error:  # as in `read`
                fail_rows([row], error)
        return not (row.done or row.abandoned)

    def next_part(self, row: Row) -> int:
        """Count the tokens to the end of a row's chunk, or of its prompt."""
        return min(self.chunk - row.read % self.chunk, row.left)

    def rows_beside(self, first: Row, most: int) -> list[Row]:
        """List the rows that read their next parts at once with the first, which is one of them.

        A row that begins as another of them does waits for the state that the other leaves.
        """
        rows, longest = [first], max(FEWEST, self.next_part(first))
        for row in self.rows[1:]:
            if any(begins_alike(row, other, other.read + self.next_part(other)) for other in rows):
                continue
            if not self.prepare(row) or not row.left or (row.cache is None) != (first.cache is None):
                continue
            if (len(rows) + 1) * max(longest, self.next_part(row)) <= most:
                rows, longest = [*rows, row], max(longest, self.next_part(row))
        return rows

    def look_up(self, row: Row) -> None:
        """Let a row go on from the kept state that has read the most of its prompt."""
        kept = self.kept.find_longest(row.prompt[:-1])
        if kept is not None and kept.tokens > row.read:
            row.reused += kept.tokens - row.read
            row.read, row.cache = kept.tokens, self.kept.restore(kept)

    @torch.inference_mode()
    def read_part(self, rows: Sequence[Row], count: int) -> None:
        """Read the next tokens of some rows, at most the given number of each."""
        caches, device = [row.cache for row in rows if row.cache is not None], self.model.device
        cache = fresh_cache(self.model) if not caches else caches[0] if len(rows) == 1 else join_caches(caches)
        parts = [row.prompt[row.read : row.read + min(count, self.next_part(row))] for row in rows]
        longest = max(map(len, parts))
        ids = torch.tensor([[0] * (longest - len(part)) + part for part in parts])
        read = torch.tensor([row.read - longest + len(part) for row, part in zip(rows, parts, strict=True)])
        real = torch.tensor([[0] * (longest - len(part)) + [1] * len(part) for part in parts])
        read_on(self.model, cache, ids.to(device), read.to(device), real.to(device) if len(rows) > 1 else None)
        for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
            row.read += len(part)
            row.cache = cache if len(rows) == 1 else take_row(cache, index, row.read)
            if self.kept.max_bytes and (row.read % self.chunk == 0 or not row.left):
                self.kept.keep(row.prompt[: row.read], row.cache)


def begins_alike(row: Row, other: Row, tokens: int) -> bool:
    """Whether the first tokens of two prompts, which both have, are the same."""
    return row.prompt[:tokens] == other.prompt[:tokens] and len(row.prompt) > tokens


def has_fixed_states(model: PreTrainedModel) -> bool:
    """Whether no layer of a model keeps anything that grows with the text."""
    if not isinstance(model, LinearizedForCausalLM):
        return False
    layers = [None if layer is None else layer["heads"] for layer in model.config.layers]
    return all(heads is not None and not any(isinstance(head, str) for head in heads) for heads in layers)
