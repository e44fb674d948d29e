"""Outputs of layers are fitted in closed form: nearer to the teacher, bit-identical again, undone when stopped."""

import pytest
import torch

from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.student.attention_interface import attending
from linearizer.teacher.layers import blocks_of
from linearizer.train.fit_outputs import Squares, fit_maps
from linearizer.train.settings import TrainingSettings
from tests.support.models import tokens
from tests.support.training import a_student, assert_equal_weights, weights

LOSSY = [Head(window=4, slots=4, bits=4), Head(window=4, bits=5)]
FIT = TrainingSettings(loss="squares", steps=6, batch=64, repeats=0.0)
TEXT = tokens(384, 32)


def last_hidden(student, ids):
    return student.base.base_model(input_ids=ids, use_cache=False)[0]


@torch.no_grad()
def missing(student, teacher, ids):
    return float((last_hidden(student, ids) - teacher).square().sum())


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox", "olmo2", "gemma3_text"])
def test_layers_come_nearer_to_the_teacher_also_on_other_text(family):
    student, unseen = a_student(heads=LOSSY, family=family), tokens(8, 32, seed=1)
    with torch.no_grad(), attending(student.base, "sdpa"):
        teacher = last_hidden(student, unseen)
    before = missing(student, teacher, unseen)
    result = finish(fit_maps(student, TEXT, FIT))
    assert result.steps == FIT.steps and sum(result.end.values()) < sum(result.start.values())
    assert missing(student, teacher, unseen) < before


@pytest.mark.parametrize(
    "family, maps", [("llama", ["mlp.down_proj", "self_attn.o_proj"]), ("mixtral", ["self_attn.o_proj"])]
)
def test_no_other_map_changes_and_the_same_bits_come_again(family, maps):
    students = [a_student(heads=LOSSY, family=family) for _ in range(2)]
    before = weights(students[0])
    for student in students:
        finish(fit_maps(student, TEXT, FIT))
    after = weights(students[0])
    changed = sorted(name for name in before if not torch.equal(before[name], after[name]))
    layers = range(len(blocks_of(students[0].base)))
    assert changed == [f"model.layers.{layer}.{name}.weight" for layer in layers for name in maps]
    assert_equal_weights(after, weights(students[1]))


def test_a_fit_that_is_closed_leaves_the_teachers_weights():
    student = a_student(heads=LOSSY)
    before = weights(student)
    fitting = fit_maps(student, TEXT, FIT)
    next(fitting)
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(student).items())
    fitting.close()
    assert_equal_weights(weights(student), before)


def test_a_fit_that_is_enough_ends_at_its_layer():
    student = a_student(heads=LOSSY)
    before, half = weights(student), FIT.steps // len(blocks_of(student.base))
    result = finish(fit_maps(student, TEXT, FIT, lambda step: step >= half))
    assert result.steps == half and len(result.end) == 1
    changed = {
        name.partition(".layers.")[2][:1] for name in before if not torch.equal(before[name], weights(student)[name])
    }
    assert changed == {"0"}


def test_what_is_added_is_the_least_squares_of_what_was_missing():
    x, linear = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)), torch.nn.Linear(8, 5)
    target = linear.weight.detach() + torch.arange(40.0).view(5, 8) / 40
    squares = Squares()
    with torch.no_grad():
        for half in x.split(32):
            squares.add(half, half @ target.mT + linear.bias - linear(half))
        squares.add_to(linear, ridge=1e-6)
    torch.testing.assert_close(linear.weight.detach(), target, atol=1e-4, rtol=1e-4)
