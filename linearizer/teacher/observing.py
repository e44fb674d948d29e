"""Lets a model attend in another way while a context lasts: as its teacher, or shown to an observer.

With OBSERVED a model shows the queries, keys and values of every layer to the observer that `observing` sets, then
attends as usual. A model with a student in each layer attends as its teacher did with `attending_as_teacher`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from linearizer.student.attention_interface import (
    attend_as_teacher,
    attention_modules,
    implementations,
    padding_only,
    score_scale,
)

OBSERVED, AS_TEACHER = "linearizer_observed", "linearizer_teacher"
WITH_MASKS = "linearizer_masks"  # OBSERVED, with the masks that a student would get
# observe(attention module, query, key, value, scaling, the mask and all other arguments from the layer)
Observer = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float, dict], None]


def observed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Show a layer's queries, keys and values to its observer, then attend as usual."""
    observe: Observer = module.observe  # type: ignore[assignment]
    observe(module, query, key, value, score_scale(query, scaling), {"attention_mask": attention_mask, **kwargs})
    return attend_as_teacher(module, query, key, value, attention_mask, scaling, **kwargs)


def implementation_of_teacher(model: Any, config: Any) -> str:
    """Name the implementation of a teacher's attention: SDPA, unless its model or class does more than that.

    Older transformers let SDPA leave caps out.
    """
    capped = getattr(config.get_text_config(decoder=True), "attn_logit_softcapping", None) is not None
    return AS_TEACHER if capped or not getattr(model, "_supports_sdpa", True) else "sdpa"


def attending_as_teacher(model: PreTrainedModel) -> AbstractContextManager[None]:
    """Attend as a student's teacher in this context."""
    return attending(model, implementation_of_teacher(model, model.config))


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Attend with another implementation in this context."""
    before = model.config._attn_implementation
    PreTrainedModel.set_attn_implementation(model, implementations(model, implementation))  # a student's own refuses
    try:
        yield
    finally:
        PreTrainedModel.set_attn_implementation(model, implementations(model, before))


@contextmanager
def observing(model: PreTrainedModel, observe: Observer, implementation: str = OBSERVED) -> Iterator[None]:
    """Show the observer what every attention layer of the model attends with, in this context."""
    modules = attention_modules(model)
    for module in modules:
        module.observe = observe  # type: ignore[assignment]
    try:
        with attending(model, implementation):
            yield
    finally:
        for module in modules:
            del module.observe


for _name, _attend in ((OBSERVED, observed), (AS_TEACHER, attend_as_teacher)):
    AttentionInterface.register(_name, _attend)
    AttentionMaskInterface.register(_name, sdpa_mask)
AttentionInterface.register(WITH_MASKS, observed)
AttentionMaskInterface.register(WITH_MASKS, padding_only)
