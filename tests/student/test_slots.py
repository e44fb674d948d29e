"""Slots: what is merged, that nothing is lost in sum, and that a slot which was never merged is an exact token."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from linearizer.student.attention_of_student import (
    HeadKind,
    Merging,
    Slots,
    merge,
    read,
)
from linearizer.student.layer_student import LayerStudent, Merger
from tests.support.log_features import reference as attend_exactly

WINDOW, SINKS, DIM = 8, 2, 4
QUERY = torch.tensor([0.7, -0.4, 0.3, 0.5, 0.2], dtype=torch.float64)


def drawn(batch=2, heads=3, group=2, length=50, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, DIM, generator=generator, dtype=torch.float64)

    return normal(batch, heads, group, length), normal(batch, heads, length), normal(batch, heads, length)


def merging(heads=3):
    merger = Merger(heads, DIM)
    merger.reset()
    merger.mean_query.data.normal_(generator=torch.Generator().manual_seed(5))
    return Merging(*(x.detach().double() for x in merger()))


def kind_of(slots, block=4):
    return HeadKind(WINDOW, slots, block)


def attend(q, k, v, slots, edges=(), block=4, real=None):
    """Attend in calls that end at these edges."""
    state, parts, ends = None, [], [*edges, q.shape[-2]]
    for a, b in zip([0, *ends], ends, strict=False):
        new = q[..., a:b, :], k[:, :, a:b], v[:, :, a:b], None if real is None else real[:, a:b]
        part, state = read(kind_of(slots, block), merging(k.shape[1]), SINKS, state, *new)
        parts.append(part)
    return torch.cat(parts, -2), state


def reference(q, k, v, slots, block, real=None):
    """Attend text by text and token by token: the plainest form, against which the definition is tested."""
    out, kind, how = v.new_zeros(*q.shape[:-1], v.shape[-1]), kind_of(slots, block), merging()
    for text in range(len(q)):
        tokens = torch.arange(q.shape[-2]) if real is None else real[text].nonzero()[:, 0]
        held = Slots(k[text, :, :0], v[text, :, :0], k[text, :, :0, 0], k[text, :, :0, 0])
        for place, token in enumerate(tokens.tolist()):
            merged = max(0, (place - WINDOW) // block + 1) * block
            if merged and place == merged - block + WINDOW:  # a block leaves the window
                leaving = tokens[[at for at in range(merged - block, merged) if at >= SINKS]]
                one = torch.ones(len(k[0]), len(leaving), dtype=k.dtype)
                added = k[text, :, leaving], v[text, :, leaving], one, 0 * one
                joined = zip((held.k, held.v, held.weight, held.spread), added, strict=True)
                held = merge(Slots(*(torch.cat(pair, 1) for pair in joined)), kind, how, k.dtype)
            exact = torch.cat([tokens[: min(SINKS, merged)], tokens[merged : place + 1]])
            level = held.weight.log() + how.gain[:, None] * held.spread
            keys, values = (torch.cat([x[text, :, exact], y], 1) for x, y in ((k, held.k), (v, held.v)))
            logits = q[text, :, :, token] @ keys.mT  # (heads, group, exact tokens and slots)
            logits[..., len(exact) :] += level[:, None]
            out[text, :, :, token] = logits.softmax(-1) @ values
    return out


def slots_of(count=12, seed=0):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, count, DIM, generator=generator, dtype=torch.float64) for _ in range(2))
    return Slots(k, v, torch.ones(2, count, dtype=torch.float64), torch.zeros(2, count, dtype=torch.float64))


def asked(k):
    """What the mean query gives a key, less what it gives the mean key."""
    return QUERY[:-1] @ k - QUERY[-1]


def seen_by(metric):
    """How heads merge that see keys by a metric, and whose mean query gives half of its square to the mean key."""
    return Merging(metric.double(), torch.ones(len(metric)).double(), QUERY.expand(len(metric), -1))


def merged(slots, count, how):
    return merge(slots, kind_of(count), how, torch.float64)


@pytest.mark.parametrize("window, block", [(0, 1), (2, 3), (4, 0)])
def test_a_block_that_a_window_does_not_hold_is_refused(window, block):
    with pytest.raises(ValueError, match=f"merge {block} tokens at once and have a window of {window}"):
        LayerStudent([[window, 0, 5, block]], SINKS, DIM, "prf")


def test_with_a_slot_for_every_token_nothing_is_approximate():
    q, k, v = drawn()
    out, _ = attend(q, k, v, slots=50)
    torch.testing.assert_close(out, attend_exactly(q, k, v, None, window=50, sinks=0))


@pytest.mark.parametrize("slots, block", [(6, 4), (3, 8), (9, 1)])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_outputs_are_those_of_the_reference(slots, block, padded):
    q, k, v = drawn(length=36)
    real = torch.rand(2, 36, generator=torch.Generator().manual_seed(0)) < 0.7 if padded else None
    seen = torch.ones(2, 36) if real is None else real
    expected = reference(q, k, v, slots, block, real)
    for edges in ((), (1, 20, 21)):
        out, _ = attend(q, k, v, slots, edges, block, real)
        torch.testing.assert_close(out * seen[:, None, None, :, None], expected)


@settings(max_examples=40)
@given(edges=st.lists(st.integers(1, 49), max_size=6, unique=True).map(sorted), block=st.integers(1, WINDOW))
def test_however_a_text_is_cut_into_calls_the_answer_is_the_same(edges, block):
    q, k, v = drawn()
    whole, state = attend(q, k, v, 6, block=block)
    cut, other = attend(q, k, v, 6, edges, block)
    torch.testing.assert_close(cut, whole)
    torch.testing.assert_close(other.weight, state.weight)
    torch.testing.assert_close(other.slot_v, state.slot_v)


@settings(max_examples=20)
@given(holes=st.lists(st.integers(0, 29), min_size=1, max_size=12, unique=True))
def test_padding_anywhere_changes_nothing(holes):
    q, k, v = drawn(batch=1, length=30)
    real = torch.ones(1, 30, dtype=torch.bool)
    real[0, holes] = False
    kept = real[0].nonzero()[:, 0]
    padded, _ = attend(q, k, v, 3, real=real)
    alone, _ = attend(q[..., kept, :], k[:, :, kept], v[:, :, kept], 3)
    torch.testing.assert_close(padded[..., kept, :], alone)


def test_the_root_multiplies_the_keys_that_are_measured():
    q, k, v = drawn()
    own = merging()
    twice = torch.cat([2 * own.mean_query[:, :-1], own.mean_query[:, -1:]], -1)
    halved = replace(own, metric=2 * own.metric, mean_query=twice, root=0.5)
    states = [read(kind_of(5), how, SINKS, None, q, k, v)[1] for how in (own, halved)]
    assert states[0].spread.max() > 0
    torch.testing.assert_close(states[1].spread, states[0].spread)


def test_merging_keeps_the_sums_and_counts_the_spread():
    given = slots_of()
    metric = torch.randn(2, DIM, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    result = merged(given, 3, seen_by(metric))
    assert result.weight.shape[-1] == 3 and (result.weight > 0).all()
    torch.testing.assert_close(result.weight.sum(-1), given.weight.sum(-1))
    for mine, theirs in ((result.k, given.k), (result.v, given.v)):
        torch.testing.assert_close((mine * result.weight[..., None]).sum(1), theirs.sum(1))

    def second_moment(slots):
        return (slots.weight * (slots.spread + (slots.k @ metric.mT).square().sum(-1))).sum(-1)

    torch.testing.assert_close(second_moment(result), second_moment(given))


def test_slots_that_go_are_the_cheapest_and_each_goes_into_one_that_stays():
    given, count = slots_of(12), 5
    given.weight[:] = torch.arange(1, 13)
    result = merged(given, count, seen_by(torch.eye(DIM).expand(2, -1, -1)))
    for head in range(2):
        k, v, weight, full = given.k[head], given.v[head], given.weight[head], [*range(12)]

        def cost(i, j, k=k, v=v, weight=weight, full=full):
            apart, values = (k[i] - k[j]).square().sum(), (v[i] - v[j]).norm()
            important = max(asked(k[i]), asked(k[j])).mul(0.5).exp()
            return float(important * apart**2 * values * weight[i] * weight[j] / (weight[i] + weight[j]))

        least = {i: min(cost(i, j) for j in full if j < i) for i in full[1:]}
        gone = sorted(least, key=least.get)[: len(full) - count]
        groups = {i: [i] for i in full if i not in gone}
        for i in gone:
            groups[min(groups, key=lambda j, i=i: cost(i, j))].append(i)
        assert result.weight[head].tolist() == [sum(weight[group]) for group in groups.values()]
        for mine, group in zip(result.v[head], groups.values(), strict=True):
            torch.testing.assert_close(mine, (weight[group, None] * v[group]).sum(0) / weight[group].sum())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_equal_costs_are_decided_by_place_alike_in_every_dtype(dtype):
    k = torch.zeros(1, 1, 9, DIM, dtype=dtype)
    k[..., 0] = torch.arange(9)  # all neighbours cost the same to merge
    how = Merging(torch.eye(DIM)[None], torch.ones(1), torch.zeros(1, DIM + 1))
    _, state = read(HeadKind(8, 5, 8), how, 0, None, k[:, :, None], k, k)
    assert state.weight.dtype == (dtype if dtype == torch.float64 else torch.float32)  # in which costs are compared
    assert state.weight[0, 0].tolist() == [3, 2, 1, 1, 1]  # 1, 2 and 3 go: 1 and 2 to 0, the first of two, 3 to 4
    assert state.slot_k[0, 0, :, 0].tolist() == [1, 3.5, 5, 6, 7] and state.slot_k.dtype == dtype


def test_tokens_that_are_alike_are_merged_for_nothing():
    q, k, v = drawn(length=40)
    k, v = (x[:, :, :10].repeat(1, 1, 4, 1) for x in (k, v))  # ten tokens, four times
    out, state = attend(q, k, v, slots=10)
    torch.testing.assert_close(out, attend_exactly(q, k, v, None, window=40, sinks=0))
    assert state.weight.sum() == 2 * 3 * (40 - SINKS - WINDOW)


def test_gradients_reach_what_was_merged():
    q, k, v = (x.requires_grad_() for x in drawn(batch=1, length=30))
    out, _ = attend(q, k, v, slots=4)
    out[..., -1, :].sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))
    assert (v.grad[:, :, SINKS:8].abs().sum(-1) > 0).all()
