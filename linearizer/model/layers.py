"""."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch
from torch import nn

from linearizer.runtime.attention_interface import attention_modules, observing
from linearizer.runtime.layer_student import HeadGroup, LayerStudent

UNIT = 256  # a weight so many times larger than it is loses no bfloat16 digits to a bias


def number(attention: nn.Module) -> int:
    """Give the number of the layer that an attention module belongs to."""
    return cast(int, attention.layer_idx)


def matrix(projection: nn.Module, inputs: int, device: torch.device) -> torch.Tensor:
    """Read a linear map, (inputs, outputs), off what it does to unit vectors: however it keeps its weight."""
    units = UNIT * torch.eye(inputs, dtype=next(projection.parameters()).dtype, device=device)
    with torch.no_grad():
        return (projection(units) - projection(torch.zeros_like(units[:1]))).float() / UNIT


def matrices(module: nn.Module) -> list[nn.Module]:
    """List the parts of a module that have a matrix for a weight: of an attention module, its q, k, v and o."""
    return [part for part in module.modules() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]


def output_projections(model: nn.Module, ids: torch.Tensor) -> Projections:
    """Find the output projections by letting a model read a few tokens."""
    projections = Projections()

    def attended(module: nn.Module, *_: object) -> None:
        projections.attended = number(module)

    with torch.no_grad(), projections.learning(model), observing(model, attended):
        getattr(model, "base_model", model)(input_ids=ids, use_cache=False)
    return projections


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The modules of one list that hold one attention module each: the layers of a model."""
    attention = set(attention_modules(model))
    for parts in model.modules():
        if isinstance(parts, nn.ModuleList) and len(parts) == len(attention):
            if all(len(attention & set(part.modules())) == 1 for part in parts):
                return list(parts)
    return []


def featured(student: LayerStudent) -> list[HeadGroup]:
    """List the groups of a layer that have features."""
    return [group for group in student.groups if isinstance(group, HeadGroup) and group.feature_map is not None]


class Projections(dict[int, nn.Module]):
    """The output projection of every layer: the first map with a matrix that it calls once it has attended."""

    attended: int | None = None  # the layer whose projection is still to come

    @contextmanager
    def learning(self, model: nn.Module) -> Iterator[None]:
        """Learn while a model runs, whose observer says which layer has `attended`."""
        hooks = [
            part.register_forward_pre_hook(partial(self.entered, number(module)))
            for module in attention_modules(model)
            for part in matrices(module)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def entered(self, index: int, part: nn.Module, args: tuple) -> None:
        if self.attended == index:
            self[index], self.attended = part, None
