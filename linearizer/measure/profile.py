"""Runs a model over text and reduces its queries, keys and values, as they come, to a Profile and to Samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from linearizer.measure.degrees_of_freedom import Spectrum, degrees_of_freedom
from linearizer.measure.recorder import LayerRecord, Recorder, draw_tokens
from linearizer.model.samples import LayerSamples, Samples
from linearizer.progress import Progress, Steps
from linearizer.run.head_bytes import Layer
from linearizer.run.plan import Plan
from linearizer.run.profile import Asked, Gauge, HeadProfile, LayerProfile, Profile

QUARTERS = 4  # disjoint stretches of the sample, for the error bars: 4 (1/4)³, 6 % more work
WORKERS = 8  # heads at once: each takes 5 samples² numbers
USUAL = Asked()


@dataclass(frozen=True)
class Measurement:
    """What measuring gives: numbers to decide by, vectors to begin from."""

    profile: Profile
    samples: Samples


def measure(
    model: nn.Module,
    windows: torch.Tensor,  # (texts, tokens)
    layers: tuple[Layer, ...],
    asked: Asked = USUAL,
    *,
    real: torch.Tensor | None = None,  # (texts, tokens) true where a token is no padding
    batch_tokens: int = 2048,
) -> Steps[Measurement]:
    """Measure the attention of a model on texts."""
    real = torch.ones_like(windows, dtype=torch.bool) if real is None else real.bool()
    sizes = tuple(size for size in (16 << step for step in range(30)) if size < windows.shape[1])
    draw = draw_tokens(real.cpu(), asked.samples, asked.rows, asked.sinks, asked.seed)
    recorder = Recorder(layers, draw, sizes)
    texts = max(1, batch_tokens // windows.shape[1])
    batches = -(-len(windows) // texts)
    for batch in range(batches):
        read(model, windows, real, slice(batch * texts, (batch + 1) * texts), recorder)
        yield Progress("profile", batch + 1, batches, "batches")
    recorder.check()
    found = yield from reduce_heads(recorder, asked)
    profiles = tuple(found[index][0] if index in found else LayerProfile(()) for index in range(len(layers)))
    samples = tuple(found[index][1] if index in found else None for index in range(len(layers)))
    return Measurement(Profile(asked, int(real.sum()), sizes, profiles), Samples(samples))


def read(model: nn.Module, windows: torch.Tensor, real: torch.Tensor, texts: slice, recorder: Recorder) -> None:
    """Run a batch of texts through the model, up to its last layer."""
    device = next(model.parameters()).device
    given = {"input_ids": windows[texts].to(device), "use_cache": False}
    if not real.all():
        mask = real[texts].long().to(device)
        given |= {"attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
    training = model.training
    model.eval()
    try:
        with torch.no_grad(), recorder.watching(model, texts.start):
            getattr(model, "base_model", model)(**given)  # no logits: of a large vocabulary they take most memory
    finally:
        model.train(training)


def reduce_heads(recorder: Recorder, asked: Asked) -> Steps[dict[int, tuple[LayerProfile, LayerSamples]]]:
    """Turn the records of the layers into curves, sample by sample."""
    samples = [
        sample for index in sorted(recorder.records) for sample in samples_of(recorder.records[index], index, asked)
    ]
    curves: dict[int, list[Freedoms]] = {index: [] for index in recorder.records}
    with one_core_each() as pool:
        found = pool.map(lambda sample: freedoms(sample[1](), asked, recorder.records[sample[0]].device), samples)
        for done, ((index, _), curve) in enumerate(zip(samples, found, strict=True)):
            curves[index].append(curve)
            yield Progress("profile", done + 1, len(samples), "heads", finished(recorder, curves, index, asked))
    return {
        index: reduced(record, curves[index], recorder.projections[index], asked)
        for index, record in recorder.records.items()
    }


def finished(recorder: Recorder, curves: dict[int, list[Freedoms]], index: int, asked: Asked) -> dict[str, object]:
    """Say what a layer's KV heads came to, once all of them are known."""
    heads = len(recorder.records[index].keys)
    if len(curves[index]) != heads:
        return {}
    return {"layer": index, "freedoms": [asked.at_reference(curve.counts) for curve in curves[index]]}


@contextmanager
def one_core_each() -> Iterator[ThreadPoolExecutor]:
    """Give each core a head of its own: two that share a head wait for each other, endlessly on a busy machine."""
    cores = torch.get_num_threads()
    pool = ThreadPoolExecutor(min(cores, WORKERS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # what a worker sets is also what later threads begin with


def samples_of(record: LayerRecord, index: int, asked: Asked) -> list[tuple[int, Callable[[], torch.Tensor]]]:
    """List the samples of a layer, each made when its turn comes: of its KV heads, then of its query heads if asked."""
    heads = [partial(head_points, record.queries, record.keys, head, asked.gauge) for head in range(len(record.keys))]
    if asked.per == "query" and not alone(record):
        group = len(record.queries) // len(record.keys)
        heads += [
            partial(in_gauge, queries, record.keys[head // group], asked.gauge)
            for head, queries in enumerate(record.queries)
        ]
    return [(index, sample) for sample in heads]


def alone(record: LayerRecord) -> bool:
    """Tell whether no query head shares its keys: then its sample is that of its KV head."""
    return len(record.queries) == len(record.keys)


def head_points(queries: torch.Tensor, keys: torch.Tensor, head: int, gauge: Gauge) -> torch.Tensor:
    """Give the sample of a KV head, (samples, key_dim): queries drawn evenly over its group, then as many keys."""
    slots = torch.arange(keys.shape[1])
    group = queries.unflatten(0, (len(keys), -1))[head]  # (group, samples / 2, key_dim)
    return in_gauge(group[slots % len(group), slots], keys[head], gauge)


def in_gauge(queries: torch.Tensor, keys: torch.Tensor, gauge: Gauge) -> torch.Tensor:
    """Put queries and keys together, the keys less their mean where that is asked."""
    keys = keys.double()
    return torch.cat([queries.double(), keys - keys.mean(0) if gauge == "centred" else keys])


@dataclass(frozen=True)
class Freedoms:
    """The curve of one sample."""

    counts: tuple[float, ...]  # N(λ) for every ridge
    errors: tuple[float, ...]
    leverage: torch.Tensor  # (samples,)


def freedoms(points: torch.Tensor, asked: Asked, device: torch.device) -> Freedoms:
    """Find N(λ), and its standard error from what the four quarters of the sample give by themselves."""
    points = points.to(device if device.type == "cuda" else "cpu")  # other accelerators have no float64
    whole = spectrum(points, asked)
    # slots rise with the text, so quarters are stretches of it: the error covers the choice of text as well
    quarters = points.unflatten(0, (2, QUARTERS, -1)).transpose(0, 1).flatten(1, 2)  # (quarters, samples / 4, key_dim)
    spread = torch.stack([spectrum(quarter, asked).freedoms for quarter in quarters]).std(0)
    return Freedoms(shortened(whole.freedoms, 6), shortened(spread / QUARTERS**0.5, 2), whole.leverage.cpu())


def spectrum(points: torch.Tensor, asked: Asked) -> Spectrum:
    """Find what was asked of one sample."""
    return degrees_of_freedom(points, asked.ridges, asked.normalise, asked.reference)


def reduced(
    record: LayerRecord, curves: list[Freedoms], projection: nn.Module, asked: Asked
) -> tuple[LayerProfile, LayerSamples]:
    """Put together what was found of a layer."""
    heads, queries = curves[: len(record.keys)], curves[len(record.keys) :]
    if asked.per == "query" and alone(record):
        queries = heads
    weights = torch.stack([curve.leverage for curve in heads]).float()
    profile = LayerProfile(head_profiles(record, heads, projection), tuple(curve.counts for curve in queries))
    return profile, LayerSamples(record.queries, record.keys, weights)


def head_profiles(record: LayerRecord, curves: list[Freedoms], projection: nn.Module) -> tuple[HeadProfile, ...]:
    """Put together what was found of the KV heads of a layer."""
    attention = [shortened(row, 6) for row in record.attention_means()]
    norms = shortened(record.value_norms(projection), 6)
    return tuple(
        HeadProfile(
            freedoms=curve.counts,
            errors=curve.errors,
            saturated=float(curve.leverage.sum()) > len(curve.leverage) / 4,
            entropy=entropy,
            sink_mass=sink_mass,
            window_mass=tuple(window_mass),
            value_norm=norm,
        )
        for curve, (entropy, sink_mass, *window_mass), norm in zip(curves, attention, norms, strict=True)
    )


def shortened(numbers: torch.Tensor, digits: int) -> tuple[float, ...]:
    """Keep the digits that mean something: a profile stays a few kilobytes."""
    return tuple(float(f"{number:.{digits}g}") for number in numbers.tolist())


def asked_of(plan: Plan) -> Asked:
    """What a plan wants to be measured."""
    return Asked(
        text=plan.text,
        samples=plan.samples,
        sinks=plan.kept_sinks,
        per=plan.per,  # type: ignore[arg-type]
        normalise=plan.normalise,  # type: ignore[arg-type]
        gauge=plan.gauge,  # type: ignore[arg-type]
        seed=plan.seed,
    )
