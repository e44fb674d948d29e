"""What a model says of the next token, and how two of them differ."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

Tensor = torch.Tensor


@torch.inference_mode()
def logits_of(model: PreTrainedModel, ids: Tensor) -> Tensor:  # (texts, tokens, vocabulary)
    return model(input_ids=ids.to(model.device), use_cache=False).logits.float()


def token_losses(logits: Tensor, ids: Tensor) -> Tensor:  # (texts, tokens - 1)
    return torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:].to(logits.device), reduction="none")


def divergence(teacher: Tensor, student: Tensor) -> Tensor:  # (texts, tokens)
    """KL(teacher ‖ student) of every next-token distribution."""
    log_p, log_q = teacher.log_softmax(-1), student.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)
