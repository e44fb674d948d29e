"""The subjects of an evaluation, and how they read: teacher, student, and controls (the model with other heads)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.method.substitute import exchange_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer, cache_bytes
from linearizer.student.attention_interface import attending
from linearizer.student.cache import CACHE
from linearizer.teacher.logits import Tensor, bytes_held, fresh_cache, logits_at_once
from linearizer.teacher.token_loop import read_tokens

ENDS_AT_ONCE = 5  # texts whose ends are predicted together
MAX_BRANCH_BYTES = 2**30  # of the copies of a cache from which continuations of a text are read together


@dataclass(frozen=True)
class Subject:
    """A model that is measured by the same code on the same text as all other subjects."""

    name: str
    model: PreTrainedModel
    allocation: Allocation | None = None  # None: a teacher, whose state grows with the text
    heads: Sequence[nn.Module] | None = None  # these replace the model's own students
    softmax: bool = False  # a student's base that attends as the teacher

    @contextmanager
    def prepared(self) -> Iterator[PreTrainedModel]:
        """Yield the model, prepared to attend like this subject."""
        if self.softmax:
            with attending(self.model, "sdpa"):
                yield self.model
        elif self.heads is None:
            yield self.model
        else:
            with exchange_students(self.model, self.heads):
                yield self.model

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Count the bytes of cache or state once `length` tokens have been read."""
        return cache_bytes(layers, length) if self.allocation is None else self.allocation.state_bytes(layers, length)


Pieces = Iterator[tuple[int, list[Tensor]]]  # where a piece begins, and each subject's logits of it
Read = Callable[[Sequence[Subject], Tensor], Pieces]


@torch.inference_mode()
def read_together(subjects: Sequence[Subject], ids: Tensor) -> Pieces:
    """Let all subjects read the same texts; yield where a piece begins, and each's logits (texts, tokens, vocabulary).

    Where memory has no room for all logits, texts are read in pieces, each subject with a cache of its own kind.
    """
    if logits_at_once(subjects[0].model, len(ids)) >= ids.shape[1]:
        yield 0, read_alike(subjects, ids, [None] * len(subjects))
    else:
        yield from read_into(subjects, ids, [fresh_cache(subject.model) for subject in subjects])


@torch.inference_mode()
def read_into(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache]) -> Pieces:
    """Let all subjects read the same texts into their caches, in pieces with as many logits as memory allows."""
    size = logits_at_once(subjects[0].model, len(ids))
    for begin in range(0, ids.shape[1], size):
        yield begin, read_alike(subjects, ids[:, begin : begin + size], caches)


def read_alike(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache | None]) -> list[Tensor]:
    """Let all subjects read on from their caches, and return their logits."""
    return [read_logits(subject, ids, cache) for subject, cache in zip(subjects, caches, strict=True)]


@torch.inference_mode()
def read_branches(subject: Subject, ends: Tensor, cache: Cache) -> Tensor:  # (texts, branches, tokens, vocabulary)
    """Let a subject read on from its cache several ends of each text (texts, branches, tokens)."""
    logits = []
    for chunk in ends.split(max(1, MAX_BRANCH_BYTES // max(bytes_held(cache), 1)), 1):
        branches = copy.deepcopy(cache)
        branches.batch_repeat_interleave(chunk.shape[1])
        logits.append(read_logits(subject, chunk.flatten(0, 1), branches).unflatten(0, chunk.shape[:2]))
    return torch.cat(logits, 1)


def read_logits(subject: Subject, ids: Tensor, cache: Cache | None, keep: int = 0) -> Tensor:
    """Let a subject read on from its cache; return the logits of the last `keep` tokens, or of all."""
    with subject.prepared() as model, torch.inference_mode():
        caching = {CACHE: cache, "use_cache": cache is not None}
        return model(ids.to(model.device), logits_to_keep=keep, **caching).logits.float()


def read_into_cache(subject: Subject, ids: Tensor, cache: Cache) -> None:
    """Let a subject read on without computing logits."""
    with subject.prepared() as model:
        for _ in read_tokens(model, ids, cache):
            pass


def read_end(subject: Subject, ids: Tensor, begin: int, cache: Cache) -> Tensor:
    """Let a subject read on from its cache; return the logits of the tokens from `begin` on."""
    read_into_cache(subject, ids[:, :begin], cache)
    return read_logits(subject, ids[:, begin:], cache)


def read_last(subject: Subject, texts: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """Yield the logits that predict the last tokens of each text, `counts` of them: (count, vocabulary)."""
    for first in range(0, len(texts), ENDS_AT_ONCE):
        ids, numbers = texts[first : first + ENDS_AT_ONCE], counts[first : first + ENDS_AT_ONCE]
        begin = ids.shape[1] - max(numbers) - 1
        logits = read_end(subject, ids, begin, fresh_cache(subject.model))[:, :-1]
        yield from (row[-count:] for row, count in zip(logits, numbers, strict=True))
