"""Students to train, and how to compare their weights."""

from __future__ import annotations

import torch

from linearizer.plan.head_bytes import Head
from linearizer.train.settings import TrainingSettings
from tests.support.models import student_of, tokens

FEW = TrainingSettings(steps=8, batch=2, save_every=3)
HEADS = [Head(window=4, features=16), Head(window=4, features=16)]
TEXT = tokens(12, 32)


def a_student(feature_map="mlp", heads=HEADS, family="llama", **overrides):
    return student_of(family, heads, feature_map=feature_map, **overrides)


def weights(student):
    return {name: tensor.clone() for name, tensor in student.state_dict().items()}


def assert_equal_weights(a, b):
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []
