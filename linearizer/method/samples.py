"""Samples of a model's queries, keys and values, from which slots and feature maps are initialised."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from safetensors import SafetensorError

from linearizer.hub.weight_files import read_tensors
from linearizer.run.folder import Run

SAMPLES = "state/samples.safetensors"  # of a run's folder
TENSORS = ("queries", "keys", "values")
TEXT = "text."  # how the names of the parts of a whole text begin


@dataclass(frozen=True)
class LayerSamples:
    """Of one layer: queries and keys where the kernel is exp(x·y), in the model's own gauge, and values."""

    queries: torch.Tensor  # (query heads, samples / 2, key_dim)
    keys: torch.Tensor  # (kv heads, samples / 2, key_dim)
    values: torch.Tensor  # (kv heads, samples / 2, value_dim) of the keys' tokens
    text: LayerSamples | None = None  # all tokens of one text in their order, where memories are fitted to it


@dataclass(frozen=True)
class Samples:
    """Samples of every layer."""

    layers: tuple[LayerSamples | None, ...]  # None where the teacher bounds the layer itself

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor, as safetensors wants them."""
        named: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            for prefix, part_of in (("", layer), (TEXT, layer and layer.text)):
                if part_of is not None:
                    named |= {f"{index}.{prefix}{part}": getattr(part_of, part) for part in TENSORS}
        return named

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor], layers: int) -> Samples:
        """Rebuild the samples from their `tensors`."""

        def read(index: int, prefix: str = "", text: LayerSamples | None = None) -> LayerSamples | None:
            if f"{index}.{prefix}keys" not in tensors:
                return None
            queries, keys, values = (tensors[f"{index}.{prefix}{part}"] for part in TENSORS)
            return LayerSamples(queries, keys, values, text)

        return Samples(tuple(read(index, "", read(index, TEXT)) for index in range(layers)))


def samples_of(run: Run) -> Samples:
    """Read the samples that were kept when the run was profiled."""
    try:
        return Samples.of_tensors(read_tensors(run.folder / SAMPLES)[0], len(run.layers))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise run.damaged_file_error(SAMPLES, error, "profile.json") from error  # they are measured together
