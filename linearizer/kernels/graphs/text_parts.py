"""Long texts on a GPU: parts on streams of their own, so that layers read different parts at the same time.

Merging takes most of the time of a text, and occupies one multiprocessor for each KV head. So while a layer reads a
part, the layers before it read later parts. Every layer reads the parts in their order, and computes what it computes
when one part is read after the other: the first long text of a model is preceded by a comparison of both.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from linearizer.kernels.graphs.call_reader import has_hooks, reader_of
from linearizer.kernels.trial import DEVICES, is_recorded, shorten
from linearizer.kernels.triton.state_pool import pools_of
from linearizer.student.attention_interface import restarts
from linearizer.student.cache import CACHE, keeps_state

Tensor = torch.Tensor
FEWEST = 4096  # tokens of a text that is read in parts
SCALE = 256  # a text of n tokens has √(n / SCALE) parts: with more, the host is too slow; with fewer, layers wait
STEP = 64  # tokens of a part are a multiple of it
MOST_STREAMS = 8  # that a GPU works on at the same time, unless CUDA_DEVICE_MAX_CONNECTIONS is set
TRIAL, TRIAL_PARTS = 2048, 8  # tokens and parts of the comparison
CLOSE = 2e-2  # of the largest logit
MASK, WITH_TEXTS = "attention_mask", ("input_ids", "inputs_embeds", "position_ids")  # the latter: (texts, tokens, …)
USUAL = {"output_hidden_states": False, "output_router_logits": False, "return_dict": True}  # of what is returned
GROWING = ("dynamic", "longrope")  # kinds of positions that depend on the length of a whole text
logger = logging.get_logger(__name__)
launching = threading.RLock()  # held while parts are launched, or a graph is captured: threads share the streams


class Streams(AbstractContextManager):
    """Streams of CUDA which parts take in turn, in this context; each begins after what was launched before on the
    current stream, and after an event."""

    def __init__(self, device: torch.device, count: int, event: Any = None) -> None:
        self.main, self.streams, self.parts = torch.cuda.current_stream(device), streams_of(device)[:count], 0
        if event is not None:
            self.main.wait_event(event)
        for stream in self.streams:
            stream.wait_stream(self.main)

    def begin_part(self) -> AbstractContextManager:
        """Launch what follows in this context on the next stream."""
        stream = self.streams[self.parts % len(self.streams)]
        self.parts += 1
        return torch.cuda.stream(stream)

    def mark(self) -> Any:
        """Return an event: all that was launched so far on the current stream is done."""
        return torch.cuda.current_stream(self.main.device).record_event()

    def wait(self, event: Any) -> None:
        """Let the current stream wait for an event."""
        torch.cuda.current_stream(self.main.device).wait_event(event)

    def keep_first(self) -> None:
        """Read all further parts on the stream of the first one."""
        self.streams = self.streams[:1]

    def __enter__(self) -> Streams:
        return self

    def __exit__(self, *error: object) -> None:
        """Let what is launched later wait for all parts."""
        for stream in self.streams:
            self.main.wait_stream(stream)

    def hand_over(self, x: Tensor) -> None:
        """Keep the memory of a part's result until what is launched later has used it."""
        x.record_stream(self.main)


@functools.cache  # since every stream has memory of its own
def streams_of(device: torch.device) -> list[Any]:
    """Return the streams of parts, and a last one, on which tokens are captured."""
    return [torch.cuda.Stream(device) for _ in range(MOST_STREAMS + 1)]


class PartOrder:
    """Lets a layer read a part, in this context, once it has read the part before."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.read = streams, None  # type: Streams, Any

    def __enter__(self) -> None:
        if self.read is not None:
            self.streams.wait(self.read)

    def __exit__(self, *error: object) -> None:
        self.read = self.streams.mark()


def read_parts(read: Callable[..., Any], arguments: dict, size: int, streams: Streams) -> Any:
    """Read a text in parts of `size` tokens, by a call of `read` for each; return what it returns for the text."""
    cache, tokens, logits = arguments[CACHE], length_of(arguments), []
    with launching, streams, ordered(cache, [PartOrder(streams) for _ in cache.layers]):
        for begin in range(0, tokens, size):
            with streams.begin_part():
                out = read(**{name: cut(name, x, tokens, begin, begin + size) for name, x in arguments.items()})
                logits.append(out.logits)
            if not begin and pools_of(cache) is None:
                streams.keep_first()  # other states are replaced, and their memory may be used again too early
    for x in logits:
        streams.hand_over(x)
    if arguments["logits_to_keep"] == 0:
        out.logits = torch.cat(logits, 1)
    return out


@contextmanager
def ordered(cache: Any, orders: Sequence[AbstractContextManager]) -> Iterator[None]:
    """Let each layer attend in a context of its own."""
    for layer, order in zip(cache.layers, orders, strict=True):
        layer.part_order = order
    try:
        yield
    finally:
        for layer in cache.layers:
            layer.part_order = None


def text_of(arguments: dict) -> Tensor:
    """Return the ids (texts, tokens) or the embeddings (texts, tokens, size) that a model is given."""
    ids: Tensor | None = arguments["input_ids"]
    return arguments["inputs_embeds"] if ids is None else ids


def length_of(arguments: dict) -> int:
    return text_of(arguments).shape[1]


def cut(name: str, x: Any, tokens: int, begin: int, end: int) -> Any:
    """Cut an argument to the tokens of a part; a mask keeps all before them, which it may have from earlier calls."""
    if not isinstance(x, Tensor):
        return x
    if name == MASK:
        return x[:, : x.shape[1] - max(tokens - end, 0)]
    return x[:, begin:end] if name in WITH_TEXTS else x[begin:end]


def choose_size(tokens: int) -> int:
    """Return how many tokens of a text are read at once."""
    return math.ceil(math.sqrt(tokens * SCALE) / STEP) * STEP


def choose_streams(model: Any, arguments: dict) -> Streams | None:
    """Return the streams on which the text of a plain call should be read, or None: on the current one, at once."""
    text = text_of(arguments)
    if text.shape[1] < FEWEST or not all(map(keeps_state, arguments[CACHE].layers)) or is_packed(arguments):
        return None
    if (count := count_streams(model, text)) < 2 or not is_repeatable(model):
        return None
    if (reader := reader_of(model)).reads_parts is None:
        reader.reads_parts = parts_agree(model, text[:1, :TRIAL])
    return Streams(text.device, count) if reader.reads_parts else None


def count_streams(model: Any, text: Tensor) -> int:
    """Count the layers that a GPU can merge at the same time: every KV head of a text takes a multiprocessor."""
    students = model.students()
    programs = len(text) * max(student.kv_heads for student in students)
    multiprocessors: int = torch.cuda.get_device_properties(text.device).multi_processor_count
    return min(MOST_STREAMS, len(students), multiprocessors // programs)


def expects_parts(model: Any) -> bool:
    """Whether layers of a model read parts of a long text at the same time, or have not tried."""
    if not hasattr(model, "call_reader"):
        return False
    known = reader_of(model).reads_parts
    return model.device.type in DEVICES if known is None else known


def is_plain_call(model: Any, arguments: dict) -> bool:
    """Whether a text on a GPU continues a cache without gradients, and its results can be put together from parts."""
    if arguments[CACHE] is None or text_of(arguments) is None or text_of(arguments).device.type not in DEVICES:
        return False
    text = text_of(arguments)
    if torch.is_grad_enabled() or model.training or torch.is_autocast_enabled(text.device.type) or is_recorded(text):
        return False
    return can_cut(model.config, arguments)


def can_cut(config: Any, arguments: dict) -> bool:
    """Whether nothing but logits of the last token or of all is wanted, and every argument has a part for each part."""
    keep, mask, positions = (arguments.get(name) for name in ("logits_to_keep", MASK, "position_ids"))
    if not isinstance(keep, int) or keep not in (0, 1) or arguments.get("labels") is not None:
        return False
    for name, usual in USUAL.items():
        if bool(getattr(config, name, usual) if arguments.get(name) is None else arguments[name]) is not usual:
            return False
    given = {name for name, x in arguments.items() if isinstance(x, Tensor)}
    return given <= {*WITH_TEXTS, MASK, "cache_position"} and all(x is None or x.dim() == 2 for x in (mask, positions))


def is_packed(arguments: dict) -> bool:
    """Whether rows may have several texts, as transformers would see from positions."""
    positions = arguments.get("position_ids")
    return arguments.get(MASK) is None and positions is not None and restarts(positions)


def is_repeatable(model: nn.Module) -> bool:
    """Whether a model lies on one device, accelerate moves nothing, nobody watches its modules, and positions do not
    depend on a text's length."""
    modules = [*model.modules()]
    kinds = [getattr(module, "rope_type", None) for module in modules]
    names = [name for kind in kinds for name in (kind.values() if isinstance(kind, dict) else [kind])]
    return lies_on_one_device(model) and not any(map(has_hooks, modules)) and not {*names} & {*GROWING}


def lies_on_one_device(model: nn.Module) -> bool:
    return len({x.device for x in model.parameters()}) == 1


def agree(logits: Tensor, expected: Tensor) -> bool:
    """Whether logits are the expected ones, but for roundings."""
    return bool((logits - expected).abs().max() <= CLOSE * expected.abs().max())


def parts_agree(model: Any, text: Tensor) -> bool:
    """Whether kernels read parts of a text, and give the same logits on several streams as on one; warn if not."""

    def read(count: int) -> Tensor | None:
        embedded, cache = text.is_floating_point(), model.empty_cache()
        named = {"input_ids": None if embedded else text, "inputs_embeds": text if embedded else None, CACHE: cache}
        arguments = {**named, "use_cache": True, "logits_to_keep": 1}
        size = math.ceil(text.shape[1] / TRIAL_PARTS)
        logits = read_parts(model.read_by_layers, arguments, size, Streams(text.device, count)).logits
        return None if pools_of(cache) is None else logits

    try:
        one = read(1)
        if one is None or (several := read(MOST_STREAMS)) is None:
            return False
        fault = None if agree(several, one) else "it gives other logits"
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # drivers and libraries raise errors of many kinds
        fault = shorten(error)
    if fault:
        logger.warning(
            f"layers of this model do not read parts of a text at the same time, which takes longer: {fault}"
        )
    return fault is None
