"""A memory that has learned nothing does no harm beside its window."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from linearizer.method.initialise import initialise_layer
from linearizer.method.recorder import LayerSamples, Samples
from linearizer.method.untrained import draw_layer
from linearizer.student.layer_student import LayerStudent
from linearizer.student.update_rules import UPDATE_RULES

DIM, TOKENS, WINDOW, SINKS = 8, 48, 4, 2


def drawn_samples():
    """Queries, keys and values of a layer with a KV head for every rule, and two query heads for each."""
    generator = torch.Generator().manual_seed(0)
    mix, heads = torch.randn(DIM, DIM, generator=generator) / 2, len(UPDATE_RULES)

    def draw(heads, count):
        return torch.randn(heads, count, DIM, generator=generator)

    def part(count):
        return draw(2 * heads, count) @ mix + 0.3, draw(heads, count) @ mix + 0.3, draw(heads, count)

    return LayerSamples(*part(256), LayerSamples(*part(TOKENS)))


def begun(samples):
    """The student of a layer whose heads hold one memory each."""
    student = LayerStudent([[WINDOW, 6, 0, 0, 16, name] for name in UPDATE_RULES], SINKS, DIM, "prf")
    draw_layer(student, torch.Generator().manual_seed(0))
    initialise_layer(student, Samples((samples,)), 0)
    return student.eval()


@torch.no_grad()
def output_errors(student, q, k, v):
    """The squared error of each head's output, whose teacher attends to all tokens."""
    exact = scaled_dot_product_attention(q, k, v, is_causal=True, scale=1.0, enable_gqa=True)
    missing = exact - student(q, k, v, 1.0, None, None)
    return missing[0].unflatten(0, (k.shape[1], -1)).square().sum((1, 2, 3))


def test_no_memory_is_further_from_its_teacher_than_its_window_and_most_are_nearer():
    samples = drawn_samples()
    text = samples.text
    inputs = text.queries[None], text.keys[None], text.values[None]
    plain = LayerStudent([[WINDOW, 0]] * len(UPDATE_RULES), SINKS, DIM, "prf")
    memory, window = (output_errors(student, *inputs) for student in (begun(samples), plain))
    assert (memory < 1.01 * window).all(), dict(zip(UPDATE_RULES, (memory / window).tolist(), strict=True))
    assert (memory < 0.99 * window).sum() > len(UPDATE_RULES) / 2
