"""Inspects a model: what it is, and whether it can be linearized, from its config alone, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from linearizer.errors import UnsupportedModel
from linearizer.hub.models import Source
from linearizer.plan.head_bytes import Layer, cache_bytes, feature_bytes
from linearizer.plan.inspection import Budget, Inspection
from linearizer.teacher.quantised import check_quantisation, describe_quantisation, gguf_file, is_packed, method_of
from linearizer.teacher.support import (
    TESTED,
    TESTED_WHOLE,
    AttentionLayer,
    Refused,
    Watched,
    build_blueprint,
    check_config,
    check_names,
    check_windows,
    run_blueprint,
    watch_layers,
    whole_of,
)
from linearizer.teacher.whole_models import reads_whole, text_because, why_not_whole

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

BUDGETS = (64, 256, 1024)  # tokens of the teacher's cache
MAX_KEPT = 64  # inspections

_kept: dict[str, Inspection] = {}  # by all that they depend on


def inspect_model(source: Source, config: PreTrainedConfig) -> Inspection:
    """Describe a model, and whether it is supported; results are cached, as building and running it takes a while."""
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)} {source}"
    result = _kept.get(key)
    if result is None:
        result = _kept[key] = build_and_inspect(source, config)
        if len(_kept) > MAX_KEPT:
            _kept.pop(next(iter(_kept)), None)
    return result


def watch_if_supported(
    source: Source, config: PreTrainedConfig
) -> tuple[PreTrainedModel | None, Watched, Refused | None]:
    """Build a model without weights, and watch its layers; return both as far as they exist, and the refusal."""
    model, watched = None, Watched()
    try:
        check_quantisation(config)
        check_config(config, reads_whole(config), why_not_whole(config))
        model = build_blueprint(config)
        if source.weights.names and (whole_of(config) or reads_whole(config)):
            check_names(model, source.weights.names)
        watched = run_blueprint(lambda: watch_layers(model))
        check_windows([layer.shape.native_window for layer in watched.layers])
    except Refused as refused:
        return model, watched, refused
    return model, watched, None


def build_and_inspect(source: Source, config: PreTrainedConfig) -> Inspection:
    """Describe a model, and whether it is supported."""
    model, watched, refusal = watch_if_supported(source, config)
    layers = tuple(layer.shape for layer in watched.layers)
    names = config.architectures
    named = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    plain = whole_of(config) is None and method_of(config) is None  # else files hold more weights, or packed numbers
    text = config.get_text_config(decoder=True)
    return Inspection(
        **source.facts,
        architecture=named or (type(model).__name__ if model is not None else config.model_type),
        model_type=config.model_type,
        supported=refusal is None,
        reason=refusal.reason if refusal else None,
        remedy=refusal.remedy if refusal else None,
        tested=refusal is None and config.model_type in (TESTED_WHOLE if reads_whole(config) else TESTED),
        layers=layers,
        scalings=tuple(layer.scaling for layer in watched.layers),
        positions=name_positions(text, model),
        max_positions=getattr(text, "max_position_embeddings", None),
        parameters=source.weights.parameters if model is None or plain else sum(x.numel() for x in model.parameters()),
        weight_bytes=source.weights.bytes,
        cache_bytes_per_token=cache_bytes(layers, 1),
        recurrent_layers=watched.recurrent_layers,
        recurrent_bytes=watched.recurrent_bytes,
        alters_scores=watched.alters_scores,
        budgets=tuple(budget_of(layers, tokens) for tokens in BUDGETS) if refusal is None else (),
        vocabulary=getattr(text, "vocab_size", 0),
        resting=0 if model is None else count_resting(model),
        tower_of=whole_of(config),
        text_because=text_because(config),
        reads_pictures=refusal is None and reads_whole(config),
        quantised=describe_quantisation(config),
        packed=is_packed(config),
        gguf=gguf_file(config),
        links=model is None or can_link_weights(config, model, source),
    )


def can_link_weights(config: PreTrainedConfig, model: PreTrainedModel, source: Source) -> bool:
    """Whether a student loads from its teacher's files: it knows the names of its decoder's weights in them.

    It does not know other names that the teacher's class translates by its own name, or outside of the decoder.
    """
    if whole_of(config) or (method_of(config) and not is_packed(config)):
        return False
    if reads_whole(config):
        return get_checkpoint_conversion_mapping(type(model).__name__) is None
    outside = [name for name, _ in model.named_parameters() if not name.startswith(f"{model.base_model_prefix}.")]
    return not source.weights.names or all(name in source.weights.names for name in outside)


def count_resting(model: PreTrainedModel) -> int:
    """Count the parameters of the experts that do not process a token, in a mixture."""
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)
    if not isinstance(chosen, int):
        return 0
    stacks = [x for name, x in model.named_parameters() if ".experts." in name and x.ndim == 3]  # one for all experts
    return sum(x[0].numel() * (len(x) - chosen) for x in stacks if len(x) > chosen)


def verify_teacher(model: PreTrainedModel, inspection: Inspection) -> None:
    """Check that a loaded model attends in every layer as its config says."""
    try:
        watched = watch_layers(model).layers
    except Refused as refused:
        raise UnsupportedModel(f"{inspection.name!r} cannot be linearized, because {refused}") from refused
    expected = tuple(
        AttentionLayer(i, *pair) for i, pair in enumerate(zip(inspection.layers, inspection.scalings, strict=True))
    )
    if watched != expected:
        pairs = zip(watched, expected, strict=False)
        actual, stated = next((pair for pair in pairs if pair[0] != pair[1]), (watched, expected))
        raise UnsupportedModel(
            f"{inspection.name!r} attends differently from what its config says ({actual} instead of {stated}): "
            f"use the config that belongs to its weights"
        )


def budget_of(layers: tuple[Layer, ...], tokens: int) -> Budget:
    """Compute the bytes of a budget in tokens of cache, and the features per KV head that they hold."""
    budget_bytes = cache_bytes(layers, tokens)
    feature = sum(layer.kv_heads * feature_bytes(layer) for layer in layers if layer.native_window is None)
    return Budget(tokens, budget_bytes, budget_bytes / feature)


def name_positions(config: PreTrainedConfig, model: PreTrainedModel | None) -> str | None:
    """Name the position encoding of a model, if its config or its modules show it."""
    rope = getattr(config, "rope_parameters", None)
    if rope:
        by_kind = [parameters for parameters in rope.values() if isinstance(parameters, dict)] or [rope]
        if any(parameters.get("partial_rotary_factor", 1) < 1 for parameters in by_kind):
            return "partial rotary"
        return "rotary" if all(getattr(config, "no_rope_layers", None) or [1]) else "rotary, but for some layers"
    if model is not None and len([m for m in model.modules() if isinstance(m, torch.nn.Embedding)]) > 1:
        return "learned"
    return None
