"""Rows of a cache: texts of different lengths join a batch and leave it.

A student's states have one size, so rows are concatenated. Keys of all tokens (of a teacher, or of heads that keep
their whole cache), or of a native window, are padded at the left in shorter rows.
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

from linearizer.student.attention_of_student import tensors
from linearizer.student.cache import (
    CACHE,
    Change,
    LinearizedCache,
    change_layer,
    copy_layer,
    exact_cache_of,
    has_student,
    keeps_state,
    recurrent_tensors,
)
from linearizer.student.columns import EMPTY
from linearizer.student.picture_positions import DELTAS, deltas_of

Tensor = torch.Tensor


def join_caches(caches: Sequence[Cache]) -> Cache:
    """Copy several caches, which have all read something, into one batch."""
    joined = copy.copy(caches[0])
    joined.layers = [join_layers(layers) for layers in zip(*(cache.layers for cache in caches), strict=True)]
    return joined


def join_layers(layers: Sequence[Any]) -> Any:
    """Concatenate the rows of a layer of several caches."""
    joined = copy_layer(layers[0], lambda x: x)
    for (_, states, key), *parts in zip(*map(recurrent_tensors, (joined, *layers)), strict=True):
        states[key] = torch.cat([held[at] for _, held, at in parts])
    if has_student(joined):
        joined.memory = join_states([layer.memory for layer in layers])
        joined.tokens_read = max(layer.tokens_read for layer in layers)
    else:
        for name in keys_and_values(joined):
            setattr(joined, name, join_rows([getattr(layer, name) for layer in layers], joined, name))
        if hasattr(joined, "cumulative_length"):
            joined.cumulative_length = max(layer.cumulative_length for layer in layers)
    return joined


def join_states(memories: Sequence[list]) -> list:
    """Concatenate the rows of a layer's states: those of heads, and of exact texts, which may both be there."""
    rows = [len(next(iter(tensors(states[0]).values()))) for states in memories]
    exact = [exact_cache_of(states) for states in memories]
    of_heads = [[x for x in states if x is not short] for states, short in zip(memories, exact, strict=True)]
    form, joined = next(filter(None, of_heads), []), []
    for index, like in enumerate(form):
        parts = [x[index] if x else empty_like(like, count) for x, count in zip(of_heads, rows, strict=True)]
        joined.append(join_parts(parts))
    if short := [x for x in exact if x is not None]:
        like = replace(short[0], real=short[0].real_columns())
        parts = [empty_like(like, count) if x is None else x for x, count in zip(exact, rows, strict=True)]
        joined.append(join_parts([replace(x, real=x.real_columns()) for x in parts]))
    return joined


def join_parts(parts: Sequence[Any]) -> Any:
    """Concatenate the rows of states of a kind."""
    form = parts[0]
    return replace(form, **{name: join_rows([getattr(x, name) for x in parts], form, name) for name in tensors(form)})


def empty_like(state: Any, rows: int) -> Any:
    """Make a state of the same kind for rows that have read nothing with it."""
    named = tensors(state).items()
    empty = {name: x.new_full((rows, *x.shape[1:]), EMPTY if name == "level" else 0) for name, x in named}
    return replace(state, **empty)


def drop_unused(cache: Cache) -> None:
    """Drop states that no row of a cache uses: of heads where all rows are exact, and the other way round."""
    for layer in cache.layers:
        exact = exact_cache_of(getattr(layer, "memory", None))
        if exact is None:
            continue
        if not (real := exact.real_columns()).any():
            layer.memory = layer.memory[:-1]
        elif real.any(1).all():
            layer.memory = [replace(exact, real=real[:, :0]) if real.all() else exact]


def kinds_of_states(cache: Cache) -> tuple[type, ...]:
    """List the kinds of a cache's states, and of its other layers."""
    return tuple(type(x) for layer in cache.layers for x in (getattr(layer, "memory", None) or [layer]))


def real_tokens(cache: Cache, lengths: Tensor, added: int) -> Tensor | None:  # (rows, tokens)
    """Return which tokens are not padding, when rows that have read `lengths` (rows,) tokens read `added` more.

    None if all layers keep states, which have no padding, or if no row needs padding.
    """
    if all(keeps_state(layer) for layer in cache.layers) or (lengths == lengths[0]).all():
        return None
    longest = lengths.max()
    return (torch.arange(int(longest) + added, device=lengths.device) >= (longest - lengths)[:, None]).long()


def read_on(
    model: PreTrainedModel, cache: Cache, ids: Tensor, lengths: Tensor, shifts: Tensor, real: Tensor | None = None
) -> Tensor:  # (rows, vocabulary)
    """Read the next tokens (rows, tokens) of rows that have read `lengths` (rows,) tokens; return the last logits.

    Positions are lengths with `shifts` (rows,). With states of fixed size, tokens at the left may be padding: `real`
    (rows, tokens) is 0 there.
    """
    count = ids.shape[1]
    out = model(
        input_ids=ids,
        position_ids=((lengths + shifts)[:, None] + torch.arange(count, device=ids.device)).clamp_min(0),
        attention_mask=real_tokens(cache, lengths, count) if real is None else real,
        use_cache=True,
        logits_to_keep=1,
        **{CACHE: cache},
    )
    logits: Tensor = out.logits[:, -1]
    return logits


def set_shift(cache: Cache, model: PreTrainedModel, shift: int) -> None:
    """Let a cache of one text know how far its positions are from the numbers of its tokens."""
    setattr(cache, DELTAS, torch.tensor([[shift]], device=model.device) if shift else None)


def take_shift(cache: Cache) -> int:
    """Take that from a cache, as its row will know it."""
    deltas = deltas_of(cache)
    setattr(cache, DELTAS, None)
    return 0 if deltas is None else int(deltas)


def keep_rows(cache: Cache, rows: Sequence[int], longest: int) -> None:
    """Keep the given rows of a batch, with no more padding than the longest of them needs."""
    cut_padding(cache, longest)
    index = torch.tensor(rows)
    for layer in cache.layers:
        change_layer(layer, lambda x: x[index])  # copies, so nothing of the padding stays in memory
    drop_unused(cache)


def view_row(cache: Cache, row: int, tokens: int) -> Cache:
    """View one row, which has read `tokens` tokens, of a batch."""
    view = copy_cache(cache, lambda x: x[row : row + 1])
    cut_padding(view, tokens)
    drop_unused(view)
    return view


def take_row(cache: Cache, row: int, tokens: int) -> Cache:
    """Copy one row, which has read `tokens` tokens, of a batch of states; kernels can read it where it is."""
    assert isinstance(cache, LinearizedCache)
    taken = cache.copied_texts(lambda x: x[row : row + 1].clone())
    cut_padding(taken, tokens)
    drop_unused(taken)
    return taken


def copy_cache(cache: Cache, change: Change) -> Cache:
    """Return a copy of a cache with `change` applied to each tensor."""
    layers = [copy_layer(layer, change) for layer in cache.layers]
    if isinstance(cache, LinearizedCache):
        return LinearizedCache(layers)
    copied = copy.copy(cache)
    copied.layers = layers
    return copied


def tensors_of(cache: Cache) -> list[Tensor]:
    """List the tensors of a cache, in the order in which `copy_cache` changes them."""
    result: list[Tensor] = []
    for layer in cache.layers:
        result += [states[key] for _, states, key in recurrent_tensors(layer)]
        if has_student(layer):
            result += [x for state in layer.memory for x in tensors(state).values()]
        result += [getattr(layer, name) for name in keys_and_values(layer)]
    return result


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Copy tensors into one of bytes: hundreds of small ones would take half as much memory again."""
    return torch.cat([x.flatten().view(torch.uint8) for x in tensors])


def unpack(form: Cache, packed: Tensor, shapes: Sequence[torch.Size], tokens: int) -> Cache:
    """Make a cache from tensors that `pack` copied, with their shapes; `form` is any cache of the same model."""
    sizes = [shape.numel() * x.itemsize for shape, x in zip(shapes, tensors_of(form), strict=True)]
    parts = zip(packed.split(sizes), shapes, strict=True)

    def take_next(x: Tensor) -> Tensor:
        part, shape = next(parts)
        return part.clone().view(x.dtype).view(shape)  # new memory is aligned for any type

    cache = copy_cache(form, take_next)
    cut_padding(cache, tokens)  # there is none, but this sets the layers' counts
    return cache


def cut_padding(cache: Cache, longest: int) -> None:
    """Remove the padding that no row needs if the longest has read `longest` tokens."""
    for layer in cache.layers:
        if has_student(layer):
            layer.tokens_read = longest
            for state in layer.memory:
                cut_rows(state, tensors(state), longest)
        else:
            window = getattr(layer, "sliding_window", None)
            cut_rows(layer, keys_and_values(layer), longest if window is None else min(longest, window - 1))
            if hasattr(layer, "cumulative_length"):
                layer.cumulative_length = longest


def keys_and_values(layer: Any) -> list[str]:
    """Name the tensors that a teacher's own kind of layer has for its attention; other layers have none."""
    return [name for name in ("keys", "values") if isinstance(getattr(layer, name, None), Tensor)]


def join_rows(parts: list[Tensor], holder: Any, name: str) -> Tensor:
    """Concatenate rows; if they grow with the text, pad the shorter ones at the left."""
    if (axis := growing_axis(holder, name)) is not None:
        longest = max(part.shape[axis] for part in parts)
        behind = [0, 0] * (-1 - axis)
        parts = [pad(part, [*behind, longest - part.shape[axis], 0]) for part in parts]
    return torch.cat(parts)


def cut_rows(holder: Any, names: Iterable[str], longest: int) -> None:
    """Cut tensors that grow with the text to views of the last `longest` tokens, or to the tokens that some row has."""
    kept = holder.real.any(0).nonzero()[:, 0] if hasattr(holder, "real") else None
    for name, axis in [(name, axis) for name in names if (axis := growing_axis(holder, name)) is not None]:
        x = getattr(holder, name)
        if kept is None:
            setattr(holder, name, x.narrow(axis, x.shape[axis] - longest, longest))
        elif len(kept) < x.shape[axis] and holder.real.numel():
            setattr(holder, name, x.index_select(axis, kept))


def growing_axis(holder: Any, name: str) -> int | None:
    """Return the axis along which a tensor grows with the text; None if its size is fixed."""
    if hasattr(holder, "real"):
        return {"real": -1, "k": -2, "v": -2}.get(name)  # not its sinks
    return -2 if hasattr(holder, "keys") else None
