"""Students as models of vLLM: one class, whose layers are vLLM's own where it knows the teacher, else transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching

from linearizer.vllm_plugin.checkpoint_layers import CheckpointLayers
from linearizer.vllm_plugin.native_layers import NativeLayers, knows
from linearizer.vllm_plugin.refusals import version_problem
from linearizer.vllm_plugin.state_memory import StateMemory

Tensor = torch.Tensor
OPTION, CHECKPOINT = "linearizer_layers", "checkpoint"  # in vLLM's --additional-config
logger = init_logger(f"vllm.{__name__}")

if problem := version_problem():
    raise ImportError(problem)


class LinearizedForVllm(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        chosen = (vllm_config.additional_config or {}).get(OPTION)
        kind: Any = NativeLayers if chosen != CHECKPOINT and knows(vllm_config) else CheckpointLayers
        self.layers = kind(vllm_config)
        readers = self.layers.readers
        memory = StateMemory(max(reader.end() for reader in readers), "linearized.states.0", vllm_config)
        for reader in readers:
            reader.memory = memory
        heads, exact = ([each for each in parts if each] for parts in zip(*(r.parts() for r in readers), strict=True))
        held = max(sum(part.row.held for part in parts) for parts in (heads, exact))
        logger.info(
            "A state takes %d bytes, of which %d hold nothing; layers are %s.",
            memory.size,
            memory.size - held,
            kind.MADE_BY,
        )

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.layers.embed_input_ids(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None, **kwargs: object,
    ) -> Tensor:  # fmt: skip
        return self.layers(input_ids, positions, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        return self.layers.compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load all weights; vLLM learns which of its own parameters have them."""
        self.layers.load_weights(weights)
        for reader in self.layers.readers:
            reader.forget_weights()
        return {name for name, _ in self.named_parameters()}

    @classmethod
    def get_mamba_state_shape_from_config(cls, vllm_config: VllmConfig) -> tuple[tuple[int, ...], ...]:
        return ((1,),)

    @classmethod
    def get_mamba_state_dtype_from_config(cls, vllm_config: VllmConfig) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    @classmethod
    def get_mamba_state_copy_func(cls) -> tuple:
        return MambaStateCopyFuncCalculator.linear_attention_state_copy_func()  # copies a row whole
