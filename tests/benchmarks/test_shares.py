"""Shares by others' prices spend the same bytes, and more where more is lost; an oracle keeps what it foresees."""

import pytest
import torch

from linearizer.evaluate.subjects import Subject, read_logits
from linearizer.method.recorder import Samples
from linearizer.method.substitute import exchange_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Head, cache_bytes, head_bytes
from linearizer.plan.plan import Plan
from linearizer.run.measured import Prices
from tests.benchmarks import shares
from tests.benchmarks.rivals import Rival, attention_when_repeated, foreseeing
from tests.support.models import layers_of, student_of, teacher_of, tokens

PLAN = Plan.of("best", model="demo", budget=6, bits=8, sinks=1)


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(shares, "SIZES", (4, 8, 16))


@pytest.mark.parametrize("kind", shares.PRICES)
def test_every_head_has_a_price_for_every_size_and_the_shares_fill_the_budget(kind, small):
    model = teacher_of("llama")
    layers = layers_of(model)
    kl = shares.PRICES[kind](model, layers, tokens(4, 32), PLAN, Samples((None,) * len(layers)))
    assert [len(row) for row in kl] == [layer.kv_heads for layer in layers]
    assert all(len(prices) == 3 and min(prices) >= 0 and max(prices) > 0 for row in kl for prices in row)
    prices = Prices(1, tuple(Head(window=size, bits=8) for size in shares.SIZES), kl)
    bought = shares.share_out(prices, PLAN, layers)
    halved = shares.with_slots(bought, layers)
    for allocation in (bought, halved):
        bytes = allocation.state_bytes(layers, 512)
        assert 0.8 * cache_bytes(layers, 6) < bytes <= cache_bytes(layers, 6)
    assert all(head.slots and abs(head.window - head.slots) <= 3 for row in halved.heads for head in row)


def test_a_head_that_loses_more_gets_more_of_the_bytes(small):
    layers = layers_of(teacher_of("llama"))
    kl = tuple(
        tuple((8.0 / 10**head, 1.0 / 10**head, 0.1 / 10**head) for head in range(layer.kv_heads)) for layer in layers
    )
    prices = Prices(1, tuple(Head(window=size, bits=8) for size in shares.SIZES), kl)
    rows = shares.share_out(prices, PLAN, layers).heads
    assert sum(row[0].window for row in rows) > sum(row[1].window for row in rows)
    spent = head_bytes(rows[0][0], layers[0], 1, 0)
    halved = shares.half_slots(rows[0][0], layers[0], 1)
    assert spent - 40 < head_bytes(halved, layers[0], 1, 0) <= spent


def test_the_utility_that_is_lost_is_of_what_an_eviction_drops(small):
    so_far = torch.tensor([5.0, 1, 4, 0, 0, 0, 0, 0, 0, 0])
    utility = torch.arange(10.0)
    four, eight, all = shares.utility_lost(so_far, utility).tolist()
    assert four == 45 - (0 + 2 + 8 + 9) and all == 0  # the two newest, and the two heaviest
    assert eight == pytest.approx(45 - (0 + 1 + 2 + 6 + 7 + 8 + 9) - 3, abs=2)  # of the others any one stays


@torch.no_grad()
def test_an_oracle_keeps_the_newest_tokens_and_those_that_it_foresees():
    student, ids = student_of("llama", [Head(window=40)]), tokens(2, 24)
    rivals = [Rival([8] * layer.kv_heads, "kvzip") for layer in student.students()]
    subject, cache = Subject("oracle", student, Allocation("", 0, ())), student.empty_cache()
    with exchange_students(student, rivals), foreseeing(student, rivals):
        read_logits(subject, ids, cache)
    most = attention_when_repeated(student, ids)
    assert len(most) == len(rivals) and most[0].shape == (2, len(rivals[0].tokens), 24)
    for layer, own in zip(cache.layers, most, strict=True):
        held = layer.memory[0]
        for text in range(2):
            for head in range(own.shape[1]):
                kept = sorted(held.place[text, head][held.weight[text, head] > 0].tolist())
                assert len(kept) == 8 and kept[-4:] == [20, 21, 22, 23]
                best = own[text, head, :20].topk(4).indices.tolist()
                assert kept[:4] == sorted(best)
