"""The cache of a linearized model: a state of fixed size in each layer, where a teacher keeps all keys.

Short texts are read exactly: as long as a cache of all their tokens fits into a state, it is their state. A text of at
most `exact_tokens` tokens keeps the teacher's keys and values, and attends as the teacher does. With the first token
too many its heads read all of them, as if they had read the text from its begin; from then on it has the states of its
heads alone. Each text of a batch is exact or not by itself, however it is cut or padded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from transformers import GenerationMixin
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from .attention_of_student import change_tensors, tensors
from .layer_student import find_kernels

# What transformers calls a cache, in arguments and outputs of a model: past_key_values before 5.24.
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
FORMAT = "linearized state 4"  # of a layer: each copy of this code accepts another's
COUNTERS = ("count", "real")  # in states

Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]
Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]  # (q, k, v, which columns a row sees) -> outputs


class TextsOfCache:
    """The changes that transformers asks for, of a cache and of its layers alike."""

    change: Callable[[Change], None]

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.change(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self.change(lambda x: x[indices])

    def crop(self, *args: object) -> None:
        """Refuse, before any layer is changed."""
        raise ValueError(
            "a linearized model cannot forget tokens that it has read, because they are summed into a state of fixed "
            "size: go on with a copy from before (cache.fork()), or generate without an assistant or prompt lookup"
        )


class LinearizedLayer(TextsOfCache, CacheLayerMixin):
    """The states of one layer's head groups. `update` stores nothing: attention itself writes the states."""

    is_sliding = False
    state_format = FORMAT
    part_order = None  # type: object  # while a text is read in parts (text_parts.py)

    def __init__(self) -> None:
        super().__init__()
        self.tokens_read = 0
        self.memory: list = []
        self.kept: list[tuple[list, bool]] = []  # states before a call's tokens, and whether any were read before them
        self.is_initialized = True

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the first attention makes the states, since it knows their sizes."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        self.tokens_read += key_states.shape[-2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes for a mask of the new tokens only."""
        return query_length, self.tokens_read

    def get_seq_length(self) -> int:
        return self.tokens_read

    @property
    def has_read(self) -> bool:
        return self.tokens_read > 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    def bytes(self) -> int:
        """Count the bytes of the states, without counters."""
        stored = [x for state in self.memory for name, x in tensors(state).items() if name not in COUNTERS]
        return sum(x.numel() * x.element_size() for x in stored)

    def copied_texts(self, change: Change) -> Any:
        """Return a copy; `change` copies the texts (first axis) of each tensor, which stay in a pool."""
        kernels = find_kernels() if keeps_state(self) else None
        if kernels is None or (states := kernels.copy_states(self.memory, change)) is None:
            return copy_layer(self, change)
        result = copy.copy(self)
        result.memory = states
        return result

    def change(self, change: Change) -> None:
        change_layer(self, change)

    @torch.compiler.disable
    def keep(self, readers: int) -> None:
        """Copy the state for later layers of a call, which read it with the same tokens."""
        self.kept = [(self.copied_texts(torch.clone).memory, self.has_read) for _ in range(readers)]

    def reset(self) -> None:
        self.tokens_read, self.memory, self.kept = 0, [], []


class LinearizedAndRecurrentLayer(LinearizedLayer, LinearAttentionLayer):
    """The states of a layer whose softmax attention has a student, beside the recurrent part that it has, too."""

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        LinearizedLayer.__init__(self)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        if kwargs:  # of the recurrent part
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        LinearizedLayer.reset(self)


class LinearizedCache(TextsOfCache, Cache):
    """The states of a linearized model, and the teacher's own kind of layer where the model has no student."""

    token_graph: Any = None  # which reads its next tokens (token_graph.py); False: none does
    tokens_alone = 0  # read one after another before there was a graph
    is_half_read = False  # whether a call failed after some layers had read its tokens
    rope_deltas: Tensor | None = None  # (texts, 1), of positions after pictures (picture_positions.py)

    def __init__(self, layers: list[CacheLayerMixin]) -> None:
        super().__init__(layers=layers)
        self.layers = layers

    def reset(self) -> None:
        super().reset()
        self.token_graph, self.tokens_alone, self.is_half_read, self.rope_deltas = None, 0, False, None

    def change(self, change: Change) -> None:
        """Change the texts (first axis) of each tensor: not all kinds of transformers' layers do it."""
        for layer in self.layers:
            change_layer(layer, change)
        self.rope_deltas = None if self.rope_deltas is None else change(self.rope_deltas)

    def fork(self, texts: int = 1) -> LinearizedCache:
        """Copy the state, each text `texts` times; reading with the copy does not change this one."""
        return self.copied_texts(lambda x: x.clone() if texts == 1 else x.repeat_interleave(texts, 0))

    def copied_texts(self, change: Change) -> LinearizedCache:
        """Return a copy; `change` copies the texts (first axis) of each tensor."""
        layers = self.layers
        copied = LinearizedCache([x.copied_texts(change) if has_student(x) else copy_layer(x, change) for x in layers])
        copied.rope_deltas = None if self.rope_deltas is None else change(self.rope_deltas)
        copied.is_half_read = self.is_half_read
        return copied


def take_cache(kwargs: dict) -> Cache | None:
    """Take the cache out of the arguments of a call, by its new name or its old one, which older libraries use."""
    cache, older = kwargs.pop("cache", None), kwargs.pop("past_key_values", None)
    return older if cache is None else cache


def has_student(layer: object) -> bool:
    """Whether a cache layer is a LinearizedLayer, of this copy of the code or of another checkpoint's."""
    return getattr(layer, "state_format", None) == FORMAT


def keeps_state(layer: object) -> bool:
    """Whether a cache layer has the states of a student and nothing beside them."""
    return has_student(layer) and not hasattr(layer, "recurrent_states")


def recurrent_tensors(layer: object) -> list[tuple[str, dict, int]]:
    """List the tensors of a layer's recurrent part: the attribute, the dictionary that holds it, and its key there."""
    held = [(name, getattr(layer, name, None) or {}) for name in ("conv_states", "recurrent_states")]
    return [(name, states, key) for name, states in held for key, x in states.items() if x is not None]


def change_layer(layer: Any, change: Change) -> None:
    """Replace each tensor of a layer of any kind: of its recurrent part, its states, or its keys and values."""
    for _, states, key in recurrent_tensors(layer):
        states[key] = change(states[key])
    if has_student(layer):
        layer.memory = [change_tensors(state, change) for state in layer.memory]
    elif isinstance(getattr(layer, "keys", None), Tensor):
        layer.keys, layer.values = change(layer.keys), change(layer.values)


def copy_layer(layer: Any, change: Change) -> Any:
    """Return a copy of a layer with `change` applied to each tensor."""
    result = copy.copy(layer)
    vars(result).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    change_layer(result, change)
    return result


def empty_cache(base_config: object, linearized: Sequence[bool]) -> LinearizedCache:
    """Make a cache: a state of fixed size for each layer with a student, the teacher's kind for the others."""
    is_plain = all(linearized) and "hybrid" not in (getattr(base_config, "layer_types", None) or ())
    native = [None] * len(linearized) if is_plain else native_layers(base_config)
    layers = [layer_beside(native[index]) if mine else native[index] for index, mine in enumerate(linearized)]
    return LinearizedCache(layers)


def layer_beside(native: Any) -> LinearizedLayer:
    """Make the layer that takes the place of a teacher's, with the recurrent part that this has."""
    if hasattr(native, "recurrent_states"):
        return LinearizedAndRecurrentLayer(native.number_of_states)
    return LinearizedLayer()


def native_layers(base_config: Any) -> list[CacheLayerMixin]:
    """Make the layers of a teacher's cache."""
    layers = DynamicCache(config=base_config).layers
    if not layers:  # transformers before 5.14 gives layers[:-0] where none shares its keys
        base_config = copy.copy(base_config)
        base_config.num_kv_shared_layers = -base_config.num_hidden_layers
        layers = DynamicCache(config=base_config).layers
    return layers


# Texts that are read exactly.


@dataclass
class ExactCache:
    """Keys and values of the exact texts of a batch, the last of a layer's states.

    Columns of padding, and all of other texts, are not real; `real` has no columns while every column is real.
    """

    k: Tensor  # (batch, heads, columns, dim)
    v: Tensor
    real: Tensor  # (batch, columns or 0)
    is_exact = True  # in any copy of this code

    def real_columns(self) -> Tensor:  # (batch, columns)
        return self.real if self.real.shape[1] else self.real.new_ones(len(self.real), self.k.shape[2])

    def with_new(self, k: Tensor, v: Tensor, real: Tensor | None) -> ExactCache:
        """Return the cache with new columns."""
        columns = torch.cat([self.k, k], 2), torch.cat([self.v, v], 2)
        if real is None and not self.real.shape[1]:
            return ExactCache(*columns, self.real)
        new = self.real.new_ones(len(k), k.shape[2]) if real is None else real.bool()
        return ExactCache(*columns, torch.cat([self.real_columns(), new], 1))

    def without(self, texts: Tensor) -> ExactCache:
        """Return the cache without texts (batch,), and without columns that no other text has."""
        real = self.real_columns() & ~texts[:, None]
        kept = real.any(0).nonzero()[:, 0]
        return ExactCache(self.k[:, :, kept], self.v[:, :, kept], real[:, kept])

    def seen(self, tokens: int) -> Tensor | None:
        """Return which columns the newest tokens see (batch or 1, 1, tokens, columns); None: all that came before."""
        columns, padded = self.k.shape[2], self.real.shape[1] > 0
        if not padded and tokens in (1, columns):
            return None
        seen = torch.ones(tokens, columns, dtype=torch.bool, device=self.k.device).tril(columns - tokens)[None, None]
        return seen & self.real[:, None, None] if padded else seen


def exact_cache_of(states: list | None) -> Any:
    """Return the exact cache among a layer's states; None if there is none."""
    return states[-1] if states and getattr(states[-1], "is_exact", False) else None


def attend_by_length(
    most: int, begun: bool, read: Callable[..., Tensor], attend: Attend, q: Tensor, k: Tensor, v: Tensor,
    real: Tensor | None, states: list | None,
) -> Tensor:  # fmt: skip
    """`attend` to texts of at most `most` tokens, and `read` (q, k, v, real, states) with heads beyond them.

    q, k, v (batch, heads, tokens, dim); `real` (batch, tokens) is false at padding; `begun`: tokens were read before.
    """
    cache = exact_cache_of(states)
    if cache is None and (begun or not most):
        return read(q, k, v, real, states)
    of_heads = [state for state in states or () if state is not cache]
    mixed = begun and bool(of_heads)  # some texts are exact, others are not
    if cache is None:
        cache = ExactCache(k[:, :, :0], v[:, :, :0], torch.ones(len(k), 0, dtype=torch.bool, device=k.device))
    after = ExactCache.with_new(cache, k, v, real)
    if not mixed and after.k.shape[2] <= most:
        out, left = attend(q, after.k, after.v, after.seen(q.shape[2])), [after]
    elif mixed or after.real.shape[1]:
        out, left = attend_by_text(most, mixed, read, attend, q, after, of_heads)
    else:
        out, left = attend_beyond(most, read, attend, q, after, of_heads), of_heads
    if states is not None:
        states[:] = left
    return out


def attend_beyond(
    most: int, read: Callable[..., Tensor], attend: Attend, q: Tensor, cache: ExactCache, of_heads: list
) -> Tensor:
    """Attend where all texts become too long, and nothing is padded; add the states of heads to `of_heads`."""
    before = cache.k.shape[2] - q.shape[2]
    out = read(behind(q, before), cache.k, cache.v, None, of_heads)[:, :, before:]
    if (exact := most - before) <= 0:
        return out
    short = ExactCache(cache.k[:, :, :most], cache.v[:, :, :most], cache.real)
    return torch.cat([attend(q[:, :, :exact], short.k, short.v, short.seen(exact)), out[:, :, exact:]], 2)


@torch.compiler.disable
def attend_by_text(
    most: int, mixed: bool, read: Callable[..., Tensor], attend: Attend, q: Tensor, cache: ExactCache, of_heads: list
) -> tuple[Tensor, list]:
    """Attend where texts are padded, or only some are exact; return outputs and the states that are left."""
    real, tokens = cache.real_columns(), q.shape[2]
    before = real.shape[1] - tokens
    longer = counts_of(of_heads[0]) > 0 if mixed else real.new_zeros(len(real))
    ending = ~longer & (real.sum(1) > most)
    out = q.new_zeros(*q.shape[:3], cache.v.shape[-1])
    if ending.any():
        shown = torch.cat([real[:, :before] & ending[:, None], real[:, before:] & (longer | ending)[:, None]], 1)
        out = read(behind(q, before), cache.k, cache.v, shown, of_heads)[:, :, before:]
    elif longer.any():
        out = read(q, cache.k[:, :, before:], cache.v[:, :, before:], real[:, before:] & longer[:, None], of_heads)
    out = out.clone()
    for text in (~longer).nonzero()[:, 0].tolist():
        columns = real[text].nonzero()[:most, 0]
        new = columns[columns >= before] - before
        if len(new):
            k, v = (x[text : text + 1, :, columns] for x in (cache.k, cache.v))
            one = ExactCache(k, v, real[:1, :0])
            part = attend(q[text : text + 1, :, new], one.k, one.v, one.seen(len(new)))
            out[text : text + 1, :, new] = part.to(out.dtype)
    if (longer | ending).all():
        return out, of_heads
    return out, [*of_heads, cache.without(longer | ending)]


def behind(q: Tensor, tokens: int) -> Tensor:
    """Return queries behind so many of tokens that were read before: nobody asks for their outputs."""
    return torch.cat([q.new_zeros(*q.shape[:2], tokens, q.shape[3]), q], 2)


def counts_of(state: Any) -> Tensor:  # (batch,)
    """Count the tokens that each text's heads have read."""
    return state.count if hasattr(state, "count") else state.real.sum(-1)
