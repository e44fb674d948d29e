"""Keys and values in few bits: near what they were, the same however often they are rounded, in as few bytes."""

from dataclasses import replace

import pytest
import torch

from linearizer.method.initialise import initialise_turns
from linearizer.method.untrained import draw_layer, metric_to_stored
from linearizer.plan.head_bytes import Head, vector_bytes
from linearizer.student.attention_of_student import (
    TRIED,
    HeadKind,
    Merging,
    Slots,
    as_sink,
    limit_of,
    merge,
    open_state,
    pack,
    read,
    round_vectors,
    tensors,
    unpack,
)
from linearizer.student.layer_student import LayerStudent, StoredBasis, rotate
from tests.support.models import MIXED, allocation_of, layers_of, student_of, teacher_of, tokens

MAX_CODE = 127
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
DOUBLE = ("llama", "gpt2", "gemma3_text", "gpt_bigcode", "cohere2", "opt", "phi")  # families that differ
SMALL = [replace(head, bits=8) for head in MIXED]
FEWER = [replace(head, bits=bits) for bits in (4, 5, 6) for head in MIXED if not head.features]

TOGETHER = [Head(window=4, slots=6, bits=4), Head(window=4, slots=8, bits=6)]  # they merge in one call


def drawn(dtype, size=33):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, size, generator=generator) * torch.randn(500, 1, generator=generator).mul(4).exp()
    return torch.cat([x.clamp(-6e4, 6e4), torch.zeros(1, size), torch.full((1, size), MAX_CODE / 128)]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_rounded_to_8_bits_stays_what_it_is_and_moves_by_at_most_a_127th_of_the_largest(dtype):
    x = drawn(dtype)
    largest, once, held = x.abs().amax(-1, keepdim=True).double(), round_vectors(x, 8), pack(x, 8)
    assert ((once.double() - x.double()).abs() <= largest / MAX_CODE + 2.0**-25).all()
    assert held.dtype == torch.int8 and held.shape[-1] == x.shape[-1] + 1
    assert torch.equal(unpack(held, 8, dtype), once)
    assert torch.equal(round_vectors(once, 8), once) and torch.equal(unpack(pack(once, 8), 8, dtype), once)


def test_gradients_pass_as_if_nothing_were_rounded():
    x = drawn(torch.float32).requires_grad_()
    found = round_vectors(x, 8)
    assert torch.equal(found, round_vectors(x.detach(), 8))
    (found * torch.arange(33.0)).sum().backward()
    assert torch.equal(x.grad, torch.arange(33.0).expand_as(x))


@pytest.mark.parametrize("bits", [4, 5, 6])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_what_is_rounded_to_fewer_bits_stays_what_it_is_in_as_few_bytes_as_are_priced(dtype, bits):
    x = drawn(dtype, 40)
    once = round_vectors(x, bits)
    limit = limit_of(bits)
    step = x.abs().amax(-1, keepdim=True) / limit  # with which no number is cut off
    near = x.abs() <= min(TRIED) * step * limit
    assert ((once - x).abs() <= 0.503 * step)[near].all() and near.float().mean() > 0.7
    assert ((once - x).abs() <= (1.01 - min(TRIED)) * step * limit + step).all() and (once[-2] == 0).all()
    assert torch.equal((once / once.abs().amin(-1, keepdim=True))[:500].abs().amax(-1) <= 2**bits, torch.ones(500) > 0)
    held = pack(once, bits)
    assert held.dtype == torch.uint8 and held.shape[-1] == vector_bytes(40, bits)
    assert torch.equal(round_vectors(once, bits), once) and torch.equal(unpack(held, bits, dtype), once)
    assert torch.equal(unpack(pack(x, bits), bits, dtype), once)


@pytest.mark.parametrize("bits", [4, 8])
def test_weight_and_spread_of_slots_take_two_bytes_each_in_few_bits_and_are_rounded_before_they_are_seen(bits):
    kind, x = HeadKind(4, 3, 2, bits), torch.randn(1, 1, 40, 8, generator=torch.Generator().manual_seed(0))
    merging = Merging(torch.eye(8)[None], torch.ones(1), torch.zeros(1, 9))
    _, state = read(kind, merging, 1, None, x[:, :, None], x, x)
    assert state.weight.element_size() == state.spread.element_size() == (2 if bits < 8 else 4)
    opened = open_state(kind, state, 40, 1, torch.float32)
    assert opened.slots.weight.sum() == 40 - 1 - opened.near_k.shape[1]
    full = Slots(x[0, :, :4], x[0, :, :4], torch.tensor([[9e9, 1, 300, 4097]]), torch.rand(1, 4))
    merged = merge(full, kind, merging, torch.float32)
    assert (merged.weight.max() == 32767) == (bits < 8)
    assert (bits < 8) == torch.equal(merged.spread, merged.spread.bfloat16().float())


@pytest.mark.parametrize("bits, dim", [(5, 12), (6, 6), (4, 5)])
def test_vectors_that_do_not_fill_bytes_in_few_bits_are_refused(bits, dim):
    with pytest.raises(ValueError, match=f"do not fill bytes in {bits} bits"):
        LayerStudent([{"window": 4, "bits": bits}], 1, dim, "prf")


@pytest.mark.parametrize("dim", [8, 32, 80, 96])
def test_rotating_spreads_what_is_large_and_keeps_products(dim):
    x = torch.randn(2, 5, dim, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0] += 100 * torch.eye(dim)[3].double()
    torch.testing.assert_close(rotate(rotate(x)), x)
    torch.testing.assert_close(rotate(x[0]) @ rotate(x[1]).mT, x[0] @ x[1].mT)
    assert rotate(x[0]).abs().amax() < 80 and rotate(x.bfloat16()).dtype == torch.float32


def heads_that_differ(dim=16):
    """Queries, keys and values of two heads that differ much in few directions, and lie off the origin."""
    generator = torch.Generator().manual_seed(3)
    shape = 0.7 ** torch.arange(dim).double()
    turns = torch.linalg.qr(torch.randn(2, dim, dim, generator=generator, dtype=torch.float64))[0]
    x = torch.randn(3, 2, 400, dim, generator=generator, dtype=torch.float64) * shape @ turns
    return x[0], 3 * x[1] + turns[:, :1], x[2] - 2 * turns[:, 1:2]


def begun(q, k, v, root):
    """How heads turn what they take that begin with these queries, keys and values."""
    turns = StoredBasis(len(k), k.shape[-1], v.shape[-1]).double()
    initialise_turns(turns, q * root, k * root, v)
    return turns


@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_queries_see_turned_keys_as_they_came_and_rounding_moves_them_less(bits):
    q, k, v = heads_that_differ()
    k[..., 3], q[..., 3] = 8 * k[..., 3], q[..., 3] / 8  # as a few directions of real keys are
    exact = (q @ k.mT / 4).softmax(-1) @ v
    turns = begun(q, k, v, 0.5)
    query, key, value = turns.to_stored(q[None, :, None], k[None], v[None], 0.5, slice(None))
    seen = (query @ key[:, :, None].mT / 4).softmax(-1) @ value[:, :, None]
    torch.testing.assert_close(turns.from_stored(seen, slice(None))[0, :, 0], exact)
    plain = (q @ round_vectors(k, bits).mT / 4).softmax(-1) @ round_vectors(v, bits)
    query, key, value = turns.to_stored(q[None, 1:, None], k[None, 1:], v[None, 1:], 0.5, [1])
    rounded = (query @ round_vectors(key, bits)[:, :, None].mT / 4).softmax(-1) @ round_vectors(value, bits)[:, :, None]
    off = (turns.from_stored(rounded, [1])[0, 0, 0] - exact[1]).square().mean()
    assert off < 0.3 * (plain[1] - exact[1]).square().mean()


def test_a_metric_sees_of_turned_keys_what_it_saw():
    q, k, v = heads_that_differ()
    turns = begun(q, k, v, 0.5)
    key = turns.to_stored(q[None, :, None], k[None], v[None], 0.5, slice(None))[1][0, 1]
    metric = torch.randn(16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    apart = (key[:1] - key[1:]) @ metric_to_stored(turns, metric, 1).mT
    torch.testing.assert_close(apart.norm(dim=-1), ((k[1, :1] - k[1, 1:]) * 0.5 @ metric.mT).norm(dim=-1))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("held", [Head(window=3), Head(window=9), Head(window=4, slots=6), Head(softmax=True)])
@torch.no_grad()
def test_sinks_are_not_rounded_wherever_they_are_read(held, bits):
    """Keys and values that only the first tokens have larger than others: what rounds them moves every token."""
    student, sinks = LayerStudent([replace(held, bits=bits).to_config()], 2, 16, "prf", 16), 2
    draw_layer(student, torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 1, 12, 16, generator=generator) for _ in range(3))
    k[:, :, :sinks] *= 30
    memory: list = []
    outs = [
        student(*(x[:, :, a:b] for x in (q, k, v)), 0.25, None, memory) for a, b in ((0, 1), (1, 4), (4, 5), (5, 12))
    ]
    turned = student.turns.to_stored(q[:, :, None], k, v, 0.5, slice(None))
    for name, x in (("sink_k", turned[1]), ("sink_v", turned[2])):
        assert torch.equal(getattr(memory[0], name).float(), as_sink(x[:, :, :sinks], bits))
    rounded, seen = round_vectors(turned[1], bits), turned[0][:, :, 0]
    exact = torch.cat([as_sink(turned[1][:, :, :sinks], bits), rounded[:, :, sinks:]], 2)
    values = torch.cat([as_sink(turned[2][:, :, :sinks], bits), round_vectors(turned[2], bits)[:, :, sinks:]], 2)
    near = 3 if not held.slots else 2
    for place in range(near + sinks if not held.softmax else 12):  # until something else is merged or forgotten
        own = (seen[:, :, place] * 0.25 @ exact[:, :, : place + 1].mT).softmax(-1) @ values[:, :, : place + 1]
        expected = student.turns.from_stored(own[:, :, None], slice(None))[:, :, 0]
        torch.testing.assert_close(torch.cat(outs, 2)[:, :, place : place + 1], expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("family", "held"),
    [*((family, SMALL) for family in DOUBLE), ("llama", FEWER), ("llama", TOGETHER), ("gpt2", FEWER)],
)
@torch.no_grad()
def test_a_state_of_few_bits_goes_on_as_the_full_pass(family, held):
    # in fp64: a number between two that are kept falls to one side or the other by the last digit
    student, ids = student_of(family, held).double(), tokens(2, 30)
    full = student(ids, use_cache=False).logits
    cache = student.empty_cache()
    edges = [0, 9, 16, *range(17, 31)]
    pieces = [student(ids[:, a:b], past_key_values=cache).logits for a, b in zip(edges, edges[1:], strict=False)]
    torch.testing.assert_close(torch.cat(pieces, 1), full, atol=1e-5, rtol=0)
    exact = [replace(head, bits=16) for head in held]
    off = (full - student_of(family, exact).double()(ids, use_cache=False).logits).abs()
    assert 1e-4 < off.mean() < (0.2 if held is SMALL else 0.9)  # it is not the student of 16 bits, and near it


def test_gradients_of_heads_of_few_bits_beside_others_are_finite():
    student = student_of("llama", [Head(window=4, slots=4, bits=4), Head(window=4, bits=8)])
    weight = student.get_input_embeddings().weight.requires_grad_()
    student(tokens(2, 20), use_cache=False).logits.square().sum().backward()
    assert weight.grad.isfinite().all() and weight.grad.abs().sum() > 0


@torch.no_grad()
def test_a_window_over_the_whole_text_is_the_nearer_to_the_teacher_the_more_bits_it_has():
    ids, off = tokens(2, 40), {}
    for bits in (4, 5, 6, 8):
        for held in (Head(window=40, bits=bits), Head(softmax=True, bits=bits)):
            given = student_of("llama", [held])(ids).logits - teacher_of("llama")(ids).logits
            off[bits, held.softmax] = given.abs().mean().item()
        assert off[bits, False] == pytest.approx(off[bits, True], rel=1e-3)  # whatever holds them
    assert 0.9 > off[4, True] > off[5, True] > off[6, True] > off[8, True] > 1e-6


@pytest.mark.parametrize("held", [SMALL, FEWER], ids=["8 bits", "4 to 6 bits"])
@pytest.mark.parametrize("length", [12, 60])
@torch.no_grad()
def test_the_state_of_few_bits_is_as_large_as_it_is_priced(length, held):
    layers = layers_of(teacher_of("llama"))
    allocation, student = allocation_of(layers, held, 2), student_of("llama", held)
    cache = student.empty_cache()
    student(tokens(1, length), past_key_values=cache)
    assert sum(layer.bytes() for layer in cache.layers) == allocation.state_bytes(layers, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", [[16, 0, 0, 0, 8], [16, 0, 32, 8, 8], [16, 0, 32, 8, 4], "softmax 4"], ids=str)
@torch.no_grad()
def test_what_a_layer_holds_of_a_row_depends_on_its_own_tokens_alone(held, dtype):
    layer = LayerStudent([held] * 3, 2, 64, "prf")
    draw_layer(layer, torch.Generator().manual_seed(0))
    text = [torch.randn(3, heads, 161, 64, generator=torch.Generator().manual_seed(heads)) for heads in (9, 3, 1)]
    text = [x.to(dtype) for x in (text[0], text[1], text[2].expand(-1, 3, -1, -1))]

    def read(rows):
        memory = []
        calls = [[x[rows, :, part] for x in text] for part in (slice(0, 160), slice(160, 161))]
        return torch.cat([layer(*call, 0.125, None, memory) for call in calls], 2), memory

    together, states = read(slice(0, 3))
    for row in range(3):
        alone, (state,) = read(slice(row, row + 1))
        assert torch.equal(together[row], alone[0])
        for name, held_alone in tensors(state).items():
            assert torch.equal(getattr(states[0], name)[row], held_alone[0]), name
