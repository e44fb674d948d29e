"""Long texts by CUDA graphs: a few launches for a part of a text, where Python launches a thousand kernels.

Python takes longer to launch the kernels of a part (text_parts.py) than a GPU takes to run them. So once a model has
read some single texts by calls, parts of the SIZES are captured for each stream. A capture is cut where the attention
of a layer begins and ends: between its graphs, a layer waits for the part before. Graphs use memory at fixed addresses,
so they have states of their own, to which those of a cache are copied, and back. A call reads the tokens after the last
whole part. Texts of a batch, which leave less of a GPU idle, are read by calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers.utils import logging

from linearizer.kernels.graphs.call_reader import facts_of, is_plain, reader_of
from linearizer.kernels.graphs.text_parts import (
    MASK,
    PartOrder,
    Streams,
    agree,
    count_streams,
    is_packed,
    is_repeatable,
    launching,
    ordered,
)
from linearizer.kernels.graphs.token_graph import FAR, Results, positions_for
from linearizer.kernels.trial import shorten
from linearizer.kernels.triton.state_pool import StatePool, pools_of
from linearizer.student.cache import CACHE, LinearizedCache, exact_cache_of, keeps_state

Tensor = torch.Tensor
SIZES = (512, 256)  # tokens of parts: large ones take less time in all; of small ones, more run at the same time
LONG = 4096  # tokens of a text that has large parts, too
FEWEST = 512  # tokens of a text that graphs read: a call for the last ones takes as long as a call for so few
BEFORE = 8  # texts that are read by calls before graphs are captured, which takes as long as they save in about as many
SHARE = 1 / 8  # of the free memory, which graphs of a size may take: they hold it until the model is trained or changed
TRIAL_PARTS = 8  # of the comparison
logger = logging.get_logger(__name__)
Piece = Callable[[], object]


class Pieces:
    """Captures what is launched on the current stream, in graphs, cut where the attention of a layer begins and ends.

    The graphs of a stream share their memory, since they are repeated one after the other.
    """

    def __init__(self, memory: Any) -> None:
        self.graphs: list[Piece] = []
        self.layers: list[int] = []  # which each second graph belongs to
        self.memory = memory or torch.cuda.graph_pool_handle()

    @contextmanager
    def captured(self) -> Iterator[None]:
        self.begin()
        try:
            yield
        except BaseException:
            with suppress(Exception):  # that the capture failed, too
                self.end()
            raise
        self.end()

    def begin(self) -> None:
        self.graph = torch.cuda.CUDAGraph()
        self.graph.capture_begin(self.memory, capture_error_mode="thread_local")

    def end(self) -> None:
        self.graph.capture_end()
        self.graphs.append(self.graph.replay)

    def cut(self) -> None:
        self.end()
        self.begin()


@dataclass
class Cut(AbstractContextManager):
    """Makes the attention of a layer, in this context, a piece of its own."""

    pieces: Pieces
    layer: int

    def __enter__(self) -> None:
        self.pieces.layers.append(self.layer)
        self.pieces.cut()

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self.pieces.cut()


def capture_in_pieces(step: Callable[[], Any], cache: LinearizedCache, memory: Any) -> tuple:
    """Capture a step on the current stream, in memory of earlier graphs or None; return fields of a PartGraph."""
    pieces = Pieces(memory)
    with ordered(cache, [Cut(pieces, layer) for layer in range(len(cache.layers))]), pieces.captured():
        out = step()
    return pieces.memory, pieces.graphs, pieces.layers, out


@dataclass
class PartGraph:
    """A part of a text, captured for one stream."""

    ids: Tensor  # (1, tokens)
    positions: Tensor  # (1, tokens)
    memory: Any
    pieces: list[Piece]
    layers: list[int]  # which each second piece belongs to
    out: Any  # what the model returns for the last token

    def repeat(self, orders: Sequence[AbstractContextManager]) -> None:
        """Read the part; each layer attends in its own of the contexts."""
        begin, *others = self.pieces
        begin()
        for layer, attend, go_on in zip(self.layers, others[::2], others[1::2], strict=True):
            with orders[layer]:
                attend()
            go_on()


class TextGraphs:
    """Graphs for `count` streams, and the cache whose states they read."""

    def __init__(self, model: Any, count: int, capture: Callable[..., Any]) -> None:
        self.read_by_layers, self.facts = model.read_by_layers, facts_of(model)
        self.count, self.capture = count, capture
        self.cache: LinearizedCache = model.empty_cache()
        self.bytes = 0  # that the graphs hold
        self.parts: dict[int, list[PartGraph]] = {}  # for each stream, by their tokens; none if memory does not suffice
        self.done: Any = None  # the event after the last text

    @property
    def pools(self) -> list[StatePool]:
        """Return the pools of states, of all layers."""
        return pools_of(self.cache) or []

    @torch.inference_mode(False)  # so that later calls may write the inputs
    @torch.no_grad()
    def add(self, model: Any, text: Tensor, size: int) -> bool:
        """Capture a part of a text (1, tokens) for each stream, and compare such parts with those read by calls; return
        whether all states lie in pools. There are fewer streams if memory does not suffice for all."""
        parts: list[PartGraph] = []
        earlier, (before, free) = next(iter(self.parts.values()), []), memory_of(text.device)
        with Streams(text.device, self.count, self.done) as streams:
            order = PartOrder(streams)
            for stream in range(self.count):
                with streams.begin_part(), order:
                    ids, positions = text[:, :size].clone(), torch.arange(size, device=text.device)[None]
                    step = partial(call_model, self.read_by_layers, self.cache, ids, positions)
                    for _ in range(1 + exact_tokens(model) // size):  # until the text is no longer exact
                        step()  # since libraries prepare what they need at the first call on a stream
                    if not self.pools:
                        return False
                    memory = earlier[stream].memory if earlier else None
                    parts.append(PartGraph(ids, positions, *self.capture(step, self.cache, memory)))
                taken = memory_of(text.device)[0] - before
                if taken * (1 + 1 / len(parts)) > SHARE * free:
                    break
        if len(parts) < (self.count if earlier else 2):
            raise torch.OutOfMemoryError("graphs of texts would take too much of the free memory")
        self.count, self.bytes = len(parts), self.bytes + taken
        self.done, self.parts[size], text = streams.mark(), parts, text[:, : TRIAL_PARTS * size]
        logits = self.read({"input_ids": text, CACHE: model.empty_cache()}, [size]).logits
        if not agree(logits, read_by_calls(model, text, size)):
            raise ValueError("graphs read other logits than the model, which may look at how many tokens were read")
        return True

    def accepts(self, cache: LinearizedCache) -> bool:
        """Whether the states of a cache can be copied here."""
        if all(exact_cache_of(layer.memory) is not None or not layer.tokens_read for layer in cache.layers):
            return True
        pools = pools_of(cache)
        return pools is not None and all(a.layout.kind == b.layout.kind for a, b in zip(pools, self.pools, strict=True))

    def read(self, arguments: dict, sizes: Sequence[int]) -> Any:
        """Read a text of a plain call that continues a cache, in parts of the sizes, largest first; return what the
        model returns for its last token."""
        cache, ids, begin = arguments[CACHE], arguments["input_ids"], 0
        positions, tokens, theirs = positions_for(arguments), ids.shape[1], pools_of(cache)
        with launching:
            with Streams(ids.device, self.count, self.done) as streams:
                orders = [PartOrder(streams) for _ in self.cache.layers]
                for size in cut_text(tokens, sizes):
                    part, end = self.parts[size][streams.parts % self.count], begin + size
                    with streams.begin_part():
                        if not begin:
                            self.load(theirs)  # later parts wait for the first one before they read states
                        part.ids.copy_(ids[:, begin:end])
                        part.positions.copy_(positions[:, begin:end])
                        part.repeat(orders)
                    out, begin = part.out, end
                if begin < tokens:
                    for layer in self.cache.layers:
                        layer.tokens_read = cache.get_seq_length() + begin
                    with streams.begin_part(), ordered(self.cache, orders):
                        out = call_model(self.read_by_layers, self.cache, ids[:, begin:], positions[:, begin:])
                    streams.hand_over(out.logits)
            self.store(cache, theirs, tokens)
            out = Results(out).copy(cache)
            self.done = streams.mark()
        return out

    def load(self, pools: Sequence[StatePool] | None) -> None:
        """Begin with the states of a cache, or with empty ones."""
        for place, pool in enumerate(self.pools):
            if pools is None:
                pool.pool.zero_()
                pool.count.zero_()
            else:
                pool.lay_pool(0, pools[place])

    def store(self, cache: LinearizedCache, pools: Sequence[StatePool] | None, tokens: int) -> None:
        """Give a cache the states after a text."""
        for place, (layer, pool) in enumerate(zip(cache.layers, self.pools, strict=True)):
            if pools is None:
                pool.copy(torch.clone).show(layer.memory)
            else:
                pools[place].lay_pool(0, pool)
                pools[place].missing = 0
            layer.tokens_read += tokens


class TextReader:
    """The graphs of a model, and how many texts were read without."""

    def __init__(self, capture: Callable[..., Any] = capture_in_pieces) -> None:
        self.capture, self.graphs, self.called = capture, None, 0  # type: Callable[..., Any], TextGraphs | None, int

    @property
    def bytes(self) -> int:
        """Count the bytes that graphs hold."""
        return 0 if self.graphs is None else self.graphs.bytes

    def __reduce__(self) -> tuple:
        """Become an empty reader in a copy of a model, whose weights lie elsewhere."""
        return TextReader, ()

    def find(self, model: Any, text: Tensor, sizes: Sequence[int]) -> TextGraphs | None:
        """Find or capture graphs for a text (1, tokens) in parts of the sizes; None: it should be read by calls."""
        if not is_repeatable(model):
            return None
        if self.graphs is not None and self.graphs.facts != facts_of(model):
            self.graphs, self.called = None, 0
        if self.graphs is None:
            self.called += 1
            if self.called <= BEFORE or (count := count_streams(model, text)) < 2 or not is_plain(model):
                return None
            self.graphs, self.called = TextGraphs(model, count, self.capture), 0
        for size in reversed(sizes):
            if size not in self.graphs.parts and not self.add(model, self.graphs, text, size):
                self.graphs = None
                break
        return self.graphs

    def add(self, model: Any, graphs: TextGraphs, text: Tensor, size: int) -> bool:
        """Capture parts of a size; if that fails, let the model read by calls from then on. Return whether texts may be
        read by graphs."""
        try:
            reader_of(model).repeats_texts = None if graphs.add(model, text, size) else False
        except torch.OutOfMemoryError:  # there may be memory later
            graphs.parts[size] = []
            return len(graphs.parts) > 1
        except Exception as error:  # failed captures raise errors of many kinds
            logger.warning(f"long texts are read without graphs of CUDA, which takes longer: {shorten(error)}")
            reader_of(model).repeats_texts = False
        return reader_of(model).repeats_texts is not False


def read_text_by_graphs(model: Any, arguments: dict) -> Any:
    """Read the text of a plain call by graphs; return what the model returns, or None: it should be read by calls."""
    cache, ids, mask = arguments[CACHE], arguments["input_ids"], arguments.get(MASK)
    if ids is None or len(ids) > 1 or ids.shape[1] < FEWEST or arguments["logits_to_keep"] != 1:
        return None
    if (reader := reader_of(model)).repeats_texts is False:
        return None
    if not isinstance(cache, LinearizedCache) or not all(map(keeps_state, cache.layers)) or is_packed(arguments):
        return None
    if mask is not None and not mask[:, -ids.shape[1] :].all():
        return None
    past, exact = cache.get_seq_length(), exact_tokens(model)
    begins_exactly = 0 < exact >= past
    if begins_exactly and past + ids.shape[1] < exact + FEWEST:
        return None
    sizes = SIZES if ids.shape[1] >= LONG else SIZES[-1:]
    with launching:
        reader.text_reader = reader.text_reader or TextReader()
        graphs = reader.text_reader.find(model, ids, sizes)
    if graphs is None or not graphs.accepts(cache):
        return None
    taken = [size for size in sizes if graphs.parts[size]]
    if begins_exactly:
        arguments = read_begin(model, arguments, -(-(exact + 1) // taken[-1]) * taken[-1])
    return graphs.read(arguments, taken) if graphs.accepts(cache) else model.read_by_layers(**arguments)


def read_begin(model: Any, arguments: dict, tokens: int) -> dict:
    """Read the first tokens of a text by calls, since they are exact; return arguments for all others."""
    ids, positions = arguments["input_ids"], positions_for(arguments)
    call_model(model.read_by_layers, arguments[CACHE], ids[:, :tokens], positions[:, :tokens])
    return {**arguments, "input_ids": ids[:, tokens:], "position_ids": positions[:, tokens:]}


def exact_tokens(model: Any) -> int:
    """Return the length of the longest text that a student reads as its teacher does."""
    return max((student.exact_tokens for student in model.students()), default=0)


def memory_of(device: torch.device) -> tuple[int, int]:
    """Return how many bytes PyTorch holds on a GPU, and how many are free."""
    if device.type != "cuda":
        return 0, 0
    held = torch.cuda.memory_reserved(device)
    return held, torch.cuda.mem_get_info(device)[0] + held - torch.cuda.memory_allocated(device)


def cut_text(tokens: int, sizes: Sequence[int]) -> list[int]:
    """Return the sizes of the whole parts of a text, largest first."""
    parts: list[int] = []
    for size in sizes:
        count, tokens = divmod(tokens, size)
        parts += [size] * count
    return parts


def call_model(read: Callable[..., Any], cache: LinearizedCache, ids: Tensor, positions: Tensor) -> Any:
    """Read tokens (1, tokens) into a cache."""
    return read(input_ids=ids, position_ids=positions, use_cache=True, logits_to_keep=1, **{CACHE: cache})


def read_by_calls(model: Any, ids: Tensor, size: int) -> Tensor:
    """Return the logits of the last token, read part by part; Python sees more tokens before the last part."""
    cache, most = model.empty_cache(), getattr(model.config, "max_position_embeddings", None) or FAR
    for begin in range(0, ids.shape[1], size):
        if begin + size >= ids.shape[1]:
            for layer in cache.layers:
                layer.tokens_read = max(most - size, begin)
        part = ids[:, begin : begin + size]
        positions = torch.arange(begin, begin + part.shape[1], device=ids.device)[None]
        logits: Tensor = call_model(model.read_by_layers, cache, part, positions).logits
    return logits
