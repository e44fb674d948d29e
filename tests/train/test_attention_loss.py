"""The row-blocked losses and their gradients agree with the textbook form, at any magnitude."""

import pytest
import torch

from linearizer.student.feature_maps import far_logits_exactly
from linearizer.train import attention_loss as module
from linearizer.train.attention_loss import attention_loss
from tests.support.attention_losses import DIM, make


def textbook(u, w, q, k, window, sinks):
    """Everything tokens × tokens, and features besides: (loss, least)."""
    tokens = q.shape[-2]
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    causal, near = j <= i, (j < sinks) | (i - j < window)
    scores = (q @ k[:, :, None].mT).masked_fill(~causal, -torch.inf)
    logits = torch.where(near & causal, scores, far_logits_exactly(u, w)).masked_fill(~causal, -torch.inf)
    p = scores.softmax(-1)
    losses = [-(p * x.log_softmax(-1).masked_fill(~causal, 0)).sum(-1).mean() for x in (logits, scores)]
    return losses[0], losses[1]


def with_gradients(loss, u, w, *arguments):
    u, w = u.clone().requires_grad_(), w.clone().requires_grad_()
    value, least = loss(u, w, *arguments)
    gradients = torch.autograd.grad(value, (u, w)) if value.requires_grad else (0 * u, 0 * w)
    return value.detach(), least, gradients


def relative(a, b):
    return ((a - b).norm() / b.norm().clamp_min(1e-30)).item()


@pytest.fixture(params=[(128, 2**19), (16, 64)], ids=["one block", "many blocks"])
def blocks(request, monkeypatch):
    monkeypatch.setattr(module, "ROWS", request.param[0])
    monkeypatch.setattr(module, "BLOCK", request.param[1])


@pytest.mark.parametrize("window, sinks", [(0, 0), (5, 0), (1, 3), (20, 2), (0, 4), (100, 4)])
@pytest.mark.parametrize("tokens", [1, 16, 50])
def test_loss_and_gradients_are_the_textbook_s(window, sinks, tokens, blocks):
    inputs = make(tokens)
    value, least, gradients = with_gradients(attention_loss, *inputs, window, sinks)
    expected, lowest, expected_gradients = with_gradients(textbook, *inputs, window, sinks)
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(least, lowest.to(least), rtol=1e-10, atol=1e-12)
    for gradient, expected_gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, expected_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("case", ["a first key of norm 60", "all keys of norm 60", "a later key", "scores of ±80"])
@pytest.mark.parametrize("window, sinks", [(0, 0), (3, 2)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_texts_are_right(case, window, sinks, dtype):
    u, w, q, k = make(40)
    generator = torch.Generator().manual_seed(1)
    z = torch.randn(2, 5, DIM, generator=generator, dtype=torch.float64)
    length = k.norm(dim=-1, keepdim=True)
    if case == "a first key of norm 60":
        k[:, :, 0] *= 60 / length[:, :, 0]
    elif case == "all keys of norm 60":
        k *= 60 / length
    elif case == "a later key":
        k[:, :, 20] *= 60 / length[:, :, 20]
    else:
        k *= 80**0.5 / length
        q = k[:, :, None] * torch.where(torch.arange(40)[:, None] % 2 == 0, 1.0, -1.0)
    u = q @ z[:, None].mT - q.square().sum(-1, keepdim=True) / 2
    w = k @ z.mT - k.square().sum(-1, keepdim=True) / 2
    rounded = [x.to(dtype) for x in (u, w, q, k)]
    exact = with_gradients(textbook, *(x.double() for x in rounded), window, sinks)
    plain = with_gradients(textbook, *rounded, window, sinks)
    result = with_gradients(attention_loss, *rounded, window, sinks)
    floor = 1e-5 if dtype == torch.float32 else 1e-10
    assert relative(result[0], exact[0]) <= 4 * relative(plain[0], exact[0]) + floor
    for gradient, plain_gradient, exact_gradient in zip(result[2], plain[2], exact[2], strict=True):
        assert relative(gradient, exact_gradient) <= 4 * relative(plain_gradient, exact_gradient) + floor


def test_gradients_of_a_row_sum_to_nothing_and_both_sides_agree():
    u, w, q, k = make(60)
    for window, sinks in ((0, 0), (7, 2)):
        _, _, (by_row, by_key) = with_gradients(attention_loss, u, w, q, k, window, sinks)
        torch.testing.assert_close(by_row.sum((2, 3)), by_key.sum(2), rtol=0, atol=1e-14)
        if not window:
            assert by_row.sum(-1).abs().max() < 1e-14 < by_row.abs().max()


def test_a_scale_multiplies_the_scores():
    u, w, q, k = make(20)
    scaled, multiplied = attention_loss(u, w, q, k, 3, 1, scale=0.3), attention_loss(u, w, q * 0.3, k, 3, 1)
    assert scaled.value == multiplied.value and scaled.least == multiplied.least


def test_memory_stays_linear():
    """The largest tensor made for 1,024 tokens is far smaller than tokens × tokens."""
    u, w, q, k = make(1024, batch=1, heads=1, group=1, dtype=torch.float32)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **kwargs or {})
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        with_gradients(attention_loss, u, w, q, k, 0, 0)
    assert largest <= 128 * 1024
