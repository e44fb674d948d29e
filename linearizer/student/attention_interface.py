"""The seam to transformers' attention, and the only place that knows it.

A model that asks for the implementation IMPLEMENTATION hands the queries, keys and values of every layer, positions
applied, to `linearized`; one that asks for "observed" hands them to whatever `observing` put there, and then attends
as it always did. A layer without a student (a native sliding window) always attends as it did.
"""

import hashlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask
from transformers.utils import logging

from .cache import CACHE, empty_cache, keeps_state, take_cache

# Checkpoints bring a copy of this file each; the names keep them apart in one process.
_COPY = hashlib.sha256(__name__.encode()).hexdigest()[:8]
IMPLEMENTATION, OBSERVED = f"linearized_{_COPY}", f"observed_{_COPY}"
NOT_SERVED = (
    "a linearized model attends causally to one text per row; packed rows and custom masks are not served: "
    "give each text a row of its own, and an attention_mask (texts, tokens) for its padding"
)
NO_WEIGHTS = (
    "a linearized model computes no weights between tokens, so its attentions are None: ask its teacher for them"
)
logger = logging.get_logger(__name__)


def attention_modules(model: nn.Module) -> list[nn.Module]:
    """The self-attention modules of a model, in the order of its layers."""
    modules = [m for m in model.modules() if type(m).__name__.endswith("Attention") and hasattr(m, "layer_idx")]
    return sorted(modules, key=lambda module: int(module.layer_idx))  # type: ignore[arg-type]


def device_of(module: nn.Module, usual: torch.device) -> torch.device:
    """Return where an attention module computes: where its weights lie, or the usual device if they are moved."""
    own = [x.device for name, x in module.named_parameters() if not name.startswith("student.")]
    return next((device for device in own if device.type != "meta"), usual)


def hands_over(module: nn.Module) -> bool:
    """Whether a module's code uses the attention interface, whatever its class claims."""
    return hasattr(sys.modules[type(module).__module__], "ALL_ATTENTION_FUNCTIONS")


def score_scale(query: torch.Tensor, scaling: float | None) -> float:
    """The factor of q·k: the model's own where it states one, and else the default of the interface."""
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def linearized(
    module: nn.Module,
    query: torch.Tensor,  # (batch, query heads, tokens, head_dim)
    key: torch.Tensor,  # (batch, kv heads, tokens, head_dim)
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # (batch, 1, 1, tokens), false at padding
    scaling: float | None = None,
    linear_state: list | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Attend with the student of this layer, or as the teacher did where the layer has none."""
    student = getattr(module, "student", None)
    if student is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    real = None if attention_mask is None else attention_mask[:, 0, 0]
    out = student(query, key, value, score_scale(query, scaling), real, linear_state)
    return out.transpose(1, 2).contiguous(), None


def padding_only(
    q_length: int,
    mask_function: Callable,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return which of the new tokens are not padding; a student knows the rest, so no tokens × tokens mask is built."""
    if local_size is not None:
        given = {"mask_function": mask_function, "attention_mask": attention_mask, "local_size": local_size}
        return sdpa_mask(q_length=q_length, **given, **kwargs)
    if mask_function is not causal_mask_function:
        raise ValueError(NOT_SERVED)
    new = None if attention_mask is None else attention_mask[:, -q_length:]
    if new is None:
        return None
    in_graph = torch.compiler.is_compiling() and q_length == 1 and new.is_cpu  # which looks at no number
    if not in_graph and new.all():
        return None
    return new[:, None, None].bool()


def serve_decoder(base: PreTrainedModel, linearized: Sequence[bool]) -> None:
    """Let the decoder of a model pass the cache of students to its layers, whoever calls it."""
    decoder: Any = base.get_decoder()
    if not isinstance(decoder, PreTrainedModel):  # modernbert-decoder returns its head
        decoder = base.base_model
    decoder.linearized = tuple(linearized)
    names = tuple(inspect.signature(type(decoder).forward).parameters)[1:]
    decoder.register_forward_pre_hook(partial(give_cache, names), with_kwargs=True)


def give_cache(names: tuple, decoder: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Pass an empty cache of ours to a decoder that keeps one; refuse what it does not serve (a forward pre-hook)."""
    if decoder.config._attn_implementation != IMPLEMENTATION:
        return None  # it attends as the teacher that it was
    kwargs = {**dict(zip(names, args, strict=False)), **kwargs}
    mask, positions, cache = kwargs.get("attention_mask"), kwargs.get("position_ids"), take_cache(kwargs)
    if mask is not None and getattr(mask, "ndim", None) != 2:
        raise ValueError(NOT_SERVED)
    leave_out_weights(kwargs, decoder.config)
    new = kwargs["input_ids"] if kwargs.get("input_ids") is not None else kwargs["inputs_embeds"]
    if cache is None:
        use_cache = kwargs.get("use_cache")
        learns = decoder.training and torch.is_grad_enabled()
        recomputes = learns and getattr(decoder, "gradient_checkpointing", False)
        if (decoder.config.use_cache if use_cache is None else use_cache) and not recomputes:
            cache = empty_cache(decoder.config, decoder.linearized)
    elif [keeps_state(layer) for layer in getattr(cache, "layers", [])] != [*decoder.linearized]:
        raise ValueError(
            f"a linearized model keeps a state, not keys, and cannot use a {type(cache).__name__}: "
            f"leave {CACHE} out, or pass model.empty_cache()"
        )
    if torch.compiler.is_compiling() and mask is positions is cache is None:  # or transformers sees packed texts
        kwargs["attention_mask"] = torch.ones(new.shape[:2], dtype=torch.long, device=new.device)
    read = 0 if cache is None else cache.get_seq_length()
    if cache is not None and mask is None and positions is not None and not read and restarts(positions):
        raise ValueError(NOT_SERVED)  # without a cache transformers sees it
    if mask is not None and positions is None and "position_ids" in names and mask.shape[1] == read + new.shape[1]:
        kwargs["position_ids"] = positions_of(mask)[:, read:]
    return (), {**kwargs, CACHE: cache}


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Count the tokens of each row without its padding, as `generate` does.

    Softmax sees only how far rotated keys are apart, but features and numbers of few bits change with their positions.
    """
    return (mask.long().cumsum(-1) - 1).clamp_min(0)


def leave_out_weights(kwargs: dict, config: PreTrainedConfig) -> None:
    """Ask for no weights between tokens, whether an argument or the config wants them, and say so."""
    wanted = kwargs.get("output_attentions")
    if config.output_attentions if wanted is None else wanted:
        logger.warning_once(NO_WEIGHTS)
        kwargs["output_attentions"] = False


def restarts(positions: torch.Tensor) -> bool:
    """Whether positions (texts, tokens) do not count on: several texts are packed into a row."""
    return bool((positions.diff(dim=-1) != 1).any())


def hand_over_state(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Pass its own state to an attention module (a forward pre-hook); each kind has its name for the cache."""
    for given in [*args, *kwargs.values()]:
        if isinstance(given, Cache):  # perhaps of another copy of this code, or of a base that attends as its teacher
            layers = given.layers[int(module.layer_idx) :]  # type: ignore[arg-type]
            kwargs["linear_state"] = getattr(layers[0], "memory", None) if layers else None
    return args, kwargs


# observe(attention module, query, key, value, scaling, the mask and the other arguments that the layer passed)
Observer = Callable[[nn.Module, torch.Tensor, torch.Tensor, torch.Tensor, float, dict], None]


def observed(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Show a layer's queries, keys and values to its observer, then attend as the model does by itself."""
    observe: Observer = module.observe  # type: ignore[assignment]
    observe(module, query, key, value, score_scale(query, scaling), {"attention_mask": attention_mask, **kwargs})
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


@contextmanager
def attending(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """While this lasts, let the model attend with another implementation: "sdpa" makes a student's base its teacher."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def observing(model: PreTrainedModel, observe: Observer) -> Iterator[None]:
    """While this lasts, show the observer what every attention layer of the model attends with."""
    modules = attention_modules(model)
    for module in modules:
        module.observe = observe  # type: ignore[assignment]
    try:
        with attending(model, OBSERVED):
            yield
    finally:
        for module in modules:
            del module.observe


AttentionInterface.register(IMPLEMENTATION, linearized)
AttentionMaskInterface.register(IMPLEMENTATION, padding_only)
AttentionInterface.register(OBSERVED, observed)
AttentionMaskInterface.register(OBSERVED, sdpa_mask)
