"""Students as models of vLLM: one class, whose layers are vLLM's own where it knows the teacher, else transformers'."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_tp_group
from vllm.logger import init_logger
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateCopyFuncCalculator
from vllm.model_executor.models.interfaces import HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching

from linearizer.vllm_plugin.checked_config import has_own_layers
from linearizer.vllm_plugin.checkpoint_layers import CheckpointLayers
from linearizer.vllm_plugin.native_layers import NativeLayers
from linearizer.vllm_plugin.refusals import version_problem
from linearizer.vllm_plugin.state_memory import StateMemory, bytes_of

Tensor = torch.Tensor
logger = init_logger(f"vllm.{__name__}")

if problem := version_problem():
    raise ImportError(problem)


class LinearizedForVllm(nn.Module, HasInnerState, IsAttentionFree, SupportsMambaPrefixCaching):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        kind: Any = NativeLayers if has_own_layers(vllm_config) else CheckpointLayers
        self.layers = kind(vllm_config)
        parts, recurrent = [*zip(*(r.parts() for r in self.layers.readers), strict=True)], self.layers.recurrent
        size = largest_of_ranks(max(row.end for rows in parts for row in rows))
        self.memory = StateMemory(size, "linearized.states.0", recurrent, vllm_config)
        for reader in self.layers.readers:
            reader.memory = self.memory
        held = max(sum(row.held for row in rows) for rows in parts) + sum(map(bytes_of, recurrent.values()))
        logger.info("A state takes %d bytes, of which %d hold nothing; layers are %s.", size, size - held, kind.MADE_BY)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        return self.layers.embed_input_ids(input_ids)

    def forward(
        self, input_ids: Tensor | None, positions: Tensor, intermediate_tensors: object = None,
        inputs_embeds: Tensor | None = None, **kwargs: object,
    ) -> Tensor:  # fmt: skip
        self.memory.hand_out_step()
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


def largest_of_ranks(size: int) -> int:
    """Return the most bytes that a row has in any process: vLLM gives all of them rows of one size."""
    largest = torch.tensor(size, device="cpu")
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, get_tp_group().cpu_group)
    return int(largest)
