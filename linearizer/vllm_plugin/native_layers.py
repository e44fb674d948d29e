"""vLLM's own model of the teacher, with a student in place of each attention: its linear and recurrent layers, its
graphs and its compiled code stay, whatever the teacher's architecture, if vLLM knows it. Attention to a sliding window
has a student, too: one that keeps the window. With tensor parallelism a process reads the KV heads that vLLM gives it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models.utils import extract_layer_index, init_vllm_registered_model
from vllm.utils.torch_utils import direct_register_custom_op

from linearizer.method.untrained import draw_layer, generator_at
from linearizer.student.layer_student import LayerStudent
from linearizer.vllm_plugin.checked_config import teacher_config
from linearizer.vllm_plugin.layer_reader import LayerReader, add_reader, window_student
from linearizer.vllm_plugin.refusals import OTHER_LAYERS, OTHER_WEIGHTS, SHARED, WHOLE_ATTENTION
from linearizer.vllm_plugin.state_memory import bytes_of

Tensor = torch.Tensor
STUDENT = re.compile(r"(\d+)\.\w+\.student\.(.+)")  # in the name of a weight: its layer, and its name there


class StudentAttention(nn.Module):
    """What a layer calls in place of vLLM's Attention, with q, k and v (tokens, heads · dim)."""

    def __init__(self, reader: LayerReader, attention: Attention) -> None:
        super().__init__()
        self.student, self.reader, self.impl = reader.heads.student, reader, attention.impl
        self.query_heads, self.heads = attention.num_heads, attention.num_kv_heads
        self.value_dim, self.name = attention.head_size_v, attention.layer_name

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = value.new_empty(value.shape[0], self.query_heads * self.value_dim)
        torch.ops.vllm.linearizer_attend(query, key, value, out, self.name)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        counts = self.query_heads, self.heads, self.heads
        q, k, v = (x.unflatten(1, (count, -1)) for x, count in zip((query, key, value), counts, strict=True))
        cap, sinks = (getattr(self.impl, name, None) for name in ("logits_soft_cap", "sinks"))
        scores = (cap or None, sinks) if cap or sinks is not None else ()
        return self.reader.attend(q, k, v, self.impl.scale, scores).flatten(1)


def linearizer_attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    """Attend as one step that graphs do not look into; they contain the name of a layer of the engine's model."""
    out.copy_(get_forward_context().no_compile_layers[name].attend(q, k, v))


def traced(q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    """Stand for that step while a graph is made."""


direct_register_custom_op("linearizer_attend", linearizer_attend, mutates_args=["out"], fake_impl=traced)


class NativeLayers(nn.Module):
    MADE_BY = "vLLM's own"

    def __init__(self, vllm_config: VllmConfig) -> None:
        super().__init__()
        model_config, compilation = vllm_config.model_config, vllm_config.compilation_config
        config = model_config.hf_config
        if compilation.splitting_ops is not None:
            compilation.splitting_ops.append("vllm::linearizer_attend")
        base = teacher_config(config)
        self.model = init_vllm_registered_model(vllm_config, hf_config=base, architectures=base.architectures)
        context = compilation.static_forward_context
        self.recurrent = {name: layer for name, layer in context.items() if isinstance(layer, MambaBase)}
        for layer in self.recurrent.values():
            layer.get_kv_cache_spec = lambda vllm_config: None  # what it keeps lies in our rows
        found = [(m, m.attn) for m in self.model.modules() if isinstance(getattr(m, "attn", None), Attention)]
        self.add_readers([attention for _, attention in found], config.linearized, model_config.dtype)
        for parent, attention in found:
            parent.attn = StudentAttention(self.by_layer[extract_layer_index(attention.layer_name)], attention)
            context[attention.layer_name] = parent.attn
        described = {index for index, layer in enumerate(config.linearized["layers"]) if layer is not None}
        others = [
            name for name, x in context.items() if isinstance(x, AttentionLayerBase) and name not in self.recurrent
        ]
        if others or not described <= self.by_layer.keys():
            raise ValueError(OTHER_LAYERS.format(base.architectures[0]))

    def add_readers(self, found: list[Attention], entries: dict, dtype: torch.dtype) -> None:
        """Make the readers of layers by their numbers: first those of windows, which lie in every row."""
        self.readers: list[LayerReader] = []
        self.by_layer: dict[int, LayerReader] = {}
        self.whole: dict[int, LayerStudent] = {}  # of layers with all heads, as the checkpoint has their weights
        begin = sum(map(bytes_of, self.recurrent.values()))
        layers = {extract_layer_index(attention.layer_name): attention for attention in found}
        for index, attention in sorted(layers.items(), key=lambda item: entries["layers"][item[0]] is not None):
            dims, layer = (attention.head_size, attention.head_size_v), entries["layers"][index]
            sizes = attention.num_heads, dims, dtype
            if attention.kv_sharing_target_layer_name is not None:
                raise ValueError(SHARED.format(index))
            if layer is not None:
                whole, mine = layer["heads"], heads_of_rank(len(layer["heads"]))
                kind = entries["sinks"], dims[0], entries["feature_map"], dims[1]
                self.whole[index] = student = LayerStudent(whole, *kind).float().eval()
                if mine != [*range(len(whole))]:
                    student = LayerStudent([whole[head] for head in mine], *kind).float().eval()
                draw_layer(student, generator_at(0))
                most = entries["exact_tokens"]
            elif attention.sliding_window is not None:
                student, most = window_student(attention.sliding_window, attention.num_kv_heads, dims), 0
            else:
                raise ValueError(WHOLE_ATTENTION.format(index))
            self.by_layer[index] = add_reader(self.readers, student, *sizes, most, begin)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        return self.model(input_ids, positions, None, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        own = {
            (index, name): weight
            for index, student in self.whole.items()
            for name, weight in student.named_parameters()
        }
        missing = {*own}

        def of_teacher() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if (match := STUDENT.search(name)) is None:
                    yield name, weight
                    continue
                if (place := (int(match[1]), match[2])) not in own:
                    raise ValueError(OTHER_WEIGHTS.format("has a strange weight", name))
                own[place].data.copy_(weight)
                missing.discard(place)

        self.model.load_weights(of_teacher())
        if missing:
            index, name = min(missing)
            raise ValueError(OTHER_WEIGHTS.format("lacks", f"{name} of the student of layer {index}"))
        for index, whole in self.whole.items():
            copy_heads(whole, self.by_layer[index].heads.student, heads_of_rank(whole.kv_heads))


def heads_of_rank(kv_heads: int) -> list[int]:
    """Return the KV heads of a layer that this process reads; more processes than heads share some."""
    rank, ranks = get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size()
    first = rank * kv_heads // ranks
    return [*range(first, first + max(1, kv_heads // ranks))]


@torch.no_grad()
def copy_heads(whole: LayerStudent, part: LayerStudent, heads: list[int]) -> None:
    """Copy the weights of some heads of a layer to the student that has these alone."""
    if part is whole:
        return
    if part.turns is not None:
        for name, weight in part.turns.named_parameters():
            weight.copy_(getattr(whole.turns, name)[heads])
    for group in part.head_groups():
        source = next(each for each in whole.head_groups() if heads[group.heads[0]] in each.heads)
        rows = [source.heads.index(heads[place]) for place in group.heads]
        weights = dict(source.named_parameters())
        for name, weight in group.named_parameters():
            weight.copy_(weights[name][rows])
