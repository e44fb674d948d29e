"""Where slots and feature maps begin, found from a sample of a layer's queries and keys, without training.

  slots  the metric of the queries: |metric·x|² is the mean of (q·x)²
  codebook, clusters  centres of the keys, by k-means in that metric
  prf, mlp  orthogonal directions, drawn again by their leverage on the sample: the density that the theory calls
            optimal (Bach 2017), with the weights that keep the estimate of the kernel unbiased
Hedgehog stays as its authors start it, and directions that are not learnt stay as they are.
"""

from __future__ import annotations

import math

import torch

from linearizer.model.layers import featured, number
from linearizer.model.samples import LayerSamples, Samples, samples_of
from linearizer.model.swap import Begin
from linearizer.run.folder import Run
from linearizer.runtime.attention_interface import attention_modules
from linearizer.runtime.feature_maps import (
    MLP,
    Clusters,
    Codebook,
    FeatureMap,
    PositiveFeatures,
    half_square,
    orthogonal,
)
from linearizer.runtime.layer_student import LayerStudent, SlotGroup
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

LLOYD = 8  # rounds of k-means
SHARPNESS = 4.0  # of a key's assignment to centres, while training: nearly that of inference
POOL = 2048  # directions that are drawn from
POINTS = 512  # queries, and keys, whose kernel they have to give
RIDGE = 0.1  # of the kernel's trace

Tensor = torch.Tensor


@torch.no_grad()
def initialise(student: LinearizedForCausalLM, samples: Samples, seed: int = 0, leverage: bool = False) -> None:
    """Begin what the layers of a student hold from samples of the teacher's queries and keys.

    prf and mlp only if `leverage` asks for it: on the demo model it takes a fifth off the divergence of an untrained
    mlp, and is no gain once it is trained.
    """
    generator = torch.Generator().manual_seed(seed)
    for module in attention_modules(student.base):
        student_of_layer, found = getattr(module, "student", None), samples.layers[number(module)]
        if student_of_layer is not None and found is not None:
            begin_layer(student_of_layer, found, generator, leverage)


@torch.no_grad()
def begin_layer(student: LayerStudent, found: LayerSamples, generator: torch.Generator, leverage: bool = False) -> None:
    """Begin the slots and the feature maps of one layer."""
    queries = found.queries.unflatten(0, (len(found.keys), -1)).flatten(1, 2).float()  # of each KV head, its group's
    for group in student.groups:
        if isinstance(group, SlotGroup):
            group.merger.reset()
            for place, head in enumerate(group.heads):
                group.merger.metric[place] = query_metric(queries[head]).to(group.merger.metric)
    for group in featured(student):
        if leverage or isinstance(group.feature_map, Codebook):
            for place, head in enumerate(group.heads):
                begin(group.feature_map, place, queries[head], found.keys[head].float(), generator)  # type: ignore[arg-type]


def begin(feature_map: FeatureMap, head: int, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Begin one head of a map from queries and keys, (samples, dim), whose kernel is exp(q·k)."""
    if isinstance(feature_map, Codebook):
        metric = query_metric(q).to(feature_map.metric)
        centres = cluster(k @ metric.cpu(), feature_map.features, generator)
        feature_map.metric[head] = metric
        feature_map.centres[head] = torch.linalg.solve(metric.cpu(), centres.mT).mT
        if isinstance(feature_map, Clusters):
            feature_map.query_centres[head] = feature_map.centres[head]
        feature_map.log_sharpness[head] = math.log(SHARPNESS)
    elif isinstance(feature_map, MLP):
        z, weight = directions(q, k, feature_map.features, generator)
        for side in (feature_map.query_side, feature_map.key_side):
            side.z[head] = z
            side.bias[head] = (weight - math.log(len(z))) / 2
    elif isinstance(feature_map, PositiveFeatures) and feature_map.z.requires_grad:
        feature_map.z[head], feature_map.log_weight[head] = directions(q, k, feature_map.features, generator)


def query_metric(q: Tensor) -> Tensor:
    """A matrix with |metric·x|² the mean of (q·x)²: what a difference of keys is to queries."""
    return root(q.mT @ q / len(q))


def root(square: Tensor) -> Tensor:
    """The symmetric root of a covariance, lifted a little so that it can be inverted."""
    values, vectors = torch.linalg.eigh(square.double())
    values = values.clamp_min(0) + 1e-4 * values.mean() + 1e-12
    return (vectors * values.sqrt() @ vectors.mT).float()


def cluster(points: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (count, dim)
    """Find centres of points by k-means, begun far apart (k-means++)."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    distance = (points - points[chosen]).square().sum(-1)
    for _ in range(count - 1):
        new = torch.multinomial(distance + 1e-12, 1, generator=generator)  # there may be fewer points than centres
        chosen = torch.cat([chosen, new])
        distance = torch.minimum(distance, (points - points[new]).square().sum(-1))
    centres = points[chosen]
    for _ in range(LLOYD):
        nearest = torch.cdist(points, centres).argmin(-1)
        members = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    return centres


def directions(q: Tensor, k: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw z (count, dim) by leverage from a Gaussian pool, and log α = log of p(z) over the density drawn from."""
    points = torch.cat([part[torch.randperm(len(part), generator=generator)[:POINTS]] for part in (q, k)])
    pool = orthogonal(POOL, points.shape[1], generator)
    logs = points @ pool.mT - half_square(points)
    features = (logs - logs.mul(2).logsumexp(-1, keepdim=True) / 2).exp().double()  # rows of norm one: no overflow
    kernel = features @ features.mT
    kernel.diagonal().add_(RIDGE * len(points))
    leverage = (features * torch.linalg.solve(kernel, features)).sum(0)
    chance = (leverage / leverage.sum()).float()
    drawn = torch.multinomial(chance, count, replacement=count > len(pool), generator=generator)
    return pool[drawn], -(chance[drawn] * len(pool)).log()


def begin_of(run: Run, drawn: torch.Generator | None = None) -> Begin:
    """Give the way to begin the student of one layer; centres of features are drawn one after the other."""
    samples, generator = samples_of(run), drawn or torch.Generator().manual_seed(run.plan.seed)

    def begin(student: LayerStudent, index: int) -> None:
        if (found := samples.layers[index]) is not None:
            begin_layer(student, found, generator)

    return begin
