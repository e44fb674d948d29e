"""Computes logits, and gradients through them, for a few tokens at a time.

Each token of a text takes a row of logits. With a vocabulary of 262,144, all rows of 4,096 tokens take 4.3 GB in
float32, once for every tensor that is made of them. A model's hidden states take little, so they are kept instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from linearizer.method.substitute import fixed_answer
from linearizer.teacher.logits import kl_of, vocabulary

MAX_LOGITS = 2**24  # in memory at once, for each tensor that is made of them

Tensor = torch.Tensor


def run_decoder(model: PreTrainedModel, ids: Tensor) -> ModelOutput:  # its last hidden states: (texts, tokens, hidden)
    """Run a model up to its last hidden states."""
    return decoder_of(model)(input_ids=ids.to(model.device), use_cache=False)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Find the part whose answer a model turns into logits."""
    return model.get_decoder()


def logits_by_rows(
    model: PreTrainedModel, ids: Tensor, answer: ModelOutput, places: Tensor | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the last hidden states and the logits of a few tokens of all texts, from the first token on.

    The tokens are those at some places, or all. The model's own code makes logits of the hidden states, and may
    multiply, cap or shift them.
    """
    states = answer[0]
    if places is not None:
        ids, states = ids[:, places.to(ids.device)], states[:, places.to(states.device)]
    texts, tokens = ids.shape
    rows = max(1, MAX_LOGITS // (texts * vocabulary(model)))
    ids = ids.to(model.device)
    for begin, end in pairwise([*range(0, tokens, rows), tokens]):
        hidden = states[:, begin:end].detach().requires_grad_(torch.is_grad_enabled())
        with fixed_answer(decoder_of(model), type(answer)(**{**answer, "last_hidden_state": hidden})):
            logits = model(input_ids=ids[:, begin:end], use_cache=False).logits
        yield hidden, logits


def gradients_at_hidden(
    model: PreTrainedModel, ids: Tensor, answer: ModelOutput, likelihoods: Callable[[Tensor], Sequence[Tensor]]
) -> list[Tensor]:  # (texts, tokens, hidden) for each draw
    """Compute the gradients of log-likelihoods at a decoder's last hidden states."""
    parts = []
    for hidden, logits in logits_by_rows(model, ids, answer):
        numbers = likelihoods(logits)
        parts.append([torch.autograd.grad(number, hidden, retain_graph=True)[0] for number in numbers])
    return [torch.cat(of_draw, 1) for of_draw in zip(*parts, strict=True)]


@torch.inference_mode()
def kl_of_answers(
    model: PreTrainedModel, ids: Tensor, teacher: ModelOutput, students: Sequence[ModelOutput], places: Tensor
) -> list[Tensor]:  # (texts, places) for each student
    """Compute the kl of students at some places, in nats, from the last hidden states of teacher and students."""
    answers = (teacher, *students)
    rows = zip(*(logits_by_rows(model, ids, answer, places) for answer in answers), strict=True)
    kl: list[list[Tensor]] = [[] for _ in students]
    for (_, expected), *of_students in rows:
        for parts, (_, logits) in zip(kl, of_students, strict=True):
            parts.append(kl_of(expected.float(), logits.float()))
    return [torch.cat(parts, 1) for parts in kl]
