"""Continues texts with a model, a token at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

Tensor = torch.Tensor
Choose = Callable[[Tensor], Tensor]  # logits (texts, vocabulary) -> next tokens (texts, 1)


def write_tokens(model: PreTrainedModel, ids: Tensor, cache: Cache, choose: Choose) -> Iterator[Tensor]:
    """Yield the next token of every text (texts, 1), without end; `ids` (texts, tokens) follow what the cache holds."""
    while True:
        with torch.inference_mode():
            out = model(input_ids=ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            ids = choose(out.logits[:, -1].float())
        yield ids


def choose_likeliest(logits: Tensor) -> Tensor:
    return logits.argmax(-1, keepdim=True)


def draw_tokens(seed: int, device: torch.device) -> Choose:
    """Draw from the softmax of the logits with the random numbers of a seed."""
    generator = torch.Generator(device).manual_seed(seed)
    return lambda logits: torch.multinomial(logits.softmax(-1), 1, generator=generator)


def draw_with_same_noise(seed: int) -> Choose:
    """Draw so that models whose logits are equal draw the same tokens, on any device."""
    generator = torch.Generator().manual_seed(seed)

    def choose(logits: Tensor) -> Tensor:  # the largest of logits with Gumbel noise is a draw from their softmax
        noise = torch.rand(logits.shape, generator=generator).clamp_min(1e-20).log().neg().log()
        return choose_likeliest(logits.cpu() - noise).to(logits.device)

    return choose
