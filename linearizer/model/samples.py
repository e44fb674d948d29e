"""Samples of a model's queries, keys and values, from which slots and feature maps are initialised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from linearizer.model.safetensors import read_tensors
from linearizer.run.folder import Run

SAMPLES = "state/samples.safetensors"  # of a run's folder
NEEDED, PARTS = ("queries", "keys"), ("queries", "keys", "values")
TEXT = "text."  # how the names of the parts of a whole text begin


@dataclass(frozen=True)
class LayerSamples:
    """Of one layer: queries and keys where the kernel is exp(x·y), in the model's own gauge, and values."""

    queries: torch.Tensor  # (query heads, samples / 2, key_dim)
    keys: torch.Tensor  # (kv heads, samples / 2, key_dim)
    values: torch.Tensor | None = None  # (kv heads, samples / 2, value_dim) of the keys' tokens; None: of older runs
    text: LayerSamples | None = None  # all tokens of one text in their order, where memories are fitted to it


@dataclass(frozen=True)
class Samples:
    """Samples of every layer."""

    layers: tuple[LayerSamples | None, ...]  # None where the teacher bounds the layer itself

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor, as safetensors wants them."""
        named: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            if layer is not None:
                parts = {part: getattr(layer, part) for part in PARTS}
                parts |= {TEXT + part: getattr(layer.text, part) for part in PARTS if layer.text is not None}
                named |= {f"{index}.{part}": x for part, x in parts.items() if x is not None}
        return named

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor], layers: int) -> Samples:
        """Rebuild the samples from their `tensors`."""

        def layer(index: int) -> LayerSamples:
            queries, keys = (tensors[f"{index}.{part}"] for part in NEEDED)
            text = None
            if f"{index}.{TEXT}keys" in tensors:
                asks, seen, values = (tensors[f"{index}.{TEXT}{part}"] for part in PARTS)
                text = LayerSamples(asks, seen, values)
            return LayerSamples(queries, keys, tensors.get(f"{index}.values"), text)

        return Samples(tuple(layer(index) if f"{index}.keys" in tensors else None for index in range(layers)))


def samples_of(run: Run) -> Samples:
    """Read the samples that were kept when the run was profiled."""
    try:
        return Samples.of_tensors(read_tensors(run.folder / SAMPLES)[0], len(run.layers))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise run.damaged_file_error(SAMPLES, error, "profile.json") from error  # they are measured together
