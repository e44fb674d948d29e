"""Tokens of the running batch by graphs of CUDA: one launch for a token in place of the hundreds that a model takes.

A graph works on tensors that stay where they are. So each has states of its own, for 1, 2, 4, … texts: texts that join
the batch are laid there, and those that stay move there as rows of bytes. What lies in other places is read, too, and
dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.serve.cache_rows import copy_cache, join_caches, keep_rows, read_on, tensors_of
from linearizer.student.cache import keeps_state
from linearizer.student.state_pool import StatePool

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], object], Tensor]]  # what repeats a step, and where its result then lies
WARM_UPS = 2  # steps before one is captured
FAR = 2**20  # tokens that a text has read, as far as Python knows, where a graph is tried; or all that a model may read
CLOSE = 2e-2  # of the largest logit


@dataclass
class TokenGraph:
    """A token of so many texts."""

    cache: Cache
    pools: list[StatePool]  # of its layers
    ids: Tensor  # (texts,)
    read: Tensor  # (texts,) tokens read before
    repeat: Callable[[], object]
    logits: Tensor  # (texts, vocabulary) after `repeat`

    @classmethod
    def of(cls, model: PreTrainedModel, cache: Cache, capture: Capture) -> TokenGraph:
        """Capture a token of texts with such states, and compare it with one that `cache` reads without."""
        own = copy_cache(cache, lambda name, x: x.clone())
        read = states_of(cache)[0].count.clone()
        ids = torch.zeros_like(read)

        def step() -> Tensor:
            return read_on(model, own, ids[:, None], read)

        step()  # lays states into pools
        memories = [layer.memory for layer in own.layers]
        pools = [pool for memory in memories for state in memory if (pool := state.state_pool) is not None]
        if [len(pool.windows) for pool in pools] != [len(memory) for memory in memories]:
            raise ValueError("some heads hold features, or all tokens")
        graph = cls(own, pools, ids, read, *capture(step))
        graph.lay(0, cache)
        for layer in cache.layers:
            layer.tokens_read = (getattr(model.config, "max_position_embeddings", None) or FAR) - 1
        expected = read_on(model, cache, ids[:, None], read)
        graph.repeat()
        if not (graph.logits - expected).abs().max() <= CLOSE * expected.abs().max():
            raise ValueError("a graph writes other tokens than the model, which may look at how many tokens were read")
        return graph

    def lay(self, at: int, cache: Cache) -> None:
        """Lay the states of a cache, from a place on."""
        for pool, layer in zip(self.pools, cache.layers, strict=True):
            pool.lay(at, layer.memory)

    def move(self, other: TokenGraph, places: Sequence[int]) -> None:
        """Take the states in some places of a graph, perhaps of this one, for the first of these."""
        if other is self and [*places] == [*range(len(places))]:
            return
        index = torch.tensor(places, device=self.ids.device)
        for own, pool in zip(self.pools, other.pools, strict=True):
            own.pool[: len(places)], own.count[: len(places)] = pool.pool[index], pool.count[index]


class TokenGraphs:
    """Reads tokens of the batch by graphs where they serve, and joins and keeps its rows so that they may."""

    def __init__(self, model: PreTrainedModel, capture: Capture | None = None) -> None:
        self.model = model
        self.capture = capture_on_gpu if capture is None and is_on_one_gpu(model) else capture
        self.graphs: dict[int, TokenGraph] = {}  # by the number of texts
        self.loaded: tuple[TokenGraph, Cache] | None = None  # the graph in use, and the batch's cache that shows it

    def join(self, caches: Sequence[Cache]) -> Cache:
        """Join caches, of which the first may be the batch's."""
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

    def graph_of(self, cache: Cache) -> TokenGraph | None:
        """Return the graph whose states a cache shows."""
        return self.loaded[0] if self.loaded is not None and self.loaded[1] is cache else None

    def find(self, caches: Sequence[Cache], texts: int) -> TokenGraph | None:
        """Find a graph for so many texts with states as those of caches, or capture one; None: none serves."""
        states = [found[0] for cache in caches if (found := states_of(cache))]
        if self.capture is None or len(states) < len(caches):
            return None
        if any(int(state.count.min()) < state.sink_k.shape[2] for state in states):
            return None  # until all sinks are there
        if (size := 1 << (texts - 1).bit_length()) not in self.graphs:
            try:
                alike = copy_cache(caches[0], lambda name, x: x[[0] * size])
                self.graphs[size] = TokenGraph.of(self.model, alike, self.capture)
            except torch.OutOfMemoryError:
                return None
            except Exception as error:  # what cannot be captured raises errors of many kinds
                logger.warning("tokens are written without graphs of CUDA, which takes longer: %s", first_line(error))
                self.capture = None
                return None
        return self.graphs[size]

    def show(self, graph: TokenGraph, texts: int, tokens: int) -> Cache:
        """Return the batch's cache: views of the first states of a graph, of which the longest has read some tokens."""
        shown = copy_cache(graph.cache, lambda name, x: x[:texts])
        for layer in shown.layers:
            layer.tokens_read = tokens
        self.loaded = graph, shown
        return shown

    def read(self, cache: Cache, ids: Tensor, read: Tensor) -> Tensor:  # (rows, vocabulary)
        """Read a token of each row (rows,), of which `read` (rows,) tokens were read before; return the logits."""
        if (graph := self.graph_of(cache)) is None:
            return read_on(self.model, cache, ids[:, None], read)
        graph.ids[: len(ids)], graph.read[: len(ids)] = ids, read
        graph.repeat()
        for layer in cache.layers:
            layer.tokens_read += 1
        return graph.logits[: len(ids)]


def states_of(cache: Cache) -> list:
    """List the states of a cache that has nothing else."""
    if not all(keeps_state(layer) for layer in cache.layers):
        return []
    return [state for layer in cache.layers for state in layer.memory]


def is_on_one_gpu(model: PreTrainedModel) -> bool:
    devices = {parameter.device for parameter in model.parameters()}
    return len(devices) == 1 and next(iter(devices)).type == "cuda"


def capture_on_gpu(step: Step) -> tuple[Callable[[], object], Tensor]:
    """Capture a step as a graph of CUDA."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as CUDA asks for
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        logits = step()
    return graph.replay, logits
