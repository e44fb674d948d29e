"""The link to transformers' attention interface, which no other module uses.

With the implementation IMPLEMENTATION a model passes the queries, keys and values of every layer, positions applied, to
`linearized`. A layer without a student (a native sliding window) always attends as usual.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from .attention_of_student import Scores, tensors
from .cache import CACHE, attend_by_length, empty_cache, has_student, take_cache
from .layer_student import find_kernels

# Every checkpoint brings a copy of this file; the hash keeps their names apart in one process.
_COPY = hashlib.sha256(__name__.encode()).hexdigest()[:8]
IMPLEMENTATION = f"linearized_{_COPY}"
NOT_SERVED = (
    "a linearized model attends causally to one text per row; packed rows and custom masks are not served: "
    "give each text a row of its own, and an attention_mask (texts, tokens) for its padding"
)
HALF_READ = (
    "the last call with this cache failed in the middle, so some layers have read its tokens and others have not: go "
    "on with a copy from before (cache.fork()), or read the text again"
)
OTHER_TEXTS = "the cache has states of {} texts, the call {}: choose those of cache.fork() by batch_select_indices"
NO_WEIGHTS = "a linearized model computes no weights between tokens: its attentions are None; ask its teacher for them"
HANDED_OVER = {"linear_state": "memory", "has_read": "has_read", "part_order": "part_order"}  # of a cache's layer
logger = logging.get_logger(__name__)
Tensor = torch.Tensor


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """Return the softmax attention modules of a model in layer order; other layers of a hybrid have none."""
    modules = decoder_of(model).modules()  # towers for pictures number their layers, too
    named = [m for m in modules if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")]
    return sorted(filter(hands_over, named), key=lambda module: int(module.layer_idx))


def decoder_of(model: Any) -> Any:
    """Return the part of a model that reads the tokens of a text: its text tower, if it has others."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if not isinstance(decoder, PreTrainedModel):  # modernbert-decoder returns its head
        decoder = getattr(model, "base_model", model)
    return decoder


def implementations(model: PreTrainedModel, name: str) -> str | dict[str, str]:
    """Name an implementation for a model's decoder: towers for pictures keep their own."""
    config, text = model.config, decoder_of(model).config
    parts = [key for key in config.sub_configs if getattr(config, key, None) is text]
    return {"": name, parts[0]: name} if parts else name


def attention_by_layer(model: nn.Module) -> dict[int, nn.Module]:
    """Return the softmax attention modules of a model by the numbers of their layers."""
    return {int(module.layer_idx): module for module in attention_modules(model)}  # type: ignore[arg-type]


def device_of(module: nn.Module, usual: torch.device) -> torch.device:
    """Return the device of an attention module's weights, or the usual device where they are offloaded."""
    devices = [x.device for name, x in module.named_parameters() if not name.startswith("student.")]
    return next((device for device in devices if device.type != "meta"), usual)


def hands_over(module: nn.Module) -> bool:
    """Whether a module's code uses the attention interface, whatever its class claims."""
    return "ALL_ATTENTION_FUNCTIONS" in inspect.unwrap(type(module).forward).__code__.co_names


def score_scale(query: torch.Tensor, scaling: float | None) -> float:
    """Return the factor of q·k: the model's if it states one, else the default of the interface."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def linearized(
    module: nn.Module,
    query: torch.Tensor,  # (batch, query heads, tokens, head_dim)
    key: torch.Tensor,  # (batch, kv heads, tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (batch, 1, 1, tokens), false at padding
    scaling: float | None = None,
    linear_state: list | None = None,
    part_order: AbstractContextManager | None = None,
    has_read: bool = False,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend with the student of this layer, or as the teacher did: where the layer has none, and in short texts."""
    student = getattr(module, "student", None)
    if student is None:
        return attend_as_teacher(module, query, key, value, attention_mask, scaling, **kwargs)
    if attention_mask is not None and attention_mask.shape[-2] > 1:
        raise ValueError(NOT_SERVED)
    real = None if attention_mask is None else attention_mask[:, 0, 0]
    scale, scores = score_scale(query, scaling), scores_of(module, kwargs)

    def read(q: Tensor, k: Tensor, v: Tensor, real: Tensor | None, states: list | None) -> Tensor:
        return student(q, k, v, scale, real, states, *scores)

    def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
        return attend_as_teacher(module, q, k, v, seen, scaling, **kwargs)[0].transpose(1, 2)

    left_out = key.shape[2] - query.shape[2]  # Gemma 4 asks a shared layer only for the rows whose logits it needs
    query = nn.functional.pad(query, (0, 0, left_out, 0)) if left_out else query
    with part_order or nullcontext():
        exact = getattr(student, "exact_tokens", 0)
        out = attend_by_length(exact, has_read, read, attend, query, key, value, real, linear_state)[:, :, left_out:]
    return out.transpose(1, 2).contiguous(), None


def scores_of(module: nn.Module, kwargs: dict) -> tuple[float | None, torch.Tensor | None] | tuple[()]:
    """Return the cap of a layer's scores and its learned sinks, which it passes or keeps; nothing if it has neither."""
    cap, sink = kwargs.get("softcap"), kwargs.get("s_aux")
    own = getattr(module, "sinks", None)
    sink = own if sink is None and isinstance(own, torch.Tensor) else sink
    return () if cap is None and sink is None else (cap, sink)


def attend_as_teacher(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (batch, 1, tokens, columns), true where a token is seen
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as usual, also where scores are capped, or where there are learned sinks, which SDPA does not know."""
    if not (altered := scores_of(module, kwargs)):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    cap, sink = altered
    group, tokens, columns = query.shape[1] // key.shape[1], query.shape[2], key.shape[2]
    if attention_mask is None:
        attention_mask = torch.ones(1, 1, tokens, columns, dtype=torch.bool, device=key.device).tril(columns - tokens)
    scores = Scores(cap, None if sink is None else sink.view(key.shape[1], group)).of_heads(len(query))
    queries = query.unflatten(1, (-1, group)).flatten(0, 1) * score_scale(query, scaling)
    bias = torch.zeros_like(attention_mask, dtype=torch.float32).masked_fill(~attention_mask, -torch.inf)
    bias = bias.expand(len(query), -1, -1, -1).repeat_interleave(key.shape[1], 0)
    logits = queries.float() @ key.flatten(0, 1)[:, None].mT.float()
    weights = scores.weights(logits, bias, slice(None)).nan_to_num().to(value.dtype)  # a row of padding sees nothing
    out = (weights @ value.flatten(0, 1)[:, None]).view(*query.shape[:3], value.shape[-1])
    return out.transpose(1, 2).contiguous(), None


def padding_only(
    q_length: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return which new tokens are not padding: a student needs no tokens × tokens mask.

    Layers without a student get such a mask, as their teacher makes it.
    """
    is_causal = mask_function is causal_mask_function
    if local_size is not None or (not is_causal and q_length > 1):
        mask_inputs = {"mask_function": mask_function, "attention_mask": attention_mask, "local_size": local_size}
        return sdpa_mask(q_length=q_length, **mask_inputs, **kwargs)
    if not is_causal:
        raise ValueError(NOT_SERVED)
    real = None if attention_mask is None else attention_mask[:, -q_length:]
    if real is None:
        return None
    in_graph = torch.compiler.is_compiling() and q_length == 1 and real.is_cpu  # a graph must not read values
    if not in_graph and real.all():
        return None
    return real[:, None, None].bool()


def serve_decoder(base: PreTrainedModel, linearized: Sequence[bool]) -> None:
    """Make a model's decoder pass the students' cache to its layers, whoever calls it."""
    decoder = decoder_of(base)
    decoder.linearized = tuple(linearized)
    modules = attention_by_layer(base)
    decoder.attentions = tuple(modules.get(index) if mine else None for index, mine in enumerate(linearized))
    names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
    decoder.register_forward_pre_hook(partial(give_cache, names), with_kwargs=True)
    decoder.register_forward_hook(mark_as_read, with_kwargs=True)


def give_cache(names: tuple, decoder: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pass an empty cache of ours to a decoder that uses one; refuse inputs it cannot serve (a forward pre-hook)."""
    if decoder.config._attn_implementation != IMPLEMENTATION:
        return None  # it attends as its teacher did
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, positions, cache = kwargs.get("attention_mask"), kwargs.get("position_ids"), take_cache(kwargs)
    leave_out_weights(kwargs, decoder.config)
    inputs = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    texts, tokens = inputs.shape[:2]
    if cache is None:
        use_cache = kwargs.get("use_cache")
        learns = decoder.training and torch.is_grad_enabled()
        recomputes = learns and getattr(decoder, "gradient_checkpointing", False)
        if (decoder.config.use_cache if use_cache is None else use_cache) and not recomputes:
            cache = empty_cache(decoder.config, decoder.linearized)
    elif [has_student(layer) for layer in getattr(cache, "layers", [])] != [*decoder.linearized]:
        raise ValueError(
            f"a linearized model keeps a state, not keys, and cannot use a {type(cache).__name__}: "
            f"leave {CACHE} out, or pass model.empty_cache()"
        )
    if torch.compiler.is_compiling() and mask is positions is cache is None:  # else transformers assumes packed texts
        kwargs["attention_mask"] = torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
    past = 0 if cache is None else cache.get_seq_length()
    if mask is not None and not isinstance(mask, dict):  # of masks that the model around its decoder made (gemma4)
        if getattr(mask, "ndim", 0) != 2 or len(mask) != texts or not tokens <= mask.shape[1] <= past + tokens:
            raise ValueError(f"{NOT_SERVED}: of the {tokens} new tokens, or of all {past + tokens}")
    numbers = positions if positions is None or positions.ndim == 2 else positions[: len(positions) - 3]
    if cache is not None and mask is None and numbers is not None and not past and restarts(numbers):
        raise ValueError(NOT_SERVED)  # without a cache transformers itself detects packed texts
    if cache is not None and not past and (kernels := find_kernels()) is not None:
        students = [getattr(module, "student", None) for module in decoder.attentions]
        if tokens > max(getattr(student, "exact_tokens", 0) for student in students):
            kernels.begin_texts(students, [getattr(layer, "memory", None) for layer in cache.layers], inputs)
    counted = isinstance(mask, torch.Tensor) and mask.shape[1] == past + tokens
    if counted and positions is None and "position_ids" in names:
        kwargs["position_ids"] = positions_of(cast(Tensor, mask))[:, past:]
    elif mask is positions is None and past and "position_ids" in names and not all(decoder.linearized):
        new = torch.arange(past, past + tokens, device=inputs.device)  # bamba starts at 0
        kwargs["position_ids"] = new[None]
    if cache is not None and not torch.compiler.is_compiling():
        if getattr(cache, "is_half_read", False):
            raise ValueError(HALF_READ)
        states: list = next((layer.memory for layer in cache.layers if has_student(layer)), [])
        if states and (held := len(next(iter(tensors(states[0]).values())))) != texts:
            raise ValueError(OTHER_TEXTS.format(held, texts))
        cache.is_half_read = True
    return (), {**kwargs, CACHE: cache}


def mark_as_read(decoder: Any, args: tuple, kwargs: dict, output: object) -> None:
    """Note that all layers have read a call's tokens (a forward hook, which an error leaves out)."""
    if (cache := kwargs.get(CACHE)) is not None and not torch.compiler.is_compiling():
        cache.is_half_read = False


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Return the positions of each row's tokens, not counting padding, as `generate` does.

    Softmax depends only on how far rotated keys are apart; features and rounding depend on the positions themselves.
    """
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def leave_out_weights(kwargs: dict, config: PreTrainedConfig) -> None:
    """Turn off a request for weights between tokens, by an argument or by the config, with a warning."""
    requested = kwargs.get("output_attentions")
    if config.output_attentions if requested is None else requested:
        logger.warning_once(NO_WEIGHTS)
        kwargs["output_attentions"] = False


def restarts(positions: torch.Tensor) -> bool:
    """Whether positions (texts, tokens) are not consecutive: several texts are packed into a row."""
    return bool((positions.diff(dim=-1) != 1).any())


def hand_over_state(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pass an attention module its state (a forward pre-hook), whatever it calls its cache argument."""
    for value in [*args, *kwargs.values()]:
        if isinstance(value, Cache):  # perhaps of another copy of this code, or of a base that attends as its teacher
            reads: Any = getattr(module.student, "reads", module.layer_idx)
            layer: Any = value.layers[int(reads)] if int(reads) < len(value.layers) else None
            for argument, name in HANDED_OVER.items():
                kwargs[argument] = getattr(layer, name, None)
            if reads != module.layer_idx and has_student(layer):
                kwargs["linear_state"], kwargs["has_read"] = layer.kept.pop()
            elif (readers := getattr(module, "readers", 0)) and has_student(layer):
                layer.keep(readers)
    return args, kwargs


AttentionInterface.register(IMPLEMENTATION, linearized)
AttentionMaskInterface.register(IMPLEMENTATION, padding_only)
