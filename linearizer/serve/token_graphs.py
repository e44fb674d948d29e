"""Tokens of the running batch by graphs of CUDA: one launch for a token in place of the hundreds that a model takes.

A graph works on tensors that stay where they are. So each has states of its own, for 1, 2, 4, … texts: rows that join
the batch or stay in it are copied there, and the places left over repeat the first row.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import first_line
from linearizer.serve.cache_rows import copy_cache, read_on, tensors_of
from linearizer.student.cache import keeps_state
from linearizer.student.token_pool import TokenPool

logger = logging.getLogger(__name__)
Tensor = torch.Tensor
Step = Callable[[], Tensor]
Capture = Callable[[Step], tuple[Callable[[], object], Tensor]]  # what repeats a step, and where its result then lies
WARM_UPS = 2  # steps before one is captured: they build kernels, and lay states into pools


@dataclass
class TokenGraph:
    """A token of so many texts."""

    cache: Cache
    pools: list[TokenPool]  # of its layers
    ids: Tensor  # (texts,)
    read: Tensor  # (texts,) tokens read before
    repeat: Callable[[], object]
    logits: Tensor  # (texts, vocabulary) after `repeat`

    @classmethod
    def of(cls, model: PreTrainedModel, cache: Cache, capture: Capture) -> TokenGraph:
        """Capture a token of texts with such states."""
        cache = copy_cache(cache, lambda name, x: x.clone())
        ids = torch.zeros(len(tensors_of(cache)[0]), dtype=torch.long, device=model.device)
        read = ids.clone()

        def step() -> Tensor:
            return read_on(model, cache, ids[:, None], read)

        step()  # lays states into pools
        memories = [layer.memory for layer in cache.layers]
        pools = [pool for memory in memories for state in memory if (pool := state.token_pool) is not None]
        if [len(pool.windows) for pool in pools] != [len(memory) for memory in memories]:
            raise ValueError("some heads hold features, or all tokens")
        return cls(cache, pools, ids, read, *capture(step))

    def load(self, cache: Cache) -> Cache:
        """Take the states of a cache, of as many texts or fewer; return a cache whose tensors are views of these."""
        for pool, layer in zip(self.pools, repeated(cache, len(self.ids)).layers, strict=True):
            pool.fill(layer.memory)
        rows = len(tensors_of(cache)[0])
        shown = copy_cache(self.cache, lambda name, x: x[:rows])
        for own, layer in zip(shown.layers, cache.layers, strict=True):
            own.tokens_read = layer.tokens_read
        return shown


class TokenGraphs:
    """Reads a token of each row by a graph where it can."""

    def __init__(self, model: PreTrainedModel, capture: Capture | None = None) -> None:
        self.model = model
        self.capture = capture_on_gpu if capture is None and is_on_one_gpu(model) else capture
        self.graphs: dict[int, TokenGraph] = {}  # by the number of texts
        self.loaded: tuple[TokenGraph, Cache] | None = None  # the graph in use, and the cache that shows its states

    def load(self, cache: Cache) -> Cache:
        """Return the batch's cache as a graph works on it, or as it is where no graph can."""
        self.loaded = None
        states = [state for layer in cache.layers if keeps_state(layer) for state in layer.memory]
        if self.capture is None or not states or int(states[0].count.min()) < states[0].sink_k.shape[2]:
            return cache  # graphs serve once all sinks are there
        size = 1 << (len(states[0].count) - 1).bit_length()
        try:
            if size not in self.graphs:
                self.graphs[size] = TokenGraph.of(self.model, repeated(cache, size), self.capture)
            self.loaded = self.graphs[size], self.graphs[size].load(cache)
        except torch.OutOfMemoryError:
            return cache
        except Exception as error:  # what cannot be captured raises errors of many kinds
            logger.warning("tokens are written without graphs of CUDA, which takes longer: %s", first_line(error))
            self.capture = None
            return cache
        return self.loaded[1]

    def read(self, cache: Cache, ids: Tensor, read: Tensor) -> Tensor:  # (rows, vocabulary)
        """Read a token of each row (rows,), of which `read` (rows,) tokens were read before; return the logits."""
        if self.loaded is None or self.loaded[1] is not cache:
            return read_on(self.model, cache, ids[:, None], read)
        graph, rows = self.loaded[0], len(ids)
        graph.ids[:rows], graph.read[:rows] = ids, read
        graph.repeat()
        for layer in cache.layers:
            layer.tokens_read += 1
        return graph.logits[:rows]


def repeated(cache: Cache, size: int) -> Cache:
    """Copy a cache to the given number of texts, the first of them in the places left over."""
    rows = len(tensors_of(cache)[0])
    places = [*range(rows), *[0] * (size - rows)]
    return copy_cache(cache, lambda name, x: x[places])


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
