"""Adds, switches off, merges and removes low-rank adapters (LoRA) on the matrices of a student's attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers import PreTrainedModel

from linearizer.student.attention_interface import attention_modules
from linearizer.teacher.layers import is_transposed, matrices

NAME = "distillation"


def add_adapters(base: PreTrainedModel, rank: int, seed: int) -> None:
    """Add adapters, in fp32, to q, k, v and o of every layer that has a student; they start without effect."""
    from peft import LoraConfig, inject_adapter_in_model

    names = {part: name for name, part in base.named_modules()}
    targets = [
        names[part] for module in attention_modules(base) if hasattr(module, "student") for part in matrices(module)
    ]
    transposed = any(is_transposed(base.get_submodule(name)) for name in targets)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, fan_in_fan_out=transposed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, base, adapter_name=NAME)
    for name, parameter in base.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.float()


def adapted_modules(base: PreTrainedModel) -> dict[str, nn.Module]:
    """Name the modules that have an adapter."""
    return {name: module for name, module in base.named_modules() if hasattr(module, "lora_A")}


@contextmanager
def without_adapters(base: PreTrainedModel) -> Iterator[None]:
    """Switch the adapters off while the context lasts."""
    modules = adapted_modules(base).values()
    for module in modules:
        module.enable_adapters(False)  # type: ignore[operator]
    try:
        yield
    finally:
        for module in modules:
            module.enable_adapters(True)  # type: ignore[operator]


def remove_adapters(base: PreTrainedModel, merge: bool) -> None:
    """Remove the adapters; `merge` adds their effect to the weights first."""
    for name, module in adapted_modules(base).items():
        if merge:
            module.merge()  # type: ignore[operator]
        parent, _, child = name.rpartition(".")
        setattr(base.get_submodule(parent), child, module.get_base_layer())  # type: ignore[operator]
