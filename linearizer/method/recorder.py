"""Records a model's attention while it runs: a sample of queries, keys and values, and a few sums over the text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from safetensors import SafetensorError
from torch import nn

from linearizer.errors import FaultError, RequestError, TextError
from linearizer.hub.weight_files import read_tensors
from linearizer.plan.head_bytes import Layer
from linearizer.run.folder import Run
from linearizer.student.attention_interface import observing
from linearizer.teacher.layers import layer_number

SAMPLES = "state/samples.safetensors"  # of a run's folder
TENSORS = ("queries", "keys", "values")
TEXT = "text."  # how the names of the parts of a whole text begin
SCORES = 2**23  # attention scores that are held at once


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


@dataclass(frozen=True)
class Draw:
    """The sampled tokens, drawn before the model runs, so that batches do not change the result."""

    sinks: int  # first tokens of each text, of which none is drawn
    keys: torch.Tensor  # (samples / 2,) positions in the flattened texts, rising
    queries: torch.Tensor  # (samples / 2,) drawn apart from the keys
    rows: torch.Tensor  # (rows,) the queries whose whole attention is computed


def draw_sample(texts: torch.Tensor, samples: int, rows: int, sinks: int, seed: int) -> Draw:
    """Draw tokens of texts (texts, tokens) that are not sinks, without replacement."""
    eligible = torch.arange(texts.numel()).view(texts.shape)[:, sinks:].flatten()
    if texts.shape[1] <= sinks:
        raise TextError(
            f"texts of {texts.shape[1]} tokens leave none to draw from after {sinks} sinks: ask for a --length above "
            f"{sinks}, or for fewer sinks"
        )
    if len(eligible) < samples // 2:
        raise TextError(
            f"the text leaves {len(eligible)} tokens to draw from, {samples} samples per head need {samples // 2}: "
            "give more text, or ask for fewer samples"
        )
    generator = torch.Generator().manual_seed(seed)

    def pick(count: int) -> torch.Tensor:
        return eligible[torch.randperm(len(eligible), generator=generator)[:count]].sort().values

    return Draw(sinks, pick(samples // 2), pick(samples // 2), pick(rows))


class LayerRecord:
    """The record of one layer; its sums are over the drawn rows, each a mean over the query group of a KV head."""

    def __init__(
        self, layer: Layer, draw: Draw, windows: tuple[int, ...], device: torch.device, keeps_text: bool = False
    ) -> None:
        heads = layer.kv_heads
        self.keeps_text, self.text = keeps_text, None  # type: bool, LayerSamples | None
        self.layer, self.draw, self.windows, self.device = layer, draw, windows, device
        self.keys = torch.zeros(heads, len(draw.keys), layer.key_dim)
        self.values = torch.zeros(heads, len(draw.keys), layer.value_dim)
        self.queries = torch.zeros(layer.query_heads, len(draw.queries), layer.key_dim)
        # (kv heads, 2 + windows): entropy, mass on sinks, mass within each window
        self.attention = torch.zeros(heads, 2 + len(windows), dtype=torch.float64, device=device)

    def add(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, first: int) -> None:
        """Add a batch whose first text is number `first`; query and key contain the scaling."""
        texts, length = len(query), query.shape[2]
        if self.keeps_text and first == 0:
            self.text = LayerSamples(query[0].clone().cpu(), key[0].clone().cpu(), value[0].clone().cpu())
        drawn = ((self.keys, key, self.draw.keys), (self.values, value, self.draw.keys))
        for sample, vectors, positions in (*drawn, (self.queries, query, self.draw.queries)):
            slots, places = find_within(positions, first * length, (first + texts) * length)
            places = places.to(vectors.device)
            sample[:, slots] = vectors[places // length, :, places % length].transpose(0, 1).cpu()
        for text in range(texts):
            _, rows = find_within(self.draw.rows, (first + text) * length, (first + text + 1) * length)
            self.add_attention(query[text], key[text], rows.to(query.device))

    def add_attention(self, query: torch.Tensor, key: torch.Tensor, rows: torch.Tensor) -> None:
        """Add the whole attention of some rows of one text, a block at a time."""
        for block in rows.split(max(1, SCORES // (query.shape[0] * query.shape[1]))):
            grouped = query[:, block].unflatten(0, (self.layer.kv_heads, -1))  # (kv heads, group, rows, key_dim)
            self.attention += attention_sums(grouped, key, block, self.draw.sinks, self.windows)


def find_within(positions: torch.Tensor, begin: int, end: int) -> tuple[slice, torch.Tensor]:
    """Find the rising positions in begin … end - 1: their slots in the sample, and their distance from `begin`."""
    low, high = torch.searchsorted(positions, torch.tensor([begin, end])).tolist()
    return slice(low, high), positions[low:high] - begin


def attention_sums(
    query: torch.Tensor,  # (kv heads, group, rows, key_dim)
    key: torch.Tensor,  # (kv heads, tokens, key_dim)
    rows: torch.Tensor,  # (rows,) where the queries stand among the tokens
    sinks: int,
    windows: tuple[int, ...],
) -> torch.Tensor:  # (kv heads, 2 + windows)
    """Sum entropy, mass on sinks, and mass within each window (sinks apart) over the rows."""
    place = torch.arange(key.shape[1], device=rows.device)
    seen, is_sink = place <= rows[:, None], place < sinks
    logs = (query @ key.unsqueeze(1).mT).masked_fill(~seen, -torch.inf).log_softmax(-1)  # (…, rows, tokens)
    mass = logs.exp()
    entropy = -(mass * logs.masked_fill(~seen, 0)).sum(-1)
    before = (mass * ~is_sink).cumsum(-1)
    edges = rows[:, None] - rows.new_tensor(windows)  # (rows, windows): the last token outside
    outside = before.gather(-1, edges.clamp(min=0).expand(*mass.shape[:3], -1)) * (edges >= 0)
    sums = [entropy.unsqueeze(-1), (mass * is_sink).sum(-1, keepdim=True), before[..., -1:] - outside]
    return torch.cat(sums, -1).double().mean(1).sum(1)


class Recorder:
    """Observes a model while it runs, and keeps a record of every layer that the teacher does not bound itself."""

    def __init__(
        self, layers: tuple[Layer, ...], draw: Draw, windows: tuple[int, ...], keeps_text: bool = False
    ) -> None:
        self.layers, self.draw, self.windows, self.keeps_text = layers, draw, windows, keeps_text
        self.records: dict[int, LayerRecord] = {}
        self.first = 0  # number of the batch's first text

    @contextmanager
    def recording(self, model: nn.Module, first: int) -> Iterator[None]:
        """Record while a batch runs that begins with text number `first`; nothing stays on the model afterwards."""
        self.first = first
        with observing(model, self.observe):
            yield

    def observe(
        self,
        module: nn.Module,
        query: torch.Tensor,  # (batch, query heads, tokens, key_dim)
        key: torch.Tensor,  # (batch, kv heads, tokens, key_dim)
        value: torch.Tensor,  # (batch, kv heads, tokens, value_dim)
        scaling: float,
        others: dict,
    ) -> None:
        """Record one layer of a batch."""
        index = layer_number(module)
        layer = self.layers[index]
        if layer.native_window is not None:
            return
        for name, vectors in (("queries", query), ("keys", key), ("values", value)):
            if not vectors.isfinite().all():
                raise RequestError(
                    f"layer {index}: the {name} are not finite; the weights are damaged, or their type is too small: "
                    "load the model in float32"
                )
        if index not in self.records:
            self.records[index] = LayerRecord(layer, self.draw, self.windows, query.device, self.keeps_text)
        root = scaling**0.5  # half of it to each, so that the kernel is exp(x·y)
        self.records[index].add(query.float() * root, key.float() * root, value.float(), self.first)

    def check(self) -> None:
        """Check that every layer was seen."""
        expected = {index for index, layer in enumerate(self.layers) if layer.native_window is None}
        if missing := sorted(expected - self.records.keys()):
            raise FaultError(f"the attention of layers {missing} was not seen: this model cannot be measured")
