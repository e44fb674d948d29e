"""Tokens by CUDA graphs: one launch for a token of all layers, where Python launches hundreds of kernels.

A graph reads and writes the states of one cache at fixed addresses (state_pool.py). So a cache that reads one token
after another gets a graph of its own. It is compared with the model before its first use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache
from transformers.utils import logging

from linearizer.kernels.graphs.call_reader import facts_of, is_plain, reader_of
from linearizer.kernels.graphs.text_parts import MASK, agree, is_repeatable, launching, length_of, streams_of
from linearizer.kernels.trial import shorten
from linearizer.kernels.triton.state_pool import StatePool, pools_of
from linearizer.student.attention_interface import positions_of
from linearizer.student.cache import CACHE, LinearizedCache

Tensor = torch.Tensor
Step = Callable[[], Any]
Capture = Callable[[Step], tuple[Callable[[], object], Any]]  # returns a function to repeat a step, and its result
BEFORE = 8  # tokens that a cache reads one after another without a graph: capturing one takes about as long
WARM_UPS = 2  # steps before one is captured
FAR = 2**20  # tokens read, as Python sees it, in the comparison, or fewer if the model has fewer positions
logger = logging.get_logger(__name__)


class Results:
    """What a captured step returns, without its cache."""

    def __init__(self, out: Any) -> None:
        self.kind, self.cached = type(out), [name for name, x in out.items() if isinstance(x, Cache)]
        self.values = {name: x for name, x in out.items() if name not in self.cached}

    def copy(self, cache: Cache) -> Any:
        """Return a copy with a cache."""
        copied = {name: x.clone() if isinstance(x, Tensor) else x for name, x in self.values.items()}
        return self.kind(**copied, **dict.fromkeys(self.cached, cache))


@dataclass
class TokenGraph:
    """A captured step of one token for the texts of a cache, which it does not keep alive."""

    pools: list[StatePool]  # of the cache's layers
    facts: list  # about the model, which the graph takes for granted
    ids: Tensor  # (texts, 1)
    positions: Tensor  # (texts, 1)
    repeat: Callable[[], object]
    results: Results  # of the model, after `repeat`

    def __reduce__(self) -> tuple:
        """Become None in a copy of a cache, whose states lie elsewhere."""
        return type(None), ()

    @classmethod
    @torch.inference_mode(False)  # so that later calls may write the inputs
    @torch.no_grad()
    def of(cls, model: Any, cache: Cache, capture: Capture) -> TokenGraph:
        """Capture a token of texts that continue a cache, and compare it with one read without a graph."""
        if (pools := pools_of(cache)) is None:
            raise ValueError("some heads hold features, or all tokens")
        facts = facts_of(model)
        before = [(pool.pool.clone(), pool.count.clone()) for pool in pools]
        positions, read = before[0][1][:, None].clone(), [layer.tokens_read for layer in cache.layers]
        ids = torch.zeros_like(positions)

        def step() -> Any:
            return model.read_by_layers(
                input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{CACHE: cache}
            )

        def go_back(read: list[int]) -> None:
            for pool, (bytes, count) in zip(pools, before, strict=True):
                pool.pool.copy_(bytes)
                pool.count.copy_(count)
            for layer, tokens in zip(cache.layers, read, strict=True):
                layer.tokens_read = tokens
            cache.is_half_read = False  # where a capture failed

        try:
            with launching, torch.cuda.device_of(ids):
                repeat, out = capture(step)
            go_back([(getattr(model.config, "max_position_embeddings", None) or FAR) - 1] * len(read))
            expected = step().logits
            go_back(read)
            repeat()
            if not agree(out.logits, expected):
                raise ValueError(
                    "a graph writes other tokens than the model, which may look at how many tokens were read"
                )
        finally:
            go_back(read)
        return cls(pools, facts, ids, positions, repeat, Results(out))

    def holds(self, cache: Cache, model: Any) -> bool:
        """Whether the states of the cache still are where the graph reads them, and the model is what it was."""
        pools = pools_of(cache)
        same = pools is not None and all(a is b for a, b in zip(pools, self.pools, strict=True))
        return same and facts_of(model) == self.facts

    def repeat_for(self, cache: Cache, ids: Tensor, positions: Tensor) -> None:
        """Read a token of each of the first texts (texts, 1); the results are overwritten by the next call."""
        self.ids[: len(ids)], self.positions[: len(ids)] = ids, positions
        self.repeat()
        for layer in cache.layers:
            layer.tokens_read += 1

    def read(self, cache: Cache, ids: Tensor, positions: Tensor) -> Any:
        """Read a token of each text (texts, 1), and return what the model returns."""
        self.repeat_for(cache, ids, positions)
        return self.results.copy(cache)


def read_by_graph(model: Any, arguments: dict) -> Any:
    """Read the token of a plain call by its cache's graph; return what the model returns, or None without a graph."""
    cache, mask = arguments[CACHE], arguments.get(MASK)
    if length_of(arguments) > 1 or arguments["input_ids"] is None:
        return None
    if not isinstance(cache, LinearizedCache) or cache.token_graph is False:
        return None
    if reader_of(model).repeats_tokens is False:
        return None
    if mask is not None and not mask[:, -1].all():
        return None
    if cache.token_graph is not None and not cache.token_graph.holds(cache, model):
        cache.token_graph, cache.tokens_alone = None, 0
    if cache.token_graph is None:
        cache.tokens_alone += 1
        cache.token_graph = capture_token(model, cache) if cache.tokens_alone > BEFORE else None
    if not cache.token_graph or len(cache.token_graph.ids) != len(arguments["input_ids"]):
        return None
    return cache.token_graph.read(cache, arguments["input_ids"], positions_for(arguments))


def capture_token(model: Any, cache: LinearizedCache) -> TokenGraph | bool | None:
    """Capture a graph for a cache; return None until its states lie in pools with all sinks, False if it must not."""
    if (pools := pools_of(cache)) is None or any(pool.missing for pool in pools):
        return None
    if not is_repeatable(model) or not is_plain(model):
        return False
    try:
        return TokenGraph.of(model, cache, capture_on_gpu)
    except torch.OutOfMemoryError:
        return False
    except Exception as error:  # failed captures raise errors of many kinds
        reader_of(model).repeats_tokens = False
        logger.warning(f"tokens are written without graphs of CUDA, which takes longer: {shorten(error)}")
        return False


def positions_for(arguments: dict) -> Tensor:
    """Return the positions (texts, tokens) of a text, as transformers counts them if it is given none."""
    positions, mask, ids = arguments.get("position_ids"), arguments.get(MASK), arguments["input_ids"]
    past, tokens = arguments[CACHE].get_seq_length(), ids.shape[1]
    if positions is not None:
        return positions
    if mask is not None and mask.shape[1] == past + tokens:
        return positions_of(mask)[:, past:]
    return torch.arange(past, past + tokens, device=ids.device).expand_as(ids)


def capture_on_gpu(step: Step) -> tuple[Callable[[], object], Any]:
    """Capture a step as a CUDA graph, on the current device."""
    stream = streams_of(torch.device("cuda", torch.cuda.current_device()))[-1]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # as CUDA requires
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        out = step()
    return graph.replay, out
