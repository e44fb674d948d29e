"""Decides where a teacher's weights lie, and streams those of its blocks where memory cannot hold them.

Such a block's weights stay in the memory of the CPU or in their files, and come to the device while the block computes.
The bits of what is computed are the same; every pass over the model reads all of its weights again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linearizer.errors import RequestError
from linearizer.model.devices import choose_device, choose_dtype, device_kind
from linearizer.model.layers import blocks_of
from linearizer.model.memory import free_bytes
from linearizer.model.probe import build_blueprint
from linearizer.model.quantised import is_packed, method_of
from linearizer.run.inspection import Inspection

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from linearizer.model.hub import Source

STATE_ARGUMENT = "linear_state"  # that an attention module is given
FILLED = 0.8  # of what is free, that weights may take: the rest is for what is computed


@dataclass(frozen=True)
class Weights:
    """The bytes of a model's weights in the type that it computes in."""

    whole: int
    streamed: int  # all but those of its blocks, and two blocks
    merged: bool  # whether loading merges some, as the experts of mixtures, so that no file holds them as they are used
    blocks: Mapping[str, str]  # the names of the modules that are no blocks, and of the blocks: "" or "block"


def measure_weights(config: PreTrainedConfig, dtype: torch.dtype) -> Weights:
    """Compute what the weights of a model take, from its config alone."""
    model = build_blueprint(config)
    blocks = set(blocks_of(model))
    sizes = [sum(x.numel() for x in block.parameters()) for block in blocks]
    whole = sum(x.numel() for x in model.parameters())
    names = {name: "block" if module in blocks else "" for name, module in outermost(model, blocks)}
    streamed = whole - sum(sizes) + 2 * max(sizes, default=0)
    merged = any(".experts." in name and x.ndim == 3 for name, x in model.named_parameters())
    return Weights(whole * dtype.itemsize, streamed * dtype.itemsize, merged, names)


def outermost(module: nn.Module, blocks: set[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """List the blocks of a model, and the largest of its other parts that contain none."""
    if module in blocks or not blocks & set(module.modules()):
        yield name, module
    else:
        for part, child in module.named_children():
            yield from outermost(child, blocks, f"{name}.{part}".lstrip("."))


def bytes_for_weights(device: str) -> int:
    """Say how many bytes of weights a device may hold; any number on a GPU that is lent later, and elsewhere."""
    known = device_kind(device) == "cpu" or torch.cuda.is_available()
    place = torch.device(choose_device(device) if known else device)
    return int(FILLED * free_bytes(place)) if known and place.type in ("cpu", "cuda") else 2**60


def place_weights(config: PreTrainedConfig, source: Source, dtype: torch.dtype, device: str) -> dict[str, str] | None:
    """Choose where the parts of a model lie; None: all on the device. Refuse a model that cannot be streamed either."""
    free, method = bytes_for_weights(device), method_of(config)
    if method is not None:
        check_quantised_fit(config, source, dtype, free)
        return None
    if source.parameters * dtype.itemsize <= free or (weights := measure_weights(config, dtype)).whole <= free:
        return None
    place = torch.device(choose_device(device))
    if weights.streamed > free or "block" not in weights.blocks.values():
        raise RequestError(
            f"its weights take {weights.whole / 1e9:.2f} GB in {str(dtype).removeprefix('torch.')}, and "
            f"{weights.streamed / 1e9:.2f} GB block by block, where {free / 1e9:.2f} GB of memory may be taken: free "
            "memory, or use a larger machine"
        )
    elsewhere = "disk"
    if place.type == "cuda" and weights.whole <= FILLED * free_bytes(torch.device("cpu")):
        elsewhere = "cpu"
    if elsewhere == "disk" and weights.merged:
        raise RequestError(
            f"its weights take {weights.whole / 1e9:.2f} GB, where {free / 1e9:.2f} GB of memory may be taken, and its "
            "experts are merged while they are loaded, so they cannot be read from its files: use a larger machine"
        )
    return {name: elsewhere if kind else str(place) for name, kind in weights.blocks.items()}


def check_quantised_fit(config: PreTrainedConfig, source: Source, dtype: torch.dtype, free: int) -> None:
    """Refuse quantised weights that memory cannot hold: they are not streamed."""
    needed = source.weight_bytes if is_packed(config) else measure_weights(config, dtype).whole
    if needed > free:
        raise RequestError(
            f"its quantised weights take {needed / 1e9:.2f} GB here, where {free / 1e9:.2f} GB of memory may be taken, "
            "and are not read block by block: free memory, name the model that it was quantised from, or use a larger "
            "machine"
        )


def bytes_in_memory(inspection: Inspection, asked: str = "auto", device: str = "auto") -> int:
    """Compute what the weights of an inspected model take in the type that they are computed in here."""
    if inspection.packed:
        return inspection.weight_bytes
    stored = torch.float32 if inspection.number_bytes == 4 else torch.bfloat16
    chosen = asked if device_kind(device) == "cuda" else choose_dtype(asked, stored, device)
    return inspection.parameters * (stored if chosen == "auto" else getattr(torch, chosen)).itemsize


def streams(inspection: Inspection, asked: str = "auto", device: str = "auto") -> bool:
    """Tell whether a model will be read block by block here, as far as its size tells."""
    return inspection.quantised is None and bytes_in_memory(inspection, asked, device) > bytes_for_weights(device)


def is_streamed(model: nn.Module) -> bool:
    """Tell whether a model's weights are read in every pass."""
    return any(True for _ in offload_hooks(model))


def streamed_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Read the weights that are not on the device, one after the other."""
    for name, module, hook in offload_hooks(model):
        for part, _ in module.named_parameters(recurse=False):
            yield f"{name}.{part}", hook.weights_map[part]


def offload_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """List the modules whose weights come to the device for every call, and what brings them there."""
    for name, module, hook in placing_hooks(model):
        if getattr(hook, "offload", False) and any(True for _ in module.parameters(recurse=False)):
            yield name, module, hook


def placing_hooks(model: nn.Module) -> Iterator[tuple[str, nn.Module, Any]]:
    """List the modules to whose device their arguments are brought, and what brings them there."""
    for name, module in model.named_modules():
        if (hook := getattr(module, "_hf_hook", None)) is not None:
            for each in getattr(hook, "hooks", [hook]):
                yield name, module, each


def leave_states_in_place(model: nn.Module) -> None:
    """Let the state of a student be handed over as it is: what is brought to a device is a copy, which is lost."""
    for _, _, hook in placing_hooks(model):
        names = getattr(hook, "skip_keys", None) or ()
        hook.skip_keys = [*([names] if isinstance(names, str) else names), STATE_ARGUMENT]
