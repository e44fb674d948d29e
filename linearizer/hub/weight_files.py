"""Checks that a model's weights are complete, by their headers; writes and reads our own tensors with a digest."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from linearizer.errors import ModelNotAvailable
from linearizer.plan.json_products import parse_json, parse_object
from linearizer.run.files import UNFINISHED, remove, sync, writing

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_NAME = 255  # letters of a file
TEACHER_FILES = "teacher_files"  # in the metadata of a student's index: names of files, and the teacher's names of them
SEAL = "linearizer"  # the name of our entry in the metadata of a file
GGUF = "gguf"  # the name of the format, and of its quantisation
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Weights:
    """The files of a model's weights, with their parameters and bytes, and the names of their tensors."""

    files: tuple[str, ...]
    parameters: int
    bytes: int
    names: frozenset[str] = frozenset()


def check_format(name: str, files: Collection[str]) -> None:
    """Refuse a model without weights that can be read without running code."""
    if SINGLE in files or INDEX in files:
        return
    pickles = sorted(file for file in files if file.endswith(PICKLES) and file != "training_args.bin")
    if pickles:
        raise ModelNotAvailable(
            f"{name!r} has its weights only as a pickle ({pickles[0]}), which can run any code when it is opened: "
            f"ask its author for safetensors, or convert it yourself with save_pretrained where that code is harmless"
        )
    check_other_format(name, files)
    unsupported = sorted(file for file in files if file.endswith((".safetensors", ".h5", ".msgpack", ".onnx")))
    instead = f"only {unsupported[0]}" if unsupported else "and no other weights"
    raise ModelNotAvailable(
        f"{name!r} has neither {SINGLE} nor {INDEX}, {instead}: name a model that transformers can load"
    )


def check_other_format(name: str, files: Collection[str]) -> None:
    """Refuse a model with weights in GGUF files only: the user must name one of these."""
    if file := min((file for file in files if file.endswith(f".{GGUF}")), default=None):
        full = os.path.join(name, file) if os.path.isdir(name) else f"{name}:{file}"
        raise ModelNotAvailable(f"{name!r} has its weights as GGUF: name one of its files, such as {full!r}")


def read_json(name: str, path: Path) -> dict[str, Any]:
    """Read a JSON object of a model's folder."""
    try:
        return parse_object(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or f"it is not JSON: {error}"
        raise ModelNotAvailable(
            f"{name!r} has a {path.name} that cannot be read ({reason}): repair that file, or download the model again"
        ) from error


def damaged_weights(name: str, fault: object) -> ModelNotAvailable:
    """Return the error of damaged weights."""
    return ModelNotAvailable(f"{name!r} has damaged weights ({fault}): download the model again")


def weigh_folder(name: str, folder: Path) -> Weights:
    """Count the parameters of a local model from its headers, which must match the length of each file."""
    check_format(name, [path.name for path in folder.iterdir()])
    files = (SINGLE,) if (folder / SINGLE).exists() else list_shards(name, read_json(name, folder / INDEX))
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        raise damaged_weights(name, f"{INDEX} names {missing[0]}, which is missing")
    sizes: dict[str, int] = {}
    for file in files:
        try:
            with safe_open(folder / file, framework="pt") as weights:
                sizes |= {key: math.prod(weights.get_slice(key).get_shape()) for key in weights.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise damaged_weights(name, f"{file}: {error}") from error
    weight_bytes = sum((folder / file).stat().st_size for file in files)
    return Weights(files, sum(sizes.values()), weight_bytes, frozenset(sizes))


def teacher_files(folder: Path) -> dict[str, str]:
    """List the files of a checkpoint that are its teacher's, with their names in the teacher's repository."""
    index = read_json(str(folder), folder / INDEX) if (folder / INDEX).is_file() else {}
    metadata = index.get("metadata")
    named = metadata.get(TEACHER_FILES) if isinstance(metadata, dict) else None
    return named if isinstance(named, dict) else {}


def list_shards(name: str, index: dict[str, Any]) -> tuple[str, ...]:
    """List the files that an index of sharded weights names."""
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise damaged_weights(name, f"{INDEX} names no files")
    if not all(isinstance(file, str) and len(file) <= MAX_NAME for file in weight_map.values()):
        raise damaged_weights(name, f"{INDEX} contains impossible names of files")
    if not isinstance(index.get("metadata"), dict):  # transformers looks into it
        raise damaged_weights(name, f"{INDEX} has no metadata")
    return tuple(sorted({*weight_map.values()}))


def read_header(path: Path) -> dict[str, tuple[int, int]]:
    """Read where each tensor of a file begins and ends, by name."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return {name: tuple(entry["data_offsets"]) for name, entry in header.items() if name != "__metadata__"}


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], facts: str = "") -> None:
    """Replace a file of tensors and text at once; it contains a digest of both."""
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    unfinished = path.with_name(path.name + UNFINISHED)  # a folder, which also takes safetensors' temporary file
    with writing(path):
        remove(unfinished)
        unfinished.mkdir()
        try:
            target = unfinished / path.name
            # A single entry: the order of several differs between files.
            save_file(tensors, target, {SEAL: json.dumps({"facts": facts, "digest": digest(tensors, facts)})})
            sync(target)
            target.replace(path)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], str]:
    """Read a file that `write_tensors` wrote; raise ValueError if its content has changed since."""
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        sealed = parse_json((file.metadata() or {})[SEAL])
    if digest(tensors, sealed["facts"]) != sealed["digest"]:
        raise ValueError("its content has changed since it was written")
    return tensors, sealed["facts"]


def digest(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """Hash tensors and text."""
    import torch

    hashed = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        hashed.update(f"{name} {tensors[name].dtype} {tuple(tensors[name].shape)}".encode())
        hashed.update(tensors[name].detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.hexdigest()
