"""Rows of the kernels' benchmark: the losses beside other ways to write them."""

import subprocess
import sys

import torch

from linearizer.train.attention_loss import attention_loss, blocked
from tests.benchmarks.attention_rows import group_of
from tests.benchmarks.timing import GPU, attempt, compiled, draw, peak_so_far


def textbook(u, w, q, k):
    """p log p̂ with everything tokens × tokens."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    a = (u.exp() @ w.exp()[:, :, None].mT).masked_fill(~mask, 0)
    return -(p * (a / (a.sum(-1, keepdim=True) + 1e-12)).clamp(min=1e-12).log()).sum(-1).mean()


def lolcats(u, w, q, k):
    """The form of the LoLCATs trainer: clamped weights as logits of a cross-entropy with probabilities as targets."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    a = (u.exp() @ w.exp()[:, :, None].mT).masked_fill(~mask, 0)
    a = (a / (a.sum(-1, keepdim=True) + 1e-12)).clamp(min=1e-12).log()
    return torch.nn.functional.cross_entropy(a.flatten(0, -2), p.flatten(0, -2).to(a.dtype))


def leanest(u, w, q, k):
    """The fewest passes that eager PyTorch needs: the denominators by a running sum of the keys."""
    mask = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).tril()
    p = (q @ k[:, :, None].mT).masked_fill(~mask, -1e30).softmax(-1)
    query, key = u.exp(), w.exp()
    total = (query * key.cumsum(-2)[:, :, None]).sum(-1).log()
    return (total - (p * (query @ key[:, :, None].mT).clamp(min=1e-30).log()).sum(-1)).mean()


def with_gradients(loss, u, w, *rest):
    u, w = u.detach().requires_grad_(), w.detach().requires_grad_()
    value = loss(u, w, *rest)
    return value, *torch.autograd.grad(value, (u, w))


def loss_inputs(batch, tokens, heads, group, dim, features):
    q, k = draw(batch, heads, group, tokens, dim) * dim**-0.25, draw(batch, heads, tokens, dim) * dim**-0.25
    feature_map = group_of(heads, dim, features).feature_map
    with torch.no_grad():
        return feature_map.queries(q.float()), feature_map.keys(k.float()), q, k


FORMS = {
    "ours": lambda u, w, q, k: attention_loss(u, w, q, k, 0, 0).value,
    "l2": lambda u, w, q, k: attention_loss(u, w, q, k, 0, 0, "l2").value,
    "textbook": textbook,
    "lolcats": lolcats,
    "leanest": leanest,
}


def losses(quick):
    sizes = [(8, 2048, 32, 1, 128), (8, 2048, 8, 4, 128), (1, 8192, 8, 4, 128), (32, 512, 12, 1, 64)]
    for size in (sizes[:1] if quick else sizes) if GPU else [(1, 2048, 8, 1, 64)]:
        for features in (64, 128, 256) if GPU and not quick else (64,):
            row = loss_row(size, features)
            for name in () if GPU else FORMS:
                if "seconds" in row[name]:
                    row[name]["bytes"] = peak_in_a_process(name)
            yield row


def loss_row(size, features):
    inputs = loss_inputs(*size, features)
    row = {"op": "loss", "size": size, "features": features}
    for name, form in FORMS.items():
        row[name] = attempt(name, lambda form=form: [lambda: with_gradients(form, *inputs)], least=20)
    if GPU:
        lean = [x.bfloat16() for x in inputs]
        for name, form in (("leanest bf16", leanest), ("leanest compiled", compiled(leanest))):
            row[name] = attempt(name, lambda form=form: [lambda: with_gradients(form, *lean)], least=20)
    return row | {"error": loss_error(*size[2:], features)}


def loss_error(heads, group, dim, features):
    u, w, q, k = loss_inputs(1, 300, heads, group, dim, features)
    exact = blocked(*(x.double() for x in (u, w, q, k)), 0, 0, False, True)[1][0] / u[..., 0].numel()
    ours = with_gradients(FORMS["ours"], u, w, q, k)[1]
    return ((ours.double() - exact).norm() / exact.norm()).item()


def peak_in_a_process(name):
    """The bytes that a loss adds to the peak of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.kernels", "--peak", name], capture_output=True, check=True
    )
    return int(done.stdout)


def peak(name):
    inputs = loss_inputs(1, 2048, 8, 1, 64, 64)
    short = [x[..., :64, :].contiguous() for x in inputs]
    with_gradients(FORMS[name], *short)  # loads what every form needs
    before = peak_so_far()
    with_gradients(FORMS[name], *inputs)
    return peak_so_far() - before
