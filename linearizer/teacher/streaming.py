"""Decides where a teacher's weights lie: on the device, spread over several, or streamed where they do not fit.

A model that is spread has each of its blocks on one device, and the output of a block moves to the next block's device.
The weights of a streamed block stay in the memory of the CPU or in their files, and are copied to the device while the
block computes; every pass over the model reads all of its weights again. The results are bit-identical.

Most files of mixtures hold each expert by itself, and transformers merges the experts of a layer while it loads them.
Those that stay on disk are written to a folder in the Hub's folder of this machine. That is removed with the model, at
the end of its process, or by the next process if that one was killed.
"""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import nn

from linearizer.amounts import size
from linearizer.errors import RequestError
from linearizer.hub.models import home_folder
from linearizer.plan.inspection import Inspection
from linearizer.run.files import check_free_disk
from linearizer.teacher.devices import choose_device, choose_dtype, device_kind
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.quantised import is_packed, method_of
from linearizer.teacher.ram import free_bytes
from linearizer.teacher.support import build_blueprint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from linearizer.hub.models import Source

STATE_ARGUMENT = "linear_state"  # of an attention module
OFFLOADED = {"cpu", "disk"}  # where the weights of streamed blocks lie
EXPERTS = "linearizer-experts-"  # of folders, before the number of the process and the name of its machine
FILLED = 0.8  # share of the free memory for weights: the rest is for computations


@dataclass(frozen=True)
class WeightSizes:
    """The bytes of a model's weights in the type that it computes in."""

    whole: int
    streamed: int  # of two blocks, and of all other parts
    stacks: Mapping[str, int]  # the bytes of those of all experts of a mixture, which many files hold one by one
    blocks: Mapping[str, str]  # by the name of a part: "block", or "" for any other
    parts: Mapping[str, int]  # the bytes of each of these


def measure_weights(config: PreTrainedConfig, dtype: torch.dtype) -> WeightSizes:
    """Compute the bytes of a model's weights, from its config alone."""
    model = build_blueprint(config)
    blocks = set(blocks_of(model))
    sizes = [sum(x.numel() for x in block.parameters()) for block in blocks]
    total = sum(x.numel() for x in model.parameters())
    parts = dict(list_outermost_parts(model, blocks))
    names = {name: "block" if module in blocks else "" for name, module in parts.items()}
    bytes_of = {name: dtype.itemsize * sum(x.numel() for x in part.parameters()) for name, part in parts.items()}
    streamed = total - sum(sizes) + 2 * max(sizes, default=0)
    stacks = {
        name: dtype.itemsize * x.numel() for name, x in model.named_parameters() if ".experts." in name and x.ndim == 3
    }
    return WeightSizes(total * dtype.itemsize, streamed * dtype.itemsize, stacks, names, bytes_of)


def list_outermost_parts(module: nn.Module, blocks: set[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List the blocks of a model, and the largest of its other parts that contain none, if only a parameter."""
    if module in blocks or not blocks & set(module.modules()):
        yield name, module
    else:
        for part, x in module.named_parameters(recurse=False):
            yield f"{name}.{part}".lstrip("."), nn.ParameterList([x])
        for part, child in module.named_children():
            yield from list_outermost_parts(child, blocks, f"{name}.{part}".lstrip("."))


def rooms_for_weights(device: str) -> dict[str, int]:
    """Return how many bytes of weights a device may hold; no limit for a GPU that is lent later, or other devices.

    If `device` names no particular GPU, return all GPUs in their order.
    """
    is_present = device_kind(device) == "cpu" or torch.cuda.is_available()
    place = torch.device(choose_device(device) if is_present else device)
    if not is_present or place.type not in ("cpu", "cuda"):
        return {str(place): 2**60}
    any_gpu = place.type == "cuda" and place.index is None
    places = [torch.device("cuda", index) for index in range(torch.cuda.device_count())] if any_gpu else [place]
    return {str(each): int(FILLED * free_bytes(each)) for each in places}


def bytes_for_weights(device: str) -> int:
    """Return how many bytes of weights a device may hold, or several together."""
    return sum(rooms_for_weights(device).values())


def spread_blocks(weights: WeightSizes, rooms: Mapping[str, int]) -> dict[str, str] | None:
    """Place the blocks of a model on several devices, in their order, and all else on the first; None: no room.

    Each is filled by the same share, so that all have free memory for computations.
    """
    sizes, devices = weights.parts, iter(rooms)
    share = sum(sizes.values()) / sum(rooms.values())
    largest = max((sizes[name] for name, kind in weights.blocks.items() if kind), default=0)
    remaining = {device: min(room, share * room + largest) for device, room in rooms.items()}
    place = next(devices)
    places = {name: place for name, kind in weights.blocks.items() if not kind}
    remaining[place] -= sum(sizes[name] for name in places)
    for name in (name for name, kind in weights.blocks.items() if kind):
        while sizes[name] > remaining[place]:
            if (following := next(devices, None)) is None:
                return None
            place = following
        places[name], remaining[place] = place, remaining[place] - sizes[name]
    return places if min(remaining.values()) >= 0 else None


def place_weights(config: PreTrainedConfig, source: Source, dtype: torch.dtype, device: str) -> dict[str, str] | None:
    """Choose the device of each part of a model; None: all on one. Refuse a model that cannot be streamed either."""
    rooms, method = rooms_for_weights(device), method_of(config)
    free = next(iter(rooms.values()))
    if method is not None:
        needed = source.weights.bytes if is_packed(config) else measure_weights(config, dtype).whole
        if needed > free:
            raise RequestError(
                f"its quantised weights take {size(needed)} here, where {size(free)} of memory are available, and "
                "cannot be read block by block: free memory, name the model that it was quantised from, or use a "
                "larger machine"
            )
        return None
    if source.weights.parameters * dtype.itemsize <= free or (weights := measure_weights(config, dtype)).whole <= free:
        return None
    if len(rooms) > 1 and (places := spread_blocks(weights, rooms)) is not None:
        return places
    place = torch.device(choose_device(device))
    if weights.streamed > free or "block" not in weights.blocks.values():
        raise RequestError(
            f"its weights take {size(weights.whole)} in {str(dtype).removeprefix('torch.')}, and "
            f"{size(weights.streamed)} block by block, where {size(free)} of memory are available: free memory, or use "
            "a larger machine"
        )
    fits_ram = place.type == "cuda" and weights.whole <= FILLED * free_bytes(torch.device("cpu"))
    elsewhere = "cpu" if fits_ram else "disk"
    if elsewhere == "disk":
        merged = sum(count for name, count in weights.stacks.items() if name not in source.weights.names)
        check_free_disk(home_folder(), merged)
    return {name: elsewhere if kind else str(place) for name, kind in weights.blocks.items()}


def bytes_in_memory(inspection: Inspection, dtype: str = "auto", device: str = "auto") -> int:
    """Compute the bytes of an inspected model's weights in the type that this machine computes in."""
    if inspection.packed:
        return inspection.weight_bytes
    stored = torch.float32 if inspection.number_bytes == 4 else torch.bfloat16
    chosen = dtype if device_kind(device) == "cuda" else choose_dtype(dtype, stored, device)
    return inspection.parameters * (stored if chosen == "auto" else getattr(torch, chosen)).itemsize


def streams(inspection: Inspection, dtype: str = "auto", device: str = "auto") -> bool:
    """Whether a model will be read block by block here, judging by its size."""
    return inspection.quantised is None and bytes_in_memory(inspection, dtype, device) > bytes_for_weights(device)


def spreads(inspection: Inspection, dtype: str = "auto", device: str = "auto") -> bool:
    """Whether a model will be spread over several devices here, judging by its size."""
    rooms = list(rooms_for_weights(device).values())
    return inspection.quantised is None and rooms[0] < bytes_in_memory(inspection, dtype, device) <= sum(rooms)


def is_streamed(model: nn.Module) -> bool:
    """Whether a model's weights are read in every pass."""
    return any(True for _ in offload_hooks(model))


def streamed_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights that are not on the device, one after the other."""
    for name, module, hook in offload_hooks(model):
        for part, _ in module.named_parameters(recurse=False):
            yield f"{name}.{part}", hook.weights_map[part]


def offload_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """List the modules whose weights are copied to the device for every call, with the hooks that copy them."""
    for name, module, hook in placing_hooks(model):
        if getattr(hook, "offload", False) and any(True for _ in module.parameters(recurse=False)):
            yield name, module, hook


def placing_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """List the modules with hooks that move their arguments to a device, and these hooks."""
    for name, module in model.named_modules():
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            for each in getattr(hook, "hooks", [hook]):
                yield name, module, each


def leave_states_in_place(model: nn.Module) -> None:
    """Do not let hooks move the state of a student: they would move a copy, and changes of it would be lost."""
    for _, _, hook in placing_hooks(model):
        names = getattr(hook, "skip_keys", None) or ()
        hook.skip_keys = [*([names] if isinstance(names, str) else names), STATE_ARGUMENT]


def load_with_experts(
    places: Mapping[str, str] | None, load: Callable[[Path | None], PreTrainedModel]
) -> PreTrainedModel:
    """Load a model whose parts lie in these places, with a folder for its experts if some stay on disk."""
    if "disk" not in (places or {}).values():
        return load(None)
    folder = make_folder()
    try:
        model = load(folder)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    weakref.finalize(model, shutil.rmtree, folder, ignore_errors=True)
    return model


def make_folder() -> Path:
    """Make a folder for the experts of one model, and remove those of processes of this machine that have ended."""
    home, host = home_folder(), f"@{platform.node()}@"  # other machines may share the disk
    for folder in home.glob(f"{EXPERTS}*{host}*"):
        process = folder.name.removeprefix(EXPERTS).partition("@")[0]
        if process.isdecimal() and not psutil.pid_exists(int(process)):
            shutil.rmtree(folder, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{EXPERTS}{os.getpid()}{host}", dir=home))
