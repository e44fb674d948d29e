"""Positions of tokens after pictures, in models that number a picture's tokens by its rows and columns.

Such a picture takes fewer positions than tokens. transformers keeps the difference (`rope_deltas`) in the model, which
may read other texts in between; here it belongs to the cache of the text.
"""

from inspect import signature
from typing import Any

import torch
from torch import nn

from .attention_interface import positions_of

DELTAS = "rope_deltas"  # (texts, 1), of a cache, as transformers calls them in models
GRIDS = ("image_grid_thw", "video_grid_thw")


def numbering_part(model: nn.Module) -> Any:
    """Return the part of a model that numbers the tokens of pictures by rows and columns; None: none does."""
    parts = (getattr(model, "base_model", model), model)
    return next((part for part in parts if hasattr(part, DELTAS) and hasattr(part, "get_rope_index")), None)


def deltas_of(cache: Any) -> torch.Tensor | None:
    """Return the differences of a cache's texts; None: their positions are the numbers of their tokens."""
    return getattr(cache, DELTAS, None)


def place_tokens(model: nn.Module, arguments: dict[str, Any], cache: Any) -> None:
    """Let a call number its tokens from what the cache has read, and note the differences of its texts in the cache."""
    ids, embeds = arguments.get("input_ids"), arguments.get("inputs_embeds")
    inputs: torch.Tensor | None = ids if embeds is None else embeds
    if inputs is None or (part := numbering_part(model)) is None:
        return
    mask, positions = arguments.get("attention_mask"), arguments.get("position_ids")
    count, past = inputs.shape[1], 0 if cache is None else cache.get_seq_length()
    deltas = deltas_of(cache) if past else None
    deltas = None if deltas is None else deltas.to(inputs.device)
    part.rope_deltas = None  # of another text
    if positions is not None and positions.ndim == 3:  # from `generate`
        read = past + count if mask is None else mask.sum(-1, keepdim=True)
        deltas = positions[-3:].amax((0, 2))[:, None] + 1 - read
    elif positions is None and (placed := place_pictures(part, arguments, past, deltas)) is not None:
        arguments["position_ids"], deltas = placed
    elif positions is None and deltas is not None:
        arguments["position_ids"] = text_positions(mask, past, count, deltas) + deltas
    if cache is not None:
        setattr(cache, DELTAS, deltas)


def place_pictures(
    part: Any, arguments: dict[str, Any], past: int, deltas: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Number tokens with pictures among them after `past` tokens; return positions (3, texts, tokens) and differences.

    None if there are no pictures, or if nothing says which tokens are theirs.
    """
    if not any(arguments.get(name) is not None for name in GRIDS):
        return None
    names = [name for name, each in signature(part.get_rope_index).parameters.items() if each.kind != each.VAR_KEYWORD]
    given = {name: arguments[name] for name in names if arguments.get(name) is not None}
    if "input_ids" not in given or not given.keys() & {*GRIDS}:
        return None
    if "mm_token_type_ids" in names and "mm_token_type_ids" not in given:
        return None
    mask = arguments.get("attention_mask")
    before = past if mask is None else mask[:, :past].sum(-1, keepdim=True)
    if mask is not None:
        given["attention_mask"] = mask[:, past:]
    positions, more = part.get_rope_index(**given)
    more = more.to(positions.device)
    begin = before + (0 if deltas is None else deltas)
    return positions + begin, more if deltas is None else more + deltas


def text_positions(mask: torch.Tensor | None, past: int, count: int, like: torch.Tensor) -> torch.Tensor:
    """Number tokens (texts, tokens) after `past` tokens, without padding."""
    if mask is None or mask.shape[1] != past + count:
        return torch.arange(past, past + count, device=like.device)[None]
    return positions_of(mask)[:, past:]
