"""Rows of a cache: texts of different lengths join a batch and leave it.

A student's states have one size, so rows are concatenated. Where keys of all tokens are kept (by a teacher,
or heads that keep their whole cache), or those of a native window, shorter rows are padded at the left.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.student.cache import CACHE, Change, LinearizedCache, copy_layer, keeps_state
from linearizer.student.state import tensors

Tensor = torch.Tensor


def join_caches(caches: Sequence[Cache]) -> Cache:
    """Copy several caches, each of which has read something, into one batch."""
    joined = copy.copy(caches[0])
    joined.layers = [join_layers(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joined


def join_layers(layers: Sequence[Any]) -> Any:
    """Concatenate the rows of a layer of several caches."""
    joined = copy.copy(layers[0])
    if keeps_state(joined):
        joined.memory = [
            replace(
                states[0],
                **{name: join_rows([getattr(x, name) for x in states], states[0], name) for name in tensors(states[0])},
            )
            for states in zip(*(layer.memory for layer in layers), strict=True)
        ]
        joined.tokens_read = max(layer.tokens_read for layer in layers)
    else:
        for name in ("keys", "values"):
            setattr(joined, name, join_rows([getattr(layer, name) for layer in layers], joined, name))
        if hasattr(joined, "cumulative_length"):
            joined.cumulative_length = max(layer.cumulative_length for layer in layers)
    return joined


def real_tokens(cache: Cache, read: Tensor, new: int) -> Tensor | None:  # (rows, tokens)
    """Return which tokens are not padding, once rows that have read the given numbers (rows,) read new ones.

    None where no layer keeps keys of tokens, as states have no padding, and where none is needed.
    """
    if all(keeps_state(layer) for layer in cache.layers) or (read == read[0]).all():
        return None
    longest = read.max()
    return (torch.arange(int(longest) + new, device=read.device) >= (longest - read)[:, None]).long()


def read_on(
    model: PreTrainedModel, cache: Cache, ids: Tensor, read: Tensor, real: Tensor | None = None
) -> Tensor:  # (rows, vocabulary)
    """Read the next tokens (rows, tokens) of rows that have read the given numbers (rows,); return the last logits.

    Where states have a fixed size, tokens at the left may be padding: `real` (rows, tokens) is 0 there.
    """
    count = ids.shape[1]
    out = model(
        input_ids=ids,
        position_ids=(read[:, None] + torch.arange(count, device=ids.device)).clamp_min(0),
        attention_mask=real_tokens(cache, read, count) if real is None else real,
        use_cache=True,
        logits_to_keep=1,
        **{CACHE: cache},
    )
    logits: Tensor = out.logits[:, -1]
    return logits


def keep_rows(cache: Cache, rows: Sequence[int], longest: int) -> None:
    """Keep the given rows of a batch, with no more padding than the longest of them needs."""
    cache.batch_select_indices(torch.tensor(rows))
    cut_padding(cache, longest)


def take_row(cache: Cache, row: int, tokens: int) -> Cache:
    """Take one row of a batch, which has read the given tokens; its tensors are views of the batch."""
    other = copy_cache(cache, lambda name, x: x[row : row + 1])
    cut_padding(other, tokens)
    return other


def copy_cache(cache: Cache, change: Change) -> Cache:
    """Copy a cache, whose tensors become what `change` makes of them."""
    if isinstance(cache, LinearizedCache):
        return cache.copied(change)
    other = copy.copy(cache)
    other.layers = [copy_layer(layer, change) for layer in cache.layers]
    return other


def tensors_of(cache: Cache) -> list[Tensor]:
    """List the tensors of a cache, in the order in which `copy_cache` changes them."""
    found: list[Tensor] = []
    for layer in cache.layers:
        if keeps_state(layer):
            found += [x for state in layer.memory for x in tensors(state).values()]
        elif layer.is_initialized:
            found += [layer.keys, layer.values]
    return found


def pack(held: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one of bytes: by themselves, hundreds of small ones would take half as much memory again."""
    return torch.cat([x.flatten().view(torch.uint8) for x in held])


def unpack(form: Cache, packed: Tensor, shapes: Sequence[torch.Size], tokens: int) -> Cache:
    """Make a cache with the tensors of given shapes that `pack` copied; `form` is any cache of the same model."""
    sizes = [shape.numel() * x.itemsize for shape, x in zip(shapes, tensors_of(form), strict=True)]
    parts = zip(packed.split(sizes), shapes, strict=True)

    def take_next(name: str, x: Tensor) -> Tensor:
        part, shape = next(parts)
        return part.clone().view(x.dtype).view(shape)  # its own memory begins where any type may

    cache = copy_cache(form, take_next)
    cut_padding(cache, tokens)  # there is none, but layers count their tokens
    return cache


def cut_padding(cache: Cache, longest: int) -> None:
    """Remove the padding that no row needs where the longest has read the given number of tokens."""
    for layer in cache.layers:
        if keeps_state(layer):
            layer.tokens_read = longest
            for state in layer.memory:
                cut_rows(state, tensors(state), longest)
        else:
            window = getattr(layer, "sliding_window", None)
            cut_rows(layer, ("keys", "values"), longest if window is None else min(longest, window - 1))
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = longest


def join_rows(parts: list[Tensor], holder: Any, name: str) -> Tensor:
    """Concatenate rows, the shorter ones padded at the left where they grow with the text."""
    if (axis := growing_axis(holder, name)) is not None:
        longest = max(part.shape[axis] for part in parts)
        behind = [0, 0] * (-1 - axis)
        parts = [pad(part, [*behind, longest - part.shape[axis], 0]) for part in parts]
    return torch.cat(parts)


def cut_rows(holder: Any, names: Iterable[str], longest: int) -> None:
    """Keep the given number of tokens at the right of all that grows with the text."""
    for name in names:
        if (axis := growing_axis(holder, name)) is not None:
            x = getattr(holder, name)
            setattr(holder, name, x.narrow(axis, x.shape[axis] - longest, longest).contiguous())


def growing_axis(holder: Any, name: str) -> int | None:
    """Return the axis along which a tensor grows with the text; None: its size is fixed."""
    if hasattr(holder, "real"):
        return {"real": -1, "k": -2, "v": -2}.get(name)  # all but its sinks
    return -2 if hasattr(holder, "keys") else None
