"""What vLLM asks before it builds a student: refusals, and the settings of models with states."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING
from vllm import ModelRegistry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP, MambaModelConfig

from linearizer.student.modeling_linearized import reads_pictures
from linearizer.vllm_plugin.refusals import OF_PICTURES, PARALLEL, PIPELINE, SPECULATIVE, student_problem

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OPTION, CHECKPOINT = "linearizer_layers", "checkpoint"  # in vLLM's --additional-config


def teacher_config(config: Any) -> Any:
    """Return the config of a student's teacher, which names the teacher's class."""
    kind = CONFIG_MAPPING[config.linearized["teacher_type"]]
    content = {**config.of_teacher(), "architectures": [MODEL_FOR_CAUSAL_LM_MAPPING[kind].__name__]}
    return kind.from_dict(content)


def has_own_layers(vllm_config: VllmConfig) -> bool:
    """Whether vLLM has a model of its own for the teacher, whose layers are to be used."""
    (name,) = teacher_config(vllm_config.model_config.hf_config).architectures
    chosen = (vllm_config.additional_config or {}).get(OPTION)
    return chosen != CHECKPOINT and name in ModelRegistry.get_supported_archs()


class CheckedConfig(MambaModelConfig):
    @classmethod
    def verify_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what is not served; a state stays until its request ends, or is cached at the ends of blocks."""
        config = vllm_config.model_config.hf_config
        kind, layers = CONFIG_MAPPING[config.linearized["teacher_type"]], config.linearized["layers"]
        problem = OF_PICTURES if reads_pictures(kind) else student_problem(layers, has_own_layers(vllm_config))
        if vllm_config.parallel_config.pipeline_parallel_size > 1:
            problem = problem or PIPELINE
        if vllm_config.parallel_config.tensor_parallel_size > 1 and not has_own_layers(vllm_config):
            problem = problem or PARALLEL
        if vllm_config.speculative_config is not None:
            problem = problem or SPECULATIVE
        if problem:
            raise ValueError(problem)
        (teacher,) = teacher_config(config).architectures
        if teacher in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[teacher].verify_and_update_config(vllm_config)  # types of recurrent states
        super().verify_and_update_config(vllm_config)
