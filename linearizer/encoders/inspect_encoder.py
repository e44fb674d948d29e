"""Decides from its config whether an encoder can be linearized, without its weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from linearizer.encoders.attention_interface import attention_modules, replaced_modules
from linearizer.encoders.modeling_encoder import CLASSES, grid_of
from linearizer.encoders.stretch_positions import position_tables, unused_rows
from linearizer.errors import UnsupportedModel
from linearizer.hub.models import Source
from linearizer.plan.encoder_plan import EncoderInspection
from linearizer.teacher.observing import OBSERVED, attending
from linearizer.teacher.support import Refused, build_blueprint, run_blueprint

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

WATCHED_TOKENS = 8
ANOTHER = "name an encoder with plain softmax attention, such as bert, roberta, electra, vit or dinov2"
MASKED = "its layers mask or weight pairs of tokens in other ways, such as by biases of positions"
CAUSAL = "its tokens read only those before them"
UNSEEN = "its code does not hand its attention to transformers' attention interface, so no layer is seen"
TESTED = frozenset(
    "bert roberta electra distilbert modernbert vit deit dinov2 siglip_vision_model clip_vision_model".split()
)


def reads_both_ways(config: PreTrainedConfig) -> bool:
    """Whether a config is of an encoder of texts or pictures, which this room serves or refuses."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING, MODEL_MAPPING

    kind = type(config)
    if kind not in MODEL_MAPPING or config.is_encoder_decoder or getattr(config, "is_decoder", False):
        return False
    return kind in MODEL_FOR_MASKED_LM_MAPPING or (is_of_pictures(config) and kind not in MODEL_FOR_CAUSAL_LM_MAPPING)


def is_of_pictures(config: PreTrainedConfig) -> bool:
    return getattr(config, "image_size", None) is not None and getattr(config, "patch_size", None) is not None


def auto_class_of(config: PreTrainedConfig) -> str:
    """Return the name of the class of transformers for the architecture in a config; AutoModel if it names none."""
    names = getattr(config, "architectures", None) or ()
    for auto, auto_class in CLASSES.items():
        kinds = auto_class._model_mapping[type(config)] if type(config) in auto_class._model_mapping else ()
        if any(kind.__name__ in names for kind in (kinds if isinstance(kinds, (list, tuple)) else [kinds])):
            return auto
    return "AutoModel"


def inspect_encoder(source: Source, config: PreTrainedConfig, auto_class: str | None = None) -> EncoderInspection:
    """Describe an encoder; refuse it if its attention is more than softmax over all tokens.

    It is loaded by `auto_class`, or by that of the architecture in its config.
    """
    auto_class = auto_class or auto_class_of(config)
    try:
        model = build_blueprint(config, CLASSES[auto_class])
        shapes = run_blueprint(lambda: watch_encoder(model))
    except Refused as refused:
        name, reason, remedy = source.name, refused.reason, refused.remedy
        remedy = ANOTHER if remedy.startswith("name a decoder") else remedy
        raise UnsupportedModel(f"{name!r} cannot be linearized, because {reason}: {remedy}") from refused
    embedded = sum(x.numel() for m in model.modules() if isinstance(m, nn.Embedding) for x in m.parameters())
    parameters = sum(x.numel() for x in model.parameters())
    pictures = is_of_pictures(config)
    patches = math.prod(grid_of(config, blank_input(model)["pixel_values"])) if pictures else 0
    _, heads, tokens, dim = shapes[0]
    return EncoderInspection(
        **source.facts,
        architecture=(config.architectures or [type(model).__name__])[0],
        model_type=config.model_type,
        auto_class=auto_class,
        reads="pictures" if pictures else "texts",
        tested=config.model_type in TESTED,
        layers=len(shapes),
        heads=heads,
        head_dim=dim,
        tokens=tokens if pictures else most_tokens(model),
        first=tokens - patches if pictures else 0,
        stretches=not pictures and bool(position_tables(model)),
        parameters=parameters,
        layer_parameters=parameters - embedded,
        repo_id=source.repo_id,
    )


def watch_encoder(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Run a model on a small input; return the shapes of the queries in the layers that a student replaces."""
    shapes: list[tuple[int, ...]] = []

    def observe(module: nn.Module, query: torch.Tensor, *args: Any) -> None:
        kwargs = args[-1]
        if kwargs.get("is_causal"):
            raise Refused(CAUSAL)
        if kwargs.get("sliding_window") is not None:
            return
        if any(kwargs.get(name) is not None for name in ("attention_mask", "position_bias", "softcap", "s_aux")):
            raise Refused(MASKED)
        if not hasattr(module, "is_causal") or module.is_causal is not False:
            raise Refused(CAUSAL)
        shapes.append(tuple(query.shape))

    if not attention_modules(model):
        raise Refused(UNSEEN)
    for module in model.modules():
        module.observe = observe
    with torch.no_grad(), attending(model, OBSERVED):
        model(**blank_input(model))
    if not shapes or len(shapes) != len(replaced_modules(model)):
        raise Refused(UNSEEN)
    return shapes


def blank_input(model: PreTrainedModel) -> dict[str, Any]:
    """Return a short text, or a picture of a model's usual size."""
    config = model.config
    if not is_of_pictures(config):
        return {"input_ids": torch.zeros(1, WATCHED_TOKENS, dtype=torch.long, device=model.device)}
    size = config.image_size
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    channels = getattr(config, "num_channels", 3)
    return {"pixel_values": torch.zeros(1, channels, height, width, device=model.device)}


def most_tokens(model: PreTrainedModel) -> int:
    """Return the largest number of tokens of a text."""
    for _, table in position_tables(model):
        return table.num_embeddings - unused_rows(table)
    return int(getattr(model.config, "max_position_embeddings", 0)) or 512
