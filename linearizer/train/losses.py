"""The losses that students are trained on.

Layer by layer, on the queries, keys and values of the teacher's layer:
  softmax  cross-entropy of the teacher's attention rows against the student's; its excess is their KL divergence
  l2       squared error of the kernel exp(q·k), divided by its own square: the paper's, which fits large scores only
  output   squared error of the attention output after the output projection, divided by the output's own square:
           directions that the network does not read cost nothing. Where memory splits a batch, the parts' mean
End to end, on the hidden states from which the logits are made, a few tokens' logits at a time:
  direct   the negative log-likelihood of the next token
  logits   the KL divergence of the student's next-token distribution from the teacher's
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.kernels.features import attend_in_blocks
from linearizer.student.columns import EMPTY
from linearizer.student.feature_maps import FeatureGroup, ScaledMap
from linearizer.student.features_torch import attend_text_with_features
from linearizer.student.layer_student import LayerStudent
from linearizer.teacher.layers import blocks_of, featured, matrix
from linearizer.train.attention_loss import MIN_PRODUCT, attention_loss, multiply, products_of_features

EXCESS_NAMES = {"softmax": "attention_error", "logits": "kl"}  # of the excess that is a KL divergence, by its loss
LARGEST_LOG = 40.0  # of a kernel over its largest value: its square is finite in fp32
STRAIGHT = 0.9  # of the cap of logits: larger ones do not show a factor before it
TRAINED_LOGITS = 2**23  # in memory at once, in fp32, with their gradients
STUDENT_WIDTHS = 40  # numbers in the graph of a student's block for each token, in sizes of its hidden state

Tensor = torch.Tensor


@dataclass(frozen=True)
class AttentionInputs:
    """The queries, keys and values of a layer of the teacher."""

    query: Tensor  # (batch, query heads, tokens, key_dim)
    key: Tensor  # (batch, kv heads, tokens, key_dim)
    value: Tensor  # (batch, kv heads, tokens, value_dim)
    scale: float

    def of_heads(self, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Take q, k, v of the KV heads, q multiplied by the scale: (batch, heads, [group,] tokens, dim)."""
        query = self.query.unflatten(1, (self.key.shape[1], -1))[:, heads].float()
        return query * self.scale, self.key[:, heads].float(), self.value[:, heads].float()

    def is_finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.query, self.key, self.value))


@dataclass(frozen=True)
class LayerLoss:
    """A loss, and its excess over the smallest possible loss."""

    loss: Tensor
    excess: Tensor  # detached


def layer_loss(kind: str, student: LayerStudent, inputs: AttentionInputs, projection: nn.Module | None) -> LayerLoss:
    """Compare one layer with its teacher."""
    if kind == "output":
        assert projection is not None
        loss = output_loss(student, inputs, projection)
        return LayerLoss(loss, loss.detach())
    groups = featured(student)
    losses = [(kernel_loss if kind == "l2" else rows_loss)(group, inputs) for group in groups]
    shares = [len(group.heads) / sum(len(group.heads) for group in groups) for group in groups]
    loss, excess = (sum(s * x for s, x in zip(shares, part, strict=True)) for part in zip(*losses, strict=True))
    return LayerLoss(loss, excess)


def rows_loss(group: FeatureGroup, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compare the attention rows of a group of heads; return the loss and its excess."""
    q, k, _ = inputs.of_heads(group.heads)
    features = ScaledMap(group.feature_map, inputs.scale)
    u, w = features.queries(q), features.keys(k)
    q, k = inputs.query.unflatten(1, (inputs.key.shape[1], -1))[:, group.heads], inputs.key[:, group.heads]
    loss, least = attention_loss(u, w, q, k, group.window, group.sinks, inputs.scale)
    return loss, loss.detach() - least


def kernel_loss(group: FeatureGroup, inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
    """Compare the kernel of a group of heads, on pairs that are not near; return the mean over heads, twice."""
    q, k, _ = inputs.of_heads(group.heads)
    features = ScaledMap(group.feature_map, inputs.scale)
    u, w = features.queries(q), features.keys(k)
    texts = [
        checkpoint(kernel_errors, *text, group.window, group.sinks, use_reentrant=False)
        for text in zip(u, w, q, k, strict=True)
    ]
    loss = torch.stack(texts).mean()
    return loss, loss.detach()


def kernel_errors(u: Tensor, w: Tensor, q: Tensor, k: Tensor, window: int, sinks: int) -> Tensor:  # (heads,)
    """Compute Σ (K - K̂)² / Σ K² of each head over one text; K has the scale of its largest value."""
    place = torch.arange(k.shape[1], device=k.device)
    is_far = (place <= place[:, None] - window) & (place >= sinks)
    scores, (products, bound) = multiply(q, k), products_of_features(u, w)
    largest = scores.masked_fill(~is_far, EMPTY).amax((1, 2, 3), keepdim=True)
    logs = products.clamp_min(MIN_PRODUCT).log() + bound
    exact, approximate = (
        (each - largest).masked_fill(~is_far, EMPTY).clamp_max(LARGEST_LOG).exp() * is_far for each in (scores, logs)
    )
    size = exact.square().sum((1, 2, 3)).clamp_min(torch.finfo(exact.dtype).tiny)
    return (exact - approximate).square().sum((1, 2, 3)) / size


def projection_by_head(inputs: AttentionInputs, projection: nn.Module) -> Tensor:  # (kv heads, group, size, hidden)
    """Split the weight of the output projection by heads."""
    kv_heads, group = inputs.key.shape[1], inputs.query.shape[1] // inputs.key.shape[1]
    size = inputs.value.shape[-1]
    return matrix(projection, kv_heads * group * size, inputs.value.device).unflatten(0, (kv_heads, group, size))


@torch.no_grad()
def softmax_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute the output of the teacher's attention: (batch, heads, group, tokens, size)."""
    heads = scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, scale=1.0, enable_gqa=True)
    return heads.unflatten(1, q.shape[1:3])


def output_loss(student: LayerStudent, inputs: AttentionInputs, projection: nn.Module) -> Tensor:
    """Compute Σ |W (y - ŷ)|² / Σ |W y|² over the heads that have features, W the output projection."""
    weight = projection_by_head(inputs, projection)
    error, output = (inputs.value.new_zeros((), dtype=torch.float32) for _ in range(2))
    for group in featured(student):
        q, k, v = inputs.of_heads(group.heads)
        exact = softmax_output(q, k, v)
        with torch.no_grad():
            output = output + project(exact, weight[group.heads])
        state, memory = group.empty(k, v, group.window, inputs.scale), group.memory(inputs.scale)
        arguments = q, k, v, memory, group.window, None, state
        approximation = attend_text_with_features(*arguments, attend=attend_in_blocks)
        error = error + project(exact - approximation, weight[group.heads])
    return error.square().sum() / output.square().sum().clamp_min(torch.finfo(output.dtype).tiny)


def project(heads: Tensor, weight: Tensor) -> Tensor:
    """(batch, heads, group, tokens, size), (heads, group, size, hidden) -> (batch, tokens, hidden)."""
    return heads.permute(0, 3, 1, 2, 4).flatten(2) @ weight.flatten(0, 2)


class LogitHead:
    """Computes logits from hidden states like the model: with its output embedding, and perhaps a factor and a cap."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.embedding, self.scale = model.get_output_embeddings(), 1.0
        self.cap = getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None)
        with torch.no_grad():
            logits, hidden = model(input_ids=ids, use_cache=False).logits.float(), hidden_states(model, ids)
            plain = self.embedding(hidden).float()
            straight = logits if self.cap is None else self.cap * (logits / self.cap).atanh()
            small = logits.abs() < STRAIGHT * (self.cap or math.inf)
            self.scale = float((straight * plain)[small].sum() / plain[small].square().sum().clamp_min(1e-30))
            made = self(hidden)
        if not torch.allclose(logits, made, rtol=0.02, atol=0.02 * float(logits.abs().max())):
            raise RequestError(
                "this model computes its logits in an unusual way, so no end-to-end loss can be computed: "
                "train layer by layer (softmax or output), or nothing (the recipe best)"
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        logits = self.embedding(hidden).float() * self.scale
        return logits if self.cap is None else self.cap * (logits / self.cap).tanh()


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run a model without its output embedding: (batch, tokens, hidden)."""
    return model.base_model(input_ids=ids, use_cache=False)[0]


@contextmanager
def recomputed_blocks(model: PreTrainedModel) -> Iterator[None]:
    """Keep of each block only what it receives: backward computes it again, and holds the graph of one at a time."""
    blocks = [(block, block.__dict__.get("forward")) for block in blocks_of(model)]
    for block, _ in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)
    try:
        yield
    finally:
        for block, own in blocks:
            del block.forward
            if own is not None:  # of a library that moves weights
                block.forward = own


def logits_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, teacher: Tensor) -> Tensor:
    """Compute the mean over tokens of KL(teacher ‖ student)."""

    def kl(hidden: Tensor, teacher: Tensor) -> Tensor:
        student, target = head(hidden).log_softmax(-1), head(teacher).log_softmax(-1)
        return kl_div(student, target, reduction="sum", log_target=True)

    return mean_over_pieces(kl, head, hidden, teacher)


def direct_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor) -> Tensor:
    """Compute the mean negative log-likelihood of the next token."""

    def negative_log_likelihood(hidden: Tensor, following: Tensor) -> Tensor:
        return cross_entropy(head(hidden), following, reduction="sum")

    return mean_over_pieces(negative_log_likelihood, head, hidden[:, :-1], ids[:, 1:])


def mean_over_pieces(
    loss: Callable[[Tensor, Tensor], Tensor], head: Callable[[Tensor], Tensor], hidden: Tensor, target: Tensor
) -> Tensor:
    """Compute the mean of a loss over tokens; backward computes the logits of each piece again."""
    hidden, target = hidden.flatten(0, 1), target.flatten(0, 1)
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    size = max(1, TRAINED_LOGITS // vocabulary)
    pieces = zip(hidden.split(size), target.split(size), strict=True)
    parts = [checkpoint(loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(parts).sum() / len(hidden)
