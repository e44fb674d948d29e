"""The link to transformers' attention interface for models that read in both directions.

With the implementation IMPLEMENTATION a model passes the queries, keys and values of every layer to `both_ways`, with a
mask of padding only.
"""

import hashlib
import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

# Every checkpoint brings a copy of this file; the hash keeps their names apart in one process.
_COPY = hashlib.sha256(__name__.encode()).hexdigest()[:8]
IMPLEMENTATION = f"both_ways_{_COPY}"
GRID: ContextVar[tuple[int, ...]] = ContextVar("grid", default=())  # patches along each axis of the current pictures
NOT_SERVED = (
    "a linearized encoder lets every token see all others but padding; other masks are not served: pass an "
    "attention_mask (texts, tokens), or leave it out"
)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that attend in both directions through transformers' attention interface, in order."""
    return [module for module in model.modules() if getattr(module, "is_causal", None) is False and hands_over(module)]


def replaced_modules(model: nn.Module) -> list[nn.Module]:
    """Return those of them that attend to all tokens; modules with a native window stay unchanged."""
    return [module for module in attention_modules(model) if getattr(module, "sliding_window", None) is None]


def hands_over(module: nn.Module) -> bool:
    """Whether a module is attention whose code uses the attention interface, whatever its class claims."""
    named = type(module).__name__.endswith("Attention") and "Cross" not in type(module).__name__
    return named and hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def both_ways(
    module: nn.Module,
    query: torch.Tensor,  # (batch, heads, tokens, head_dim)
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (batch, 1, 1, tokens), false at padding
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the module's `both_ways`; without it, or with a native window, as the teacher did."""
    attention = getattr(module, "both_ways", None)
    if attention is None or kwargs.get("sliding_window") is not None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if key.shape[1] != query.shape[1]:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask is None:
        # checkpointed layers are computed again outside of the model's call
        out = attention.attend(query, key, value, scale, GRID.get() or getattr(module, "grid", ()))
    else:
        out = attend_without_padding(attention, query, key, value, scale, attention_mask[:, 0, 0])
    return out.transpose(1, 2).contiguous(), None


def attend_without_padding(
    attention: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, real: torch.Tensor
) -> torch.Tensor:
    """Attend only with the real tokens (batch, tokens) of each row, so that a row does not depend on its batch.

    Rows of the same length attend together; the output at padding is 0.
    """
    out, lengths = torch.zeros_like(value), real.sum(-1)
    for length in sorted({*lengths.tolist()} - {0}):
        rows = (lengths == length).nonzero()  # (rows, 1)
        tokens = real[rows[:, 0]].nonzero()[:, 1].view(-1, length)
        parts = (x.transpose(1, 2)[rows, tokens].transpose(1, 2) for x in (query, key, value))
        out.transpose(1, 2)[rows, tokens] = attention.attend(*parts, scale).transpose(1, 2)
    return out


def padding_only(
    q_length: int,
    kv_length: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return which tokens are not padding, so that no tokens × tokens mask is built."""
    if local_size is not None or mask_function is not bidirectional_mask_function:
        if local_size is None or q_length != kv_length:
            raise ValueError(NOT_SERVED)
        sizes = {"q_length": q_length, "kv_length": kv_length, "local_size": local_size}
        return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **sizes, **kwargs)
    if attention_mask is None or attention_mask.all():
        return None
    return attention_mask[:, None, None].bool()


AttentionInterface.register(IMPLEMENTATION, both_ways)
AttentionMaskInterface.register(IMPLEMENTATION, padding_only)
