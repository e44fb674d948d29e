"""Serves students in vLLM, which finds registration.py by the entry point `vllm.general_plugins`."""
