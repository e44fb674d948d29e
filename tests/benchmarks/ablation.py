"""A student with one of its branches taken away for as long as a context lasts: what the other is worth alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from linearizer.student.layer_student import FeatureGroup, SlotGroup
from linearizer.student.modeling_linearized import LinearizedForCausalLM


@contextmanager
def without_far(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a window hold nothing else."""
    with ExitStack() as stack:
        for layer in student.students():
            for index, group in enumerate(layer.groups):
                slots = isinstance(group, SlotGroup)
                if slots or (isinstance(group, FeatureGroup) and group.features and group.window):
                    key_dim = group.merger.metric.shape[-1] if slots else 1
                    plain = FeatureGroup(group.heads, group.window, 0, group.sinks, key_dim, "prf", group.bits)
                    stack.enter_context(patch.dict(layer.groups._modules, {str(index): plain}))
        yield


@contextmanager
def without_window(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a far field see nothing exactly but sinks, and with slots the newest token."""
    with ExitStack() as stack:
        for group in (group for layer in student.students() for group in layer.groups):
            if isinstance(group, SlotGroup):
                stack.enter_context(patch.dict(group.__dict__, {"window": 1, "block": 1}))
            elif isinstance(group, FeatureGroup) and group.features:
                stack.enter_context(patch.dict(group.__dict__, {"window": 0}))
        yield
