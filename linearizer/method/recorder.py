"""Records a sample of a model's queries, keys and values while it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from safetensors import SafetensorError
from torch import nn

from linearizer.errors import FaultError, RequestError
from linearizer.hub.weight_files import read_tensors
from linearizer.plan.head_bytes import Layer
from linearizer.run.folder import Run
from linearizer.teacher.layers import layer_number
from linearizer.teacher.observing import observing
from linearizer.teacher.ranks import ALONE, Ranks

SAMPLES = "state/samples.safetensors"  # of a run's folder
TENSORS = ("queries", "keys", "values")
TEXT = "text."  # prefix of the tensors of a whole text


@dataclass(frozen=True)
class LayerSamples:
    """Queries and keys of one layer, where the kernel is exp(x·y), in the model's own gauge, and values."""

    queries: torch.Tensor  # (query heads, samples / 2, key_dim)
    keys: torch.Tensor  # (kv heads, samples / 2, key_dim)
    values: torch.Tensor  # (kv heads, samples / 2, value_dim) of the keys' tokens
    text: LayerSamples | None = None  # all tokens of one text in their order, where memories are fitted to it


@dataclass(frozen=True)
class Samples:
    """Samples of every layer."""

    layers: tuple[LayerSamples | None, ...]  # None where the teacher bounds the layer itself
    seed: int = 0  # of what students draw in addition

    def tensors(self) -> dict[str, torch.Tensor]:
        """Name every tensor for safetensors."""
        named: dict[str, torch.Tensor] = {}
        for index, layer in enumerate(self.layers):
            for prefix, record in (("", layer), (TEXT, layer and layer.text)):
                if record is not None:
                    named |= {f"{index}.{prefix}{name}": getattr(record, name) for name in TENSORS}
        return named

    @staticmethod
    def of_tensors(tensors: Mapping[str, torch.Tensor], layers: int, seed: int = 0) -> Samples:
        """Rebuild the samples from their `tensors`."""

        def read(index: int, prefix: str = "", text: LayerSamples | None = None) -> LayerSamples | None:
            if f"{index}.{prefix}keys" not in tensors:
                return None
            queries, keys, values = (tensors[f"{index}.{prefix}{name}"] for name in TENSORS)
            return LayerSamples(queries, keys, values, text)

        return Samples(tuple(read(index, "", read(index, TEXT)) for index in range(layers)), seed)


def samples_of(run: Run) -> Samples:
    """Read the samples that were kept when the run was profiled."""
    try:
        return Samples.of_tensors(read_tensors(run.folder / SAMPLES)[0], len(run.layers), run.plan.seed)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise run.damaged_file_error(SAMPLES, error, "profile.json") from error  # they are measured together


@dataclass(frozen=True)
class Draw:
    """The sampled tokens, drawn before the model runs, so that batches do not change the result."""

    keys: torch.Tensor  # (samples / 2,) positions in all texts one after the other, rising
    queries: torch.Tensor  # (samples / 2,) drawn apart from the keys


def draw_sample(texts: Sequence[torch.Tensor], samples: int, sinks: int, seed: int) -> Draw:
    """Draw tokens that are not sinks, without replacement; each tensor holds texts of one length (texts, tokens)."""
    numbers = torch.arange(sum(x.numel() for x in texts)).split([x.numel() for x in texts])
    eligible = torch.cat([x.view(y.shape)[:, sinks:].flatten() for x, y in zip(numbers, texts, strict=True)])
    assert len(eligible) >= samples // 2  # else checks.py refuses the plan
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> torch.Tensor:
        return eligible[torch.randperm(len(eligible), generator=generator)[:count]].sort().values

    return Draw(pick(samples // 2), pick(samples // 2))


class Recorder:
    """Observes a model while it runs, and samples every layer that the teacher does not bound itself."""

    def __init__(self, layers: tuple[Layer, ...], draw: Draw, keeps_text: bool = False) -> None:
        self.layers, self.draw, self.keeps_text = layers, draw, keeps_text
        self.samples: dict[int, LayerSamples] = {}  # once all is recorded
        self.parts: dict[int, list[LayerSamples]] = {}  # of the samples, one for each batch
        self.begin = 0  # tokens before the batch

    @contextmanager
    def recording(self, model: nn.Module, begin: int) -> Iterator[None]:
        """Record while a batch runs, before which are `begin` tokens; nothing stays on the model afterwards."""
        self.begin = begin
        with observing(model, self.observe):
            yield

    def observe(
        self,
        module: nn.Module,
        query: torch.Tensor,  # (batch, query heads, tokens, key_dim)
        key: torch.Tensor,  # (batch, kv heads, tokens, key_dim)
        value: torch.Tensor,  # (batch, kv heads, tokens, value_dim)
        scaling: float,
        kwargs: dict,
    ) -> None:
        """Record one layer of a batch."""
        index = layer_number(module)
        if not self.is_sampled(index):
            return
        for name, vectors in (("queries", query), ("keys", key), ("values", value)):
            if not vectors.isfinite().all():
                raise RequestError(
                    f"layer {index}: the {name} are not finite; the weights are damaged, or their type is too small: "
                    "load the model in float32"
                )
        root = scaling**0.5  # half of it to each, so that the kernel is exp(x·y)
        self.add(index, query.float() * root, key.float() * root, value.float())

    def add(self, index: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add the drawn tokens of a batch to the sample of a layer; query and key contain the scaling."""
        text, length = None, query.shape[2]
        if self.keeps_text and self.begin == 0:
            queries, keys, values = (vectors[0].clone().cpu() for vectors in (query, key, value))
            text = LayerSamples(queries, keys, values)
        border = torch.tensor([self.begin, self.begin + len(query) * length])

        def take(vectors: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
            low, high = torch.searchsorted(positions, border).tolist()
            places = (positions[low:high] - border[0]).to(vectors.device)
            return vectors[places // length, :, places % length].transpose(0, 1).cpu()

        drawn = take(query, self.draw.queries), take(key, self.draw.keys), take(value, self.draw.keys)
        self.parts.setdefault(index, []).append(LayerSamples(*drawn, text))

    def is_sampled(self, index: int) -> bool:
        """Whether the teacher does not bound a layer itself, or the one whose keys it reads."""
        source = self.layers[index].reads
        return self.layers[index if source is None else source].native_window is None

    def finish(self, ranks: Ranks = ALONE) -> None:
        """Join what the ranks have recorded, and move the queries of layers without keys to the layers they read."""
        expected = [index for index in range(len(self.layers)) if self.is_sampled(index)]
        for index in expected:
            if parts := ranks.gather_shares(self.parts.pop(index, [])):
                self.samples[index] = join_parts(parts)
        if missing := [index for index in expected if index not in self.samples]:
            raise FaultError(f"the attention of layers {missing} was not seen: this model cannot be measured")
        for index, layer in enumerate(self.layers):
            if layer.reads is not None and index in self.samples:
                self.samples[layer.reads] = add_queries(self.samples[layer.reads], self.samples.pop(index))


def join_parts(parts: Sequence[LayerSamples]) -> LayerSamples:
    """Join the samples of batches that follow each other; the first may have the whole text."""
    queries, keys, values = (torch.cat([getattr(part, name) for part in parts], 1) for name in TENSORS)
    return LayerSamples(queries, keys, values, parts[0].text)


def add_queries(samples: LayerSamples, others: LayerSamples) -> LayerSamples:
    """Add the queries of a layer to those of the layer whose keys it reads: their heads share KV heads."""
    heads = len(samples.keys)
    groups = [x.queries.unflatten(0, (heads, -1)) for x in (samples, others)]
    text = add_queries(samples.text, others.text) if samples.text and others.text else None
    return replace(samples, queries=torch.cat(groups, 1).flatten(0, 1), text=text)
