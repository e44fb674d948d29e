"""Decides whether a model that reads pictures is served whole, or by its text tower alone.

Its picture tokens must enter the state like other tokens: each sees the tokens before it. Where they see each other in
both directions, the model is served as text.
"""

from __future__ import annotations

from collections.abc import Collection
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch

from linearizer.progress import quiet
from linearizer.student.modeling_linearized import reads_pictures
from linearizer.teacher.observing import WITH_MASKS, observing
from linearizer.teacher.support import (
    WATCHED_TOKENS,
    Refused,
    build_blueprint,
    check_windows,
    run_blueprint,
    text_tower,
    watch_layers,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

AS_ASKED = "text alone was asked for"
BOTH_WAYS = "its tokens of a picture see each other in both directions, and a state of fixed size reads a text once"
MAX_KEPT = 64  # configs
TYPES = "token_type_ids"  # ends the names of arguments that mark the tokens of pictures

_kept: dict[str, str | None] = {}  # reasons against pictures by configs, as building a model takes a while


def is_whole(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a whole model that reads pictures."""
    return reads_pictures(type(config)) and config.get_text_config(decoder=True) is not config


def choose_config(config: PreTrainedConfig, stored: Collection[str], text_only: bool = False) -> PreTrainedConfig:
    """Return the config of a whole model if its pictures are served, or else of its text tower, if it has one.

    The tower's config states why. `stored` are the names of the tensors in its files, as far as they are known.
    """
    if not text_only and reads_whole(config):
        return config
    tower = text_tower(config, stored)
    if tower is not config:
        tower.text_because = AS_ASKED if text_only else why_not_whole(config)
    return tower


def reads_whole(config: PreTrainedConfig) -> bool:
    """Whether a config is that of a whole model whose pictures are served."""
    return is_whole(config) and why_not_whole(config) is None


def why_not_whole(config: PreTrainedConfig) -> str | None:
    """Say why a model's pictures are not served; None if they are, or if it reads none."""
    if not is_whole(config) or config.is_encoder_decoder:
        return None
    key = f"{type(config).__name__} {config.to_json_string(use_diff=False)}"
    if key not in _kept:
        try:
            model = build_blueprint(config)
            run_blueprint(lambda: check_whole(model))
            _kept[key] = None
        except Refused as refused:
            _kept[key] = refused.reason
        if len(_kept) > MAX_KEPT:
            _kept.pop(next(iter(_kept)), None)
    return _kept[key]


def check_whole(model: PreTrainedModel) -> None:
    """Refuse a model whose decoder cannot be linearized, or whose picture tokens see each other."""
    windows = [layer.shape.native_window for layer in watch_layers(model).layers]
    check_windows(windows)
    tokens = torch.zeros(1, WATCHED_TOKENS, dtype=torch.long, device=model.device)
    marked = {name: torch.ones_like(tokens) for name in signature(model.forward).parameters if name.endswith(TYPES)}

    def observe(module: Any, q: object, k: object, v: object, scale: float, arguments: dict) -> None:
        mask = arguments.get("attention_mask")
        if windows[module.layer_idx] is None and mask is not None and mask.shape[-2] > 1:
            raise Refused(BOTH_WAYS)

    with torch.no_grad(), quiet(), observing(model, observe, WITH_MASKS):
        model(input_ids=tokens, attention_mask=torch.ones_like(tokens), use_cache=True, **marked)


def text_because(config: PreTrainedConfig) -> str | None:
    """Say why a model is served by its text tower alone, if it is one and the reason is known."""
    return getattr(config, "text_because", None)
