"""Losses by kernels are the blocked ones of PyTorch, and so are their gradients."""

import pytest
import torch

pytest.importorskip("triton")

from linearizer.train import attention_loss, attention_loss_kernels
from tests.support.attention_losses import make
from tests.support.kernels import CLOSE, DEVICE, EXACT, ON_GPU, relative

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # lanes that are masked afterwards

ALONE = dict(heads=1, batch=1)  # one text and head: the interpreter takes its time for every program
LOSSES = {
    "no window": (70, 0, 0, ALONE),
    "window and sinks": (40, 5, 3, dict(features=37)),
    "sinks alone": (33, 0, 3, dict(group=4, **ALONE)),
    "everything near": (30, 64, 1, ALONE),
    "eight query heads": (34, 2, 0, dict(group=8, **ALONE)),
    "one query head": (65, 1, 1, dict(group=1, batch=1)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_their_gradients_are_the_blocked_ones(name):
    tokens, window, sinks, sizes = LOSSES[name]
    inputs = [x.to(DEVICE, EXACT) for x in make(tokens, **sizes)]
    total, (du, dw) = attention_loss.blocked(*inputs, window, sinks, True, 0.5)
    loss, least, lost, kernel_du, kernel_dw = attention_loss_kernels.losses(*inputs, window, sinks, 0.5)
    assert relative(torch.stack([loss.sum(), least.sum()]), total) < CLOSE
    assert max(relative(kernel_du, du), relative(kernel_dw, dw)) < CLOSE
    assert not lost.any()


def test_heads_that_lost_pairs_are_computed_again():
    u, w, q, k = (x.float().to(DEVICE) for x in make(40, heads=1))
    w[1, 0, 0] -= 2000  # a key whose features all vanish beside the others', and which the teacher looks at
    exact = attention_loss.blocked(*(x.double() for x in (u, w, q, k)), 0, 0, True)
    result = attention_loss.fused(u, w, q, k, 0, 0, True)
    assert relative(result[0], exact[0]) < 1e-5
    assert max(relative(a, b) for a, b in zip(result[1], exact[1], strict=True)) < 1e-4


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("features", [64, 182])
def test_on_a_gpu_kernels_err_at_most_twice_as_much_as_pytorch(dtype, features):
    u, w, *text = (x.to(DEVICE) for x in make(300, features=features, dtype=torch.float32))
    text = [x.to(dtype) for x in text]
    best = attention_loss.blocked(*(x.double() for x in (u, w, *text)), 16, 4, True)
    slow = attention_loss.blocked(*(x.to(dtype) for x in (u, w)), *text, 16, 4, True)
    fast = attention_loss.fused(u, w, *text, 16, 4, True)
    assert relative(fast[0].double(), best[0]) <= 2 * relative(slow[0].double(), best[0]) + 1e-4
    for gradient, plain, exact in zip(fast[1], slow[1], best[1], strict=True):
        assert relative(gradient.double(), exact) <= 2 * relative(plain.double(), exact) + 1e-3
