"""Linear attention in both directions agrees with a dense reference of its definition, whatever is near."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import scaled_dot_product_attention

from linearizer.encoders.attention_both_ways import CHUNK, BothWays, Slots, block_layout, find_slots
from linearizer.encoders.attention_interface import attend_without_padding

SCALE = 16**-0.5


def draw(tokens, size=2.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [size * torch.randn(2, 3, tokens, 16, generator=generator) for _ in range(3)]


def near_tokens(how, tokens, grid=()):
    """Which tokens see which exactly, (tokens, tokens)."""
    near = torch.zeros(tokens, tokens, dtype=torch.bool)
    inner = tokens - how.first - how.last
    layout = block_layout(tuple(grid) or (inner,), how.block, torch.device("cpu"))
    for own, around in zip(layout.members.tolist(), layout.near.tolist(), strict=True):
        for i in (i for i in own if i < inner):
            near[how.first + i, [how.first + j for j in around if j < inner]] = True
    ends = torch.ones(tokens, dtype=torch.bool)
    ends[how.first : tokens - how.last] = False
    return near | ends | ends[:, None]


def reference(how, query, key, value, grid=()):
    """The definition: out_i = softmax_j( q_i·k_j if j is near i, else q_i·k̄_c(j) + spread_c(j) ) v_j."""
    inner = slice(how.first, query.shape[2] - how.last)
    slots = Slots.of(*(x[:, :, inner] for x in (query * SCALE, key, value)), how.slots)
    means, spreads = key.clone(), torch.zeros_like(key[..., 0])
    means[:, :, inner] = slots.keys.gather(2, slots.owner[..., None].expand_as(means[:, :, inner]))
    spreads[:, :, inner] = slots.spreads.gather(2, slots.owner)
    far = query * SCALE @ means.mT + spreads[:, :, None]
    scores = torch.where(near_tokens(how, query.shape[2], grid), query * SCALE @ key.mT, far)
    return scores.softmax(-1) @ value


CASES = {
    "a text": (BothWays((8,), 36, 1, 1), 203, ()),
    "a text without global tokens": (BothWays((5,), 20), 150, ()),
    "a picture with ragged edges": (BothWays((2, 3), 20, 1), 1 + 17 * 11, (17, 11)),
    "several chunks": (BothWays((50,), 9, 0, 1), CHUNK + 301, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_linear_form_is_the_dense_one(case):
    how, tokens, grid = CASES[case]
    heads = [x[:, :1] for x in draw(tokens)]
    torch.testing.assert_close(how.attend(*heads, SCALE, grid), reference(how, *heads, grid), rtol=1e-4, atol=1e-5)


def test_a_slot_whose_tokens_are_all_near_leaves_nothing_behind():
    """Two blocks of tokens whose keys point away from each other: a slot is near in whole, and its scores are huge."""
    query, key, value = draw(120, size=1.0)
    key[:, :, :60] += 40 * query.mean((0, 1, 2))
    key[:, :, 60:] -= 40 * query.mean((0, 1, 2))
    how = BothWays((20,), 10)
    out = how.attend(20 * query, key, value, SCALE)
    torch.testing.assert_close(out, reference(how, 20 * query, key, value), rtol=1e-3, atol=1e-4)
    assert out.abs().max() <= value.abs().max() * 1.001  # a mean of values


@given(st.integers(1, 150), st.integers(1, 40), st.integers(0, 12), st.integers(0, 2), st.integers(0, 2))
@settings(max_examples=30)
def test_equal_values_come_out_as_they_are(tokens, block, slots, first, last):
    """Weights sum to one, however many tokens, slots and global tokens there are."""
    query, key, value = draw(tokens)
    out = BothWays((block,), slots, first, last).attend(query, key, torch.ones_like(value), SCALE)
    torch.testing.assert_close(out, torch.ones_like(value), rtol=1e-4, atol=1e-4)


def test_a_window_over_all_tokens_is_softmax_and_so_is_a_text_within_the_budget():
    query, key, value = draw(90)
    exact = scaled_dot_product_attention(query, key, value, scale=SCALE)
    edges = BothWays((29,), 8, 1, 1), BothWays((88,), 0, 1, 1), BothWays((30,), 12)
    for how in edges:
        assert torch.equal(how.attend(query, key, value, SCALE), exact)
    inner = [x[:, :, 1:-1] for x in (SCALE * query, key, value)]
    wide = BothWays((44,), 3, 1, 1).attend_within(*inner, key[:, :, [0, 89]], value[:, :, [0, 89]], ())
    torch.testing.assert_close(wide, exact[:, :, 1:-1], rtol=1e-4, atol=1e-5)


def test_a_row_does_not_depend_on_the_padding_of_its_batch():
    how, (query, key, value) = BothWays((4,), 16, 1, 1), draw(140)
    real = torch.zeros(2, 140, dtype=torch.bool)
    real[0, 17:], real[1, :131] = True, True  # padding on the left, and on the right
    out = attend_without_padding(how, query, key, value, SCALE, real)
    assert not out.transpose(1, 2)[~real].any()
    for row in range(2):
        alone = how.attend(*(x[row : row + 1, :, real[row]] for x in (query, key, value)), SCALE)
        torch.testing.assert_close(out[row : row + 1, :, real[row]], alone)


def test_slots_hold_all_tokens_and_like_keys_rather_than_neighbours():
    centres = 10 * torch.randn(1, 2, 12, 16, generator=torch.Generator().manual_seed(1))
    names = torch.randint(0, 12, (400,), generator=torch.Generator().manual_seed(2))
    keys = centres[:, :, names]

    def spread(owner):
        counts = torch.zeros(1, 2, 40).scatter_add(2, owner, torch.ones(1, 2, 400)).clamp_min(1)
        into = owner[..., None].expand_as(keys)
        means = torch.zeros(1, 2, 40, 16).scatter_add(2, into, keys) / counts[..., None]
        return (keys - means.gather(2, into)).square().sum()

    owner = find_slots(keys, 40)
    assert 0 <= owner.min() and owner.max() < 40
    assert spread(owner) < 0.5 * spread((torch.arange(400) // 10).expand(1, 2, 400))


def test_gradients_reach_queries_keys_and_values_also_after_inference():
    inputs, how = [x.requires_grad_() for x in draw(130)], BothWays((4,), 12, 1, 1)
    block_layout.cache_clear()
    with torch.inference_mode():
        how.attend(*inputs, SCALE)
    how.attend(*inputs, SCALE).square().sum().backward()
    assert all(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0 for x in inputs)
