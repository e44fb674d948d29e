"""How long attention takes in a layer, by the number of tokens: a student's, and softmax over all tokens (SDPA)."""

from __future__ import annotations

import json
import math
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention

from linearizer.encoders.attention_both_ways import BothWays, HeadsOfLayer
from linearizer.encoders.encoder_folder import TIMES, EncoderRun
from linearizer.encoders.encoder_quality import LayerTime
from linearizer.progress import Progress, Steps
from linearizer.run.stopping import log_progress
from linearizer.teacher.devices import choose_device

LEAST, MOST = 256, 32768  # tokens
MOST_SECONDS = 1.0  # of a layer: longer texts are not timed
FASTER = 2.0  # times as fast as SDPA: the lines have crossed
TIMED = 3  # times, of which the fastest counts; longer texts are timed once
SHORT = 2048  # tokens


def keep_times(encoder: EncoderRun) -> Steps[None]:
    """Time a layer of the student with more and more tokens, until it is clearly faster, and store the times."""
    times = yield from log_progress(encoder.run, time_lengths(encoder))
    encoder.run.write_product(TIMES, json.dumps({"times": [asdict(layer_time) for layer_time in times]}))


def time_lengths(encoder: EncoderRun) -> Steps[list[LayerTime]]:
    inspection, device, times = encoder.inspection, choose_device(encoder.plan.device), list[LayerTime]()
    for grid in sizes_of(encoder.both_ways, encoder.tokens):
        times.append(time_layer(encoder.typical_layer, inspection.heads, inspection.head_dim, grid, device))
        yield Progress("evaluate", len(times), len(times) + 1, "lengths")
        if times[-1].sdpa > FASTER * times[-1].student or max(times[-1].sdpa, times[-1].student) > MOST_SECONDS:
            break
    return times


def sizes_of(way: BothWays, tokens: int) -> Iterator[tuple[int, ...]]:
    """Yield lengths of texts, or sides of pictures from the usual one on, each twice the last.

    Skip sizes with no more tokens than keys: there is nothing to compare.
    """
    axes, size = len(way.block), LEAST if len(way.block) == 1 else math.isqrt(tokens)
    while size**axes <= MOST:
        if size**axes > way.keys:
            yield (size,) * axes
        size *= 2


def time_layer(
    way: BothWays | HeadsOfLayer,
    heads: int,
    dim: int,
    grid: tuple[int, ...],
    device: str = "cpu",
    clock: Callable[[], float] = time.perf_counter,
) -> LayerTime:
    """Time a layer on random numbers."""
    tokens = math.prod(grid) + (way.first if len(grid) > 1 else 0)
    query, key, value = (torch.randn(1, heads, tokens, dim, device=device) for _ in range(3))
    axes, times = grid if len(grid) > 1 else (), TIMED if tokens <= SHORT else 1

    def seconds(attend: Callable[[], torch.Tensor]) -> float:
        with torch.no_grad():
            return min(timeit.repeat(lambda: float(attend()[0, 0, 0, 0]), timer=clock, repeat=times, number=1))

    student = seconds(lambda: way.attend(query, key, value, dim**-0.5, axes))
    return LayerTime(tokens, student, seconds(lambda: scaled_dot_product_attention(query, key, value)))


def crossing(times: Sequence[LayerTime]) -> float | None:
    """Return the number of tokens from which on a layer is faster than SDPA, interpolated between two timed sizes."""
    ahead = [(math.log(x.tokens), math.log(x.sdpa / x.student)) for x in times]
    for (before, low), (after, high) in pairwise(ahead):
        if low < 0 <= high:
            return math.exp(before - low * (after - before) / (high - low))
    return None
