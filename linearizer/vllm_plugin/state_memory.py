"""The memory that vLLM gives to states: a row of bytes for each request, which holds the states of all layers.

One row for all layers wastes nothing where layers hold different amounts: vLLM gives each layer of a kind as many bytes
as the largest needs. A hybrid's recurrent layers are vLLM's own; what they keep lies in the row, too.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

from linearizer.vllm_plugin.state_rows import aligned

Text = tuple[int, int, int, int]  # its row, its first token in the step, its tokens, and those it has read


@dataclass
class StepMetadata(BaseMambaAttentionMetadata):
    """What a step reads: texts with one token come first."""

    texts: tuple[Text, ...] = ()
    plans: dict[int, Any] = field(default_factory=dict)  # how layers read them, made by the first one of a kind
    of_recurrent: dict[str, Any] = field(default_factory=dict)  # what recurrent layers read, by their names


class StepMetadataBuilder(BaseMambaAttentionMetadataBuilder[StepMetadata]):
    metadata_cls = StepMetadata
    needs_causal_conv1d_metadata = False
    _cudagraph_support = AttentionCGSupport.NEVER  # what a text needs changes as it grows: graphs hold other layers

    def __init__(self, spec: Any, names: list[str], vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(spec, names, vllm_config, device)
        recurrent = vllm_config.compilation_config.static_forward_context[names[0]].recurrent
        kinds: dict[type, list[str]] = {}
        for name, layer in recurrent.items():
            kinds.setdefault(layer.get_attn_backend(), []).append(name)

        def make(kind: type[AttentionBackend], of_kind: list[str]) -> Any:
            own = MambaBase.get_kv_cache_spec(recurrent[of_kind[0]], vllm_config)
            return kind.get_builder_cls()(own, of_kind, vllm_config, device)

        self.others = [(of_kind, make(kind, of_kind)) for kind, of_kind in kinds.items()]

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> StepMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        rows = torch.cat([metadata.state_indices_tensor_d[:, 0], metadata.state_indices_tensor_p]).tolist()
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        ends = common_attn_metadata.seq_lens_cpu_upper_bound.tolist()  # exact, as nothing drafts tokens here
        metadata.texts = tuple(
            (row, begin, stop - begin, read - (stop - begin))
            for row, begin, stop, read in zip(rows, starts, starts[1:], ends, strict=False)
            if stop > begin
        )
        for names, builder in self.others:
            metadata.of_recurrent |= dict.fromkeys(names, builder.build(common_prefix_len, common_attn_metadata))
        return metadata


class StateBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "LINEARIZED"

    @staticmethod
    def get_builder_cls() -> type[StepMetadataBuilder]:
        return StepMetadataBuilder

    @classmethod
    def is_ssm(cls) -> bool:
        return True


class StateMemory(MambaBase):
    """Asks vLLM for `size` bytes a request, of which recurrent layers use the first."""

    mamba_type = MambaAttentionBackendEnum.LINEAR
    kv_cache: tuple[torch.Tensor, ...]

    def __init__(self, size: int, name: str, recurrent: dict[str, MambaBase], vllm_config: VllmConfig) -> None:
        self.size, self.name, self.recurrent = size, name, recurrent
        for layer in recurrent.values():
            self.mamba_type = layer.mamba_type  # for which vLLM prepares kernels
        self.kv_cache = (torch.tensor([]),)
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def pool(self) -> torch.Tensor:
        """Return all rows: (rows, bytes)."""
        return self.kv_cache[0]

    def bind_kv_cache(self, kv_cache: torch.Tensor) -> None:
        super().bind_kv_cache(kv_cache)
        begin = 0
        for layer in self.recurrent.values():
            layer.bind_kv_cache(kv_cache[..., begin : begin + bytes_of(layer)])
            begin += bytes_of(layer)

    def hand_out_step(self) -> None:
        """Pass a step's metadata to recurrent layers, which vLLM does not know to need some."""
        metadata = get_forward_context().attn_metadata if is_forward_context_available() else None
        if self.recurrent and isinstance(metadata, dict):
            metadata |= metadata[self.name].of_recurrent

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend


def bytes_of(layer: MambaBase) -> int:
    """Return the bytes of a row that a recurrent layer uses."""
    states = zip(layer.get_state_shape(), layer.get_state_dtype(), strict=True)
    return aligned(sum(prod(shape) * dtype.itemsize for shape, dtype in states))
