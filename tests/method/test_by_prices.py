"""Prices buy what spares most per byte, within the budget."""

import itertools
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from linearizer.method.by_prices import STEEPEST, OffersOfHeads, allocate_by_prices, kl_by_bytes
from linearizer.method.decide import allocate_alike, sinks_to_try
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, head_bytes
from linearizer.plan.plan import Plan
from linearizer.run.measured import Prices

LAYERS = (Layer(4, 2, 16, 16), Layer(4, 2, 16, 16, native_window=8), Layer(4, 2, 16, 16))
WINDOWS = (4, 16, 64)
OPTIONS = tuple(Head(window=window) for window in WINDOWS) + (Head(window=4, slots=32),)


def prices_of(rows):
    return Prices(2, OPTIONS, (tuple(map(tuple, rows[:2])), (), tuple(map(tuple, rows[2:]))))


def believed(kl):
    """Sort the kl of the windows, and let none fall steeper than is believed: the largest may fall to nothing."""
    small, large, largest = sorted(kl[:3], reverse=True)
    return [small, max(large, small * (64 - 16) / (64 - 4) * (4 / 16) ** STEEPEST), largest, kl[3]]


falling = st.lists(st.floats(1e-6, 1.0), min_size=4, max_size=4).map(believed)
four_heads = st.lists(falling, min_size=4, max_size=4).map(prices_of)


def allocate(prices, budget, length, may_grow=True):
    offers = OffersOfHeads.of(prices, LAYERS, budget, length, may_grow)
    allocation = allocate_by_prices(offers, "gain")
    return allocation, math.fsum(offer.kl for offer in offers.taken(allocation))


def spent(allocation, length):
    return allocation.state_bytes(LAYERS, length)


@given(prices=four_heads, budget=st.integers(6, 300))
def test_the_frontier_has_every_allocation_on_or_above_it(prices, budget):
    offers = OffersOfHeads.of(prices, LAYERS, budget, 4096)
    points = kl_by_bytes(offers)
    assert all(low[0] < high[0] and low[1] >= high[1] - 1e-12 for low, high in itertools.pairwise(points))
    allocation, kl = allocate(prices, budget, 4096, may_grow=False)
    assert min(lost for bytes, lost in points if bytes <= spent(allocation, 0)) >= kl - 1e-12
    largest, smallest_kl = allocate(prices, 10**6, 4096, may_grow=False)
    assert points[-1] == (spent(largest, 0), pytest.approx(smallest_kl))


@given(prices=four_heads, budget=st.integers(6, 300), may_grow=st.booleans(), length=st.integers(64, 4096))
def test_the_budget_is_kept_and_every_head_served(prices, budget, may_grow, length):
    allocation, kl = allocate(prices, budget, length, may_grow)
    assert spent(allocation, length) <= cache_bytes(LAYERS, budget)
    assert [len(row) for row in allocation.heads] == [2, 0, 2]
    assert math.isfinite(kl)
    assert may_grow or not any(head.softmax for row in allocation.heads for head in row)


def test_nothing_is_offered_between_a_large_head_and_one_that_holds_a_whole_text():
    options = tuple(Head(window=4, slots=slots) for slots in (12, 60, 76))
    prices = Prices(2, options, (((1e-2, 1e-3, 5e-4),) * 2, (), ((1e-2, 1e-3, 5e-4),) * 2))
    for offers in OffersOfHeads.of(prices, LAYERS, 300, 80).offers:
        slots = [offer.head.slots for offer in offers]
        assert {12, 60, 76} <= {*slots} and max(slots[:-1]) == 60 and any(12 < count < 60 for count in slots)


def test_a_price_that_falls_steeper_than_any_price_does_is_not_believed():
    options = tuple(Head(window=4, slots=slots) for slots in (12, 28, 60))
    prices = Prices(2, options, (((1e-2, 1e-7, 1e-8),) * 2, (), ((1e-2, 8e-3, 7e-3),) * 2))
    steep, flat = (OffersOfHeads.of(prices, LAYERS, 300, 80).offers[place] for place in (0, -1))
    assert {offer.head.slots: offer.kl for offer in steep if offer.head in options} == pytest.approx(
        {12: 1e-2, 28: 1e-2 / 8 * (64 - 32) / (64 - 16), 60: 1e-8}
    )
    assert {offer.kl for offer in flat} >= {1e-2, 7e-3}


@given(
    budget=st.integers(8, 300),
    bits=st.sampled_from([8, 16]),
    strategy=st.sampled_from(["gain", "windows"]),
)
def test_students_whose_heads_hold_the_same_spend_the_budget_whatever_sinks_they_keep(budget, bits, strategy):
    plan = Plan("demo", budget=budget, bits=bits, strategy=strategy)
    for sinks in sinks_to_try(plan):
        result = allocate_alike(LAYERS, plan, sinks)
        (head,) = {each for row in result.heads for each in row}
        assert result.sinks == sinks and head.window and head.bits == bits
        assert spent(result, 999) <= cache_bytes(LAYERS, budget)
        longer = replace(head, window=head.window + 1)
        dearer = replace(result, heads=tuple((longer,) * len(row) for row in result.heads))
        assert spent(dearer, 999) > cache_bytes(LAYERS, budget)


def test_sinks_that_are_asked_for_are_not_tried_against_others():
    assert sinks_to_try(Plan("demo", budget=64, sinks=3)) == (3,)
    assert sinks_to_try(Plan("demo", budget=64)) == (4, 2, 1, 0)
    assert sinks_to_try(Plan("demo", budget=16)) == (2, 1, 0), "an eighth of the budget at most"


@given(prices=four_heads, budget=st.integers(6, 120))
def test_it_is_the_best_choice_but_for_one_step(prices, budget):
    """Against all choices: no budget of one head's dearest option less does better."""
    _, kl = allocate(prices, budget, 10_000, may_grow=False)
    dearest = max(head_bytes(option, LAYERS[0], 2, 10_000) for option in OPTIONS)
    budget_bytes = cache_bytes(LAYERS, budget) - dearest
    rows = [row for layer in prices.kl for row in layer]
    best = min(
        (
            sum(row[i] for row, i in zip(rows, chosen, strict=True))
            for chosen in itertools.product(range(4), repeat=4)
            if sum(head_bytes(OPTIONS[i], LAYERS[0], 2, 10_000) for i in chosen) <= budget_bytes
        ),
        default=math.inf,
    )
    assert kl <= best + 1e-9


@given(prices=four_heads, budget=st.integers(6, 200), extra=st.integers(0, 200))
def test_a_larger_budget_is_spent_to_lose_no_more(prices, budget, extra):
    small, large = (allocate(prices, spend, 4096, may_grow=False)[1] for spend in (budget, budget + extra))
    assert large <= small + 1e-12


@pytest.mark.parametrize("far_field", [{}, {"slots": 4}])
def test_fewer_bits_are_bought_where_their_rounding_costs_less_than_the_tokens_they_spare(far_field):
    sizes = [Head(window=window, bits=8, **far_field) for window in (4, 16, 64)]
    rough, fine = [1.0, 0.3, 0.1, 0.5, 1e-3], [1.0, 0.3, 0.1, 0.01, 1e-3]  # what 4 and 6 bits cost stands last
    options = (*sizes, Head(softmax=True, bits=4), Head(softmax=True, bits=6))
    prices = Prices(2, options, ((tuple(rough), tuple(fine)), (), (tuple(rough), tuple(fine))))
    budget = 14
    offers = OffersOfHeads.of(prices, LAYERS, budget, 4096)
    allocation = allocate_by_prices(offers, "gain")
    assert spent(allocation, 0) <= cache_bytes(LAYERS, budget)
    bits = [head.bits for row in allocation.heads for head in row]
    assert set(bits[::2]) <= {6, 8} and 4 in bits[1::2]
    coarse = [offer for offer in offers.offers[1] if offer.head.bits == 4]
    assert coarse and all(offer.kl > 0.01 for offer in coarse)
    grown = OffersOfHeads.of(prices, LAYERS, 10**6, 64, may_grow=True).offers[0][-1].head
    assert grown == Head(softmax=True, bits=8), "the whole cache costs nothing in the bits that all was priced with"


def test_a_dear_head_is_left_softmax_where_its_length_can_be_budget_bytes():
    prices = prices_of([[0.5, 0.4, 0.3, 0.4]] + [[1e-4, 1e-5, 1e-6, 1e-4]] * 3)
    kinds = [allocate(prices, 64, length)[0].heads[0][0].softmax for length in (128, 4096)]
    assert kinds == [True, False]
