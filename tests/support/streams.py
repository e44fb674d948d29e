"""A stand-in for streams of CUDA, which records which work is ordered after which; the work itself is done at once."""

from contextlib import AbstractContextManager, contextmanager

opened = []  # the streams of a test


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
