"""Prompts that are read before they join the running batch, and states that are kept between requests.

A prompt is read in chunks, after the longest kept state of its beginning: the next turn of a conversation reads only
new text. On a GPU, which one text leaves mostly idle, students of a fixed size read several prompts at once.
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

from linearizer.kernels.graphs.text_parts import expects_parts
from linearizer.serve.cache_rows import (
    copy_cache,
    join_caches,
    kinds_of_states,
    pack,
    read_on,
    set_shift,
    take_row,
    take_shift,
    tensors_of,
    unpack,
)
from linearizer.serve.row import Row, fail_rows
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.logits import fresh_cache
from linearizer.teacher.ram import run_if_it_fits, trim_heaps
from linearizer.teacher.token_loop import read_tokens

CHUNK = 512  # tokens read at once on a CPU; states are kept at multiples of it
TIMES_ON_GPU = 4  # as many tokens at once: launches for fewer take a host as long
DOUBLINGS = 3  # of the tokens that a GPU reads at once, as a prompt goes on: layers read parts of them at the same time
FEWEST = 64  # tokens of a prompt at once, if it has as many: fewer take hardly less time
KEPT_BYTES, SHAPE_BYTES = 1024, 128  # further bytes of a state, and of the shape of each of its tensors
TRIMMED_SHARE = 1 / 8  # of the bytes to keep: after as many new bytes, freed memory goes back to the system


@dataclass(frozen=True)
class KeptState:
    tokens: int
    bytes: int
    shift: int  # of its row
    packed: torch.Tensor  # all tensors of its cache as bytes
    shapes: tuple[torch.Size, ...]
    form: Cache  # a cache with the same kinds of states, without numbers


class KeptStates:
    """States by the tokens that they have read; the least recently used is dropped first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes, self.untrimmed = max_bytes, 0, 0
        self.states: OrderedDict[bytes, KeptState] = OrderedDict()
        self.forms: dict[tuple[type, ...], Cache] = {}  # by the kinds of states: those of short texts are others
        self.shapes: dict[tuple[torch.Size, ...], tuple[torch.Size, ...]] = {}  # one object for all equal shapes

    def keep(self, tokens: Sequence[int], cache: Cache, shift: int = 0, owner: str = "") -> None:
        """Keep a copy of a cache that has read these tokens, with the shift of its row, if there is room for it.

        Only rows of the same owner find it: else clients could find out by cache hits which texts others have sent.
        """
        parts = tensors_of(cache)
        size = KEPT_BYTES + sum(SHAPE_BYTES + x.nbytes for x in parts)
        if size > self.max_bytes:
            return
        if (kinds := kinds_of_states(cache)) not in self.forms:
            self.forms[kinds] = copy_cache(cache, lambda x: x[:0].clone())
        key = next(hashes(tokens, [len(tokens)], owner))
        if key in self.states:
            self.drop(key)
        if (packed := run_if_it_fits(lambda: pack(parts))) is None:  # requests need the memory more
            for key in [*self.states]:
                self.drop(key)
            return
        shapes = tuple(x.shape for x in parts)
        shapes = self.shapes.setdefault(shapes, shapes)
        self.states[key] = KeptState(len(tokens), size, shift, packed, shapes, self.forms[kinds])
        self.bytes += size
        while self.bytes > self.max_bytes:
            self.drop(next(iter(self.states)))
        self.untrimmed += size
        if self.untrimmed > self.max_bytes * TRIMMED_SHARE:  # freed tensors leave holes between those that stay
            self.untrimmed = 0
            trim_heaps()

    def drop(self, key: bytes) -> None:
        dropped = self.states.pop(key)
        self.bytes -= dropped.bytes
        if all(state.shapes is not dropped.shapes for state in self.states.values()):  # else one more for every length
            del self.shapes[dropped.shapes]

    def find_longest(self, tokens: Sequence[int], owner: str = "") -> KeptState | None:
        """Return the owner's state that has read the most of these tokens, from the first one on."""
        lengths = sorted({state.tokens for state in self.states.values() if state.tokens <= len(tokens)})
        if not (keys := [key for key in hashes(tokens, lengths, owner) if key in self.states]):
            return None
        self.states.move_to_end(keys[-1])
        return self.states[keys[-1]]

    def restore(self, state: KeptState) -> Cache:
        """Make a cache from a kept state, which does not change with it."""
        return unpack(state.form, state.packed, state.shapes, state.tokens)


def hashes(tokens: Sequence[int], lengths: Sequence[int], owner: str) -> Iterator[bytes]:
    """Yield the hash of the owner and the first tokens for each of the ascending lengths."""
    hashed, begin = hashlib.sha256(hashlib.sha256(owner.encode()).digest()), 0
    for length in lengths:
        hashed.update(array("q", tokens[begin:length]).tobytes())
        begin = length
        yield hashed.digest()


class Prompts:
    """Reads prompts in order of arrival, except for their last tokens, which are read in the batch."""

    def __init__(self, model: PreTrainedModel, kept: KeptStates) -> None:
        self.model, self.kept = model, kept
        on_gpu = model.device.type == "cuda"
        self.times = TIMES_ON_GPU if on_gpu else 1
        self.chunk = CHUNK * self.times
        self.several = on_gpu and has_fixed_states(model)  # whether several prompts are read at once
        self.rows: list[Row] = []  # in order of arrival

    def read(self, budget: int) -> list[Row]:
        """Read about `budget` tokens; return the rows whose prompts are read, and remove them from the queue."""
        finished: list[Row] = []
        while self.rows:
            row = self.rows[0]
            if not self.prepare(row):
                self.rows.pop(0)
            elif not row.unread:
                finished.append(self.rows.pop(0))
            elif budget > 0:
                if row.read < row.reach:
                    budget -= row.reach - row.read
                    self.read_pictures(row)
                    continue
                rows = self.rows_beside(row, budget) if self.several else [row]
                count = min(max(map(self.next_part, rows)), max(FEWEST, budget))
                budget -= max(FEWEST, count) * len(rows)
                try:
                    self.read_part(rows, count)
                except Exception as error:  # a device may fail in many ways; other requests must still be served
                    fail_rows(rows, error)
            else:
                break
        return finished

    def prepare(self, row: Row) -> bool:
        """Let a row continue from the longest kept state; return whether the row still waits."""
        if not (row.done or row.abandoned):
            try:
                self.look_up(row)
            except Exception as error:  # as in `read`
                fail_rows([row], error)
        return not (row.done or row.abandoned)

    def next_part(self, row: Row) -> int:
        """Count the tokens to the end of a row's chunk, or of its prompt; if the model reads parts of it at the same
        time, a chunk is as long as all before it."""
        most = DOUBLINGS if expects_parts(self.model) else 0
        doublings = min((row.read // self.chunk).bit_length() - 1, most)
        chunk = self.chunk << max(doublings, 0)
        return min(chunk - row.read % chunk, row.unread)

    def rows_beside(self, first: Row, budget: int) -> list[Row]:
        """List the rows that read their next parts at once with the first, including it.

        A row that begins like another of them waits for the other's state.
        """
        rows, longest = [first], max(FEWEST, self.next_part(first))
        for row in self.rows[1:]:
            if any(begins_alike(row, earlier, earlier.read + self.next_part(earlier)) for earlier in rows):
                continue
            if not self.prepare(row) or not row.unread or (row.cache is None) != (first.cache is None):
                continue
            if row.read < row.reach:
                continue
            if (len(rows) + 1) * max(longest, self.next_part(row)) <= budget:
                rows, longest = [*rows, row], max(longest, self.next_part(row))
        return rows

    def look_up(self, row: Row) -> None:
        """Let a row continue from the kept state that has read the most of its prompt, and all of its pictures."""
        state = self.kept.find_longest(row.prompt[:-1], row.owner)
        if state is not None and state.tokens > row.read and state.tokens >= row.reach:
            row.reused += state.tokens - row.read
            row.read, row.shift, row.cache = state.tokens, state.shift, self.kept.restore(state)

    @torch.inference_mode()
    def read_pictures(self, row: Row) -> None:
        """Read the tokens of a row up to its last picture, at once."""
        assert row.shown is not None
        try:
            cache = fresh_cache(self.model) if row.cache is None else row.cache
            set_shift(cache, self.model, row.shift)
            ids = torch.tensor([row.shown.tokens[: row.shown.pictures.reach]])
            next(read_tokens(self.model, ids, cache, row.shown.pictures))
            row.read, row.shift, row.cache = row.reach, take_shift(cache), cache
        except Exception as error:  # as in `read`
            fail_rows([row], error)

    @torch.inference_mode()
    def read_part(self, rows: Sequence[Row], count: int) -> None:
        """Read the next tokens of some rows, at most `count` of each."""
        caches, device = [row.cache for row in rows if row.cache is not None], self.model.device
        cache = fresh_cache(self.model) if not caches else caches[0] if len(rows) == 1 else join_caches(caches)
        parts = [row.prompt[row.read : row.read + min(count, self.next_part(row))] for row in rows]
        longest = max(map(len, parts))
        ids = torch.tensor([[0] * (longest - len(part)) + part for part in parts])
        lengths = torch.tensor([row.read - longest + len(part) for row, part in zip(rows, parts, strict=True)])
        real = torch.tensor([[0] * (longest - len(part)) + [1] * len(part) for part in parts])
        shifts = torch.tensor([row.shift for row in rows])
        padding = real.to(device) if len(rows) > 1 else None
        read_on(self.model, cache, ids.to(device), lengths.to(device), shifts.to(device), padding)
        for index, (row, part) in enumerate(zip(rows, parts, strict=True)):
            row.read += len(part)
            row.cache = cache if len(rows) == 1 else take_row(cache, index, row.read)
            if self.kept.max_bytes and (row.read % self.chunk == 0 or not row.unread):
                self.kept.keep(row.prompt[: row.read], row.cache, row.shift, row.owner)


def begins_alike(row: Row, earlier: Row, tokens: int) -> bool:
    """Whether the first tokens of two prompts of the same owner, which both have, are the same."""
    is_same = row.owner == earlier.owner and row.prompt[:tokens] == earlier.prompt[:tokens]
    return is_same and len(row.prompt) > tokens


def has_fixed_states(model: PreTrainedModel) -> bool:
    """Whether no layer's state grows with the text."""
    if not isinstance(model, LinearizedForCausalLM):
        return False
    layers = [None if layer is None else layer["heads"] for layer in model.config.linearized["layers"]]
    return all(heads is not None and not any("softmax" in head for head in heads) for heads in layers)
