"""Which ways of reading a whole call a model may use, and what graphs of CUDA take for granted about a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from linearizer.student.attention_interface import give_cache, hand_over_state, mark_as_read

CODE = ("torch", "transformers", "linearizer", "transformers_modules")  # whose modules have no switches, as peft's do


class CallReader:
    """What a model learnt about reading calls: None where it has not tried."""

    def __init__(self) -> None:
        self.reads_parts: bool | None = None  # of long texts on streams; None: if a comparison succeeds
        self.repeats_tokens: bool | None = None  # by CUDA graphs; None: until a capture fails
        self.repeats_texts: bool | None = None  # the same for parts of a long text
        self.text_reader: Any = None  # the graphs of long texts (text_graphs.py)

    def __reduce__(self) -> tuple:
        """Become an empty reader in a copy of a model, whose weights lie elsewhere."""
        return CallReader, ()


def reader_of(model: Any) -> CallReader:
    """Return what a model learnt; models in training forget it."""
    if getattr(model, "call_reader", None) is None:
        model.call_reader = CallReader()
    return model.call_reader


def facts_of(model: nn.Module) -> list:
    """List what a graph takes for granted: where tensors lie, and their versions, the modules, and their hooks.

    A graph would read other tensors where these were, and states have numbers that were computed from them.
    """
    facts: list = []
    for module in model.modules():
        facts.append(id(module))
        if module._forward_hooks or module._forward_pre_hooks:
            facts.append(has_hooks(module))
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None:
                plain = type(x) in (torch.Tensor, nn.Parameter)  # some kinds have no place
                facts.append((x.data_ptr() if plain else id(x), None if x.is_inference() else x._version))
    return facts


def is_plain(model: nn.Module) -> bool:
    """Whether all modules are of libraries that read no switches between calls, as adapters of peft do."""
    return all(type(module).__module__.split(".")[0] in CODE for module in model.modules())


def has_hooks(module: nn.Module) -> bool:
    """Whether accelerate or a user follows the calls of a module, which a graph would not make; hooks of transformers
    do nothing unless hidden states are requested."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    functions = [getattr(hook, "func", hook) for hook in hooks]  # a user's hook may be unhashable
    others = [x for x in functions if not any(x is own for own in (give_cache, hand_over_state, mark_as_read))]
    return hasattr(module, "_hf_hook") or any(not str(x.__module__).startswith("transformers.") for x in others)
