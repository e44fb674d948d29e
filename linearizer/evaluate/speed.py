"""Speed and memory of teacher and student on this device, by the length of the text.

Lengths are measured as far as memory and time allow; for longer lengths only predictions from the state's shape remain.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import linear_regression

import torch

from linearizer.evaluate.subjects import Subject, read_into_cache, read_logits
from linearizer.kernels.graphs.text_graphs import BEFORE as TEXTS_BEFORE
from linearizer.kernels.graphs.text_graphs import LONG
from linearizer.kernels.graphs.token_graph import BEFORE
from linearizer.plan import head_bytes
from linearizer.plan.head_bytes import Layer
from linearizer.progress import Progress, Steps
from linearizer.run.results import Breakeven, Pace, Speed, SpeedOfModel
from linearizer.teacher.logits import bytes_held, fresh_cache, vocabulary
from linearizer.teacher.ram import PeakMemory, free_bytes, run_if_it_fits

Tensor = torch.Tensor
LENGTHS = (1024, 4096, 16384, 65536, 131072)
TIMED = 15  # tokens that are written
MAX_BATCH = 64
MAX_MEMORY_SHARE = 0.8  # of the free memory


def measure_speed(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    lengths: Sequence[int],
    positions: int,
    seconds: float,
    seed: int = 0,
) -> Steps[Speed]:
    """Measure all subjects at all lengths, shortest first; a measurement may take `seconds`."""
    lengths = sorted(lengths)
    courses = []
    for done, subject in enumerate(subjects):
        meter = Meter(subject, layers, seconds, seed)
        meter.prepare(lengths)
        paces: list[Pace] = []
        batched: list[Pace] = []
        for place, length in enumerate(lengths):
            paces.append(meter.measure_pace(length, paces[-1] if paces else None))
            if paces[-1].extrapolated is None:
                batched.append(meter.measure_largest_batch(paces[-1]))
            yield Progress("speed", done * len(lengths) + place + 1, len(subjects) * len(lengths), "lengths")
        courses.append(SpeedOfModel(subject.name, tuple(paces), tuple(batched)))
    beyond = tuple(length > positions for length in lengths)
    return Speed(tuple(lengths), beyond, seconds, tuple(courses), breakeven_of(subjects, layers, courses))


def finish_and_read_clock(device: torch.device) -> float:
    """Return the time at which the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Meter:
    """Measures one subject."""

    subject: Subject
    layers: Sequence[Layer]
    seconds: float
    seed: int
    clock: Callable[[torch.device], float] = finish_and_read_clock

    @property
    def on_gpu(self) -> bool:
        return self.subject.model.device.type == "cuda"

    @property
    def untimed(self) -> int:
        """Count the tokens that are written first, and not timed: by then a GPU has captured a graph."""
        return BEFORE + 2 if self.on_gpu else 1

    @property
    def written(self) -> int:
        return self.untimed + TIMED

    def prepare(self, lengths: Sequence[int]) -> None:
        """Read texts of some lengths, shortest first, so that kernels are built, and on a GPU the graphs of texts
        captured: those of short texts, then those of long ones."""
        untimed = [lengths[0]]
        if self.on_gpu and self.subject.allocation is not None:
            untimed += [lengths[0]] * TEXTS_BEFORE + [x for x in lengths if x - self.written >= LONG][:1]
        for length in untimed:
            run_if_it_fits(partial(self.time_texts, length, 1))

    def measure_pace(self, length: int, last: Pace | None) -> Pace:
        """Measure a length, or say why it cannot be measured, judging by the next shorter length."""
        longer = length / last.length if last else 1
        reason = (last.extrapolated or self.reason_to_end(last, longer, longer)) if last else None
        measured = None if reason else run_if_it_fits(partial(self.time_texts, length, 1))
        if measured is not None:
            return measured
        return Pace(length, 1, None, None, None, None, *self.predict(length, 1), reason or "memory")

    def measure_largest_batch(self, single: Pace) -> Pace:
        """Measure the largest batch that memory and time allow, a power of two."""
        batch = MAX_BATCH
        while batch > 1:
            if not self.reason_to_end(single, batch, 1):
                if (pace := run_if_it_fits(partial(self.time_texts, single.length, batch))) is not None:
                    return pace
            batch //= 2
        return single

    def reason_to_end(self, last: Pace, times: float, longer: float) -> str | None:
        """Name what would end reading `times` the tokens, in texts `longer` times as long: time, memory or None."""
        assert last.read_rate is not None and last.write_rate is not None
        reading, writing = last.length * last.batch / last.read_rate, self.written * last.batch / last.write_rate
        if (reading * longer + writing) * times > self.seconds:
            return "time"
        memory = max(last.peak_bytes or 0, last.state_bytes or 0) * times
        return "memory" if memory > MAX_MEMORY_SHARE * free_bytes(self.subject.model.device) else None

    @torch.inference_mode()
    def time_texts(self, length: int, batch: int) -> Pace:
        """Read a batch of texts up to their last tokens, then token by token."""
        device = self.subject.model.device
        drawn = torch.Generator().manual_seed(self.seed)
        ids = torch.randint(vocabulary(self.subject.model), (batch, length), generator=drawn).to(device)
        with self.subject.prepared() as model:  # once: preparing the model is not part of a token's time
            subject, cache, peak = Subject(self.subject.name, model), fresh_cache(model), PeakMemory(device)
            begin = self.clock(device)
            read_into_cache(subject, ids[:, : length - self.written], cache)
            read_all = self.clock(device)
            for place, token in enumerate(ids[:, length - self.written :].split(1, dim=1)):
                if place == self.untimed:
                    first = self.clock(device)
                read_logits(subject, token, cache, keep=1)
            end = self.clock(device)
        rates = (length - self.written) * batch / (read_all - begin), TIMED * batch / (end - first)
        taken, graphs = peak.taken(), getattr(getattr(model, "call_reader", None), "text_reader", None)
        if taken is not None and graphs is not None:
            taken += graphs.bytes  # which may have been taken before
        return Pace(length, batch, *rates, taken, bytes_held(cache), *self.predict(length, batch))

    def predict(self, length: int, batch: int) -> tuple[int, int]:
        """Predict the bytes of the state and the operations for a token."""
        operations, allocation = head_bytes.cache_operations(self.layers, length), self.subject.allocation
        if allocation is not None:
            operations = head_bytes.state_operations(allocation.heads, self.layers, allocation.sinks, length)
        return batch * self.subject.state_bytes(self.layers, length), operations


def breakeven_of(
    subjects: Sequence[Subject], layers: Sequence[Layer], courses: Sequence[SpeedOfModel]
) -> Breakeven | None:
    """Compare the first student with the teacher, if there is a teacher."""
    if subjects[0].allocation is not None or len(subjects) < 2:
        return None
    allocation = subjects[1].allocation
    assert allocation is not None, "only the first subject is a teacher"
    return Breakeven(
        predicted_bytes=allocation.breakeven_tokens(layers),
        predicted_operations=head_bytes.breakeven_operations(allocation.heads, layers, allocation.sinks),
        writing=crossing(*(writing_line(course.paces) for course in courses[:2])),
    )


Line = tuple[float, float]  # value at length 0, slope


def writing_line(paces: Sequence[Pace]) -> Line:
    """Fit a line to the seconds of a written token over the length; a horizontal line to a single length."""
    measured = [(pace.length, 1 / pace.write_rate) for pace in paces if pace.write_rate]
    if len(measured) < 2:
        return sum(seconds for _, seconds in measured), 0.0
    slope, height = linear_regression(*zip(*measured, strict=True))
    return height, slope


def crossing(teacher: Line, student: Line) -> int | None:
    """Return the length from which on the student's line is no higher; None: it is always higher."""
    gain = teacher[1] - student[1]
    if gain <= 0:
        return 0 if student[0] <= teacher[0] and gain == 0 else None
    return max(0, math.ceil((student[0] - teacher[0]) / gain))
