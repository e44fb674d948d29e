"""Rivals hold as many tokens as they may, attend exactly to what they hold, and go on with a text as without a cut."""

import math

import pytest
import torch

from linearizer.method.substitute import exchange_students
from linearizer.plan.head_bytes import Head, cache_bytes, token_bytes
from tests.benchmarks.kivi_control import GROUP, RECENT, CacheInFewBits, caches_in_few_bits, round_rows
from tests.benchmarks.rivals import RULES, Rival
from tests.support.models import layers_of, student_of, teacher_of, tokens


def attended(q, k, v, size, rule):
    """Attend with one KV head whose scores are not scaled: q (texts, group, tokens, dim), k and v without group."""
    return Rival([size], rule)(q, k[:, None], v[:, None], 1.0, None, None)


@pytest.mark.parametrize("rule", RULES)
def test_a_cache_that_is_never_full_drops_and_merges_nothing(rule):
    q, k, v = (torch.randn(2, *shape, 20, 4, dtype=torch.float64) for shape in ((3,), (), ()))
    expected = (q @ k[:, None].mT).masked_fill(~torch.ones(20, 20, dtype=torch.bool).tril(), -torch.inf)
    expected = expected.softmax(-1) @ v[:, None]
    torch.testing.assert_close(attended(q, k, v, 20, rule), expected, atol=1e-6, rtol=1e-6)
    short = attended(q, k, v, 5, rule)
    torch.testing.assert_close(short[:, :, :5], expected[:, :, :5], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(short[:, :, -1], expected[:, :, -1], atol=1e-3)


def test_tova_keeps_what_the_newest_token_attends_to():
    k = torch.eye(4)[None]
    q = 5 * torch.tensor([[0, 0, 0, 0], [1.0, 0, 0, 0], [1, 0, 2, 0], [1, 0, 0, 0]])[None, None]
    values = torch.arange(4.0)[None, :, None]
    rows = attended(q, k, values, 2, "tova")[0, 0, :, 0]
    assert rows[3] == pytest.approx((0 * math.exp(5) + 2 + 3) / (math.exp(5) + 2), abs=1e-4)  # token 1 was dropped


@pytest.mark.parametrize("rule", ["zsmerge", "keepkv"])
def test_what_counts_its_tokens_loses_nothing_of_keys_that_are_the_same(rule):
    q, v = torch.randn(1, 2, 30, 4), torch.randn(1, 30, 4)
    k = torch.randn(1, 1, 4).expand(1, 30, 4)
    expected = torch.stack([v[0, : t + 1].mean(0) for t in range(30)])
    torch.testing.assert_close(attended(q, k, v, 6, rule)[0, 0], expected, atol=1e-5, rtol=1e-5)


def test_keepkv_gives_a_merged_key_the_logit_that_both_had():
    q = torch.ones(1, 1, 3, 4)
    k = torch.tensor([[[2.0, 0, 0, 0], [1.0, 0, 0, 0], [0.5, 0.5, 0, 0]]])
    v = torch.randn(1, 3, 4)
    whole = attended(q, k, v, 3, "keepkv")
    cache = []
    merged = Rival([2], "keepkv")
    merged(q, k[:, None], v[:, None], 1.0, None, cache)
    held = cache[0]
    there = held.weight[0, 0] > 0
    assert there.sum() == 2 and held.weight[0, 0][there].sum() == 3
    logits = (held.k[0, 0] @ q[0, 0, 0] + held.weight[0, 0].log())[there]
    torch.testing.assert_close(logits.softmax(-1) @ held.v[0, 0][there], whole[0, 0, 2], atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES)
def test_a_bounded_cache_goes_on_with_a_text_and_reads_several_as_each_alone(rule):
    student, ids = student_of("llama", [Head(window=40)]), tokens(2, 24)
    heads = [Rival([6] * layer.kv_heads, rule) for layer in student.students()]
    with exchange_students(student, heads):
        whole, cache, parts = student(ids, use_cache=False).logits, student.empty_cache(), []
        alone = torch.cat([student(text[None], use_cache=False).logits for text in ids])
        for piece in ids.split(7, 1):
            parts.append(student(piece, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone, whole, atol=1e-4, rtol=0)


@torch.no_grad()
def test_the_cache_in_few_bits_goes_on_with_a_text_and_is_the_nearer_the_more_bits_it_has():
    student, ids = student_of("llama", [Head(window=200)]).double(), tokens(2, 150)
    exact, off = student(ids, use_cache=False).logits, []
    for bits in (2, 3, 8):
        heads = [CacheInFewBits(bits, group=16) for _ in student.students()]
        with exchange_students(student, heads):
            whole, cache, parts = student(ids, use_cache=False).logits, student.empty_cache(), []
            for piece in (*ids[:, :60].split(23, 1), *ids[:, 60:].split(45, 1)):
                parts.append(student(piece, past_key_values=cache).logits)
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-6, rtol=0)
        assert torch.allclose(whole[:, : 16 + RECENT - 1], exact[:, : 16 + RECENT - 1], atol=1e-6)  # nothing is rounded
        off.append((whole - exact)[:, 40:].abs().mean().item())
    assert off[0] > 1.5 * off[1] > 6 * off[2] > 0


def test_the_bytes_of_the_cache_in_few_bits_are_those_of_its_codes_scales_and_exact_tokens():
    layers = layers_of(teacher_of("llama"))
    student = student_of("llama", [Head(window=8)])
    (subject,) = caches_in_few_bits(student, layers, [4])
    layer, heads = layers[0], sum(layer.kv_heads for layer in layers)
    few = GROUP * (layer.key_dim + layer.value_dim) // 2 + 4 * layer.key_dim + 4 * GROUP
    assert subject.state_bytes(layers, GROUP + RECENT) == heads * (few + RECENT * token_bytes(layer))
    assert subject.state_bytes(layers, GROUP + RECENT - 1) == cache_bytes(layers, GROUP + RECENT - 1)
    keys = torch.randn(1, 2, GROUP, 8)
    assert all(len(channel.unique()) <= 16 for channel in round_rows(keys.mT, 4).flatten(0, 2))
