"""The next tokens of rows that each draw in their own way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from transformers import RepetitionPenaltyLogitsProcessor

Tensor = torch.Tensor


@dataclass(frozen=True)
class Drawing:
    """How a row draws its tokens: temperature 0 takes the likeliest."""

    temperature: float = 0.0
    top_p: float = 1.0
    random: Random = field(default_factory=Random)
    top_k: int | None = None  # None: all
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def choose_tokens(logits: Tensor, drawings: Sequence[Drawing], texts: Sequence[Sequence[int]] = ()) -> list[int]:
    """Choose the next token of every row of logits (rows, vocabulary), after the tokens of its text."""
    for row, drawing in enumerate(drawings):
        if drawing.repetition_penalty != 1.0:
            text = torch.tensor([texts[row]], device=logits.device)
            logits[row] = RepetitionPenaltyLogitsProcessor(drawing.repetition_penalty)(text, logits[row : row + 1])[0]
    chosen = logits.argmax(-1)
    drawn = [row for row, drawing in enumerate(drawings) if drawing.temperature > 0]
    if drawn:
        some = [drawings[row] for row in drawn]
        chosen[drawn] = draw_tokens(logits[drawn], some)
    tokens: list[int] = chosen.tolist()
    return tokens


def draw_tokens(logits: Tensor, drawings: Sequence[Drawing]) -> Tensor:
    """Draw with one random number a row: of the likeliest top_k tokens, from those whose probabilities add up to top_p,
    and of these from those that have min_p of the likeliest one's; in the order in which transformers does it."""

    def column(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=logits.device, dtype=logits.dtype)[:, None]

    temperature = column([drawing.temperature for drawing in drawings])
    shares = ((logits - logits.amax(-1, keepdim=True)) / temperature).softmax(-1)
    shares, order = shares.sort(stable=True, dim=-1, descending=True)
    if any(drawing.top_k is not None for drawing in drawings):
        most = column([drawing.top_k or shares.shape[-1] for drawing in drawings])
        shares = shares * (torch.arange(shares.shape[-1], device=logits.device) < most)
        shares = shares / shares.sum(-1, keepdim=True)
    before = shares.cumsum(-1) - shares
    kept = before < column([drawing.top_p for drawing in drawings])
    kept &= shares >= column([drawing.min_p for drawing in drawings]) * shares[:, :1]
    kept[:, 0] = True
    total = (shares * kept).cumsum(-1)
    place = torch.searchsorted(
        total, total[:, -1:] * column([drawing.random.random() for drawing in drawings]), right=True
    )
    place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
    return order.gather(-1, place)[:, 0]
