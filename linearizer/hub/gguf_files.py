"""GGUF files as teachers: the head of a file describes the model; transformers expands its weights.

A head holds metadata, and names, shapes and types of all tensors; it precedes the weights. Only the head of a file on
the Hub is fetched: from its stand-in, a file of the same length in which the weights are a hole, transformers and
`gguf` read the same config and the same tokenizer as from the complete file.
"""

from __future__ import annotations

import atexit
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Any

from linearizer.errors import ModelNotAvailable, UnsupportedModel, first_line
from linearizer.hub.weight_files import GGUF, Weights, damaged_weights
from linearizer.progress import quiet, shared

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY = 8, 9
FORMATS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
ALIGNMENT = 32  # of the weights, unless the metadata say otherwise
FIRST_BYTES, MOST_BYTES = 2**22, 2**27  # of a head: the first read, and the maximum
MAX_DIMENSIONS, MAX_NESTED = 8, 4
KEPT_ITEMS = 64  # of a list; longer lists are a tokenizer's
FLOATING = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # types of single weights
EXPANDED = "float32"  # the type that other types are expanded to: a smaller type would round them once more
MADE_FROM = "name the model that it was made from"


class TooShort(Exception):
    """The bytes end within the head."""


@dataclass(frozen=True)
class Tensor:
    """The place of a tensor in a file, after its head, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int


@dataclass(frozen=True)
class FileHead:
    """The part of a file that precedes its weights."""

    metadata: dict[str, Any]  # without long lists
    tensors: tuple[Tensor, ...]
    bytes: int

    @property
    def dtype(self) -> str:
        """The floating type that the weights are expanded to: their own, if all have one."""
        kinds = {kind_name(tensor.kind) for tensor in self.tensors}
        if not kinds <= FLOATING.keys():
            return EXPANDED
        return next((FLOATING[kind] for kind in ("BF16", "F16") if kind in kinds), EXPANDED)

    @property
    def stored(self) -> str:
        """The storage of the weights as in names of files: Q4_K_M."""
        from gguf import LlamaFileType

        stated = self.metadata.get("general.file_type")
        if stated in LlamaFileType.__members__.values() and stated != LlamaFileType.GUESSED:
            return LlamaFileType(stated).name.partition("_")[2]
        return kind_name(max(self.tensors, key=lambda tensor: math.prod(tensor.shape)).kind)

    @property
    def terms(self) -> dict[str, Any]:
        """Licence and languages, as stated by its author."""
        stated = {"license": "general.license", "license_link": "general.license.link", "language": "general.languages"}
        return {name: self.metadata[key] for name, key in stated.items() if key in self.metadata}


class HeadReader:
    """Reads the values of a head, one after the other."""

    def __init__(self, data: bytes) -> None:
        self.data, self.place = data, 0

    def take(self, count: int) -> bytes:
        end = self.place + count
        if end > len(self.data):
            raise TooShort
        begin, self.place = self.place, end
        return self.data[begin:end]

    def number(self, layout: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))[0]

    def text(self) -> str:
        return self.take(self.number("<Q")).decode("utf-8", errors="replace")

    def value(self, kind: int, nested: int = 0) -> Any:
        """Read a value; of a long list only the length."""
        if kind == STRING:
            return self.text()
        if kind in FORMATS:
            return self.number(FORMATS[kind])
        if kind != ARRAY or nested > MAX_NESTED:
            raise ValueError(f"it has a value of the type {kind}")
        item_kind, count = self.number("<I"), self.number("<Q")
        if count <= KEPT_ITEMS:
            return [self.value(item_kind, nested + 1) for _ in range(count)]
        if item_kind in FORMATS:
            self.take(struct.calcsize(FORMATS[item_kind]) * count)
        else:
            for _ in range(count):
                self.value(item_kind, nested + 1)
        return None

    def tensor(self) -> Tensor:
        name, dimensions = self.text(), self.number("<I")
        if dimensions > MAX_DIMENSIONS:
            raise ValueError(f"{name} has {dimensions} dimensions")
        shape = tuple(self.number("<Q") for _ in range(dimensions))
        return Tensor(name, shape, self.number("<I"), self.number("<Q"))


def parse_head(data: bytes) -> FileHead:
    """Read the head of a file; raise TooShort if the bytes end within it, and ValueError for other content."""
    reader = HeadReader(data)
    if reader.take(4) != MAGIC:
        raise ValueError("it does not begin like a GGUF file")
    version = reader.number("<I")
    if version not in VERSIONS:
        raise ValueError(f"it has version {version} of the format, where {VERSIONS[0]} and {VERSIONS[1]} are read")
    tensors, count = reader.number("<Q"), reader.number("<Q")
    metadata = {}
    for _ in range(count):
        key = reader.text()
        metadata[key] = reader.value(reader.number("<I"))
    entries = [reader.tensor() for _ in range(tensors)]
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or alignment < 1 or not entries:
        raise ValueError("it contains no tensors" if not entries else f"it has an alignment of {alignment}")
    return FileHead(metadata, tuple(entries), -(-reader.place // alignment) * alignment)


def kind_name(kind: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name


def tensor_bytes(tensor: Tensor) -> int:
    """Count the bytes of a tensor; raise ValueError for a type that `gguf` does not know."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    block, size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.kind)]
    return math.prod(tensor.shape) // block * size


def read_head(name: str, size: int, read: Callable[[int], bytes]) -> tuple[FileHead, bytes]:
    """Read and check the head of a file of `size` bytes; `read` returns the given number of its first bytes."""
    if find_spec("gguf") is None:
        raise ModelNotAvailable(
            f"{name!r} is a GGUF file, and the package that reads these is not installed: `pip install gguf`, or "
            f"{MADE_FROM}"
        )
    count = FIRST_BYTES
    while True:
        data = read(min(count, size))
        try:
            head = parse_head(data)
            break
        except TooShort:
            if count >= min(size, MOST_BYTES):
                raise damaged_weights(name, "its head does not end") from None
            count *= 4
        except (ValueError, OverflowError) as error:
            raise damaged_weights(name, error) from error
    try:
        end = max(head.bytes + tensor.offset + tensor_bytes(tensor) for tensor in head.tensors)
    except ValueError as error:  # a type that `gguf` does not know
        raise damaged_weights(name, error) from error
    if end > size:
        raise damaged_weights(name, f"it has {size} bytes and should have {end}")
    check_head(name, head)
    return head, data[: head.bytes]


def check_head(name: str, head: FileHead) -> None:
    """Refuse a file that transformers would read as another model."""
    parts = head.metadata.get("split.count", 1)
    if parts not in (0, 1):
        fault = f"{name!r} is one of {parts} parts of a model, which transformers does not join"
        raise UnsupportedModel(f"{fault}: name a file with the whole model, or {MADE_FROM}")
    kind = str(head.metadata.get("general.architecture"))
    scaling = head.metadata.get(f"{kind}.rope.scaling.type", "none")
    factor = head.metadata.get(f"{kind}.rope.scaling.factor", 1)
    scaled = any(tensor.name.startswith("rope_") for tensor in head.tensors)
    if (scaling != "none" and factor != 1) or scaled:
        scaled_positions = "scaled rotary positions, which transformers ignores when it reads a GGUF file"
        raise UnsupportedModel(f"{name!r} has {scaled_positions}: {MADE_FROM}")


def weigh_head(file: str, head: FileHead, size: int) -> Weights:
    """Count the parameters; their names differ from those in transformers."""
    return Weights((file,), sum(math.prod(tensor.shape) for tensor in head.tensors), size)


def read_local_head(name: str, path: Path) -> FileHead:
    """Read the head of a file on this machine."""
    try:
        state = path.stat()
        return head_of_file(name, path, state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise ModelNotAvailable(f"{name!r} cannot be read ({error.strerror}): check the file") from error


@lru_cache(maxsize=16)
def head_of_file(name: str, path: Path, size: int, changed: int) -> FileHead:
    with path.open("rb") as file:
        return read_head(name, size, lambda count: os.pread(file.fileno(), count, 0))[0]


@cache
def stand_ins() -> Path:
    """Make the folder of the stand-ins, which is removed at the end of this process."""
    folder = Path(tempfile.mkdtemp(prefix="linearizer-gguf-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def write_stand_in(path: Path, head: bytes, size: int) -> None:
    """Write a file of the same length that begins with the head; the hole takes no space on the disk."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.{get_ident()}")
    unfinished.write_bytes(head)
    os.truncate(unfinished, size)
    unfinished.replace(path)


def load_gguf_config(name: str, path: Path) -> PreTrainedConfig:
    """Load the config that transformers makes from a head; add the format of the weights."""
    import torch
    import transformers

    head, state = read_local_head(name, path), path.stat()
    with quiet():
        try:
            config = deepcopy(config_of_file(path, state.st_size, state.st_mtime_ns))
        except Exception as error:  # transformers reads each kind in its own way, with errors of many types
            raise UnsupportedModel(
                f"{name!r} is a GGUF file that transformers {transformers.__version__} does not read "
                f"({first_line(error)}): {MADE_FROM}, or update transformers"
            ) from error
    config.dtype = getattr(torch, head.dtype)
    config.__dict__.pop("_model_name_or_path", None)  # here a title, not a path
    config.quantization_config = {"quant_method": GGUF, "file": path.name, "stored": head.stored}
    return config


@lru_cache(maxsize=8)
def config_of_file(path: Path, size: int, changed: int) -> PreTrainedConfig:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)


def read_gguf(path: Path, config: PreTrainedConfig, options: dict[str, Any]) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let transformers make a model from a file, with every weight expanded; report missing and wrong weights."""
    from transformers import AutoModelForCausalLM

    plain = deepcopy(config)
    del plain.quantization_config  # our own entry
    options = {name: value for name, value in options.items() if name != "use_safetensors"}
    with shared(hide_bar):
        return AutoModelForCausalLM.from_pretrained(path.parent, config=plain, gguf_file=path.name, **options)


@contextmanager
def hide_bar() -> Iterator[None]:
    """Hide the progress bar of transformers' reader of GGUF files, which ignores all settings."""
    from transformers import modeling_gguf_pytorch_utils as reader

    bar = getattr(reader, "tqdm", None)
    if bar is None:  # in a version without a bar
        yield
        return
    reader.tqdm = partial(bar, disable=True)
    yield
    reader.tqdm = bar
