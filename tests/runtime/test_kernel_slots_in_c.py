"""The kernel in C that merges slots on a CPU: PyTorch's results, whatever comes, however the blocks were cut."""

from dataclasses import replace

import pytest
import torch

from linearizer.runtime.few_bits import round_vectors
from linearizer.runtime.kernel_in_c import load_kernel
from linearizer.runtime.kernel_slots_in_c import SOURCE, merge_blocks_in_c, merges_in_c
from linearizer.runtime.slots_merging import Merging, Slots, merge_block

BATCH, HEADS, BLOCKS, FAR = 2, 3, 6, 1.3

needs_compiler = pytest.mark.skipif(
    load_kernel("merge_blocks", SOURCE, torch.float32) is None, reason="no C compiler here"
)


def drawn(slots, block, key_dim, value_dim, bits, dtype=torch.float64, seed=0):
    """Draw empty slots, blocks of tokens of which some do not come, and how heads merge."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    k, v = (normal(BATCH, HEADS, BLOCKS * block, dim) for dim in (key_dim, value_dim))
    if bits < 16:
        k, v = (round_vectors(x, bits) for x in (k, v))
    metric = torch.eye(key_dim).to(dtype) + normal(HEADS, key_dim, key_dim) / 10
    merging = Merging(metric, torch.full_like(metric[:, 0, 0], 0.25), block, block, FAR, bits)
    present = torch.rand(BATCH, BLOCKS, block, generator=generator) < 0.9
    index = torch.arange(BLOCKS * block).view(1, BLOCKS, block).expand(BATCH, -1, -1)
    numbers = k.new_zeros(BATCH, HEADS, slots)
    none_k, none_v = (x.new_zeros(BATCH, HEADS, slots, x.shape[-1]) for x in (k, v))
    return Slots(none_k, none_v, numbers, numbers), k, v, index, present, merging


def after(slots, block):
    """Take the slots after a block of those after each."""
    return Slots(*(x.unflatten(0, (BATCH, -1))[:, block] for x in slots.all()))


def assert_equal(found, expected, **tolerance):
    for mine, other in zip(found.all(), expected.all(), strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@needs_compiler
@pytest.mark.parametrize("bits", [16, 8, 6, 5, 4])
@pytest.mark.parametrize("sizes", [(20, 16, 16, 16), (9, 4, 8, 24), (5, 3, 40, 8)])
def test_slots_are_those_of_pytorch(sizes, bits):
    held, k, v, index, present, merging = drawn(*sizes, bits)
    found = merge_blocks_in_c(held, k, v, index, present, merging)
    for block in range(BLOCKS):
        tokens = index[0, block]
        held = merge_block(held, k[:, :, tokens], v[:, :, tokens], present[:, block], merging)
        assert_equal(after(found, block), held)


@needs_compiler
@pytest.mark.parametrize("bits", [16, 8, 5])
def test_the_cut_of_a_text_changes_no_bit(bits):
    held, k, v, index, present, merging = drawn(20, 8, 16, 8, bits, torch.float32)
    whole = merge_blocks_in_c(held, k, v, index, present, merging)
    first = merge_blocks_in_c(held, k, v, index[:, :2], present[:, :2], merging)
    then = merge_blocks_in_c(after(first, -1), k, v, index[:, 2:], present[:, 2:], merging)
    assert_equal(after(then, -1), after(whole, -1), rtol=0, atol=0)


@needs_compiler
def test_means_are_kept_in_the_type_of_the_slots():
    held, k, v, index, present, merging = drawn(6, 8, 16, 16, 16, torch.float32)
    held = replace(held, k=held.k.bfloat16(), v=held.v.bfloat16())
    k, v = k.bfloat16(), v.bfloat16()
    found = after(merge_blocks_in_c(held, k, v, index[:, :1], present[:, :1], merging), 0)
    expected = merge_block(held, k[:, :, :8], v[:, :, :8], present[:, 0], merging)
    assert_equal(found, replace(expected, k=expected.k.float(), v=expected.v.float()), rtol=1e-2, atol=1e-2)
    assert torch.equal(found.k.bfloat16().float(), found.k) and torch.equal(found.v.bfloat16().float(), found.v)


@needs_compiler
def test_it_serves_no_gradients_and_may_be_kept_off(monkeypatch):
    held, k, v, _, _, merging = drawn(6, 8, 16, 16, 16, torch.float32)
    assert merges_in_c(held, k, v, merging)
    assert not merges_in_c(held, k.clone().requires_grad_(), v, merging)
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    assert not merges_in_c(held, k, v, merging)


@needs_compiler
def test_the_number_of_threads_changes_no_bit():
    held, k, v, index, present, merging = drawn(20, 8, 16, 8, 5, torch.float32)
    threads, merged = torch.get_num_threads(), []
    try:
        for count in (1, 2, 4):
            torch.set_num_threads(count)
            merged.append(merge_blocks_in_c(held, k, v, index, present, merging))
    finally:
        torch.set_num_threads(threads)
    for other in merged[1:]:
        assert_equal(other, merged[0], rtol=0, atol=0)
