"""Prompts that are read before they join the running batch, and states that are kept between requests.

A prompt is read in chunks, after the longest kept state that it begins with: the next turn of a conversation reads only
what is new. The cache of a row that is kept for later requests is not written over.
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

from linearizer.serve.cache_rows import copy_cache, read_on
from linearizer.serve.row import Row, fail_rows
from linearizer.student.cache import keeps_state
from linearizer.student.state import tensors
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.ram import trim_heaps

CHUNK = 512  # states are kept at multiples of this number of tokens
FEWEST = 64  # tokens that a prompt reads at once, if it has as many: fewer take hardly less time
TENSOR_BYTES = 640  # of memory that a tensor takes in addition to its numbers (some 400), and its share of the cache

TRIMMED_SHARE = 1 / 8  # of the bytes that may be kept: after as many more, freed memory goes back to the system


@dataclass(frozen=True)
class Kept:
    tokens: int
    bytes: int
    cache: Cache


class KeptStates:
    """States by the tokens that they have read; the least recently used is forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes, self.untrimmed = max_bytes, 0, 0
        self.states: OrderedDict[bytes, Kept] = OrderedDict()

    def keep(self, tokens: Sequence[int], cache: Cache) -> None:
        """Keep a cache that has read these tokens, and that nothing else holds, where there is room for it."""
        key, size = next(hashes(tokens, [len(tokens)])), memory_of(cache)
        if size > self.max_bytes:
            return
        if key in self.states:
            self.bytes -= self.states.pop(key).bytes
        self.states[key] = Kept(len(tokens), size, cache)
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.bytes -= self.states.popitem(last=False)[1].bytes
        self.untrimmed += size
        if self.untrimmed > self.max_bytes * TRIMMED_SHARE:  # between small tensors that stay, others leave holes
            self.untrimmed = 0
            trim_heaps()

    def find_longest(self, tokens: Sequence[int]) -> tuple[int, Cache | None]:
        """Find the state that has read the most of these tokens, from the first one on; return their number and it."""
        lengths = sorted({kept.tokens for kept in self.states.values() if kept.tokens <= len(tokens)})
        if not (found := [key for key in hashes(tokens, lengths) if key in self.states]):
            return 0, None
        self.states.move_to_end(found[-1])
        kept = self.states[found[-1]]
        return kept.tokens, kept.cache


def memory_of(cache: Cache) -> int:
    """Count the memory that a cache takes: its storages, and what each tensor takes by itself."""
    counted = []
    for layer in cache.layers:
        if keeps_state(layer):
            counted += [x for state in layer.memory for x in tensors(state).values()]
        elif layer.is_initialized:
            counted += [layer.keys, layer.values]
    return sum(x.untyped_storage().nbytes() + TENSOR_BYTES for x in counted)


def hashes(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[bytes]:
    """Yield the hash of the first tokens for each length; lengths grow."""
    hashed, done = hashlib.sha256(), 0
    for length in lengths:
        hashed.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield hashed.digest()


class Prompts:
    """Reads prompts, one after the other, but for their last tokens, which are read in the batch."""

    def __init__(self, model: PreTrainedModel, kept: KeptStates) -> None:
        self.model, self.kept = model, kept
        self.rows: list[Row] = []  # in the order in which they came

    def read(self, most: int) -> list[Row]:
        """Read about the given number of tokens; return the rows whose prompts are read, and no longer wait."""
        read: list[Row] = []
        while self.rows:
            row = self.rows[0]
            self.look_up(row)
            if not row.left or row.done or row.abandoned:
                read += [row] * (not row.done and not row.abandoned)
                self.rows.pop(0)
            elif most > 0:
                count = min(CHUNK - row.read % CHUNK, row.left, max(FEWEST, most))
                try:
                    self.read_part(row, count)
                except Exception as error:  # a device may fail in many ways, and other requests are served after it
                    fail_rows([row], error)
                most -= max(FEWEST, count)
            else:
                break
        return read

    def look_up(self, row: Row) -> None:
        """Let a row go on from the kept state that has read the most of its prompt."""
        tokens, cache = self.kept.find_longest(row.prompt[:-1])
        if tokens > row.read:
            row.reused += tokens - row.read
            row.read, row.cache, row.cache_is_kept = tokens, cache, True

    @torch.inference_mode()
    def read_part(self, row: Row, count: int) -> None:
        """Read the next tokens of a row."""
        if row.cache is None:
            row.cache = fresh_cache(self.model)
        elif row.cache_is_kept:
            row.cache, row.cache_is_kept = copy_cache(row.cache), False
        ids, read = torch.tensor([row.prompt[row.read : row.read + count]]), torch.tensor([row.read])
        read_on(self.model, row.cache, ids.to(self.model.device), read.to(self.model.device))
        row.read += count
        if self.kept.max_bytes and (row.read % CHUNK == 0 or not row.left):  # a copy: what reads on has buffers
            self.kept.keep(row.prompt[: row.read], copy_cache(row.cache))
