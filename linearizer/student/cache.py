"""The cache of a linearized model: a state of fixed size in each layer, where a teacher keeps all keys.

It can be saved to a file and loaded again (saved_state.py), copied for many questions about one text, moved to another
device, and reset to the begin of a turn of a conversation.
"""

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any

import torch
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, LinearAttentionLayer

from .attention_of_student import change_tensors, tensors, working_dtype
from .layer_student import find_kernels
from .saved_state import FORMAT, write_state

# What transformers calls a cache, in arguments and outputs of a model: past_key_values before 5.24.
CACHE = "cache" if "cache" in signature(GenerationMixin.prepare_inputs_for_generation).parameters else "past_key_values"
MAX_TURNS = 8  # that can be taken back
COUNTERS = ("count", "real")  # in states, as KEYS_AND_VALUES are; all else are sums, in fp32 at least
KEYS_AND_VALUES = ("sink_k", "sink_v", "window_k", "window_v", "slot_k", "slot_v", "k", "v")

RECURRENT = {"conv_states": "v", "recurrent_states": "recurrent"}  # attribute -> name for a `Change`

Change = Callable[[str, torch.Tensor], torch.Tensor]  # (name, tensor) -> tensor


class LinearizedLayer(CacheLayerMixin):
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
        self.device = torch.device("cpu")

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        """Do nothing: the first attention makes the states, since it knows their sizes."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.tokens_read += key_states.shape[-2]
        self.device = key_states.device
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

    def copied(self, change: Change) -> "LinearizedLayer":
        """Return a copy with `change` applied to each tensor."""
        result = LinearizedLayer()
        result.tokens_read, result.device = self.tokens_read, self.device
        for state in self.memory:
            result.memory.append(replace(state, **{name: change(name, x) for name, x in tensors(state).items()}))
        return result

    def copied_texts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LinearizedLayer":
        """Return a copy; `change` copies the texts (first axis) of each tensor, which stay in a pool."""
        states = None if (kernels := find_kernels()) is None else kernels.copy_states(self.memory, change)
        if states is None:
            return self.copied(lambda name, x: change(x))
        result = LinearizedLayer()
        result.tokens_read, result.device, result.memory = self.tokens_read, self.device, states
        return result

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.memory = [change_tensors(state, change) for state in self.memory]

    @torch.compiler.disable
    def keep(self, readers: int) -> None:
        """Copy the state for later layers of a call, which read it with the same tokens."""
        self.kept = [(self.copied_texts(torch.clone).memory, self.has_read) for _ in range(readers)]

    def reset(self) -> None:
        self.tokens_read, self.memory, self.kept = 0, [], []

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        self.change(lambda tensor: tensor.index_select(0, beam_idx.to(tensor.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change(lambda tensor: tensor.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.change(lambda tensor: tensor[indices])

    def offload(self) -> None:
        self.change(lambda tensor: tensor.to("cpu", non_blocking=True))

    def prefetch(self) -> None:
        """Move an offloaded state back to the device of its layer."""
        self.change(lambda tensor: tensor.to(self.device, non_blocking=True))

    def crop(self, *args: object) -> None:
        raise ValueError(
            "a linearized model cannot forget tokens that it has read, because they are summed into a state of fixed "
            "size: generate without an assistant model and without prompt lookup"
        )


class LinearizedAndRecurrentLayer(LinearizedLayer, LinearAttentionLayer):
    """The states of a layer whose softmax attention has a student, beside the recurrent part that it has, too."""

    def __init__(self, number_of_states: int = 1) -> None:
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)
        LinearizedLayer.__init__(self)

    def lazy_initialization(self, *args: object, **kwargs: object) -> None:
        if kwargs:  # of the recurrent part
            LinearAttentionLayer.lazy_initialization(self, **kwargs)

    def change(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().change(change)
        change_recurrent(self, lambda name, x: change(x))

    def copied(self, change: Change) -> "LinearizedAndRecurrentLayer":
        result = copy_recurrent(self, change)
        result.memory = super().copied(change).memory
        return result

    def copied_texts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LinearizedAndRecurrentLayer":
        return self.copied(lambda name, x: change(x))

    def reset(self) -> None:
        LinearAttentionLayer.reset(self)
        LinearizedLayer.reset(self)


class LinearizedCache(Cache):
    """The states of a linearized model, and the teacher's own kind of layer where the model has no student."""

    token_graph: Any = None  # which reads its next tokens (token_graph.py); False: none does
    tokens_alone = 0  # read one after another before there was a graph
    is_half_read = False  # whether a call failed after some layers had read its tokens
    rope_deltas: torch.Tensor | None = None  # (texts, 1), of positions after pictures (picture_positions.py)

    def __init__(self, layers: list[CacheLayerMixin], model: Callable[[], PreTrainedModel | None]) -> None:
        super().__init__(layers=layers)
        self.layers = layers
        self.model = model  # shared by copies of the cache
        self.turns: list[LinearizedCache] = []

    def reset(self) -> None:
        super().reset()
        self.token_graph, self.tokens_alone, self.turns, self.is_half_read = None, 0, [], False
        self.rope_deltas = None

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.change_texts(lambda x: x.repeat_interleave(repeats, 0))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.change_texts(lambda x: x[indices])

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        super().reorder_cache(beam_idx)
        self.rope_deltas = changed_deltas(self, lambda x: x.index_select(0, beam_idx.to(x.device)))

    def change_texts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Change the texts (first axis) of each tensor."""
        change_texts(self.layers, change)
        self.rope_deltas = changed_deltas(self, change)

    def save(self, path: str) -> None:
        """Write the state, and those before the turns, to a file for `model.load_cache(path)`."""
        if (model := self.model()) is None:
            raise ValueError(
                "the model that made this state is gone, or its decoder made it alone: read with the model's own cache "
                "(model.empty_cache()), and keep the model until its state is saved"
            )
        write_state(self, model, path)

    def fork(self, texts: int = 1) -> "LinearizedCache":
        """Copy the state without its turns, each text `texts` times; reading with the copy does not change this one."""
        return self.copied_texts(lambda x: x.clone() if texts == 1 else x.repeat_interleave(texts, 0))

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "LinearizedCache":
        """Copy the state and its turns to another device or dtype; bytes stay bytes, and sums stay fp32.

        A state that is there already is returned itself, like a tensor: hooks of accelerate move it for each module.
        """
        stays: list[bool] = []

        def change(name: str, x: torch.Tensor, copy: bool = True) -> torch.Tensor:
            kind = x.dtype
            if dtype is not None and x.is_floating_point():
                kind = dtype if name in KEYS_AND_VALUES else working_dtype(x.new_empty(0, dtype=dtype))
            moved = x.to(device, kind, copy=copy)
            stays.append(moved is x)
            return moved

        for each in (self, *self.turns):
            each.copied(partial(change, copy=False))
        if all(stays):
            return self
        result = self.copied(change)
        result.turns = [turn.copied(change) for turn in self.turns]
        return result

    def begin_turn(self) -> None:
        """Store a copy of the state, so that `take_back_turn` can return to it."""
        self.turns = [*self.turns, self.fork()][-MAX_TURNS:]

    def take_back_turn(self) -> None:
        """Return to the state at the last `begin_turn`."""
        if not self.turns:
            raise ValueError(
                f"there is no turn to take back: call begin_turn before each, at most {MAX_TURNS} are kept"
            )
        before = self.turns.pop()
        self.layers, self.rope_deltas, self.is_half_read = before.layers, before.rope_deltas, False

    def copied(self, change: Change) -> "LinearizedCache":
        """Return a copy without turns, with `change` applied to each tensor."""
        result = LinearizedCache([copy_layer(layer, change) for layer in self.layers], self.model)
        result.rope_deltas = changed_deltas(self, lambda x: change("count", x))
        return result

    def copied_texts(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "LinearizedCache":
        """Return a copy without turns; `change` copies the texts (first axis) of each tensor."""
        layers = [
            layer.copied_texts(change) if has_student(layer) else copy_layer(layer, lambda name, x: change(x))
            for layer in self.layers
        ]
        result = LinearizedCache(layers, self.model)
        result.rope_deltas = changed_deltas(self, change)
        return result


def changed_deltas(cache: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor | None:
    """Return a cache's differences of positions after pictures, changed, if it has any."""
    deltas = getattr(cache, "rope_deltas", None)
    return None if deltas is None else change(deltas)


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
    held = [(name, getattr(layer, name, None) or {}) for name in RECURRENT]
    return [(name, states, key) for name, states in held for key, x in states.items() if x is not None]


def change_recurrent(layer: object, change: Change) -> None:
    """Replace the tensors of a layer's recurrent part."""
    for name, states, key in recurrent_tensors(layer):
        states[key] = change(RECURRENT[name], states[key])


def copy_recurrent(layer: Any, change: Change) -> Any:
    """Return a copy of a layer with `change` applied to each tensor of its recurrent part."""
    result = copy.copy(layer)
    vars(result).update({name: dict(value) for name, value in vars(layer).items() if isinstance(value, dict)})
    change_recurrent(result, change)
    if tensors := recurrent_tensors(result):
        _, states, key = tensors[0]
        result.device = states[key].device
    return result


def change_texts(layers: Sequence[Any], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change the texts (first axis) of each tensor of a cache's layers: not all kinds of transformers do it."""
    for layer in layers:
        if has_student(layer):
            layer.change(change)
        else:
            vars(layer).update(vars(copy_layer(layer, lambda name, x: change(x))))


def copy_layer(layer: CacheLayerMixin, change: Change) -> CacheLayerMixin:
    """Return a copy of a layer with `change` applied to each tensor."""
    if has_student(layer):
        return layer.copied(change)
    result = copy_recurrent(layer, change)
    if isinstance(getattr(layer, "keys", None), torch.Tensor):
        result.keys, result.values = change("k", layer.keys), change("v", layer.values)
        result.device, result.dtype = result.keys.device, result.keys.dtype
    return result


def empty_cache(
    base_config: object, linearized: Sequence[bool], model: PreTrainedModel | None = None
) -> LinearizedCache:
    """Make a cache: a state of fixed size for each layer with a student, the teacher's kind for the others."""
    is_plain = all(linearized) and "hybrid" not in (getattr(base_config, "layer_types", None) or ())
    native = [None] * len(linearized) if is_plain else native_layers(base_config)
    layers = [layer_beside(native[index]) if mine else native[index] for index, mine in enumerate(linearized)]
    return LinearizedCache(layers, weakref.ref(model) if model is not None else no_model)


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


def no_model() -> None:
    """Stand for the model of a cache that a decoder made, called without its model."""
