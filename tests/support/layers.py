"""Layers of students on random texts, which they read in calls of any length."""

import torch

from linearizer.method.untrained import draw_layer
from linearizer.student.attention_of_student import tensors
from linearizer.student.layer_student import LayerStudent

GROUP, SINKS, SCALE = 2, 2, 0.5


def layer(held, dim=8, value_dim=8, dtype=torch.float64):
    student = LayerStudent(held, SINKS, dim, "prf", value_dim).to(dtype).eval()
    draw_layer(student, torch.Generator().manual_seed(0))
    for group in student.groups:
        if group.merger is not None:
            group.merger.mean_query.normal_(generator=torch.Generator().manual_seed(0))
    return student


def text(heads, length, dim=8, value_dim=8, dtype=torch.float64):
    """Queries, keys and values of two texts."""
    generator = torch.Generator().manual_seed(1)
    shapes = (GROUP * heads, length, dim), (heads, length, dim), (heads, length, value_dim)
    return [torch.randn(2, *shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def scores(heads, cap):
    """How a model of so many KV heads caps its scores, and the logits of its learned sinks."""
    return cap, torch.randn(GROUP * heads, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def move_keys(student):
    """Draw the middles of keys, which change capped scores and the share of a learned sink."""
    student.turns.key_middle.data.normal_(generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def read(student, given, edges, real=None, memory=None, change=None, altered=()):
    """Read in calls that end at these edges, and change the states before the last five; return outputs and states."""
    memory, out, start = [] if memory is None else memory, [], 0
    for index, end in enumerate(edges):
        if change and index >= len(edges) - 5:
            memory = change(memory)
        some = None if real is None or real[:, start:end].all() else real[:, start:end]
        out.append(student(*(x[:, :, start:end] for x in given), SCALE, some, memory, *altered))
        start = end
    return torch.cat(out, -2), memory


def assert_same_states(states, other, **tolerance):
    for mine, theirs in zip(states, other, strict=True):
        for name, x in tensors(mine).items():
            torch.testing.assert_close(x, tensors(theirs)[name], msg=name, **tolerance)
