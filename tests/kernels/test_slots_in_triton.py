"""Texts and tokens by kernels give what PyTorch gives, and leave the same states, in every number of bits."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from triton.runtime import JITFunction
from triton.runtime.interpreter import InterpretedFunction

pytest.importorskip("triton")

from linearizer.kernels import door, trial
from linearizer.kernels.triton import text_slots
from linearizer.kernels.triton import token as token_kernels
from tests.support import layers
from tests.support.kernels import CLOSE, DEVICE, EXACT, ON_GPU
from tests.support.layers import assert_same_states, layer, read, scores, text

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # in rows that hold nothing
ENDS = (14, 15, 16, 17, 24)  # of calls: blocks leave in texts, and before two of the three tokens
ROWS = {  # what KV heads hold, and the sizes of keys and values
    "16 bits": ([[8, 0, 6, 4], [5, 0, 7, 4]], 4, 4),
    "16 bits, other values": ([[8, 0, 6, 4], [9, 0]], 4, 3),
    "8 bits": ([[7, 0, 5, 4, 8], [9, 0, 0, 0, 8]], 4, 4),
    "8 bits, turned": ([[7, 0, 5, 4, 8]], 8, 16),
    "6 bits": ([[7, 0, 5, 4, 6], [9, 0, 0, 0, 6]], 8, 8),
    "5 bits": ([[7, 0, 5, 4, 5]], 8, 8),
    "4 bits": ([[7, 0, 5, 4, 4]], 24, 16),
    "all kinds in a layer": (
        [[9, 0, 0, 0, 4], [7, 0, 6, 4, 8], "softmax", [5, 0, 7, 5, 4], [6, 0, 3, 3], [4, 5]],
        8,
        8,
    ),
    "several parts": ([[12, 0, 34, 2, 8], [70, 0, 0, 0, 8]], 8, 8),
    "many slots, large blocks": ([[44, 0, 150, 37, 5], [36, 0, 20, 18]], 8, 8),
}
TWO_TEXTS = dict(texts=2, ends=(3, 16, 17))


def read_rows(name, by_kernel, monkeypatch, ends=ENDS, texts=1, dtype=EXACT, cap=None):
    """Read texts and tokens; return what they saw, and the states. Of two texts, the second has gaps."""
    held, dim, value_dim = ROWS[name]
    student = layer(held, dim, value_dim, dtype).to(DEVICE)
    if student.turns is not None:
        for turned in student.turns.parameters():
            turned.data += torch.rand(turned.shape, generator=torch.Generator().manual_seed(1)).to(turned)
    student.reader = "triton" if by_kernel else "pytorch"
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    given = [x.to(DEVICE) for x in text(len(held), ends[-1], dim, value_dim, dtype)]
    real = torch.ones(2, ends[-1], dtype=torch.bool, device=DEVICE)
    real[1, [0, 3, 7]] = False
    altered = () if cap is None else scores(len(held), cap or None)
    out, states = read(student, [x[:texts] for x in given], ends, None if texts == 1 else real, altered=altered)
    return out if texts == 1 else out * real[:, None, :, None], states


def assert_alike(name, monkeypatch, **given):
    expected, states = read_rows(name, False, monkeypatch, **given)
    out, mine = read_rows(name, True, monkeypatch, **given)
    torch.testing.assert_close(out, expected, rtol=CLOSE, atol=CLOSE)
    assert_same_states(mine, states, rtol=CLOSE, atol=CLOSE)


@pytest.mark.parametrize("name", [*ROWS][:-1])
def test_texts_and_tokens_by_kernels_are_those_of_pytorch(name, monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(token_kernels, "NUMBERS_AT_ONCE", 256)
    assert_alike(name, monkeypatch)


def test_slots_merge_as_in_pytorch_however_many_and_however_often(monkeypatch):
    assert_alike("many slots, large blocks", monkeypatch, ends=(302, 303, 304, 305, 330))


def test_texts_of_several_lengths_are_read_a_few_periods_at_a_time(monkeypatch):
    monkeypatch.setattr(text_slots, "PERIOD_BYTES", 1)
    assert_alike("16 bits, other values", monkeypatch, **TWO_TEXTS)


@pytest.mark.parametrize("cap, name, given", [(3.0, "6 bits", {}), (0, "16 bits, other values", TWO_TEXTS)], ids=str)
def test_scores_are_capped_beside_learned_sinks_as_in_pytorch(cap, name, given, monkeypatch):
    assert_alike(name, monkeypatch, cap=cap, **given)


def test_tokens_are_read_before_all_sinks_are_there(monkeypatch):
    monkeypatch.setattr(layers, "SINKS", 3)
    assert_alike("6 bits", monkeypatch, ends=(1, 2, 3, 4, 9))


def test_heads_may_have_no_sinks(monkeypatch):
    monkeypatch.setattr(layers, "SINKS", 0)
    assert_alike("5 bits", monkeypatch, ends=(1, 2, 15, 16, 24))


class Operations(TorchDispatchMode):
    """Counts operations of PyTorch by name, and launches of kernels."""

    def __init__(self):
        super().__init__()
        self.counts, self.launches = Counter(), 0

    def launch(self, run, *args, **kwargs):
        self.launches += 1
        with _disable_current_modes():  # what the interpreter runs
            return run(*args, **kwargs)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


@pytest.fixture
def default(monkeypatch):
    """Read with heads as `best` allocates them, by kernels, one after the other."""
    monkeypatch.setattr(trial, "DEVICES", {DEVICE})
    student = layer([[7, 0, 5, 4, 4], [9, 0, 0, 0, 6]], dtype=torch.float32).to(DEVICE)
    student.reader = "triton"
    given, memory = [x[:1].to(DEVICE) for x in text(2, 108, dtype=torch.float32)], []

    @torch.no_grad()
    def go(begin, end, new_text=False):
        kind, seen = JITFunction if ON_GPU else InterpretedFunction, Operations()
        if new_text:
            memory.clear()
        with monkeypatch.context() as patch, seen:
            run = kind.run
            patch.setattr(kind, "run", lambda *args, **kwargs: seen.launch(run, *args, **kwargs))
            student(*(x[:, :, begin:end] for x in given), 0.5, None, memory)
        return seen

    return go


def test_a_token_runs_no_operation_of_pytorch_and_waits_for_no_device(default, monkeypatch):
    default(0, 14), default(14, 15)  # which lays the states out for tokens
    for name in ("item", "tolist", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} waits for a device"))
    for token in (15, 16):  # before the first a block merges
        seen = default(token, token + 1)
        assert seen.launches == 3
        assert seen.counts.pop("add_") == 1  # of the number of tokens read
        computed = {*seen.counts} - {"new_empty", "slice", "select", "unbind", "view", "unsqueeze", "permute"}
        assert computed <= {"promote_types"}  # which computes nothing on a device


def test_another_text_begins_with_zeros_alone_and_waits_for_no_device(default, monkeypatch):
    default(0, 14)
    for name in ("item", "tolist", "to", "copy_"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name: pytest.fail(f"{name} may wait for a device"))
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("a new tensor waits for its device"))
    seen = default(0, 14, new_text=True)
    views = {"slice", "select", "unbind", "view", "unsqueeze", "permute", "as_strided", "detach", "alias", "expand"}
    assert {*seen.counts} - views <= {"zeros", "new_empty", "ones_like", "add_", "promote_types"}
    assert seen.launches == 3


def test_a_learned_number_that_changes_between_texts_is_noticed(monkeypatch):
    monkeypatch.setattr(door, "may_run_in_triton", lambda *_: True)
    student, given = layer([[7, 0, 5, 4], [5, 0, 7, 4]], 4, 4).to(DEVICE), [x.to(DEVICE) for x in text(2, 24, 4, 4)]
    merger, outs = student.groups[0].merger, []

    def replace(x):
        x.data = x.data * 2

    changes = ("gain", lambda x: x), ("metric", lambda x: x.mul_(2)), ("gain", replace), ("mean_query", replace)
    for learned, change in changes:
        change(getattr(merger, learned))
        student.reader = "triton"
        outs.append(read(student, given, (24,))[0])
        student.reader = "pytorch"
        torch.testing.assert_close(outs[-1], read(student, given, (24,))[0], rtol=CLOSE, atol=CLOSE)
        assert not any(torch.allclose(outs[-1], out) for out in outs[:-1])


def test_reading_a_longer_text_takes_no_more_operations(default):
    default(0, 12), default(12, 24), default(24, 60)  # what is made once for texts of a length is made
    short, long = default(60, 72), default(72, 108)
    assert not {"bmm", "baddbmm", "_softmax", "logsumexp"} & {*short.counts, *long.counts}
    assert long.counts.total() <= short.counts.total()
    assert long.launches == short.launches == 3
