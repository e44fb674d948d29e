"""Tells vLLM which class serves students.

vLLM calls `register` in each of its processes, whatever model it serves, so nothing else is imported before.
"""

from __future__ import annotations

ARCHITECTURE = "LinearizedForCausalLM"


def register() -> None:
    """Register students with vLLM and their config with transformers, so that no remote code is needed."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from linearizer.student.modeling_linearized import LinearizedConfig
    from linearizer.vllm_plugin.refusals import version_problem

    AutoConfig.register(LinearizedConfig.model_type, LinearizedConfig, exist_ok=True)
    ModelRegistry.register_model(ARCHITECTURE, "linearizer.vllm_plugin.model:LinearizedForVllm")
    if not version_problem():
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        from linearizer.vllm_plugin.checked_config import CheckedConfig

        MODELS_CONFIG_MAP[ARCHITECTURE] = CheckedConfig  # there is no public way to add one
