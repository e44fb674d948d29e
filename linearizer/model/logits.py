"""What a model says of the next token, and how two of them differ."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import FaultError
from linearizer.runtime.cache import LinearizedLayer
from linearizer.runtime.modeling_linearized import LinearizedForCausalLM

Tensor = torch.Tensor
PROBE = 16  # tokens that a model reads to be known
LOGITS = 2**26  # logits of one subject that are held at once, in fp32
NEAR = 2**19  # of them fit into a processor's caches


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:  # (texts, tokens, vocabulary)
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float()


def check_logits(model: PreTrainedModel, windows: Tensor) -> None:
    """Refuse a teacher that gives no numbers."""
    if not logits_of(model, windows[:1, :PROBE]).isfinite().all():
        raise FaultError("the teacher's logits are not finite: its weights are damaged, or load it in float32")


def losses_of(logits: Tensor, following: Tensor) -> Tensor:  # (texts, tokens)
    return by_rows(lambda own, token: cross_entropy(own, token, reduction="none"), logits, following.to(logits.device))


def kl_of(teacher: Tensor, student: Tensor) -> Tensor:  # (texts, tokens)
    """KL(teacher ‖ student) of every next-token distribution."""
    return by_rows(
        lambda p, q: kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1),
        teacher,
        student,
    )


def by_rows(compare: Callable[[Tensor, Tensor], Tensor], logits: Tensor, other: Tensor) -> Tensor:
    """Compare logits token by token; on a CPU so few at a time that they stay in its caches."""
    rows = max(1, (NEAR if logits.device.type == "cpu" else LOGITS) // logits.shape[-1])
    pieces = [zip(own.split(rows), its.split(rows), strict=True) for own, its in zip(logits, other, strict=True)]
    return torch.stack([torch.cat([compare(*pair) for pair in pairs]) for pairs in pieces])


def fresh_cache(model: PreTrainedModel) -> Cache:
    """Make a cache of the model's own kind, with nothing in it."""
    if isinstance(model, LinearizedForCausalLM):
        return model.empty_cache()
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.memory = None  # a student's base hands it to its attention, even where that is its teacher's
    return cache


def remembered(cache: Cache) -> int:
    """The bytes of a cache's tensors."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearizedLayer):
            total += layer.bytes()
        elif layer.is_initialized:
            total += sum(tensor.numel() * tensor.element_size() for tensor in (layer.keys, layer.values))
    return total


def texts_at_once(model: PreTrainedModel, length: int) -> int:
    """Tell how many texts' logits may be held at once."""
    return max(1, LOGITS // (length * vocabulary(model)))


def tokens_at_once(model: PreTrainedModel, texts: int) -> int:
    """Tell of how many tokens of so many texts the logits may be held at once."""
    return max(1, LOGITS // (texts * vocabulary(model)))


def vocabulary(model: PreTrainedModel) -> int:
    return model.get_output_embeddings().weight.shape[0]
