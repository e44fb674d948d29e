"""Keys and values in 8 bits: near what they were, the same however often they are rounded, and half the bytes."""

from dataclasses import replace

import pytest
import torch

from linearizer.run.head_bytes import Head
from linearizer.runtime.state_8bit import MAX_CODE, pack_vectors, round_vectors, unpack_vectors
from tests.support.families import FAMILIES
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of, tokens

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DOUBLE = [family for family in FAMILIES if family not in ("mixtral", "qwen3_moe")]  # experts have no fp64 product
SMALL = [replace(head, bits=8) for head in MIXED]


def drawn(dtype, size=33):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, size, generator=generator) * torch.randn(500, 1, generator=generator).mul(4).exp()
    return torch.cat([x.clamp(-6e4, 6e4), torch.zeros(1, size), torch.full((1, size), MAX_CODE / 128)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_moves_no_number_by_more_than_a_127th_of_the_largest(dtype):
    x = drawn(dtype)
    largest = x.abs().amax(-1, keepdim=True).double()
    assert ((round_vectors(x).double() - x.double()).abs() <= largest / MAX_CODE + 2.0**-25).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_stays_what_it_is(dtype):
    once = round_vectors(drawn(dtype))
    assert torch.equal(round_vectors(once), once)
    assert torch.equal(unpack_vectors(pack_vectors(once), dtype), once)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_hold_all_that_rounding_leaves(dtype):
    x = drawn(dtype)
    held = pack_vectors(x)
    assert held.dtype == torch.int8 and held.shape[-1] == x.shape[-1] + 1
    assert torch.equal(unpack_vectors(held, dtype), round_vectors(x))


def test_multiplying_by_a_power_of_two_changes_nothing_else():
    x = drawn(torch.float32)[:500].clamp(-100, 100)
    x = x[x.abs().amax(-1) > 1e-3]
    assert torch.equal(round_vectors(8 * x), 8 * round_vectors(x))


def test_gradients_pass_as_if_nothing_were_rounded():
    x = drawn(torch.float32).requires_grad_()
    result = round_vectors(x)
    assert torch.equal(result, round_vectors(x.detach()))
    (result * torch.arange(33.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(33.0).expand_as(x))


@pytest.mark.parametrize("family", DOUBLE)
@torch.no_grad()
def test_a_state_of_8_bits_goes_on_as_the_full_pass(family):
    # in fp64: a number between two of 8 bits falls to one side or the other by the last digit
    student, ids = student_of(family, SMALL).double(), tokens(2, 30)
    full = student(ids, use_cache=False).logits
    cache = student.empty_cache()
    edges = [0, 9, 16, *range(17, 31)]
    pieces = [student(ids[:, a:b], past_key_values=cache).logits for a, b in zip(edges, edges[1:], strict=False)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-5, rtol=0)
    off = (full - student_of(family, MIXED).double()(ids, use_cache=False).logits).abs()
    assert 1e-4 < off.mean() < 0.1  # it is not the student of 16 bits, and near it


@torch.no_grad()
def test_beams_choose_among_states_of_8_bits_as_without_a_state():
    student, ids = student_of("llama", SMALL), tokens(2, 12)
    settings = dict(attention_mask=torch.ones_like(ids), num_beams=3, max_new_tokens=8, eos_token_id=None)
    with_state, without = (student.generate(ids, do_sample=False, use_cache=way, **settings) for way in (True, False))
    assert torch.equal(with_state, without)


@torch.no_grad()
def test_a_window_of_8_bits_over_the_whole_text_is_nearly_the_teacher():
    ids = tokens(2, 40)
    off = student_of("llama", [Head(window=40, bits=8)])(ids).logits - teacher_of("llama")(ids).logits
    assert 1e-4 < off.abs().mean() < 0.1


@pytest.mark.parametrize("length", [12, 60])
@torch.no_grad()
def test_the_state_of_8_bits_is_as_large_as_it_is_priced(length):
    layers = layers_of(teacher_of("llama"))
    allocation, student = allocation_of(layers, SMALL, 2), student_of("llama", SMALL)
    cache = student.empty_cache()
    student(tokens(1, length), past_key_values=cache)
    assert sum(layer.bytes() for layer in cache.layers) == allocation.state_bytes(layers, length)
