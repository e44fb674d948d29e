"""Initialises slots, axes and feature maps from a sample of a layer's queries, keys and values, without training.

  turns  the mean of keys and values, and in each direction how far keys spread compared with how large queries are
  slots  the metric of the queries: |metric·x|² is the mean of (q·x)²; and their mean
  codebook, clusters  centres of the keys, by k-means in that metric
  memories  keys in the directions that queries tell apart best; routes to centres of the keys; weights by a text
All other feature maps keep the values that they were drawn with.
"""

from __future__ import annotations

import math

import torch

from linearizer.method.fit_memory import fit_memory
from linearizer.method.samples import LayerSamples, Samples, samples_of
from linearizer.method.substitute import Begin
from linearizer.run.folder import Run
from linearizer.student.attention_interface import attention_modules
from linearizer.student.feature_maps import Clusters, Codebook
from linearizer.student.layer_student import LayerStudent, SlotGroup, generator_at
from linearizer.student.matrix_rule import MatrixRule
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.student.packed_state import Turns
from linearizer.teacher.layers import featured, layer_number

KMEANS_ROUNDS = 8
RIDGE = 0.01  # of the mean square, added to every direction: no sample shows all differences
SHARPNESS = 4.0  # of a key's assignment to centres, while training: nearly that of inference

Tensor = torch.Tensor


@torch.no_grad()
def initialise(student: LinearizedForCausalLM, samples: Samples, seed: int = 0) -> None:
    """Initialise the layers of a student from samples of the teacher's queries and keys."""
    for module in attention_modules(student.base):
        layer_student, layer_samples = getattr(module, "student", None), samples.layers[layer_number(module)]
        if layer_student is not None and layer_samples is not None:
            initialise_layer(layer_student, layer_samples, seed, layer_number(module))


@torch.no_grad()
def initialise_layer(student: LayerStudent, samples: LayerSamples, seed: int, index: int) -> None:
    """Initialise the turns, slots and feature maps of a layer, which has this number.

    Every head draws for itself, so that a head with an option gets the same values whatever other heads hold.
    """
    queries = samples.queries.unflatten(0, (len(samples.keys), -1)).flatten(1, 2).float()  # (kv heads, samples, dim)
    if student.turns is not None:
        initialise_turns(student.turns, queries, samples.keys, samples.values)
    for group in student.groups:
        if isinstance(group, SlotGroup):
            group.merger.reset()
            for place, head in enumerate(group.heads):
                mean_query = queries[head].mean(0)
                around = (mean_query @ samples.keys[head].float().mean(0))[None]
                student.set_merger(group, place, query_metric(queries[head]), torch.cat([mean_query, around]))
    for group in featured(student):
        for place, head in enumerate(group.heads):
            given = place, queries[head], samples.keys[head].float(), generator_at(seed, index, head)
            if isinstance(group.feature_map, Codebook):
                initialise_codebook(group.feature_map, *given)
            elif isinstance(group.feature_map, MatrixRule):
                initialise_rule(group.feature_map, *given)
        if isinstance(group.feature_map, MatrixRule):
            fit_memory(group, samples.text)


def initialise_turns(turns: Turns, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Initialise how all heads turn what they take, from queries, keys and values (heads, samples, dim).

    Keys that are divided, and queries that are multiplied, by the root of how far keys spread ÷ how large queries are
    become equally large in each direction: then rounding keys costs every direction alike.
    """
    spread, size = (
        (x + RIDGE * x.mean(-1, keepdim=True) + 1e-12).sqrt()
        for x in (k.double().var(1, correction=0), q.double().square().mean(1))
    )
    turns.key_steps.copy_((spread / size).sqrt())
    turns.key_middle.copy_(k.double().mean(1))
    turns.value_middle.copy_(v.double().mean(1))


def initialise_codebook(codebook: Codebook, head: int, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Initialise one head of a codebook from queries and keys, (samples, dim), whose kernel is exp(q·k)."""
    metric = query_metric(q).to(codebook.metric)
    centres = cluster(k @ metric.cpu(), codebook.features, generator)
    codebook.metric[head] = metric
    codebook.centres[head] = torch.linalg.solve(metric.cpu(), centres.mT).mT
    if isinstance(codebook, Clusters):
        codebook.query_centres[head] = codebook.centres[head]
    codebook.log_sharpness[head] = math.log(SHARPNESS)


def initialise_rule(rule: MatrixRule, head: int, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Initialise one head of a matrix rule: its products of keys and of queries multiply to their scores.

    Keys are taken in the metric of the queries, in the directions in which that is largest, and queries in its inverse.
    """
    if rule.rule.has_moments:  # what the mass of Gaussian keys is off by
        mass = (q @ k.mT).logsumexp(-1) - math.log(len(k))
        rule.mass[head] = (mass - q @ k.mean(0) - q.square() @ k.var(0, correction=0) / 2).median()
    values, vectors = torch.linalg.eigh((q.mT @ q / len(q)).double())
    values, vectors = values.flip(0), vectors.flip(1)
    vectors = vectors * torch.where(q.mean(0).double() @ vectors < 0, -1.0, 1.0)  # whose signs eigh leaves open
    root = (values.clamp_min(0) + 1e-4 * values.mean() + 1e-12).sqrt()
    count = min(rule.key_map.shape[2], len(values))
    key_map, query_map = (vectors * root).mT[:count].float(), (vectors / root).mT[:count].float()
    rule.key_map[head, :, :count] = torch.stack([key_map.roll(step, 0) for step in range(rule.rule.steps)])
    rule.query_map[head, :count] = query_map
    rule.key_shift[head] = k.mean(0)
    if rule.router is not None:
        rule.router[head, :, :count] = cluster((k - k.mean(0)) @ key_map.mT, rule.rule.memories, generator)


def query_metric(q: Tensor) -> Tensor:
    """Make a matrix with |metric·x|² the mean of (q·x)²: how far queries tell two keys apart that differ by x."""
    return symmetric_root(q.mT @ q / len(q))


def symmetric_root(square: Tensor) -> Tensor:
    """Compute the symmetric root of a covariance, lifted a little so that it can be inverted."""
    values, vectors = torch.linalg.eigh(square.double())
    values = values.clamp_min(0) + 1e-4 * values.mean() + 1e-12
    return (vectors * values.sqrt() @ vectors.mT).float()


def cluster(points: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (count, dim)
    """Find centres of points by k-means, started far apart (k-means++)."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    distance = (points - points[chosen]).square().sum(-1)
    for _ in range(count - 1):
        new = torch.multinomial(distance + 1e-12, 1, generator=generator)  # there may be fewer points than centres
        chosen = torch.cat([chosen, new])
        distance = torch.minimum(distance, (points - points[new]).square().sum(-1))
    centres = points[chosen]
    for _ in range(KMEANS_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(-1)
        members = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    return centres


def begin_of(run: Run) -> Begin:
    """Return a function that initialises the student of one layer."""
    samples, seed = samples_of(run), run.plan.seed

    def begin(student: LayerStudent, index: int) -> None:
        if (layer_samples := samples.layers[index]) is not None:
            initialise_layer(student, layer_samples, seed, index)

    return begin
