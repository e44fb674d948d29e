"""What a student is trained on.

Layer by layer, on what the teacher's layer attends with:
  softmax  cross-entropy of the teacher's attention rows against the student's; KL divergence beside it
  l2       squared error of the kernel, scaled by its largest value
  output   squared error of the attention output after the output projection, as a share of the output's own square:
           what the network does not read costs nothing
The last two are held against a measure of the whole batch, which is taken first where a batch goes through in parts.
End to end, on the hidden states from which the logits are made, a few tokens' logits at a time:
  direct   the next token's negative log-likelihood
  logits   the KL divergence of the student's next token from the teacher's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, kl_div, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from linearizer.errors import RequestError
from linearizer.model.layers import featured, matrix
from linearizer.runtime.features_torch import chunked
from linearizer.runtime.layer_student import HeadGroup, LayerStudent, Scaled
from linearizer.runtime.state import State
from linearizer.train.attention_loss import attention_loss
from linearizer.train.attention_loss_blocks import largest_scores

LOGITS = 2**23  # logits that are held at once, in fp32

Tensor = torch.Tensor


@dataclass(frozen=True)
class Attended:
    """What a layer of the teacher attends with."""

    query: Tensor  # (batch, query heads, tokens, key_dim)
    key: Tensor  # (batch, kv heads, tokens, key_dim)
    value: Tensor  # (batch, kv heads, tokens, value_dim)
    scale: float

    def of(self, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Give q, k, v of some KV heads, q multiplied by the scale: (batch, heads, [group,] tokens, dim)."""
        query = self.query.unflatten(1, (self.key.shape[1], -1))[:, heads].float()
        return query * self.scale, self.key[:, heads].float(), self.value[:, heads].float()

    def finite(self) -> bool:
        return all(bool(x.isfinite().all()) for x in (self.query, self.key, self.value))


@dataclass(frozen=True)
class Found:
    """A loss, and the part of it that is the student's fault where the rest is not nothing."""

    loss: Tensor
    excess: Tensor  # detached


def layer_loss(
    kind: str,
    student: LayerStudent,
    seen: Attended,
    projection: nn.Module | None,
    keep: float,
    measure: Tensor | None = None,
) -> Found:
    """Compare one layer with its teacher, windows being cut to a share `keep` of theirs.

    `measure` is what `measure_of` gives of the whole batch, where this is a part of it.
    """
    if kind == "output":
        assert projection is not None
        loss = output_loss(student, seen, projection, keep, measure)
        return Found(loss, loss.detach())
    groups = featured(student)
    losses = [rows_loss(kind, group, seen, keep, measure) for group in groups]
    shares = [len(group.heads) / sum(len(group.heads) for group in groups) for group in groups]
    loss, excess = (sum(s * x for s, x in zip(shares, part, strict=True)) for part in zip(*losses, strict=True))
    return Found(loss, excess)


def rows_loss(
    kind: str, group: HeadGroup, seen: Attended, keep: float, measure: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compare the attention rows of some heads; also give the loss above its least."""
    q, k, _ = seen.of(group.heads)
    features = Scaled(group.feature_map, seen.scale)  # type: ignore[arg-type]
    u, w = features.queries(q), features.keys(k)
    q, k = seen.query.unflatten(1, (seen.key.shape[1], -1))[:, group.heads], seen.key[:, group.heads]  # as they are
    largest = None if measure is None else measure[group.heads]
    loss, least = attention_loss(u, w, q, k, int(group.window * keep), group.sinks, kind, seen.scale, largest)
    return loss, loss.detach() - least


def measure_of(kind: str, student: LayerStudent, seen: Attended, projection: nn.Module | None) -> Tensor:
    """What a loss is held against: of l2 each KV head's largest score, of output Σ |W y|², a text's on average."""
    if kind == "l2":
        return largest_scores(*seen.of(list(range(seen.key.shape[1])))[:2])
    assert projection is not None
    weight, whole = weight_by_head(seen, projection), seen.value.new_zeros((), dtype=torch.float32)
    for part in featured(student):
        whole = whole + projected(exact_output(*seen.of(part.heads)), weight[part.heads])
    return whole.square().sum() / len(seen.query)


def weight_by_head(seen: Attended, projection: nn.Module) -> Tensor:  # (kv heads, group, size, hidden)
    kv_heads, group = seen.key.shape[1], seen.query.shape[1] // seen.key.shape[1]
    size = seen.value.shape[-1]
    return matrix(projection, kv_heads * group * size, seen.value.device).unflatten(0, (kv_heads, group, size))


@torch.no_grad()
def exact_output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What the teacher's attention gives: (batch, heads, group, tokens, size)."""
    heads = scaled_dot_product_attention(q.flatten(1, 2), k, v, is_causal=True, scale=1.0, enable_gqa=True)
    return heads.unflatten(1, q.shape[1:3])


def output_loss(
    student: LayerStudent, seen: Attended, projection: nn.Module, keep: float, measure: Tensor | None
) -> Tensor:
    """Σ |W (y - ŷ)|² / Σ |W y|² over the heads that have features, W the output projection."""
    weight = weight_by_head(seen, projection)
    error, whole = seen.value.new_zeros((), dtype=torch.float32), seen.value.new_zeros((), dtype=torch.float32)
    for part in featured(student):
        q, k, v = seen.of(part.heads)
        own = weight[part.heads]
        exact = exact_output(q, k, v)
        if measure is None:
            with torch.no_grad():
                whole = whole + projected(exact, own)
        window = int(part.window * keep)
        state = State.empty(k, v, window, part.sinks, part.features)
        far = Scaled(part.feature_map, seen.scale)  # type: ignore[arg-type]
        error = error + projected(exact - chunked(q, k, v, far, window, None, state), own)
    square = whole.square().sum() if measure is None else measure * len(seen.query)
    return error.square().sum() / square.clamp_min(torch.finfo(whole.dtype).tiny)


def projected(heads: Tensor, weight: Tensor) -> Tensor:
    """(batch, heads, group, tokens, size), (heads, group, size, hidden) -> (batch, tokens, hidden)."""
    return heads.permute(0, 3, 1, 2, 4).flatten(2) @ weight.flatten(0, 2)


class LogitHead:
    """Makes logits of hidden states, as a model does by itself: with its output embedding, and perhaps a factor."""

    def __init__(self, model: PreTrainedModel, ids: Tensor) -> None:
        self.embedding = model.get_output_embeddings()
        self.scale = 1.0
        with torch.no_grad():
            made = model(input_ids=ids, use_cache=False).logits.float()
            plain = self(hidden_states(model, ids))
        self.scale = float((made * plain).sum() / plain.square().sum().clamp_min(1e-30))
        if not torch.allclose(made, plain * self.scale, rtol=0.02, atol=0.02 * float(made.abs().max())):
            raise RequestError(
                "this model makes its logits in a way of its own, so no loss can be taken end to end: "
                "train layer by layer (softmax, l2 or output)"
            )

    def __call__(self, hidden: Tensor) -> Tensor:
        return self.embedding(hidden).float() * self.scale


def hidden_states(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Run a model up to where its logits would be made: (batch, tokens, hidden)."""
    return model.base_model(input_ids=ids, use_cache=False)[0]


def logits_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, teacher: Tensor) -> Tensor:
    """Mean over tokens of KL(teacher ‖ student)."""

    def divergence(hidden: Tensor, teacher: Tensor) -> Tensor:
        own, wanted = head(hidden).log_softmax(-1), head(teacher).log_softmax(-1)
        return kl_div(own, wanted, reduction="sum", log_target=True)

    return in_pieces(divergence, head, hidden, teacher)


def direct_loss(head: Callable[[Tensor], Tensor], hidden: Tensor, ids: Tensor) -> Tensor:
    """Mean negative log-likelihood of the next token."""

    def surprise(hidden: Tensor, following: Tensor) -> Tensor:
        return cross_entropy(head(hidden), following, reduction="sum")

    return in_pieces(surprise, head, hidden[:, :-1], ids[:, 1:])


def in_pieces(
    loss: Callable[[Tensor, Tensor], Tensor], head: Callable[[Tensor], Tensor], hidden: Tensor, wanted: Tensor
) -> Tensor:
    """Take the mean of a loss over tokens; the logits of each piece are made again in backward."""
    hidden, wanted = hidden.flatten(0, 1), wanted.flatten(0, 1)
    with torch.no_grad():
        vocabulary = head(hidden[:1]).shape[-1]
    size = max(1, LOGITS // vocabulary)
    pieces = zip(hidden.split(size), wanted.split(size), strict=True)
    parts = [checkpoint(loss, *piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces]
    return torch.stack(parts).sum() / len(hidden)
