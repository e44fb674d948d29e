"""vLLM's own model of the teacher, with a student in place of each attention: its linear layers, its graphs and its
compiled code stay, whatever the teacher's architecture, if vLLM knows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from vllm import ModelRegistry
from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.models.utils import init_vllm_registered_model
from vllm.utils.torch_utils import direct_register_custom_op

from linearizer.method.untrained import draw_layer, generator_at
from linearizer.student.layer_student import LayerStudent
from linearizer.vllm_plugin.layer_reader import LayerReader, add_reader

Tensor = torch.Tensor
READERS: dict[str, StudentAttention] = {}  # of this process, by the names that compiled graphs contain
STUDENT = re.compile(r"(\d+)\.\w+\.student\.(.+)")  # in the name of a weight: its layer, and its name there


def knows(vllm_config: VllmConfig) -> bool:
    """Whether vLLM has a model of its own for the teacher, whose attention does nothing but softmax."""
    config = vllm_config.model_config.hf_config
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    (name,) = teacher_config(config).architectures
    return not capped and name in ModelRegistry.get_supported_archs()


def teacher_config(config: Any) -> Any:
    """Return the config of a student's teacher, which names the teacher's class."""
    kind = CONFIG_MAPPING[config.linearized["teacher_type"]]
    content = {**config.of_teacher(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__]}
    return kind.from_dict(content)


class StudentAttention(nn.Module):
    """What a layer calls in place of vLLM's Attention, with q, k and v (tokens, heads · dim)."""

    def __init__(self, reader: LayerReader, sizes: tuple[int, int, int], scale: float, name: str) -> None:
        super().__init__()
        self.student, self.reader, self.scale, self.name = reader.heads.student, reader, scale, name
        self.query_heads, self.heads, self.value_dim = sizes
        READERS[name] = self

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *args: object, **kwargs: object) -> Tensor:
        out = value.new_empty(value.shape[0], self.query_heads * self.value_dim)
        torch.ops.vllm.linearizer_attend(query, key, value, out, self.name)
        return out

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        counts = self.query_heads, self.heads, self.heads
        q, k, v = (x.unflatten(1, (count, -1)) for x, count in zip((query, key, value), counts, strict=True))
        return self.reader.attend(q, k, v, self.scale).flatten(1)


def linearizer_attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, name: str) -> None:
    """Attend as one step that graphs do not look into."""
    out.copy_(READERS[name].attend(q, k, v))


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
        base, entries = teacher_config(config), config.linearized
        names, layers = base.architectures, entries["layers"]
        self.model = init_vllm_registered_model(vllm_config, hf_config=base, architectures=names)
        self.readers: list[LayerReader] = []
        for name, parent in [*self.model.named_modules()]:
            if isinstance(attention := getattr(parent, "attn", None), Attention):
                layer = layers[len(self.readers)]
                dims = layer["key_dim"], layer.get("value_dim", layer["key_dim"])
                how = entries["sinks"], dims[0], entries["feature_map"], dims[1]
                student = LayerStudent(layer["heads"], *how).float()
                draw_layer(student.eval(), generator_at(0))
                kind = dims, model_config.dtype, entries["exact_tokens"]
                reader = add_reader(self.readers, student, attention.num_heads, *kind)
                sizes = attention.num_heads, attention.num_kv_heads, dims[1]
                parent.attn = StudentAttention(reader, sizes, attention.impl.scale, name)
                del compilation.static_forward_context[attention.layer_name]
        if len(self.readers) != len(layers):
            raise ValueError(
                f"vLLM's {names[0]} has {len(self.readers)} attention layers where the student has "
                f'{len(layers)}: serve it with --additional-config \'{{"linearizer_layers": "checkpoint"}}\''
            )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.model.embed_input_ids(input_ids)

    def forward(self, input_ids: Tensor | None, positions: Tensor, inputs_embeds: Tensor | None) -> Tensor:
        return self.model(input_ids, positions, None, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.model.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        students = [reader.heads.student for reader in self.readers]
        own = [dict(student.named_parameters()) | dict(student.named_buffers()) for student in students]
        missing = {(index, name) for index, student in enumerate(students) for name, _ in student.named_parameters()}

        def of_teacher() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                if (match := STUDENT.search(name)) is None:
                    yield name, weight
                    continue
                index, of_student = int(match[1]), match[2]
                own[index][of_student].data.copy_(weight)
                missing.discard((index, of_student))

        self.model.load_weights(of_teacher())
        if missing:
            index, name = min(missing)
            raise ValueError(f"the checkpoint lacks {name} of the student of layer {index}: download or make it again")
