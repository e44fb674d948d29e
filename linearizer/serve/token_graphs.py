"""Tokens of the running batch by CUDA graphs: one launch for a token, where a model needs hundreds.

A graph uses tensors at fixed addresses. So each has its states, for 1, 2, 4, … texts: texts that join the batch are
copied there, and those that stay move there as rows of bytes. The results of unused places are dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.kernels.graphs.call_reader import reader_of
from linearizer.kernels.graphs.text_parts import lies_on_one_device
from linearizer.kernels.graphs.token_graph import Capture, TokenGraph, capture_on_gpu
from linearizer.serve.cache_rows import copy_cache, join_caches, keep_rows, read_on, tensors_of
from linearizer.student.cache import exact_cache_of, keeps_state
from linearizer.student.modeling_linearized import LinearizedForCausalLM

logger = logging.getLogger(__name__)
Tensor = torch.Tensor


@dataclass
class BatchGraph:
    """A graph for a number of texts, and the cache whose states it reads."""

    cache: Cache
    graph: TokenGraph

    @classmethod
    def of(cls, model: LinearizedForCausalLM, cache: Cache, capture: Capture) -> BatchGraph:
        """Capture a token of texts with states like the cache's."""
        graph_cache = copy_cache(cache, lambda x: x.clone())
        lengths = states_of(cache)[0].count.clone()
        zeros = torch.zeros_like(lengths)
        read_on(model, graph_cache, zeros[:, None], lengths, zeros)  # makes the pools of states
        return cls(graph_cache, TokenGraph.of(model, graph_cache, capture))

    def lay(self, at: int, cache: Cache) -> None:
        """Copy the states of a cache into the pools, from place `at` on."""
        for pool, layer in zip(self.graph.pools, cache.layers, strict=True):
            pool.lay(at, layer.memory)

    def move(self, source: BatchGraph, places: Sequence[int]) -> None:
        """Copy the states in some places of a graph, perhaps this one, to this graph's first places."""
        if source is self and [*places] == [*range(len(places))]:
            return
        index = torch.tensor(places, device=self.graph.ids.device)
        for target, pool in zip(self.graph.pools, source.graph.pools, strict=True):
            target.pool[: len(places)], target.count[: len(places)] = pool.pool[index], pool.count[index]


class TokenGraphs:
    """Reads tokens of the batch by graphs if possible, and joins and keeps its rows in their states."""

    def __init__(self, model: PreTrainedModel, capture: Capture | None = None) -> None:
        self.model = model
        on_one_gpu = model.device.type == "cuda" and lies_on_one_device(model)
        self.capture = capture_on_gpu if capture is None and on_one_gpu else capture
        if isinstance(model, LinearizedForCausalLM):
            reader_of(model).repeats_tokens = False  # by graphs of single caches
            for student in model.students() if self.capture else ():
                student.exact_tokens = 0  # a graph cannot read texts some of which are exact
        self.graphs: dict[int, BatchGraph] = {}  # by the number of texts
        self.loaded: tuple[BatchGraph, Cache] | None = None  # the graph in use, and the batch's cache of its states

    def join(self, caches: Sequence[Cache]) -> Cache:
        """Join caches; the first may be the batch's."""
        if self.capture is None:
            return join_caches(caches)
        before, texts = self.graph_of(caches[0]), [len(tensors_of(cache)[0]) for cache in caches]
        if (graph := self.find(caches, sum(texts))) is None:
            return join_caches(caches)
        if before is not None:
            graph.move(before, range(texts[0]))
        for place, cache in enumerate(caches):
            if place or before is None:
                graph.lay(sum(texts[:place]), cache)
        return self.show(graph, sum(texts), max(cache.get_seq_length() for cache in caches))

    def keep(self, cache: Cache, rows: Sequence[int], longest: int) -> Cache:
        """Keep the given rows of the batch, with no more padding than the longest of them needs."""
        before = self.graph_of(cache)
        if before is None or (graph := self.find([cache], len(rows))) is None:
            keep_rows(cache, rows, longest)
            self.loaded = None
            return cache
        graph.move(before, rows)
        return self.show(graph, len(rows), longest)

    def graph_of(self, cache: Cache) -> BatchGraph | None:
        """Return the graph whose states are a cache's."""
        return self.loaded[0] if self.loaded is not None and self.loaded[1] is cache else None

    def find(self, caches: Sequence[Cache], texts: int) -> BatchGraph | None:
        """Find or capture a graph for this number of texts with states like the caches'; None if there is none."""
        states = [cache_states[0] for cache in caches if (cache_states := states_of(cache))]
        if self.capture is None or len(states) < len(caches):
            return None
        if any(int(state.count.min()) < state.sink_k.shape[2] for state in states):
            return None  # until all sinks are read
        if (size := 1 << (texts - 1).bit_length()) not in self.graphs:
            try:
                repeated = copy_cache(caches[0], lambda x: x[[0] * size])
                self.graphs[size] = BatchGraph.of(self.model, repeated, self.capture)
            except torch.OutOfMemoryError:
                return None
            except Exception as error:  # failed captures raise errors of many kinds
                logger.warning("tokens are written without graphs of CUDA, which takes longer: %s", first_line(error))
                self.capture = None
                return None
        return self.graphs[size]

    def show(self, graph: BatchGraph, texts: int, tokens: int) -> Cache:
        """Return the batch's cache: views of a graph's first states; the longest text has read `tokens` tokens."""
        batch = copy_cache(graph.cache, lambda x: x[:texts])
        for layer in batch.layers:
            layer.tokens_read = tokens
        self.loaded = graph, batch
        return batch

    def read(self, cache: Cache, ids: Tensor, lengths: Tensor, shifts: Tensor) -> Tensor:  # (rows, vocabulary)
        """Read a token of each row, with lengths and shifts as in `read_on`; return the logits."""
        if (batch := self.graph_of(cache)) is None:
            return read_on(self.model, cache, ids[:, None], lengths, shifts)
        batch.graph.repeat_for(cache, ids[:, None], (lengths + shifts)[:, None])
        logits: Tensor = batch.graph.results.values["logits"][: len(ids), -1]
        return logits


def states_of(cache: Cache) -> list:
    """Return the states of a cache; none if some layer keeps anything else, such as the exact cache of short texts."""
    if not all(keeps_state(layer) and exact_cache_of(layer.memory) is None for layer in cache.layers):
        return []
    return [state for layer in cache.layers for state in layer.memory]
