"""A stand-in for streams of CUDA, which records which work is ordered after which; the work itself is done at once."""

from contextlib import AbstractContextManager, contextmanager
from functools import partial
from types import SimpleNamespace

import torch

from linearizer.kernels.graphs import text_parts
from linearizer.student.attention_of_student import tensors
from tests.support.kernels import ON_GPU

opened = []  # the streams of a test


def use_streams(monkeypatch, *modules):
    """Let modules read texts on streams, as on a GPU."""
    if not ON_GPU:
        monkeypatch.setattr(text_parts, "DEVICES", {"cpu"})
        for module in (text_parts, *modules):
            monkeypatch.setattr(module, "Streams", RecordedStreams)
        known = SimpleNamespace(multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: known)


def record_launches(student, reader, monkeypatch):
    """Let layers be read by kernels or by PyTorch, and say what they launch: (text, layer, part)."""
    for index, layer in enumerate(student.students()):
        layer.reader = reader
        monkeypatch.setattr(layer, "attend", partial(launched, index, layer.attend))
    opened.clear()


def launched(layer, attend, *inputs):
    if opened:
        opened[-1].launch((len(opened), layer, opened[-1].parts - 1))
    return attend(*inputs)


def assert_same_states(cache, expected):
    for layer, known in zip(cache.layers, expected.layers, strict=True):
        assert layer.tokens_read == known.tokens_read and layer.part_order is None
        for state, numbers in zip(layer.memory, known.memory, strict=True):
            assert all(torch.equal(x, tensors(numbers)[name]) for name, x in tensors(state).items())


class RecordedStreams(AbstractContextManager):
    """Streams without a device: what was launched on one, or before an event it waited for, is done before what
    follows."""

    def __init__(self, device, count, event=None):
        self.count, self.done, self.parts, self.current = count, [event or frozenset()] * count, 0, 0
        self.before = {}  # work -> the work that is done before it
        opened.append(self)

    @contextmanager
    def begin_part(self):
        self.current = self.parts % len(self.done)
        self.parts += 1
        yield

    def launch(self, work):
        self.before[work] = self.done[self.current]
        self.done[self.current] |= {work}

    def mark(self):
        return self.done[self.current]

    def wait(self, event):
        self.done[self.current] |= event

    def keep_first(self):
        del self.done[1:]

    def __exit__(self, *error):
        self.done = [frozenset().union(*self.done)] * len(self.done)

    def hand_over(self, x):
        pass
