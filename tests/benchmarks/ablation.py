"""A student with one of its branches taken away: what each is worth."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from linearizer.runtime.layer_student import FeatureGroup, SlotGroup
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM


@contextmanager
def without_far(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a window hold nothing else."""
    with ExitStack() as stack:
        for layer in student.students():
            for index, group in enumerate(layer.groups):
                if isinstance(group, SlotGroup) or (
                    isinstance(group, FeatureGroup) and group.features and group.window
                ):
                    key_dim = group.merger.metric.shape[-1] if isinstance(group, SlotGroup) else 1
                    plain = FeatureGroup(group.heads, group.window, 0, group.sinks, key_dim, "prf", group.bits)
                    stack.enter_context(exchanged_group(layer.groups, index, plain))
        yield


@contextmanager
def without_window(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a far field see nothing exactly but sinks, and with slots the newest token."""
    changed: list[tuple[nn.Module, dict[str, int]]] = []
    for layer in student.students():
        for group in layer.groups:
            if isinstance(group, SlotGroup):
                changed.append((group, {"window": 1, "block": 1}))
            elif isinstance(group, FeatureGroup) and group.features:
                changed.append((group, {"window": 0}))
    before = [{name: getattr(group, name) for name in values} for group, values in changed]
    for group, values in changed:
        group.__dict__.update(values)
    try:
        yield
    finally:
        for (group, _), values in zip(changed, before, strict=True):
            group.__dict__.update(values)


@contextmanager
def exchanged_group(groups: nn.ModuleList, index: int, other: nn.Module) -> Iterator[None]:
    own = groups[index]
    groups[index] = other
    try:
        yield
    finally:
        groups[index] = own
