"""The memory that vLLM gives to states: a row of bytes for each request, which holds the states of all layers.

One row for all layers wastes nothing where layers hold different amounts: vLLM gives each layer of a kind as many bytes
as the largest needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadata, BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum

Text = tuple[int, int, int, int]  # its row, its first token in the step, its tokens, and those it has read


@dataclass
class StepMetadata(BaseMambaAttentionMetadata):
    """What a step reads: texts with one token come first."""

    texts: tuple[Text, ...] = ()
    plan: Any = None  # how layers read them, made by the first one


class StepMetadataBuilder(BaseMambaAttentionMetadataBuilder[StepMetadata]):
    metadata_cls = StepMetadata
    needs_causal_conv1d_metadata = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, *args: Any, **kwargs: Any
    ) -> StepMetadata:
        metadata = super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)
        rows = torch.cat([metadata.state_indices_tensor_d[:, 0], metadata.state_indices_tensor_p]).tolist()
        starts = common_attn_metadata.query_start_loc_cpu.tolist()
        ends = common_attn_metadata.seq_lens.tolist()
        metadata.texts = tuple(
            (row, begin, stop - begin, read - (stop - begin))
            for row, begin, stop, read in zip(rows, starts, starts[1:], ends, strict=False)
            if stop > begin
        )
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
    """Asks vLLM for `size` bytes a request."""

    mamba_type = MambaAttentionBackendEnum.LINEAR
    kv_cache: tuple[torch.Tensor, ...]

    def __init__(self, size: int, name: str, vllm_config: VllmConfig) -> None:
        self.size, self.name = size, name
        self.kv_cache = (torch.tensor([]),)
        vllm_config.compilation_config.static_forward_context[name] = self

    @property
    def pool(self) -> torch.Tensor:
        """Return all rows: (rows, bytes)."""
        return self.kv_cache[0]

    def get_state_shape(self) -> Iterable[tuple[int, ...]]:
        return ((self.size,),)

    def get_state_dtype(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def get_attn_backend(self) -> type[AttentionBackend]:
        return StateBackend
