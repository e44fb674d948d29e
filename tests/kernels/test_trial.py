"""Kernels are believed where a trial has found them right, and PyTorch does their work where it has not."""

import warnings

import pytest
import torch

pytest.importorskip("triton")

from linearizer.kernels import trial
from linearizer.kernels.triton import dispatch, state_pool, text_features, text_gradients, text_slots, token
from linearizer.kernels.triton.dispatch import linear_attention
from linearizer.student.columns import FeatureState
from linearizer.train import attention_loss as losses
from linearizer.train import attention_loss_kernels
from linearizer.train.attention_loss import attention_loss
from tests.support import layers
from tests.support.attention_losses import make as make_loss
from tests.support.kernels import mutate
from tests.support.log_features import far_of, make

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


@pytest.fixture(autouse=True)
def untried(monkeypatch):
    """Nothing is known yet, and Triton's interpreter counts as a device."""
    monkeypatch.setattr(trial, "_verdicts", {})
    monkeypatch.setattr(trial, "DEVICES", {DEVICE})
    monkeypatch.setattr(text_features, "SEGMENT", 32)
    if not ON_GPU:  # the interpreter is slow: shorter trials
        for name, size in (("ENDS", (4, 38)), ("WINDOW", 4)):
            monkeypatch.setattr(dispatch, f"TRIAL_{name}", size)
        monkeypatch.setattr(losses, "TRIAL_TOKENS", 34)


@pytest.fixture
def launches(monkeypatch):
    """Count what the doors hand to kernels, trials included."""
    counted = []
    for holder, name in (
        (attention_loss_kernels, "losses"),
        (dispatch.FeatureAttention, "apply"),
        (state_pool, "launch_text"),
        (state_pool, "launch_token"),
    ):
        run = getattr(holder, name)
        monkeypatch.setattr(holder, name, lambda *args, run=run, name=name: (counted.append(name), run(*args))[1])
    return counted


def inputs(tokens):
    q, k, v, feature_map = make(tokens, heads=1, batch=1, dtype=torch.float32)
    return q.to(DEVICE), k.to(DEVICE), v.to(DEVICE), far_of(feature_map.to(DEVICE))


def read(attend=linear_attention):
    q, k, v, features = inputs(5)
    with torch.no_grad():
        return attend(q, k, v, features, 2, None, FeatureState.empty(k, v, 2, 1, 4))


def train():
    q, k, v, features = inputs(5)
    out = linear_attention(q.requires_grad_(), k, v, features, 2, None, FeatureState.empty(k, v, 2, 1, 4))
    return torch.autograd.grad(out.sum(), q)[0]


def read_slots(tokens=0):
    student = layers.layer([[4, 0, 3, 2, 8]], dtype=torch.float32).to(DEVICE)
    given, memory = [x.to(DEVICE) for x in layers.text(1, 6, dtype=torch.float32)], []
    student.reader = "pytorch" if tokens else None  # the text before tokens is read by PyTorch
    with torch.no_grad():
        out = student(*(x[:, :, : 6 - tokens] for x in given), 0.5, None, memory)
        student.reader = None
        return student(*(x[:, :, 5:] for x in given), 0.5, None, memory) if tokens else out


def read_token():
    return read_slots(1)


def compare():
    return attention_loss(*(x.float().to(DEVICE) for x in make_loss(9, heads=1, batch=1)), 2, 1).value


DOORS = {
    "attention": (read, "apply"),
    "attention and its gradients": (train, "apply"),
    "texts with windows and slots": (read_slots, "launch_text"),
    "tokens with windows and slots": (read_token, "launch_token"),
    "losses of attention rows": (compare, "losses"),
}


@pytest.mark.parametrize("family", DOORS)
def test_a_kernel_that_is_right_is_used_and_tried_once(family, launches):
    call, name = DOORS[family]
    first = call()
    tried = len(launches)
    assert tried > 1 and set(launches) == {name}
    again = call()
    assert len(launches) == tried + 1
    assert torch.equal(first, again)
    assert [key[0] for key in trial._verdicts] == [family]


WRONG = {  # a line of each kernel, and what it is exchanged for
    "attention": (text_features, "mean * decay[:, None] + segment_mean", "mean + segment_mean"),
    "attention and its gradients": (text_gradients, "- delta_mean[None, :]", ""),
    "texts with windows and slots": (text_slots, "total * decay + tl.sum(p, 1)", "total + tl.sum(p, 1)"),
    "tokens with windows and slots": (token, "= new_top, total * decay + weight", "= new_top, total * decay"),
    "losses of attention rows": (attention_loss_kernels, "weight = factor - p", "weight = 1.01 * factor - p"),
}


@pytest.mark.skipif(ON_GPU, reason="the interpreter shows it as well")
@pytest.mark.parametrize("line, reason", [(None, "they err by"), ("-tl.no_such_function(1)", "they failed there with")])
@pytest.mark.parametrize("family", DOORS)
def test_a_broken_kernel_is_left_alone_and_said_so_once(family, line, reason, monkeypatch, tmp_path):
    call, _ = DOORS[family]
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected = call()
    monkeypatch.delenv("LINEARIZER_KERNELS")
    module, right, wrong = WRONG[family]
    mutate(module, right, line or wrong, tmp_path, monkeypatch)
    with pytest.warns(
        RuntimeWarning, match=f"^on {DEVICE} PyTorch does the work .* {family}, because {reason}"
    ) as said:
        assert torch.equal(call(), expected)
    (message,) = [text for each in said if "encountered in" not in (text := str(each.message))]  # of the interpreter
    assert "\n" not in message
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(call(), expected)


def test_the_environment_keeps_kernels_off(launches, monkeypatch):
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    for call, _ in DOORS.values():
        call()
    assert not launches and not trial._verdicts


def test_nothing_is_tried_while_it_is_recorded(launches, monkeypatch):
    monkeypatch.setattr(trial, "is_recorded", lambda x: True)
    read()
    assert not launches and not trial._verdicts


@pytest.mark.filterwarnings("ignore")  # what a compiler says of its own
def test_what_is_compiled_goes_on_with_kernels_that_were_found_right(monkeypatch):
    if not ON_GPU:  # the compiler is not to look into the interpreter
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", torch.compiler.disable(GridExecutor.__call__))
    expected = read()
    assert torch.equal(read(torch.compile(linear_attention, backend="eager")), expected)
    assert [*trial._verdicts.values()] == [True]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, MemoryError])
def test_a_trial_that_finds_no_memory_says_nothing_of_the_kernels(error, launches, monkeypatch):
    monkeypatch.setenv("LINEARIZER_KERNELS", "0")
    expected = read()
    monkeypatch.delenv("LINEARIZER_KERNELS")

    def full(*_):
        raise error("out of memory")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(trial, "relative_error", full)
        assert torch.equal(read(), expected) and not trial._verdicts
    launches.clear()
    read()
    assert launches and all(trial._verdicts.values())


def test_a_result_that_is_no_number_is_wrong():
    x = torch.ones(3)
    assert "err by nan" in trial.find_fault(lambda kernels, dtype: [x * torch.nan if kernels else x.to(dtype)], x)
