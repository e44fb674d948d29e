"""Errors of a far mass and of far values, against a plain loop over rows."""

import torch

from linearizer.method.recorder import far_errors

HEADS, GROUP, TOKENS, DIM, WINDOW, SINKS = 2, 2, 12, 4, 3, 1


def drawn():
    generator = torch.Generator().manual_seed(0)
    sizes = (HEADS, GROUP, TOKENS, DIM), (HEADS, TOKENS, DIM), (HEADS, TOKENS, 3)
    return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]


def measured(query, key, value, rows):
    return far_errors(query[:, :, rows], key, value, rows, SINKS, WINDOW)


def test_errors_are_those_of_a_plain_loop():
    query, key, value = drawn()
    rows = torch.tensor([0, 2, 5, 8, 11])  # nothing is far for the first two
    expected = torch.zeros(HEADS, 3, dtype=torch.float64)
    for head in range(HEADS):
        for asks in query[head]:
            for row in (5, 8, 11):
                far = slice(SINKS, row - WINDOW + 1)
                near = [*range(SINKS), *range(row - WINDOW + 1, row + 1)]
                q, keys, values = asks[row], key[head], value[head]
                exact = (q @ keys[: row + 1].T).softmax(-1) @ values[: row + 1]
                mass = (q @ keys[far].T).logsumexp(-1)
                own = (q @ keys[far].T).softmax(-1) @ values[far]
                count = row - WINDOW + 1 - SINKS
                spread = (q.square() * keys[far].var(0, correction=0)).sum() / 2
                plain = torch.tensor(count).double().log() + q @ keys[far].mean(0) + spread

                def attend(logit, far_value, q=q, keys=keys, values=values, near=near):
                    weights = torch.cat([q @ keys[near].T, logit[None]]).softmax(-1)
                    return weights @ torch.cat([values[near], far_value[None]])

                assert torch.allclose(attend(mass, own), exact)
                outputs = exact, exact - attend(plain, own), exact - attend(mass, values[far].mean(0))
                expected[head] += torch.stack([x.square().sum() for x in outputs])
    torch.testing.assert_close(measured(query, key, value, rows), expected)


def test_equal_far_keys_have_no_error_of_mass_and_equal_values_none_of_values():
    query, key, value = drawn()
    rows = torch.arange(TOKENS)
    whole, mass, values = measured(query, key[:, :1].expand_as(key), value, rows).unbind(-1)
    assert (mass < 1e-20 * whole).all() and (values < 1e-20 * whole).all()  # all far tokens weigh the same
    whole, mass, values = measured(query, key, value[:, :1].expand_as(value), rows).unbind(-1)
    assert (values < 1e-20 * whole).all()
