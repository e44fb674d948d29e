"""The parts of a model's layers: attention modules, their projections, and groups of heads with features."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import cast

import torch
from torch import nn

from linearizer.student.attention_interface import attention_modules
from linearizer.student.feature_maps import FeatureGroup
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.observing import observing

UNIT = 256  # a weight multiplied by this loses no bfloat16 digits to a bias


def layer_number(attention: nn.Module) -> int:
    """Return the number of the layer that an attention module belongs to."""
    return cast(int, attention.layer_idx)


def matrix(projection: nn.Module, inputs: int, device: torch.device) -> torch.Tensor:
    """Compute the matrix of a linear map, (inputs, outputs), from its values at unit vectors, in any storage."""
    stored = next(projection.parameters()).dtype
    units = UNIT * torch.eye(inputs, dtype=stored if stored.is_floating_point else torch.float32, device=device)
    with torch.no_grad():
        return (projection(units) - projection(torch.zeros_like(units[:1]))).float() / UNIT


def matrices(module: nn.Module) -> list[nn.Module]:
    """List the parts of a module that have a matrix for a weight: of an attention module, its q, k, v and o."""
    return [part for part in module.modules() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]


def is_transposed(part: nn.Module | None) -> bool:
    """Whether a part stores its matrix as (inputs, outputs), as in GPT-2."""
    return type(part).__name__ == "Conv1D"


def output_projections(model: nn.Module, ids: torch.Tensor) -> dict[int, nn.Module]:
    """Find the output projection of every layer: the first linear map that it calls after attention."""
    projections: dict[int, nn.Module] = {}
    attended: int | None = None  # the layer that has not called its projection yet

    def observe(module: nn.Module, *_: object) -> None:
        nonlocal attended
        attended = layer_number(module)

    def enter(index: int, part: nn.Module, args: tuple) -> None:
        nonlocal attended
        if attended == index:
            projections[index], attended = part, None

    with torch.no_grad(), observing(model, observe), ExitStack() as stack:
        for module in attention_modules(model):
            for part in matrices(module):
                stack.callback(part.register_forward_pre_hook(partial(enter, layer_number(module))).remove)
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    return projections


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Find the layers of a model: the modules of one list with all attention modules, at most one in each."""
    attention = set(attention_modules(model))
    for parts in model.modules():
        if isinstance(parts, nn.ModuleList) and attention:
            counts = [len(attention & set(part.modules())) for part in parts]
            if sum(counts) == len(attention) and max(counts) == 1:
                return list(parts)
    return []


def featured(student: LayerStudent) -> list[FeatureGroup]:
    """List the groups of a layer that have features."""
    return [group for group in student.groups if isinstance(group, FeatureGroup)]
