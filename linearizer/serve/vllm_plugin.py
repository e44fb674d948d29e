"""Registers students with vLLM: the extra `linearizer[vllm]`, and an entry point of vLLM's plugins."""

from linearizer.student.modeling_linearized import LinearizedForCausalLM


def register() -> None:
    """Let vLLM load checkpoints of students (an entry point of vllm.general_plugins)."""
    from vllm import ModelRegistry

    import linearizer.method.checkpoint  # noqa: F401  (transformers knows the config from here on)

    name = LinearizedForCausalLM.__name__
    if name not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(name, "linearizer.serve.vllm_student:VllmStudent")
