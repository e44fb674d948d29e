"""Gives an encoder of texts more positions than it has learned, so that it reads longer texts."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import interpolate
from transformers import PreTrainedModel

MOST_STRETCHED = 64  # times a model's positions


def position_tables(model: nn.Module) -> list[tuple[nn.Module, nn.Embedding]]:
    """Return the learned positions of a model, with their modules."""
    tables = [(module, getattr(module, "position_embeddings", None)) for module in model.modules()]
    return [(module, table) for module, table in tables if isinstance(table, nn.Embedding)]


def unused_rows(table: nn.Embedding) -> int:
    """Count the rows before the first position: RoBERTa's positions begin after its padding."""
    return 0 if table.padding_idx is None else table.padding_idx + 1


def stretch_positions(model: PreTrainedModel, tokens: int) -> None:
    """Interpolate positions for texts of `tokens` tokens, evenly between the first and last learned ones."""
    for module, table in position_tables(model):
        skipped = unused_rows(table)
        learned = table.weight.detach()[skipped:]
        between = interpolate(learned.T[None], size=tokens, mode="linear", align_corners=True)[0].T
        weight = torch.cat([table.weight.detach()[:skipped], between])
        module.position_embeddings = nn.Embedding.from_pretrained(weight, padding_idx=table.padding_idx)
        for name, values in (("position_ids", torch.arange(len(weight))), ("token_type_ids", None)):
            if getattr(module, name, None) is not None:
                values = torch.zeros(len(weight), dtype=torch.long) if values is None else values
                module.register_buffer(name, values[None].to(weight.device), persistent=False)
        model.config.max_position_embeddings = len(weight)
