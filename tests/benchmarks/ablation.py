"""A student with one of its branches taken away for as long as a context lasts: what the other is worth alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from unittest.mock import patch

from linearizer.student.attention_of_student import HeadKind
from linearizer.student.feature_maps import FeatureGroup
from linearizer.student.layer_student import HeadGroup
from linearizer.student.modeling_linearized import LinearizedForCausalLM


@contextmanager
def without_far(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a window hold nothing else."""
    with ExitStack() as stack:
        for layer in student.students():
            for index, group in enumerate(layer.groups):
                if group.merger is not None or (isinstance(group, FeatureGroup) and group.window):
                    plain = HeadGroup(group.heads, HeadKind(group.window, bits=group.bits), group.sinks, 8, 8)
                    plain.has_basis = group.has_basis
                    stack.enter_context(patch.dict(layer.groups._modules, {str(index): plain}))
        yield


@contextmanager
def without_window(student: LinearizedForCausalLM) -> Iterator[None]:
    """While this lasts, let heads with a far field see nothing exactly but sinks, and with slots the newest token."""
    with ExitStack() as stack:
        for group in (group for layer in student.students() for group in layer.groups):
            if group.merger is not None:
                narrow = replace(group.kind, window=1, block=1)
                stack.enter_context(patch.dict(group.__dict__, {"window": 1, "kind": narrow}))
            elif isinstance(group, FeatureGroup):
                stack.enter_context(patch.dict(group.__dict__, {"window": 0}))
        yield
