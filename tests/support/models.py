"""Small teachers and students for tests."""

import torch
from transformers import AutoModelForCausalLM

from linearizer.method.checkpoint import put_student_into
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, Layer
from linearizer.teacher.observing import observing
from tests.support.families import tiny_config

WHOLE = Head(softmax=True)
MIXED = [  # one after the other over KV heads, each layer beginning one later
    Head(window=5, features=16),
    WHOLE,
    Head(window=4, slots=6),
    Head(window=3),
    Head(features=32),
]


def teacher_of(family, **overrides):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(family, **overrides), attn_implementation="sdpa")
    return model.eval().requires_grad_(False)


def layers_of(teacher):
    """The shapes of a teacher's attention layers, seen while it reads three tokens."""
    seen = {}

    def see(module, q, k, v, scaling, extra):
        seen[module.layer_idx] = Layer(q.shape[1], k.shape[1], k.shape[-1], v.shape[-1], extra.get("sliding_window"))

    with torch.no_grad(), observing(teacher, see):
        teacher(torch.tensor([[3, 4, 5]]))
    return tuple(seen[index] for index in sorted(seen))


def allocation_of(layers, heads, sinks):
    rows = [
        [heads[(index + h) % len(heads)] for h in range(layer.kv_heads)] if layer.native_window is None else []
        for index, layer in enumerate(layers)
    ]
    return Allocation("by hand", sinks, tuple(map(tuple, rows)))


def student_of(family, heads=MIXED, sinks=2, feature_map="prf", exact_tokens=0, **overrides):
    """A family's student whose KV heads hold `heads` in turn."""
    teacher = teacher_of(family, **overrides)
    layers = layers_of(teacher)
    allocation = allocation_of(layers, heads, sinks)
    return put_student_into(teacher, layers, allocation, feature_map, exact_tokens=exact_tokens)


def tokens(batch, length, seed=0):
    return torch.randint(3, 100, (batch, length), generator=torch.Generator().manual_seed(seed))
