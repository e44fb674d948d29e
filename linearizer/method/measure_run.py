"""Measures a teacher: runs it over text and reduces its queries and keys at once to a Profile and Samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from transformers import PreTrainedModel

from linearizer.hub.weight_files import write_tensors
from linearizer.method.blockwise_pass import Chain, calls_of, chain_of, run_blocks, sweep_forward
from linearizer.method.degrees_of_freedom import degrees_of_freedom
from linearizer.method.recorder import SAMPLES, LayerSamples, Recorder, Samples, draw_sample
from linearizer.method.texts import TextsOfRun
from linearizer.plan.head_bytes import Layer
from linearizer.plan.plan import Plan
from linearizer.progress import Progress, Steps
from linearizer.run.events import EventName
from linearizer.run.folder import Run
from linearizer.run.measured import HeadProfile, LayerProfile, Profile, ProfileSettings
from linearizer.run.stopping import log_progress
from linearizer.student.attention_interface import attention_by_layer, device_of
from linearizer.teacher.load import Teacher
from linearizer.teacher.logits import check_logits
from linearizer.teacher.ranks import ALONE, Ranks
from linearizer.teacher.streaming import is_streamed

MAX_WORKERS = 8  # heads at once: each takes 5 samples² numbers
PARTS = 8  # of a sample, in the order of the texts: their N(λ) differ as those of other texts would
QUANTILE = 2.365  # 97.5% of Student's t with PARTS - 1 degrees of freedom
Freedoms = tuple[float, ...]  # N(λ) of one sample, for every ridge


@dataclass(frozen=True)
class Measurement:
    """The profile to decide by, and the samples that students are initialised from."""

    profile: Profile
    samples: Samples


def measure_profile(
    model: PreTrainedModel,
    texts: Sequence[torch.Tensor],  # each (texts, tokens)
    layers: tuple[Layer, ...],
    settings: ProfileSettings,
    *,
    keep_text: bool = False,
    ranks: Ranks = ALONE,
) -> Steps[Measurement]:
    """Measure the attention of a model on texts; the samples may also keep the whole first text.

    Ranks share the texts, and then the layers.
    """
    recorder = yield from record_samples(model, texts, layers, settings, keep_text, ranks)
    profiles = yield from profile_layers(model, recorder.samples, settings, ranks)
    rows = tuple(profiles.get(index, LayerProfile(())) for index in range(len(layers)))
    return Measurement(Profile(settings, sum(map(torch.numel, texts)), rows), collect_samples(recorder, layers))


def record_samples(
    model: PreTrainedModel,
    texts: Sequence[torch.Tensor],
    layers: tuple[Layer, ...],
    settings: ProfileSettings,
    keep_text: bool = False,
    ranks: Ranks = ALONE,
) -> Steps[Recorder]:
    """Record queries and keys of every layer while a model reads a text at a time; ranks share the texts."""
    draw = draw_sample(texts, settings.samples, settings.sinks, settings.seed)
    recorder = Recorder(layers, draw, keep_text)
    batches = [text for each in texts for text in each.split(1)]
    begins = [0, *accumulate(batch.numel() for batch in batches)]
    if is_streamed(model) and (chain := chain_of(model, batches[0])):
        yield from record_by_blocks(model, chain, batches, begins, recorder)
    else:
        own = ranks.share([*zip(begins, batches, strict=False)])
        for done, (begin, ids) in enumerate(own, 1):
            with torch.no_grad(), recorder.recording(model, begin):
                run_blocks(model, ids)
            yield Progress(EventName.PROFILE, done, len(own), "batches")
    recorder.finish(ranks)
    return recorder


def collect_samples(recorder: Recorder, layers: Sequence[Layer], seed: int = 0) -> Samples:
    return Samples(tuple(recorder.samples.get(index) for index in range(len(layers))), seed)


def record_by_blocks(
    model: PreTrainedModel, chain: Chain, batches: Sequence[torch.Tensor], begins: Sequence[int], recorder: Recorder
) -> Steps[None]:
    """Run all texts through the model block by block, so that the weights of each are read once."""

    def enter(batch: int, place: int, hidden: torch.Tensor) -> None:
        recorder.begin = begins[batch]

    with recorder.recording(model, 0):
        calls = [calls_of(model, chain, ids) for ids in batches]
        for done, _ in enumerate(sweep_forward(chain, calls, enter)):
            yield Progress(EventName.PROFILE, done + 1, len(chain.blocks), "layers")


def profile_layers(
    model: PreTrainedModel, samples: Mapping[int, LayerSamples], settings: ProfileSettings, ranks: Ranks = ALONE
) -> Steps[dict[int, LayerProfile]]:
    """Turn the samples of layers into profiles, head by head; ranks share the layers."""
    modules = attention_by_layer(model)
    own = {index: device_of(modules[index], model.device) for index in ranks.share(sorted(samples))}
    heads = [(index, sample) for index in own for sample in list_samples(samples[index], settings)]
    measured: dict[int, list[HeadProfile]] = {index: [] for index in own}
    with one_core_per_head(set(own.values())) as pool:
        results = pool.map(lambda pair: measure_freedoms(pair[1](), settings, own[pair[0]]), heads)
        for done, ((index, _), head) in enumerate(zip(heads, results, strict=True)):
            measured[index].append(head)
            details: dict[str, object] = {}
            if len(measured[index]) <= len(samples[index].keys):  # query heads follow
                details = {"layer": index, "freedoms": settings.at_reference(head.freedoms)}
            yield Progress(EventName.PROFILE, done + 1, len(heads), "query and KV heads", details)
    profiles = [layer_profile(samples[index], measured[index], settings) for index in own]
    return dict(zip(sorted(samples), ranks.gather_shares(profiles), strict=True))


@contextmanager
def one_core_per_head(devices: set[torch.device]) -> Iterator[ThreadPoolExecutor]:
    """Compute each head on a single core: two that share a head wait for each other, endlessly on a busy machine."""
    cores = torch.get_num_threads()
    for device in devices:  # PyTorch loads its solvers for a GPU at a first call, which fails in two threads at once
        torch.linalg.cholesky_ex(torch.eye(1, dtype=torch.float32, device=device))
    pool = ThreadPoolExecutor(min(cores, MAX_WORKERS), initializer=torch.set_num_threads, initargs=(1,))
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
        torch.set_num_threads(cores)  # later threads begin with the number that a worker sets


def list_samples(record: LayerSamples, settings: ProfileSettings) -> Sequence[Callable[[], torch.Tensor]]:
    """List functions that make the samples of a layer: of its KV heads, then of its query heads with per="query"."""
    gauge = settings.gauge
    samples = [partial(head_points, record.queries, record.keys, head, gauge) for head in range(len(record.keys))]
    if settings.per == "query" and not is_multi_head(record):
        group = len(record.queries) // len(record.keys)
        samples += [
            partial(join_in_gauge, queries, record.keys[head // group], gauge)
            for head, queries in enumerate(record.queries)
        ]
    return samples


def is_multi_head(record: LayerSamples) -> bool:
    """Whether every query head has keys of its own: then its sample is that of its KV head."""
    return len(record.queries) == len(record.keys)


def head_points(queries: torch.Tensor, keys: torch.Tensor, head: int, gauge: str) -> torch.Tensor:
    """Make the sample of a KV head, (samples, key_dim): queries drawn evenly over its group, then as many keys."""
    slots = torch.arange(keys.shape[1])
    group = queries.unflatten(0, (len(keys), -1))[head]  # (group, samples / 2, key_dim)
    return join_in_gauge(group[slots % len(group), slots], keys[head], gauge)


def join_in_gauge(queries: torch.Tensor, keys: torch.Tensor, gauge: str) -> torch.Tensor:
    """Join queries and keys; subtract the mean of the keys in the centred gauge."""
    keys = keys.double()
    return torch.cat([queries.double(), keys - keys.mean(0) if gauge == "centred" else keys])


def measure_freedoms(points: torch.Tensor, settings: ProfileSettings, device: torch.device) -> HeadProfile:
    """Compute N(λ) of one sample at every ridge, and its error by the parts of the sample.

    The error is too small where N comes near the points of a part, which see no more directions than they are.
    """
    points = points.to(device if device.type == "cuda" else "cpu")  # other accelerators have no float64
    counts = degrees_of_freedom(points, settings.ridges, settings.reference)
    halves = points.unflatten(0, (2, -1))  # queries and keys
    size = halves.shape[1] // PARTS
    if not size:
        return HeadProfile(shorten(counts, 6))
    parts = halves[:, : PARTS * size].unflatten(1, (PARTS, size)).transpose(0, 1).flatten(1, 2)
    logs = torch.stack([degrees_of_freedom(part, settings.ridges, settings.reference).log() for part in parts])
    return HeadProfile(shorten(counts, 6), shorten(QUANTILE * logs.std(0) / PARTS**0.5, 3))


def shorten(values: torch.Tensor, digits: int) -> Freedoms:
    """Round values to a few digits, so that a profile stays a few kilobytes."""
    return tuple(float(f"{value:.{digits}g}") for value in values.tolist())


def layer_profile(record: LayerSamples, measured: list[HeadProfile], settings: ProfileSettings) -> LayerProfile:
    """Put the results of a layer together."""
    heads, queries = measured[: len(record.keys)], measured[len(record.keys) :]
    if settings.per == "query" and is_multi_head(record):
        queries = heads
    return LayerProfile(tuple(heads), tuple(head.freedoms for head in queries))


def profile_settings(plan: Plan) -> ProfileSettings:
    """Return the settings of a plan."""
    settings = ProfileSettings(plan.text, plan.samples, sinks=plan.resolved_sinks, seed=plan.seed)
    return replace(settings, per="query", gauge="raw") if plan.recipe == "paper" else settings


def sample_teacher(plan: Plan, teacher: Teacher, texts: TextsOfRun) -> Steps[Samples]:
    """Take the samples that a run with this plan has kept, without its profile, which takes longer."""
    settings, layers = profile_settings(plan), teacher.inspection.layers
    recorder = yield from record_samples(teacher.model, texts.profiled, layers, settings, keep_text=bool(plan.memory))
    return collect_samples(recorder, layers, plan.seed)


def measure_teacher(run: Run, teacher: Teacher, texts: TextsOfRun, ranks: Ranks = ALONE) -> Steps[Profile]:
    """Measure the teacher, unless the run has its profile already."""
    if profile := run.profile:
        return profile
    check_logits(teacher.model, texts.profiled[0])
    ranks.hear((EventName.PROFILE,))
    measured = yield from log_progress(run, profile_share(run, teacher, texts.profiled, ranks))
    write_tensors(run.folder / SAMPLES, measured.samples.tensors())
    run.write_product("profile.json", measured.profile.to_json())
    run.log(EventName.PROFILED, tokens=measured.profile.tokens)
    return measured.profile


def profile_share(run: Run, teacher: Teacher, texts: Sequence[torch.Tensor], ranks: Ranks) -> Steps[Measurement]:
    """Measure a rank's share of the teacher, and gather those of the others."""
    layers, settings = teacher.inspection.layers, profile_settings(run.plan)
    return measure_profile(teacher.model, texts, layers, settings, keep_text=bool(run.plan.memory), ranks=ranks)
