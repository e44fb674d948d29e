"""The matrix rule is what its formula says: against a plain loop, however a text is cut, padded or grouped."""

from importlib.util import find_spec, module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path

import pytest
import torch

from linearizer.kernels.triton.dispatch import linear_attention
from linearizer.method.untrained import draw
from linearizer.student.attention_of_student import tensors
from linearizer.student.columns import ExactState
from linearizer.student.features_torch import attend_text_with_features
from linearizer.student.matrix_rule import MatrixRule, ScaledRule, read_and_write, running_moments
from linearizer.student.update_rules import UPDATE_RULES

DIM, VALUE_DIM, ROWS = 6, 5, 4
WINDOW, SINKS = 3, 2


def texts(tokens, heads=2, group=2, batch=2, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        draw(batch, heads, group, tokens, DIM),
        draw(batch, heads, tokens, DIM),
        draw(batch, heads, tokens, VALUE_DIM),
    )


def memory_of(rule, heads=2, rows=ROWS, seed=1):
    """A rule whose parameters are all at random, so that none of them hides what it does."""
    rule = UPDATE_RULES[rule] if isinstance(rule, str) else rule
    made = MatrixRule(heads, DIM, VALUE_DIM, rows, rule).double()
    generator = torch.Generator().manual_seed(seed)
    draw(made, generator)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return ScaledRule(made, 0.7)


def read(q, k, v, memory, window=WINDOW, sinks=SINKS, real=None, cuts=(), attend=linear_attention):
    """The whole text, in calls that end at the cuts."""
    state = memory.empty(k, v, window, sinks)
    edges, out = [0, *cuts, q.shape[-2]], []
    for a, b in zip(edges, edges[1:], strict=False):
        piece = None if real is None else real[:, a:b]
        out.append(attend(q[..., a:b, :], k[:, :, a:b], v[:, :, a:b], memory, window, piece, state))
    return torch.cat(out, -2), state


def steps_of(tokens=11, channels=True, memories=1, steps=1, seed=0, columns=VALUE_DIM):
    """What a rule may write: q, k, e, w and log decays, and the matrix before."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    k = torch.nn.functional.normalize(draw(2, 3, memories, tokens * steps, ROWS), dim=-1)
    beta = torch.rand(2, 3, memories, tokens * steps, 1, generator=generator, dtype=torch.float64) * 1.9
    decay = -draw(2, 3, memories, tokens * steps, ROWS if channels else 1).abs()
    write, q = draw(2, 3, 1, tokens * steps, columns), draw(2, 3, 1, 2, tokens, ROWS)
    return q, k, beta * k, write, decay, draw(2, 3, memories, ROWS, columns)


def plain_loop(q, k, erase, write, decay, matrix, steps=1):
    """S <- Diag(a) S; S <- S + k (w - e'S); q'S: one step after the other."""
    out = []
    for t in range(q.shape[-2]):
        for step in range(t * steps, (t + 1) * steps):
            matrix = decay[..., step, :, None].exp() * matrix
            found = torch.einsum("bhmkc,bhmk->bhmc", matrix, erase[..., step, :])
            matrix = matrix + torch.einsum("bhmk,bhmc->bhmkc", k[..., step, :], write[..., step, :] - found)
        out.append(torch.einsum("bhmkc,bhmgk->bhmgc", matrix, q[..., t, :].expand(*k.shape[:3], -1, -1)))
    return torch.stack(out, -2), matrix


@pytest.mark.parametrize("channels", [False, True])
@pytest.mark.parametrize("memories, steps", [(1, 1), (3, 1), (1, 2)])
def test_chunks_are_the_plain_loop(channels, memories, steps):
    given = steps_of(11, channels, memories, steps)
    expected, matrix = plain_loop(*given, steps)
    for size in (1, 4, 16):
        out, last = read_and_write(*given, steps, size)
        assert (out - expected).abs().max() < 1e-12 and (last - matrix).abs().max() < 1e-12


def naive(name):
    """A plain file of flash-linear-attention, which needs no GPU; its package does."""
    if find_spec("fla") is None or find_spec("einops") is None:
        pytest.skip("fla-core is not installed")
    (root,) = find_spec("fla").submodule_search_locations
    spec = spec_from_file_location(f"naive_{name}", Path(root) / "ops" / name / "naive.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["gla", "delta_rule", "gated_delta_rule", "kda", "generalized_delta_rule/dplr"])
def test_rules_are_those_of_their_authors(name):
    module = naive(name)
    q, k, _, write, decay, nothing = (x.float() for x in steps_of(33, channels=name != "gated_delta_rule"))
    decay, beta = decay / 8, torch.rand(2, 3, 1, 33, 1, generator=torch.Generator().manual_seed(1))
    asks, keys, values, logs = q[:, :, 0, 0] * ROWS**0.5, k[:, :, 0], write[:, :, 0], decay[:, :, 0]  # (…, tokens, dim)
    shares, erase, steps = beta[:, :, 0], beta * k, 1
    first = [x.transpose(1, 2) for x in (asks, keys, values, logs, shares[..., 0])]
    if name == "gla":
        expected, erase = module.naive_recurrent_gla(*first[:4])[0].transpose(1, 2), None
    elif name == "delta_rule":
        expected, write, decay = module.delta_rule_recurrence(asks, keys, values, shares)[0], beta * write, 0 * decay
    elif name == "gated_delta_rule":
        given = *first[:3], first[4], first[3][..., 0]
        expected, write = module.naive_recurrent_gated_delta_rule(*given)[0].transpose(1, 2), beta * write
    elif name == "kda":
        expected, write = module.naive_recurrent_kda(*first)[0].transpose(1, 2), beta * write
    else:  # what is found before the decay is taken out in a step of its own
        expected = module.dplr_recurrence(asks, keys, values, -shares * keys, keys.roll(1, -1), logs)[0]
        takes, nothing_written = shares * keys, torch.zeros_like(write)
        found = takes[:, :, None] / decay.exp()
        erase = torch.stack([found, torch.zeros_like(found)], 4).flatten(3, 4)
        write = torch.stack([nothing_written, write], 4).flatten(3, 4)
        decay = torch.stack([decay, torch.zeros_like(decay)], 4).flatten(3, 4)
        k, steps = torch.stack([k.roll(1, -1), k], 4).flatten(3, 4), 2
    out, _ = read_and_write(q, k, erase, write, decay, torch.zeros_like(nothing), steps, 16)
    torch.testing.assert_close(out[:, :, 0, 0], expected, atol=2e-6, rtol=1e-4)


def by_time(*tensors):
    """(batch, heads, tokens, …) of one memory as the authors have it: (batch, tokens, heads, …)."""
    return [x[:, :, 0].transpose(1, 2) for x in tensors]


@pytest.mark.parametrize("name", ["retention", "simple_gla", "linear_attn", "gated_delta_product", "gdn2"])
def test_further_rules_are_those_of_their_authors(name):
    module, steps = naive(name), 2 if name == "gated_delta_product" else 1
    given = steps_of(21, name == "gdn2", steps=steps)
    q, k, _, write, decay, matrix = (x.float() for x in given)
    erase, decay, matrix = None, decay / 8, torch.zeros_like(matrix)
    asks, scale = q[:, :, :, 0], ROWS**-0.5
    beta, wide = (torch.rand(x.shape, generator=torch.Generator().manual_seed(1)) for x in (write[..., :1], write))
    if name == "retention":
        expected = module.naive_retention(asks[:, :, 0] / scale, k[:, :, 0], write[:, :, 0]).transpose(1, 2)
        decay = (1 - 2.0 ** (-5.0 - torch.arange(3)))[:, None, None, None].log().expand_as(decay)
    elif name == "simple_gla":
        expected = module.naive_recurrent_simple_gla(*by_time(asks / scale, k, write, decay[..., 0]))[0]
    elif name == "linear_attn":  # the sum of weights is one more column of values
        q, asks, k, decay = q.abs(), asks.abs(), k.abs(), 0 * decay
        expected = module.naive_recurrent_linear_attn(*by_time(asks / scale, k, write), normalize=True)[0]
        write, matrix = torch.cat([write, torch.ones_like(beta)], -1), torch.cat([matrix, matrix[..., :1]], -1)
    elif name == "gated_delta_product":
        decay = torch.where(torch.arange(42)[:, None] % 2 == 0, decay, 0.0)  # of each token, in its first step
        own = by_time(asks, k, write, decay[..., ::2, 0], beta[..., 0])
        expected = module.naive_recurrent_gated_delta_product(*own, scale=1.0, num_householder=2)[0]
        erase, write = beta * k, beta * write
    else:
        gate = torch.rand(k.shape, generator=torch.Generator().manual_seed(2))
        expected = module.naive_recurrent_gdn2(*by_time(asks / scale, k, write, decay, gate, wide))[0]
        erase, write = gate * k, wide * write
    for size in (1, 8):
        out, _ = read_and_write(q, k, erase, write, decay, matrix, steps, size)
        out = out[..., :-1] / out[..., -1:] if name == "linear_attn" else out
        torch.testing.assert_close(out[:, :, 0, 0].transpose(1, 2), expected, atol=5e-6, rtol=1e-4)


def test_chunks_have_the_gradients_of_the_plain_loop():
    given = [x.requires_grad_() for x in steps_of(9)]
    wanted = torch.autograd.grad(sum(x.square().sum() for x in plain_loop(*given)), given)
    found = torch.autograd.grad(sum(x.square().sum() for x in read_and_write(*given, 1, 4)), given)
    assert max((a - b).abs().max() for a, b in zip(wanted, found, strict=True)) < 1e-10


@pytest.mark.parametrize("name", UPDATE_RULES)
@torch.no_grad()
def test_a_text_may_be_cut_anywhere(name):
    q, k, v = texts(23)
    memory = memory_of(name)
    whole, state = read(q, k, v, memory)
    for cuts, attend in product(((1, 2, 9), (14,), range(1, 23)), (linear_attention, attend_text_with_features)):
        pieces, other = read(q, k, v, memory, cuts=cuts, attend=attend)
        assert (pieces - whole).abs().max() < 1e-9
        for key, tensor in tensors(state).items():
            assert (tensors(other)[key] - tensor).abs().max() < 1e-9 if tensor.numel() else True, key
    chunked = attend_text_with_features(q, k, v, memory, WINDOW, None, memory.empty(k, v, WINDOW, SINKS), chunk=7)
    assert (chunked - whole).abs().max() < 1e-9


@pytest.mark.parametrize("name", UPDATE_RULES)
@torch.no_grad()
def test_padding_and_later_tokens_change_nothing(name):
    q, k, v = texts(19)
    memory, real = memory_of(name), torch.ones(2, 19, dtype=torch.bool)
    real[0, [0, 3, 4, 11]] = False
    padded, state = read(q, k, v, memory, real=real, cuts=(8,))
    alone, expected = read(q[:1, ..., real[0], :], k[:1, :, real[0]], v[:1, :, real[0]], memory)
    assert (padded[:1, ..., real[0], :] - alone).abs().max() < 1e-9
    for key, tensor in tensors(expected).items():
        assert (tensors(state)[key][:1] - tensor).abs().max() < 1e-9 if tensor.numel() else True, key
    before = {key: x.clone() for key, x in tensors(state).items()}
    nothing = torch.zeros(2, 3, dtype=torch.bool)
    linear_attention(q[..., :3, :], k[:, :, :3], v[:, :, :3], memory, WINDOW, nothing, state)
    assert [key for key, x in tensors(state).items() if not torch.equal(x, before[key]) and "window" not in key] == []
    q[..., 12:, :], k[:, :, 12:], v[:, :, 12:] = 9.0, -9.0, 9.0
    again, _ = read(q, k, v, memory, real=real, cuts=(8,))
    rows = real[0, :12]
    assert (again[:1, ..., :12, :][..., rows, :] - padded[:1, ..., :12, :][..., rows, :]).abs().max() < 1e-9


@pytest.mark.parametrize("name", UPDATE_RULES)
def test_a_state_takes_the_bytes_that_are_counted(name):
    q, k, v = (x.float() for x in texts(9))
    for rows in (3, 4):
        memory = memory_of(name, rows=rows)
        memory.rule.float()
        with torch.no_grad():
            _, state = read(q, k, v, memory)
        exact = {*ExactState.nothing(k, v, 0, 0)}
        held = sum(x.numel() for key, x in tensors(state).items() if key not in exact) // (len(k) * k.shape[1])
        assert held == UPDATE_RULES[name].numbers(rows, DIM, VALUE_DIM, q.shape[2])


def test_strong_decays_are_finite_forward_and_backward():
    q, k, erase, write, _, matrix = (x.float() for x in steps_of(64))
    decay = torch.full_like(k, -5.0).requires_grad_()
    out, last = read_and_write(q, k, erase, write, decay, matrix, 1, 16)
    (gradient,) = torch.autograd.grad(out.square().sum() + last.square().sum(), decay)
    assert out.isfinite().all() and last.isfinite().all() and gradient.isfinite().all()


def test_moments_are_those_of_all_far_keys_however_they_came():
    _, k, v = texts(30)
    memory = memory_of("gdn")
    for edges in ((0, 30), (0, 11, 30)):
        state = memory.empty(k, v, 0, 0)
        for a, b in zip(edges, edges[1:], strict=False):
            count = torch.arange(a + 1, b + 1, dtype=torch.float64)[None, None, :, None]
            running_moments(state, k[:, :, a:b], v[:, :, a:b], torch.ones_like(count), count)
        torch.testing.assert_close(state.key_mean, k.mean(2))
        torch.testing.assert_close(state.key_variance, k.var(2, correction=0))
        torch.testing.assert_close(state.value_mean, v.mean(2))
