"""A student whose heads have memories is saved and trained as any other."""

import math

import pytest
import torch

from linearizer.method.checkpoint import load, save
from linearizer.method.initialise import initialise_rule
from linearizer.method.untrained import draw
from linearizer.plan.head_bytes import Head
from linearizer.progress import finish
from linearizer.serve.saved_state import read_state, write_state
from linearizer.student.cache import CACHE
from linearizer.student.matrix_rule import MatrixRule
from linearizer.student.update_rules import UPDATE_RULES
from linearizer.train.distill import distill
from linearizer.train.settings import TrainingSettings
from tests.support.models import student_of, tokens

DIM, VALUE_DIM = 6, 5


def student_with(*memories, bits=16, **settings):
    """A tiny student whose KV heads hold these memories in turn."""
    return student_of("llama", [Head(4, 6, bits=bits, memory=memory) for memory in memories], **settings)


@torch.no_grad()
def test_a_checkpoint_and_a_saved_state_hold_memories(tmp_path):
    student = student_with("gdn", "lawcat")
    save(student, None, tmp_path / "checkpoint")
    again = load(tmp_path / "checkpoint")
    first, second = tokens(1, 12), tokens(1, 5, seed=1)
    cache = student(first, use_cache=True)[CACHE]
    dim, exact = (
        student.config.linearized["layers"][0]["key_dim"],
        2 + 4,
    )  # sinks and window, in float32 as the tiny model
    group = student.config.num_attention_heads // student.config.num_key_value_heads
    held = [4 * (exact * 2 * dim + UPDATE_RULES[memory].numbers(6, dim, dim, group)) for memory in ("gdn", "lawcat")]
    assert cache.layers[0].bytes() == sum(held)
    write_state(student, cache, tmp_path / "state")
    kept = read_state(again, tmp_path / "state")
    torch.testing.assert_close(
        again(second, past_key_values=kept).logits, student(second, past_key_values=cache).logits
    )


@pytest.mark.parametrize("pair", [[*UPDATE_RULES][i : i + 2] for i in range(0, len(UPDATE_RULES), 2)], ids=" ".join)
def test_training_by_layer_lowers_the_loss_of_every_rule(pair):
    student = student_with(*pair)
    same_text = TrainingSettings(loss="output", steps=12, batch=4, warmup=2, window_dropout=0.0, repeats=0.0)
    trained = finish(distill(student, tokens(4, 32), same_text))
    assert sum(trained.end.values()) < sum(trained.start.values()) and not trained.events


@pytest.mark.parametrize("name", UPDATE_RULES)
@torch.no_grad()
def test_a_rule_begins_with_the_scores_of_its_teacher(name):
    """Products of queries and keys are their scores, less the mean key's."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(DIM, DIM, generator=generator)
    q, k = torch.randn(200, DIM, generator=generator) @ mix, torch.randn(200, DIM, generator=generator) + 3
    rules = [MatrixRule(1, DIM, VALUE_DIM, 2 * DIM, UPDATE_RULES[name]) for _ in range(2)]
    for rule in rules:
        draw(rule, torch.Generator().manual_seed(1))
        initialise_rule(rule, 0, q, k, torch.Generator().manual_seed(2))
    first, again = (rule.state_dict() for rule in rules)
    assert all(torch.equal(first[key], again[key]) for key in first) and all(x.isfinite().all() for x in first.values())
    rule, around = rules[0], k - k.mean(0)
    if rule.rule.has_moments:
        known = rule.mass[0] + q @ k.mean(0) + q.square() @ k.var(0, correction=0) / 2
        off = (known - ((q @ k.mT).logsumexp(-1) - math.log(len(k)))).sort().values
        assert off[0] < 0 < off[-1] and abs(off[100]) < 0.1
    products = (q @ rule.query_map[0, :DIM].mT) @ (around @ rule.key_map[0, 0, :DIM].mT).mT
    torch.testing.assert_close(products, q @ around.mT, atol=2e-2, rtol=1e-2)
