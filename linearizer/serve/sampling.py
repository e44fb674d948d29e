"""The next tokens of rows, each drawn by its own options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

import torch
from transformers import MinPLogitsWarper, RepetitionPenaltyLogitsProcessor, TopKLogitsWarper, TopPLogitsWarper

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


def choose_tokens(logits: Tensor, drawings: Sequence[Drawing], texts: Sequence[Sequence[int]]) -> list[int]:
    """Choose the next token of every row of logits (rows, vocabulary), after the tokens of its text."""
    tokens: list[int] = logits.argmax(-1).tolist()
    for row, drawing in enumerate(drawings):
        if drawing.temperature or drawing.repetition_penalty != 1.0:
            tokens[row] = draw_token(logits[row : row + 1], drawing, texts[row])
    return tokens


def draw_token(logits: Tensor, drawing: Drawing, text: Sequence[int]) -> int:  # (1, vocabulary)
    """Draw a token with one random number, limited by the processors of transformers in their order."""
    ids = torch.tensor([text] if drawing.repetition_penalty != 1.0 else [[]], dtype=torch.long, device=logits.device)
    logits = RepetitionPenaltyLogitsProcessor(drawing.repetition_penalty)(ids, logits)
    if not drawing.temperature:
        return int(logits.argmax())
    logits = (logits - logits.max()) / max(drawing.temperature, 1e-30)  # a smaller one is 0 in float32
    if drawing.top_k is not None:
        logits = TopKLogitsWarper(drawing.top_k)(ids, logits)
    if drawing.top_p < 1:
        logits = TopPLogitsWarper(drawing.top_p)(ids, logits)
    if drawing.min_p > 0:
        logits = MinPLogitsWarper(drawing.min_p)(ids, logits)
    total = logits[0].double().softmax(-1).cumsum(-1)
    return int(torch.searchsorted(total, drawing.random.random() * total[-1], right=True))
