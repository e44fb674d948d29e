import pytest
import torch
from torch import nn

from linearizer.errors import RequestError
from linearizer.method.untrained import draw_layer
from linearizer.plan.head_bytes import Head
from linearizer.student.feature_maps import ScaledMap
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.layers import featured
from linearizer.teacher.observing import attending
from linearizer.train import losses
from linearizer.train.losses import AttentionInputs, LogitHead, direct_loss, hidden_states, layer_loss, logits_loss
from tests.support.families import FAMILIES
from tests.support.log_features import reference
from tests.support.models import student_of, teacher_of, tokens

SINKS, SCALE, SIZE = 2, 0.3, 8
CLOSE = dict(atol=1e-6, rtol=1e-4)  # e^S of an S of 10, in fp32, is known to about 1e-5
CAPPED = {"final_logit_softcapping": 3.0}
HELD = [[3, 16], [0, 32], [3, 16], [5, 0]]  # the last KV head has nothing to learn


def a_layer(feature_map="mlp"):
    torch.manual_seed(0)
    student = LayerStudent(HELD, SINKS, SIZE, feature_map)
    draw_layer(student, torch.Generator().manual_seed(0))
    inputs = AttentionInputs(torch.randn(2, 8, 21, SIZE), torch.randn(2, 4, 21, SIZE), torch.randn(2, 4, 21, 6), SCALE)
    return student, inputs


def logits_of(group, inputs):
    """Logits of the teacher and of the student for some heads: (batch, heads, group, tokens, tokens)."""
    q, k, _ = inputs.of_heads(group.heads)
    features, place = ScaledMap(group.feature_map, inputs.scale), torch.arange(q.shape[-2])
    near = (place < group.sinks) | (place[:, None] - place < group.window)
    exact = q @ k[:, :, None].mT
    u, w = features.queries(q), features.keys(k)
    far = torch.logsumexp(u[..., :, None, :] + w[:, :, None, None], -1)
    return exact, torch.where(near, exact, far)


def naive(group, inputs):
    exact, approximate = logits_of(group, inputs)
    causal = torch.ones(exact.shape[-2:], dtype=torch.bool).tril()
    p, log = exact.masked_fill(~causal, -1e30).softmax(-1), approximate.masked_fill(~causal, -1e30).log_softmax(-1)
    return -(p * log).sum(-1).mean()


def test_row_losses_and_their_gradients_are_the_naive_ones():
    student, inputs = a_layer()
    parameters = [p for p in student.parameters() if p.requires_grad]
    groups = featured(student)
    expected = sum(naive(group, inputs) * len(group.heads) for group in groups) / 3
    result = layer_loss("softmax", student, inputs, None)
    torch.testing.assert_close(result.loss, expected, **CLOSE)
    for a, b in zip(
        torch.autograd.grad(result.loss, parameters, allow_unused=True),
        torch.autograd.grad(expected, parameters, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, **CLOSE)


def test_the_excess_of_the_softmax_loss_is_the_divergence_of_the_rows():
    student, inputs = a_layer()
    causal, total = torch.ones(21, 21, dtype=torch.bool).tril(), 0
    for group in featured(student):
        exact, approximate = (x.masked_fill(~causal, -1e30).log_softmax(-1) for x in logits_of(group, inputs))
        total = total + len(group.heads) / 3 * (exact.exp() * (exact - approximate)).sum(-1).mean()
    torch.testing.assert_close(layer_loss("softmax", student, inputs, None).excess, total.detach())


def test_the_loss_l2_and_its_gradients_are_those_of_the_kernel_on_far_pairs():
    student, inputs = a_layer()
    parameters = [p for p in student.parameters() if p.requires_grad]
    total, place = torch.zeros(()), torch.arange(21)
    for group in featured(student):
        far = (place >= group.sinks) & (place[:, None] - place >= group.window)
        exact, approximate = (x.exp() * far for x in logits_of(group, inputs))
        errors = (exact - approximate).square().sum((2, 3, 4)) / exact.square().sum((2, 3, 4))
        total = total + errors.mean() * len(group.heads) / 3
    loss = layer_loss("l2", student, inputs, None).loss
    torch.testing.assert_close(loss, total, **CLOSE)
    for a, b in zip(*(torch.autograd.grad(x, parameters, allow_unused=True) for x in (loss, total)), strict=True):
        torch.testing.assert_close(torch.zeros(()) if a is None else a, torch.zeros(()) if b is None else b, **CLOSE)


def test_output_loss_and_its_gradients_are_the_naive_ones():
    student, inputs = a_layer()
    projection = nn.Linear(8 * 6, 10)  # its bias says nothing about the error
    parameters = [p for p in student.parameters() if p.requires_grad]
    exact, approximate = torch.zeros(2, 4, 2, 21, 6), torch.zeros(2, 4, 2, 21, 6)
    for group in featured(student):
        q, k, v = inputs.of_heads(group.heads)
        exact[:, group.heads] = reference(q, k, v, None, 21, 0)
        far = ScaledMap(group.feature_map, SCALE)
        approximate[:, group.heads] = reference(q, k, v, far, group.window, SINKS)
    weight = projection.weight.detach()

    def project(heads):
        return heads.flatten(1, 2).transpose(1, 2).flatten(2) @ weight.T

    expected = project(approximate - exact).square().sum() / project(exact).square().sum()
    result = layer_loss("output", student, inputs, projection)
    torch.testing.assert_close(result.loss, expected)
    for a, b in zip(
        torch.autograd.grad(result.loss, parameters), torch.autograd.grad(expected, parameters), strict=True
    ):
        torch.testing.assert_close(a, b, **CLOSE)


@pytest.mark.parametrize("family, altered", [*((f, {}) for f in FAMILIES), ("gemma3_text", CAPPED)])
def test_hidden_states_and_the_head_make_the_logits_of_the_model(family, altered):
    teacher, ids = teacher_of(family, **altered), tokens(2, 12)
    head = LogitHead(teacher, ids)
    with torch.no_grad():
        torch.testing.assert_close(head(hidden_states(teacher, ids)), teacher(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_model_that_bends_its_logits_is_refused():
    teacher = teacher_of("llama")
    teacher.lm_head.register_forward_hook(lambda module, args, out: out)
    teacher.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits.tanh()))
    with pytest.raises(RequestError, match="train layer by layer"):
        LogitHead(teacher, tokens(1, 12))


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("loss", ["logits", "direct"])
def test_pieces_of_logits_give_the_plain_loss_and_gradient(loss, pieces, monkeypatch):
    monkeypatch.setattr(losses, "TRAINED_LOGITS", 128 * -(-2 * 11 // pieces))
    student, ids = student_of("llama", [Head(window=3, features=16)]), tokens(2, 12)
    head = LogitHead(student, ids)
    with torch.no_grad(), attending(student, "sdpa"):
        target = hidden_states(student, ids)
        teacher = student(ids, use_cache=False).logits.log_softmax(-1)
    out = student(ids, labels=ids)
    if loss == "direct":
        result, plain = direct_loss(head, hidden_states(student, ids), ids), out.loss
    else:
        result = logits_loss(head, hidden_states(student, ids), target)
        plain = (teacher.exp() * (teacher - out.logits.log_softmax(-1))).sum(-1).mean()
    torch.testing.assert_close(result, plain)
    maps = [p for layer in student.students() for p in layer.parameters()]
    for a, b in zip(torch.autograd.grad(result, maps), torch.autograd.grad(plain, maps), strict=True):
        torch.testing.assert_close(a, b, **CLOSE)
