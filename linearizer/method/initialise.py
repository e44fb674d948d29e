"""Initialises slots, axes and feature maps from a sample of a layer's queries, keys and values, without training.

  turns  the mean of keys and values, and in each direction how far keys spread compared with how large queries are
  slots  the metric of the queries: |metric·x|² is the mean of (q·x)²; and their mean
  clusters  centres of the keys, by k-means in that metric
  memories  keys in the directions that queries tell apart best; routes to centres of the keys; the masses and the scale
            of values by a text: a memory that does not bring a head nearer to its teacher begins with almost no mass
All other feature maps keep their random values.
"""

from __future__ import annotations

import math

import torch

from linearizer.method.recorder import LayerSamples, Samples
from linearizer.method.untrained import draw_layer, generator_at, set_merger
from linearizer.student.attention_interface import attention_modules
from linearizer.student.columns import EMPTY
from linearizer.student.feature_maps import Clusters, FeatureGroup
from linearizer.student.features_torch import PartialSoftmax
from linearizer.student.layer_student import LayerStudent, StoredBasis
from linearizer.student.matrix_rule import MatrixRule, ScaledRule
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.layers import featured, layer_number

KMEANS_ROUNDS = 8
RIDGE = 0.01  # of the mean square, added to every direction: no sample shows all differences
SHARPNESS = 4.0  # of a key's shares among centres

Tensor = torch.Tensor
SHIFTS = [step / 2 for step in range(-20, 9)]  # nats that masses are moved by
MOST_SCALE = 4.0
NEGLIGIBLE = -6.0  # nats: mass that weighs almost nothing compared with what a row sees exactly
LEAST_GAIN = 0.002  # of a head's error: a smaller gain is noise


@torch.no_grad()
def initialise(student: LinearizedForCausalLM, samples: Samples) -> None:
    """Initialise the layers of a student from samples of the teacher's queries and keys."""
    for module in attention_modules(student):
        index = layer_number(module)
        if (layer_student := getattr(module, "student", None)) is not None and samples.layers[index] is not None:
            initialise_layer(layer_student, samples, index)


@torch.no_grad()
def initialise_layer(student: LayerStudent, samples_of_layers: Samples, index: int) -> None:
    """Initialise the turns, slots and feature maps of the layer with this number; without samples they are drawn.

    Each head draws its own numbers, so that a head with an option gets the same values whatever other heads hold.
    """
    samples, seed = samples_of_layers.layers[index], samples_of_layers.seed
    if samples is None:
        draw_layer(student, generator_at(seed, index))
        return
    queries = samples.queries.unflatten(0, (len(samples.keys), -1)).flatten(1, 2).float()  # (kv heads, samples, dim)
    if student.turns is not None:
        initialise_turns(student.turns, queries, samples.keys, samples.values)
    for group in student.head_groups():
        if group.merger is not None:
            group.merger.reset()
            for place, head in enumerate(group.heads):
                mean_query = queries[head].mean(0)
                around = (mean_query @ samples.keys[head].float().mean(0))[None]
                set_merger(student, group, place, query_metric(queries[head]), torch.cat([mean_query, around]))
    for far_group in featured(student):
        for place, head in enumerate(far_group.heads):
            arguments = place, queries[head], samples.keys[head].float(), generator_at(seed, index, head)
            if isinstance(far_group.feature_map, Clusters):
                initialise_clusters(far_group.feature_map, *arguments)
            elif isinstance(far_group.feature_map, MatrixRule):
                initialise_rule(far_group.feature_map, *arguments)
        if isinstance(far_group.feature_map, MatrixRule):
            fit_memory(far_group, samples.text)


def initialise_turns(turns: StoredBasis, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Initialise how all heads turn their keys and values, from queries, keys and values (heads, samples, dim).

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


def initialise_clusters(clusters: Clusters, head: int, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Initialise one head of clusters from queries and keys, (samples, dim), whose kernel is exp(q·k)."""
    metric = query_metric(q).to(clusters.metric)
    centres = cluster(k @ metric.cpu(), clusters.features, generator)
    clusters.metric[head] = metric
    clusters.centres[head] = torch.linalg.solve(metric.cpu(), centres.mT).mT
    clusters.query_centres[head] = clusters.centres[head]
    clusters.log_sharpness[head] = math.log(SHARPNESS)


def initialise_rule(rule: MatrixRule, head: int, q: Tensor, k: Tensor, generator: torch.Generator) -> None:
    """Initialise one head of a matrix rule: its products of keys and of queries multiply to their scores.

    Keys are taken in the metric of the queries, in the directions in which that is largest, and queries in its inverse.
    """
    if rule.rule.has_moments:  # the error of the mass of Gaussian keys
        mass = (q @ k.mT).logsumexp(-1) - math.log(len(k))
        rule.mass[head] = (mass - q @ k.mean(0) - q.square() @ k.var(0, correction=0) / 2).median()
    root, vectors = (x.flip(-1) for x in directions_of(q))
    vectors = vectors * torch.where(q.mean(0).double() @ vectors < 0, -1.0, 1.0)  # whose signs eigh leaves open
    count = min(rule.key_map.shape[2], len(root))
    key_map, query_map = (vectors * root).mT[:count].float(), (vectors / root).mT[:count].float()
    rule.key_map[head, :, :count] = torch.stack([key_map.roll(step, 0) for step in range(rule.rule.steps)])
    rule.query_map[head, :count] = query_map
    rule.key_shift[head] = k.mean(0)
    if rule.router is not None:
        rule.router[head, :, :count] = cluster((k - k.mean(0)) @ key_map.mT, rule.rule.memories, generator)


def query_metric(q: Tensor) -> Tensor:
    """Make a matrix with |metric·x|² the mean of (q·x)²: how far queries tell two keys apart that differ by x."""
    roots, vectors = directions_of(q)
    return (vectors * roots @ vectors.mT).float()


def directions_of(q: Tensor) -> tuple[Tensor, Tensor]:
    """Return how large queries are in each direction, lifted a little so that none is 0, and the directions."""
    values, vectors = torch.linalg.eigh((q.mT @ q / len(q)).double())
    return (values.clamp_min(0) + 1e-4 * values.mean() + 1e-12).sqrt(), vectors


def cluster(points: Tensor, count: int, generator: torch.Generator) -> Tensor:  # (count, dim)
    """Find centres of points by k-means, started far apart (k-means++)."""
    chosen = torch.randint(len(points), (1,), generator=generator)
    distance = (points - points[chosen]).square().sum(-1)
    for _ in range(count - 1):
        centre = torch.multinomial(distance + 1e-12, 1, generator=generator)  # there may be fewer points than centres
        chosen = torch.cat([chosen, centre])
        distance = torch.minimum(distance, (points - points[centre]).square().sum(-1))
    centres = points[chosen]
    for _ in range(KMEANS_ROUNDS):
        nearest = torch.cdist(points, centres).argmin(-1)
        members = torch.bincount(nearest, minlength=count)[:, None]
        sums = torch.zeros_like(centres).index_add_(0, nearest, points)
        centres = torch.where(members > 0, sums / members.clamp_min(1), centres)
    return centres


@torch.no_grad()
def fit_memory(group: FeatureGroup, text: LayerSamples | None) -> None:
    """Set the masses of a group's memory, and the scales of its values; without a text it weighs almost nothing."""
    rule = group.feature_map
    assert isinstance(rule, MatrixRule)
    if text is None or text.keys.shape[-2] <= group.window + group.sinks + 1:
        rule.mass += NEGLIGIBLE
        return
    device = rule.mass.device
    q = text.queries.unflatten(0, (len(text.keys), -1))[group.heads].float().to(device)  # (heads, group, tokens, dim)
    k, v = (x[group.heads].float().to(device) for x in (text.keys, text.values))
    far = slice(group.window + group.sinks, None)  # rows for which some tokens are far
    softmax, windowed = (attend(q, k, v, window, group.sinks) for window in (k.shape[-2], group.window))
    rule.value_scale.fill_(0.0)
    plain = read_with_memory(group, q, k, v)
    rule.value_scale.fill_(1.0)
    full = read_with_memory(group, q, k, v)
    window_mass, exact = windowed[1][:, :, far], softmax[0][:, :, far] - windowed[0][:, :, far]
    mass = full.bound[0][:, :, far] + (window_mass if full.is_share else 0.0)
    offset, values = plain.sum[0][:, :, far] - windowed[0][:, :, far], (full.sum - plain.sum)[0][:, :, far]

    def fit_scale(shift: float) -> tuple[Tensor, Tensor]:
        """Return each head's error with its masses moved, and the scale of values that makes it smallest."""
        share = (mass + shift - window_mass).sigmoid()
        missing, added = exact - share * offset, share * values
        scale = ((missing * added).sum((1, 2, 3)) / added.square().sum((1, 2, 3)).clamp_min(1e-30)).clamp(0, MOST_SCALE)
        return (missing - scale[:, None, None, None] * added).square().sum((1, 2, 3)), scale

    errors, scales = (torch.stack(parts) for parts in zip(*map(fit_scale, SHIFTS), strict=True))
    best = errors.argmin(0)
    helps = errors.amin(0) < (1 - LEAST_GAIN) * exact.square().sum((1, 2, 3))
    nothing = NEGLIGIBLE - (mass - window_mass).amax((1, 2, 3))
    rule.mass += torch.where(helps, torch.tensor(SHIFTS, device=device)[best], nothing)
    rule.value_scale.copy_(torch.where(helps, scales.gather(0, best[None])[0], 1.0))


def attend(q: Tensor, k: Tensor, v: Tensor, window: int, sinks: int) -> tuple[Tensor, Tensor]:
    """Attend to windows and sinks, head by head: outputs and the logarithms of their masses."""
    place = torch.arange(k.shape[-2], device=k.device)
    visible = (place <= place[:, None]) & ((place[:, None] - place < window) | (place < sinks))
    outputs, masses = [], []
    for head_q, head_k, head_v in zip(q, k, v, strict=True):
        logits = (head_q @ head_k.mT).masked_fill(~visible, EMPTY)
        outputs.append(logits.softmax(-1) @ head_v)
        masses.append(logits.logsumexp(-1, keepdim=True))
    return torch.stack(outputs), torch.stack(masses)


def read_with_memory(group: FeatureGroup, q: Tensor, k: Tensor, v: Tensor) -> PartialSoftmax:
    """Let a memory read a text whose tokens leave the window one after the other; return what each row reads."""
    memory, window, place = group.memory(1.0), group.window, torch.arange(k.shape[-2], device=k.device)[None]
    assert isinstance(memory, ScaledRule)
    leaving_k, leaving_v = (x.roll(window, -2)[None] for x in (k, v))
    state = memory.empty(leaving_k, leaving_v, window, group.sinks)
    return memory.chunk(state, q[None], leaving_k, leaving_v, place >= window + group.sinks, place)
