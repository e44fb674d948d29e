"""States that are kept between requests, within a bound of memory: a next turn reads only what is new."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers.cache_utils import Cache

from linearizer.student.cache import keeps_state
from linearizer.student.state import tensors

TENSOR_BYTES = 640  # of memory that a tensor takes in addition to its numbers (some 400), and its share of the cache


@dataclass(frozen=True)
class Kept:
    tokens: int
    bytes: int
    cache: Cache


class KeptStates:
    """States by the tokens that they have read; the least recently used is forgotten first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
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
