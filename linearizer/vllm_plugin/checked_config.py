"""What vLLM asks before it builds a student: refusals, and the settings of models with states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from transformers import CONFIG_MAPPING
from vllm.model_executor.models.config import MambaModelConfig

from linearizer.student.modeling_linearized import reads_pictures
from linearizer.vllm_plugin.refusals import PARALLEL, SPECULATIVE, student_problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class CheckedConfig(MambaModelConfig):
    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what is not served; a state stays until its request ends, or is cached at the ends of blocks."""
        entries = vllm_config.model_config.hf_config.linearized
        problem = student_problem(entries["layers"], reads_pictures(CONFIG_MAPPING[entries["teacher_type"]]))
        if vllm_config.parallel_config.world_size > 1:
            problem = problem or PARALLEL
        if vllm_config.speculative_config is not None:
            problem = problem or SPECULATIVE
        if problem:
            raise ValueError(problem)
        super().verify_and_update_config(vllm_config)
