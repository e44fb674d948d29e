"""How fast teacher and student read and write on this device, and what they take, by the length of the text.

A length is measured as far as memory and time go; what lies beyond is marked, and drawn out from what was measured:
what a token takes is a line in the length, for a teacher that looks at all tokens and for a student that does not.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from linearizer.evaluate.reading import read
from linearizer.evaluate.subjects import Subject
from linearizer.model.logits import bytes_held, fresh_cache, vocabulary
from linearizer.model.memory import PeakMemory, free_bytes, run_if_it_fits
from linearizer.progress import Progress, Steps
from linearizer.run import head_bytes
from linearizer.run.head_bytes import Layer
from linearizer.run.results import Breakeven, Course, Pace, Speed

Tensor = torch.Tensor
LENGTHS = (1024, 4096, 16384, 65536, 131072)
WRITTEN = 16  # tokens, of which the first is not timed
PIECE = 2048  # tokens that are read at a time
MOST = 64  # texts at once
ROOM = 0.8  # of the free memory


def measure_speed(
    subjects: Sequence[Subject],
    layers: Sequence[Layer],
    lengths: Sequence[int],
    positions: int,
    seconds: float,
    seed: int = 0,
) -> Steps[Speed]:
    """Measure all subjects at all lengths, shortest first; one measurement may take so many seconds."""
    lengths = sorted(lengths)
    courses = []
    for done, subject in enumerate(subjects):
        meter = Meter(subject, layers, seconds, seed)
        run_if_it_fits(partial(meter.timed, lengths[0], 1))  # what is done once, as building kernels is, is not timed
        one: list[Pace] = []
        many: list[Pace] = []
        for place, length in enumerate(lengths):
            one.append(meter.pace(length, one))
            if one[-1].extrapolated is None:
                many.append(meter.largest(one[-1]))
            yield Progress("speed", done * len(lengths) + place + 1, len(subjects) * len(lengths), "lengths")
        courses.append(Course(subject.name, tuple(one), tuple(many)))
    beyond = tuple(length > positions for length in lengths)
    return Speed(tuple(lengths), beyond, seconds, tuple(courses), breakeven_of(subjects, layers, courses))


@dataclass(frozen=True)
class Meter:
    """Measures one subject."""

    subject: Subject
    layers: Sequence[Layer]
    seconds: float
    seed: int

    def pace(self, length: int, before: Sequence[Pace]) -> Pace:
        """Measure one length, or draw it out from the shorter ones where memory or time would not do."""
        ended = before[-1].extrapolated if before else None
        if ended is None and before:
            ended = self.too_much(before[-1], length / before[-1].length, length / before[-1].length)
        measured = None if ended else run_if_it_fits(partial(self.timed, length, 1))
        if measured is not None:
            return measured
        known = [pace for pace in before if pace.extrapolated is None]
        return drawn_out(known, length, *self.told(length, 1), ended or "memory")

    def largest(self, one: Pace) -> Pace:
        """Measure as many texts at once as memory and time allow, in powers of two."""
        batch = MOST
        while batch > 1:
            if not self.too_much(one, batch, 1):
                if (found := run_if_it_fits(partial(self.timed, one.length, batch))) is not None:
                    return found
            batch //= 2
        return one

    def too_much(self, last: Pace, times: float, longer: float) -> str | None:
        """Tell what will end before as many times the tokens are read, in texts so many times longer."""
        assert last.read_rate is not None and last.write_rate is not None
        reading, writing = last.length * last.batch / last.read_rate, WRITTEN * last.batch / last.write_rate
        if (reading * longer + writing) * times > self.seconds:
            return "time"
        taken = max(last.peak_bytes or 0, last.state_bytes or 0) * times
        return "memory" if taken > ROOM * free_bytes(self.subject.model.device) else None

    @torch.inference_mode()
    def timed(self, length: int, batch: int) -> Pace:
        """Let some texts be read, and go on to their length."""
        device, cache = self.subject.model.device, fresh_cache(self.subject.model)
        ids = torch.randint(
            vocabulary(self.subject.model), (batch, length), generator=torch.Generator().manual_seed(self.seed)
        ).to(device)
        peak = PeakMemory(device)
        begin = now(device)
        for piece in ids[:, : length - WRITTEN].split(PIECE, dim=1):
            read(self.subject, piece, cache, keep=1)
        read_all = now(device)
        read(self.subject, ids[:, length - WRITTEN : length - WRITTEN + 1], cache, keep=1)
        first = now(device)
        for token in ids[:, length - WRITTEN + 1 :].split(1, dim=1):
            read(self.subject, token, cache, keep=1)
        end = now(device)
        return Pace(
            length,
            batch,
            (length - WRITTEN) * batch / (read_all - begin),
            (WRITTEN - 1) * batch / (end - first),
            peak.taken(),
            bytes_held(cache),
            *self.told(length, batch),
        )

    def told(self, length: int, batch: int) -> tuple[int, int]:
        """Give what cost.py says of the bytes that are remembered, and of the operations for one token."""
        held = self.subject.allocation
        if held is None:
            return batch * head_bytes.cache_bytes(self.layers, length), head_bytes.cache_operations(self.layers, length)
        operations = head_bytes.state_operations(held.heads, self.layers, held.sinks, length)
        return batch * held.state_bytes(self.layers, length), operations


def now(device: torch.device) -> float:
    """Tell the time when a device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def drawn_out(known: Sequence[Pace], length: int, predicted_bytes: int, predicted_operations: int, reason: str) -> Pace:
    """Draw the lines on that the last two measurements lie on; they do not fall."""
    pace = Pace(length, 1, None, None, None, None, predicted_bytes, predicted_operations, reason)
    if len(known) < 2:
        return pace
    a, b = known[-2:]

    def line(of: Callable[[Pace], float | None]) -> float | None:
        low, high = of(a), of(b)
        if low is None or high is None:
            return None
        return high + max(0.0, high - low) / (b.length - a.length) * (length - b.length)

    peak, state = line(lambda p: p.peak_bytes), line(lambda p: p.state_bytes)
    return replace(
        pace,
        read_rate=inverse(line(lambda p: inverse(p.read_rate))),
        write_rate=inverse(line(lambda p: inverse(p.write_rate))),
        peak_bytes=None if peak is None else round(peak),
        state_bytes=None if state is None else round(state),
    )


def inverse(rate: float | None) -> float | None:
    return None if rate is None else 1 / rate


def breakeven_of(subjects: Sequence[Subject], layers: Sequence[Layer], courses: Sequence[Course]) -> Breakeven | None:
    """Compare the first student with the teacher, if there is one."""
    if subjects[0].allocation is not None or len(subjects) < 2:
        return None
    held = subjects[1].allocation
    assert held is not None, "the teacher comes first, and once"
    teacher, student = (fit([pace for pace in course.one if not pace.extrapolated]) for course in courses[:2])
    return Breakeven(
        predicted_bytes=held.breakeven_tokens(layers),
        predicted_operations=head_bytes.breakeven_operations(held.heads, layers, held.sinks),
        bytes=crossing(teacher[0], student[0]),
        writing=crossing(teacher[1], student[1]),
    )


Line = tuple[float, float]  # where it begins, and how it rises


def fit(known: Sequence[Pace]) -> tuple[Line, Line]:
    """Lay lines through the bytes that are remembered, and through the seconds that a token takes."""
    lengths = [pace.length for pace in known]
    return (
        least_squares(lengths, [float(pace.state_bytes or 0) for pace in known]),
        least_squares(lengths, [inverse(pace.write_rate) or 0.0 for pace in known]),
    )


def least_squares(x: Sequence[float], y: Sequence[float]) -> Line:
    """Lay a line through points; a single one lies on a level line."""
    middle, height = sum(x) / max(len(x), 1), sum(y) / max(len(y), 1)
    spread = sum((a - middle) ** 2 for a in x)
    slope = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0
    return height - slope * middle, slope


def crossing(teacher: Line, student: Line) -> int | None:
    """Give the length from which on the student's line is no higher; None: it never is."""
    gain = teacher[1] - student[1]
    if gain <= 0:
        return 0 if student[0] <= teacher[0] and gain == 0 else None
    return max(0, math.ceil((student[0] - teacher[0]) / gain))
