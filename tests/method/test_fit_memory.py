"""A memory that has learned nothing does no harm beside its window, however queries and keys are turned."""

import torch

from linearizer.evaluate.head_errors import head_errors
from linearizer.method.initialise import initialise_layer
from linearizer.method.recorder import LayerSamples
from linearizer.student.layer_student import LayerStudent
from linearizer.student.update_rules import UPDATE_RULES
from linearizer.teacher.layers import featured

DIM, TOKENS, WINDOW, SINKS = 8, 48, 4, 2


def drawn_samples(turned=None):
    """Queries, keys and values of a layer with a KV head for every rule, and two query heads for each."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(DIM, DIM, generator=generator) / 2

    def draw(heads, count, through=None):
        x = torch.randn(heads, count, DIM, generator=generator)
        return x if through is None else (x @ through + 0.3) @ (torch.eye(DIM) if turned is None else turned)

    def part(count):
        return (
            draw(2 * len(UPDATE_RULES), count, mix),
            draw(len(UPDATE_RULES), count, mix),
            draw(len(UPDATE_RULES), count),
        )

    return LayerSamples(*part(256), LayerSamples(*part(TOKENS)))


def begun(samples):
    """The student of a layer whose heads hold one memory each."""
    student = LayerStudent([[WINDOW, 6, 0, 0, 16, name] for name in UPDATE_RULES], SINKS, DIM, "prf")
    student.reset(torch.Generator().manual_seed(0))
    initialise_layer(student, samples, 0, 0)
    return student.eval()


def inputs_of(samples):
    return samples.text.queries[None], samples.text.keys[None], samples.text.values[None], 1.0


def test_no_memory_is_further_from_its_teacher_than_its_window_and_most_are_nearer():
    samples = drawn_samples()
    plain = LayerStudent([[WINDOW, 0]] * len(UPDATE_RULES), SINKS, DIM, "prf")
    own, window = (head_errors(student, *inputs_of(samples))[1] for student in (begun(samples), plain))
    assert (own < 1.01 * window).all(), dict(zip(UPDATE_RULES, (own / window).tolist(), strict=True))
    assert (own < 0.99 * window).sum() > len(UPDATE_RULES) / 2


@torch.no_grad()
def test_turning_queries_and_keys_together_changes_no_memory():
    """But for the mass of Gaussian keys, which takes their variances along the axes."""
    turned, _ = torch.linalg.qr(torch.randn(DIM, DIM, generator=torch.Generator().manual_seed(1)))
    plain, other = drawn_samples(), drawn_samples(turned)
    torch.testing.assert_close(plain.keys @ turned, other.keys)
    students = begun(plain), begun(other)
    outputs = [student(*inputs_of(x), None, None) for student, x in zip(students, (plain, other), strict=True)]
    for head, (name, rule) in enumerate(UPDATE_RULES.items()):
        one, two = (featured(student)[head].feature_map for student in students)
        asks = [samples.text.queries[2 * head : 2 * head + 2][None, None] for samples in (plain, other)]
        torch.testing.assert_close(one.queries(asks[0]), two.queries(asks[1]), atol=2e-3, rtol=1e-2)
        if rule.mass != "gauss":
            mine, turned_back = (out[:, 2 * head : 2 * head + 2] for out in outputs)
            torch.testing.assert_close(mine, turned_back, atol=5e-3, rtol=1e-2, msg=lambda said, name=name: name + said)
