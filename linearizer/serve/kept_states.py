"""States that are kept between requests, within a bound of memory: a next turn reads only what is new."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from transformers.cache_utils import Cache

from linearizer.student.cache import keeps_state
from linearizer.student.state import tensors

TENSOR_BYTES = 640  # of memory that a tensor takes beside its numbers (some 400), with its share of what holds it


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
        self.lengths: Counter[int] = Counter()

    def keep(self, tokens: Sequence[int], cache: Cache) -> bool:
        """Keep a cache that has read these tokens, and is nobody else's; tell whether there is room for it."""
        key, held = next(hashes(tokens, [len(tokens)]))[1], memory_of(cache)
        if held > self.max_bytes:
            return False
        if key in self.states:
            self.forget(key)
        self.states[key] = Kept(len(tokens), held, cache)
        self.lengths[len(tokens)] += 1
        self.bytes += held
        while self.bytes > self.max_bytes:
            self.forget(next(iter(self.states)))
        return True

    def find_longest(self, tokens: Sequence[int]) -> tuple[int, Cache | None]:
        """Find the state that has read the most of these tokens, from the first one on, and tell how many."""
        longest: bytes | None = None
        for _, key in hashes(tokens, sorted(length for length in self.lengths if length <= len(tokens))):
            longest = key if key in self.states else longest
        if longest is None:
            return 0, None
        self.states.move_to_end(longest)
        kept = self.states[longest]
        return kept.tokens, kept.cache

    def forget(self, key: bytes) -> None:
        kept = self.states.pop(key)
        self.bytes -= kept.bytes
        self.lengths[kept.tokens] -= 1
        if not self.lengths[kept.tokens]:
            del self.lengths[kept.tokens]


def memory_of(cache: Cache) -> int:
    """Count the memory that a cache takes: whole storages, counters too, and what each tensor takes by itself."""
    held = []
    for layer in cache.layers:
        if keeps_state(layer):
            held += [x for state in layer.memory for x in tensors(state).values()]
        elif layer.is_initialized:
            held += [layer.keys, layer.values]
    return sum(x.untyped_storage().nbytes() + TENSOR_BYTES for x in held)


def hashes(tokens: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, bytes]]:
    """Yield each length with the hash of so many first tokens; lengths grow."""
    hashed, done = hashlib.sha256(), 0
    for length in lengths:
        hashed.update(array("q", tokens[done:length]).tobytes())
        done = length
        yield length, hashed.digest()
