"""Every strategy spends a budget, never more, on every head; a larger budget takes nothing away."""

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from linearizer.errors import BudgetError, RequestError
from linearizer.method.by_freedoms import allocate_by_freedoms
from linearizer.plan.allocation import Allocation, check_allocation
from linearizer.plan.head_bytes import Head, Layer, cache_bytes, feature_bytes
from linearizer.plan.recipes import STRATEGIES
from linearizer.run.measured import HeadProfile, LayerProfile, Profile, ProfileSettings

RIDGES = tuple(2.0**-exponent for exponent in range(0, 21, 2))
NATIVE = Layer(4, 2, 16, 16, native_window=64)


def head_of(need, steepness):
    """A curve like a measured one: it starts below 1 and grows, each head at its own rate."""
    freedoms = tuple(need * ridge**-steepness for ridge in RIDGES)
    return HeadProfile(freedoms)


def profile_of(rows, queries=()):
    layers = tuple(LayerProfile(tuple(head_of(*head) for head in row), queries) for row in rows)
    return Profile(ProfileSettings(ridges=RIDGES), 1000, layers)


@st.composite
def models(draw):
    """A profile, and the layers of its model; here and there one that the teacher bounds."""
    heads = st.tuples(st.floats(0.3, 1.0), st.floats(0.05, 0.9))
    rows, layers = [], []
    for _ in range(draw(st.integers(1, 6))):
        layer = Layer(
            8, draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([16, 64])), draw(st.sampled_from([16, 80]))
        )
        layers.append(draw(st.sampled_from([layer, layer, layer, NATIVE])))
        bounded = layers[-1] is NATIVE
        rows.append([] if bounded else draw(st.lists(heads, min_size=layer.kv_heads, max_size=layer.kv_heads)))
    assume(any(rows))
    return profile_of(rows), tuple(layers)


def features_of(allocation):
    return [head.features for row in allocation.heads for head in row]


names = pytest.mark.parametrize("strategy", [name for name, x in STRATEGIES.items() if x.decided_by == "freedoms"])
few_examples = settings(max_examples=40)


@names
@few_examples
@given(model=models(), budget=st.integers(200, 10**6), window=st.integers(0, 64), sinks=st.integers(0, 8))
def test_budget_is_kept_and_every_head_is_served(strategy, model, budget, window, sinks):
    profile, layers = model
    allocation = allocate_by_freedoms(profile, layers, budget=budget, strategy=strategy, window=window, sinks=sinks)
    check_allocation(allocation, layers)
    assert allocation.state_bytes(layers, 10**7) <= cache_bytes(layers, budget)
    assert allocation.breakeven_tokens(layers) <= budget
    assert all(features >= 16 and features % 16 == 0 for features in features_of(allocation))
    assert all(head.window == window for row in allocation.heads for head in row)


@few_examples
@given(model=models(), budget=st.integers(200, 10**5))
def test_budget_is_spent_but_for_less_than_a_tile_of_the_dearest_head(model, budget):
    profile, layers = model
    unspent = cache_bytes(layers, budget) - allocate_by_freedoms(profile, layers, budget=budget).state_bytes(layers, 0)
    assert 0 <= unspent < 16 * max(feature_bytes(layer) for layer in layers)


@names
@few_examples
@given(model=models(), budget=st.integers(200, 5000), extra=st.integers(1, 500))
def test_a_larger_budget_takes_nothing_from_any_head(strategy, model, budget, extra):
    profile, layers = model
    small = features_of(allocate_by_freedoms(profile, layers, budget=budget, strategy=strategy))
    large = features_of(allocate_by_freedoms(profile, layers, budget=budget + extra, strategy=strategy))
    assert all(before <= after for before, after in zip(small, large, strict=True))


LAYERS = (Layer(2, 2, 64, 64),) * 3
PROFILE = profile_of([[(0.5, 0.2), (0.9, 0.3)], [(0.4, 0.5), (0.6, 0.6)], [(0.5, 0.4), (0.3, 0.1)]])


def test_residue_of_fix_goes_to_the_neediest_heads():
    bought = features_of(allocate_by_freedoms(PROFILE, LAYERS, budget=64, strategy="fix"))  # 63.01 features each
    needs = [head.freedoms[4] for layer in PROFILE.layers for head in layer.heads]
    assert sorted(bought) == [48] + [64] * 5
    assert bought[needs.index(min(needs))] == 48


def test_common_lambda_gives_each_head_its_own_freedoms():
    level = 7.0
    curves = [[need * math.exp(steepness * level) for need, steepness in row] for row in [[(9, 0.2), (12, 0.3)]]]
    layers = (Layer(2, 2, 64, 64),)
    profile = profile_of([[(9, 0.2), (12, 0.3)]])
    result = features_of(allocate_by_freedoms(profile, layers, features=int(sum(curves[0]) / 2)))
    assert all(abs(features - freedoms) <= 16 for features, freedoms in zip(result, curves[0], strict=True))


@names
def test_a_budget_too_small_names_the_least_that_would_do(strategy):
    with pytest.raises(BudgetError, match="take 37;"):
        allocate_by_freedoms(PROFILE, LAYERS, budget=36, strategy=strategy, window=16, sinks=4)
    assert set(
        features_of(allocate_by_freedoms(PROFILE, LAYERS, budget=37, strategy=strategy, window=16, sinks=4))
    ) == {16}


def test_a_model_with_nothing_to_replace_is_refused():
    with pytest.raises(BudgetError, match="nothing to allocate"):
        allocate_by_freedoms(profile_of([[]]), (NATIVE,), budget=64)


KINDS = Allocation("by hand", 4, ((Head(window=8), Head(window=8, features=32)), (), (Head(softmax=True),)))


@pytest.mark.parametrize("head", [Head(window=-1), Head(features=-1), Head(window=4, softmax=True)])
def test_heads_that_cannot_be_are_refused(head):
    with pytest.raises(RequestError, match="is not a head"):
        Allocation("by hand", 0, ((head,),))


def test_allocation_is_checked_against_the_layers():
    check_allocation(KINDS, (Layer(2, 2, 8, 8), NATIVE, Layer(1, 1, 8, 8)))
    with pytest.raises(RequestError, match="3 layers, the model has 2"):
        check_allocation(KINDS, (NATIVE, NATIVE))
    with pytest.raises(RequestError, match="layer 1: .* 0 KV heads, the model has 2"):
        check_allocation(KINDS, (Layer(2, 2, 8, 8),) * 3)
