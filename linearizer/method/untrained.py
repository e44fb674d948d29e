"""Makes a teacher a student, and draws weights that nothing was measured for: merging, feature maps, memories."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from linearizer.student.attention_interface import IMPLEMENTATION, attention_by_layer, device_of, implementations
from linearizer.student.feature_maps import MLP, Clusters, FeatureMap, Hedgehog, PositiveFeatures
from linearizer.student.layer_student import HeadGroup, LayerStudent, StoredBasis, rotate
from linearizer.student.matrix_rule import SLOWNESS, MatrixRule
from linearizer.student.modeling_linearized import LinearizedForCausalLM, complete, config_like, model_like

Tensor = torch.Tensor
HALF_LIFE = 256.0  # tokens
BEGIN_SCALE = 0.1  # of what a matrix adds to the mean of values
BEGIN_SHARE = -2.0  # the logarithm of the far share


def make_student(teacher: Any, entries: dict[str, Any], seed: int) -> LinearizedForCausalLM:
    """Make a teacher a student, whose layers are untrained, as the entries of its config say."""
    entries = complete({**entries, "teacher_type": teacher.config.model_type})
    teacher.config.__class__ = config_like(type(teacher.config))  # type: ignore[arg-type]
    teacher.__class__ = model_like(type(teacher))  # type: ignore[arg-type]
    teacher.config.linearized = entries
    vars(teacher).pop("_weight_conversions", None)  # a text tower's weights would get the names of its whole model
    if "_old_forward" in vars(teacher):  # which a hook of accelerate calls
        teacher._old_forward = MethodType(type(teacher).forward, teacher)
    teacher.add_students()
    PreTrainedModel.set_attn_implementation(teacher, implementations(teacher, IMPLEMENTATION))
    for index, module in attention_by_layer(teacher).items():
        if isinstance(layer := getattr(module, "student", None), LayerStudent):
            draw_layer(layer.to(device_of(module, next(teacher.parameters()).device)), generator_at(seed, index))
    student: LinearizedForCausalLM = teacher.train(teacher.training)
    return student


def generator_at(seed: int, *place: int) -> torch.Generator:
    """Return a generator for one layer or head of a model, independent of what is drawn for the others."""
    for number in place:
        seed = (seed * 0x9E3779B97F4A7C15 + number + 1) % 2**63
    return torch.Generator().manual_seed(seed)


@torch.no_grad()
def draw_layer(student: LayerStudent, generator: torch.Generator) -> None:
    """Draw the weights of a layer; slots merge by the same metric for all directions and all keys."""
    if student.turns is not None:
        student.turns.reset()
    for group in student.head_groups():
        if (feature_map := getattr(group, "feature_map", None)) is not None:
            draw(feature_map, generator)
        if group.merger is not None:
            group.merger.reset()
            for place, metric in enumerate(group.merger.metric):
                set_merger(student, group, place, metric.clone(), metric.new_zeros(metric.shape[-1] + 1))


@torch.no_grad()
def set_merger(student: LayerStudent, group: HeadGroup, place: int, metric: Tensor, mean_query: Tensor) -> None:
    """Set the metric and the mean query, for keys multiplied by `root`, of a head by its place in its group."""
    assert group.merger is not None
    if student.turns is not None and group.has_basis:
        head = group.heads[place]
        around = mean_query[-1:].to(metric) - mean_query[:-1].to(metric) @ student.turns.key_middle[head].to(metric)
        metric, query = (metric_to_stored(student.turns, x, head) for x in (metric, mean_query[:-1]))
        mean_query = torch.cat([query, around.to(query)])
    group.merger.metric[place] = metric.to(group.merger.metric)
    group.merger.mean_query[place] = mean_query.to(group.merger.mean_query)


def metric_to_stored(turns: StoredBasis, metric: Tensor, head: int) -> Tensor:
    """Change a metric of keys multiplied by `root` into one of keys as a head stores them."""
    return rotate(metric.to(turns.key_steps) * turns.key_steps[head])


@torch.no_grad()
def draw(feature_map: FeatureMap | MatrixRule, generator: torch.Generator) -> None:
    """Draw a feature map, or the maps of a rule with gates that no token changes yet."""
    if isinstance(feature_map, MatrixRule):
        draw_rule(feature_map, generator)
    elif isinstance(feature_map, PositiveFeatures):
        feature_map.z.copy_(draw_heads(DIRECTIONS[feature_map.kind], feature_map.z, generator))
        feature_map.log_weight.zero_()
    elif isinstance(feature_map, Hedgehog):
        draw_hedgehog(feature_map, generator)
    elif isinstance(feature_map, MLP):
        draw_network(feature_map, generator)
    elif isinstance(feature_map, Clusters):
        draw_clusters(feature_map, generator)


def draw_hedgehog(hedgehog: Hedgehog, generator: torch.Generator) -> None:
    """Start at the identity, as in the paper; further rows are random directions."""
    rows, dim = hedgehog.query_weight.shape[1:]
    weight = draw_heads(gaussian, hedgehog.query_weight, generator)
    weight[:, :dim] = torch.eye(dim)[:rows]
    weight *= dim**0.25  # scaling made the heads' inputs smaller by about this factor
    hedgehog.query_weight.copy_(weight)
    hedgehog.key_weight.copy_(weight)
    hedgehog.gain.zero_()


def draw_network(network: MLP, generator: torch.Generator) -> None:
    """Start as prf."""
    z = draw_heads(gaussian, network.query_side.z, generator)
    for side in (network.query_side, network.key_side):
        side.z.copy_(z)
        side.norm.fill_(1.0)
        side.bias.fill_(-math.log(z.shape[1]) / 2)
        side.hidden.copy_(draw_heads(gaussian, side.hidden, generator) / math.sqrt(z.shape[-1]))
        side.out.zero_()


def draw_clusters(clusters: Clusters, generator: torch.Generator) -> None:
    """Queries score the centres that keys are compared with."""
    clusters.centres.copy_(draw_heads(gaussian, clusters.centres, generator))
    clusters.metric.copy_(torch.eye(clusters.metric.shape[-1]).expand_as(clusters.metric))
    clusters.log_sharpness.zero_()
    clusters.query_centres.copy_(clusters.centres)
    clusters.bias.zero_()


def draw_rule(made: MatrixRule, generator: torch.Generator) -> None:
    """Draw new maps, with gates that no token changes yet."""
    for name, parameter in made.named_parameters():
        parameter.zero_()
        if name in ("key_map", "query_map", "gate_down", "router"):
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(drawn / math.sqrt(parameter.shape[-1]))
    if made.gate_bias is not None:
        made.gate_bias.copy_(torch.cat([begin_bias(made, kind, size) for kind, size in made.gates.items()]))
    made.value_scale.fill_(BEGIN_SCALE if made.rule.has_moments else 1.0)
    if made.rule.mass == "share" and made.rule.decay != "key":  # Liger's begins with equal shares
        made.mass.fill_(BEGIN_SHARE)
    if made.norm is not None:
        made.norm.fill_(1.0)
    for weight in (made.tap_weight, made.query_tap_weight):
        if weight is not None:
            weight[:, -1] = 1.0


def begin_bias(made: MatrixRule, kind: str, size: int) -> Tensor:
    """Return biases of gates for decay with HALF_LIFE, and for erasing one half."""
    if kind == "decay" and made.rule.decay == "key":
        return torch.zeros(size)  # as in its paper: half-lives of some 16 tokens
    slowness = 1.0 if made.rule.decay == "complement" else SLOWNESS
    share = 2 ** (-slowness / HALF_LIFE) if kind == "decay" else 0.5
    return torch.full((size,), math.log(share / (1 - share)))


def gaussian(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    return torch.randn(rows, dim, generator=generator)


def orthogonal(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw blocks of orthogonal directions with the norms of Gaussian vectors."""
    q, r = torch.linalg.qr(gaussian(-(-rows // dim) * dim, dim, generator).unflatten(0, (-1, dim)))
    blocks = q * r.diagonal(dim1=-2, dim2=-1).sign()[:, None]  # uniform over rotations; without the signs biased
    return blocks.flatten(0, 1)[:rows] * gaussian(rows, dim, generator).norm(dim=-1, keepdim=True)


def cosine_transform(rows: int, dim: int, generator: torch.Generator) -> Tensor:
    """Draw rows of sign-flipped cosine transforms; their norms are evenly spaced quantiles of a Gaussian's norm."""
    index = torch.arange(dim, dtype=torch.float32)
    transform = torch.cos(math.pi / dim * (index + 0.5) * index[:, None]) * math.sqrt(2 / dim)
    transform[0] /= math.sqrt(2)
    signs = torch.randint(0, 2, (-(-rows // dim), 1, dim), generator=generator) * 2.0 - 1
    directions = (transform * signs).flatten(0, 1)[:rows]
    norms = gaussian(4096, dim, generator).norm(dim=-1).quantile((torch.arange(rows) + 0.5) / rows)
    return directions * norms[torch.randperm(rows, generator=generator), None]


def draw_heads(draw_rows: Callable, like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw (rows, dim) for every head of a parameter (heads, rows, dim)."""
    return torch.stack([draw_rows(*like.shape[1:], generator) for _ in range(like.shape[0])])


DIRECTIONS: dict[str, Callable] = {"prf": gaussian, "performer": orthogonal, "dijiang": cosine_transform}
