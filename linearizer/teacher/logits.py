"""Logits of a model, the kl between two models, and the bytes of their caches."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, kl_div
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.errors import FaultError
from linearizer.plan.head_bytes import CACHED
from linearizer.student.attention_of_student import tensors
from linearizer.student.cache import LinearizedLayer, recurrent_tensors
from linearizer.student.modeling_linearized import LinearizedForCausalLM

Tensor = torch.Tensor
KEYS_AND_VALUES = {"sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v"}  # in states
PROBE_TOKENS = 16  # that a model reads in a check
MAX_LOGITS = 2**26  # of one subject, in memory at once in fp32
MAX_CACHED_LOGITS = 2**19  # fit into a processor's caches
EVERY, FEWEST_PLACES = 8, 512  # of the places of a text one is judged, but at least so many in a text


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:  # (texts, tokens, vocabulary)
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float()


def check_logits(model: PreTrainedModel, texts: Tensor) -> None:
    """Refuse a teacher whose logits are not finite."""
    if not logits_of(model, texts[:1, :PROBE_TOKENS]).isfinite().all():
        raise FaultError("the teacher's logits are not finite: its weights are damaged, or load it in float32")


def losses_of(logits: Tensor, following: Tensor) -> Tensor:  # (texts, tokens)
    return compare_rows(
        lambda row, token: cross_entropy(row, token, reduction="none"), logits, following.to(logits.device)
    )


def kl_of(teacher: Tensor, student: Tensor) -> Tensor:  # (texts, tokens)
    """Compute KL(teacher ‖ student) of every next-token distribution, in nats."""
    return compare_rows(
        lambda p, q: kl_div(q.log_softmax(-1), p.log_softmax(-1), reduction="none", log_target=True).sum(-1),
        teacher,
        student,
    )


def compare_rows(compare: Callable[[Tensor, Tensor], Tensor], logits: Tensor, targets: Tensor) -> Tensor:
    """Compare logits token by token; on a CPU in pieces that fit into its caches."""
    rows = max(1, (MAX_CACHED_LOGITS if logits.device.type == "cpu" else MAX_LOGITS) // logits.shape[-1])
    pieces = [zip(a.split(rows), b.split(rows), strict=True) for a, b in zip(logits, targets, strict=True)]
    return torch.stack([torch.cat([compare(*pair) for pair in pairs]) for pairs in pieces])


def fresh_cache(model: PreTrainedModel) -> Cache:
    """Make an empty cache of the kind that the model reads with at the moment."""
    if isinstance(model, LinearizedForCausalLM) and not model.attends_as_teacher:
        return model.empty_cache()
    cache = DynamicCache(config=model.config)
    for layer in cache.layers:
        layer.memory = None  # a student passes it to its attention, even to its teacher's
    return cache


def bytes_held(cache: Cache, in_16_bits: bool = False) -> int:
    """Count the bytes of a cache's tensors; `in_16_bits`: as if its model computed in 16 bits, as in stated sizes."""
    total = 0
    for layer in cache.layers:
        if isinstance(layer, LinearizedLayer):
            named = [pair for state in layer.memory for pair in tensors(state).items()]
            in_dtype = [x for name, x in named if name in KEYS_AND_VALUES and x.is_floating_point()]
            total += layer.bytes()
        else:
            in_dtype = [x for x in (getattr(layer, name, None) for name in ("keys", "values")) if isinstance(x, Tensor)]
            total += sum(x.numel() * x.element_size() for x in in_dtype)
        total -= sum(x.numel() * (x.element_size() - CACHED) for x in in_dtype) * in_16_bits
    return total + recurrent_bytes(cache)


def recurrent_bytes(cache: Cache) -> int:
    """Count the bytes that recurrent layers keep, as much after any number of tokens."""
    kept = (states[key] for layer in cache.layers for _, states, key in recurrent_tensors(layer))
    return sum(x.numel() * x.element_size() for x in kept)


def drawn_places(tokens: int, seed: int = 0) -> Tensor:
    """Draw the places of a text at which models are compared: one of every few that follow each other, or all.

    Means over a text spread by documents more than by places, and with a large vocabulary logits take most of the time.
    """
    every = min(EVERY, max(1, tokens // FEWEST_PLACES))
    begins = torch.arange(0, tokens, every)
    drawn = torch.randint(every, begins.shape, generator=torch.Generator().manual_seed(seed))
    return (begins + drawn).clamp(max=tokens - 1)


def logits_at_once(model: PreTrainedModel, tokens: int) -> int:
    """Return the number of texts of `tokens` tokens, or of tokens of `tokens` texts, whose logits fit into memory."""
    return max(1, MAX_LOGITS // (tokens * vocabulary(model)))


def vocabulary(model: PreTrainedModel) -> int:
    return model.get_output_embeddings().weight.shape[0]
