"""The subjects of an evaluation, and how they read: teacher, student, and controls, the model with other heads."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from linearizer.method.substitute import exchange_students
from linearizer.plan.allocation import Allocation
from linearizer.plan.head_bytes import Layer, cache_bytes
from linearizer.student.attention_interface import attending
from linearizer.student.cache import CACHE
from linearizer.teacher.layers import blocks_of
from linearizer.teacher.logits import Tensor, bytes_held, fresh_cache, losses_of, texts_at_once, tokens_at_once
from linearizer.teacher.token_loop import read_tokens

MAX_BRANCH_BYTES = 2**28  # of the copies of a cache's layer that a text goes on from at once


@dataclass(frozen=True)
class Subject:
    """A model that goes through the same code on the same text as all other subjects."""

    name: str
    model: PreTrainedModel
    allocation: Allocation | None = None  # None: a teacher, whose state grows with the text
    heads: Sequence[nn.Module] | None = None  # what takes the place of the model's own students
    softmax: bool = False  # a student's base, attending as the teacher that it was

    @contextmanager
    def at_work(self) -> Iterator[PreTrainedModel]:
        """Give the model, attending as this subject does."""
        if self.softmax:
            with attending(self.model, "sdpa"):
                yield self.model
        elif self.heads is None:
            yield self.model
        else:
            with exchange_students(self.model, self.heads):
                yield self.model

    @property
    def exact_tokens(self) -> int:
        """The tokens that a plain window keeps."""
        return 0 if self.allocation is None else self.allocation.exact_tokens

    def state_bytes(self, layers: Sequence[Layer], length: int) -> int:
        """Give the bytes of cache or state once `length` tokens have been read."""
        return cache_bytes(layers, length) if self.allocation is None else self.allocation.state_bytes(layers, length)


Pieces = Iterator[tuple[int, list[Tensor]]]  # where a piece begins, and each subject's logits of it
Read = Callable[[Sequence[Subject], Tensor], Pieces]


@torch.inference_mode()
def read_together(subjects: Sequence[Subject], ids: Tensor) -> Pieces:
    """Let all subjects read the same texts: where a piece begins, and the logits of each (texts, tokens, vocabulary).

    Texts whose logits would be too many are read in pieces, each subject remembering in a cache of its own kind.
    """
    size = tokens_at_once(subjects[0].model, len(ids))
    if size >= ids.shape[1]:
        yield 0, read_alike(subjects, ids, [None] * len(subjects))
        return
    yield from read_into(subjects, ids, [fresh_cache(subject.model) for subject in subjects])


@torch.inference_mode()
def read_into(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache]) -> Pieces:
    """Let all subjects read the same texts into their caches, in pieces of whose logits there are not too many."""
    size = tokens_at_once(subjects[0].model, len(ids))
    for begin in range(0, ids.shape[1], size):
        piece = ids[:, begin : begin + size]
        yield begin, read_alike(subjects, piece, caches)


def read_alike(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache | None]) -> list[Tensor]:
    """Let all subjects read on from what their caches hold, and return their logits."""
    return [read_logits(subject, ids, cache) for subject, cache in zip(subjects, caches, strict=True)]


@torch.inference_mode()
def read_branches(subject: Subject, ends: Tensor, cache: Cache) -> Tensor:  # (texts, branches, tokens, vocabulary)
    """Let a subject go on from what its cache holds with several ends of each text (texts, branches, tokens)."""
    at_once = max(1, MAX_BRANCH_BYTES * len(cache.layers) // max(bytes_held(cache), 1))
    logits = []
    for some in ends.split(at_once, 1):
        with branching(subject.model, cache, some.shape[1]) as own:
            logits.append(read_logits(subject, some.flatten(0, 1), own).unflatten(0, some.shape[:2]))
    return torch.cat(logits, 1)


@contextmanager
def branching(model: PreTrainedModel, cache: Cache, branches: int) -> Iterator[Cache]:
    """Give a cache in which each text has branches; each layer is copied only while its block computes."""
    own = copy.copy(cache)
    own.layers = list(cache.layers)
    blocks, thread = blocks_of(model), get_ident()

    def branch(index: int, *_: object) -> None:
        if get_ident() == thread:  # others may run the same blocks with caches of their own
            own.layers[index] = copy.deepcopy(cache.layers[index])
            own.layers[index].batch_repeat_interleave(branches)

    def forget(index: int, *_: object) -> None:
        if get_ident() == thread:
            own.layers[index] = cache.layers[index]

    with ExitStack() as stack:
        if len(blocks) != len(own.layers):
            for index in range(len(own.layers)):
                branch(index)
        else:
            for index, block in enumerate(blocks):
                stack.callback(block.register_forward_pre_hook(partial(branch, index)).remove)
                stack.callback(block.register_forward_hook(partial(forget, index)).remove)
        yield own


def read_logits(subject: Subject, ids: Tensor, cache: Cache | None, keep: int = 0) -> Tensor:
    """Let a subject read on from what its cache holds; give the logits of the last `keep` tokens, or of all."""
    with subject.at_work() as model, torch.inference_mode():
        given = {"input_ids": ids.to(model.device), CACHE: cache, "use_cache": cache is not None}
        return model(**given, logits_to_keep=keep).logits.float()


def read_into_cache(subject: Subject, ids: Tensor, cache: Cache) -> None:
    """Let a subject read on, without its logits."""
    with subject.at_work() as model:
        for _ in read_tokens(model, ids, cache):
            pass


def read_losses(subjects: Sequence[Subject], ids: Tensor) -> list[Tensor]:
    """Give every subject's loss on every predicted token: (texts, tokens - 1), fp64."""
    losses_by_subject: list[list[Tensor]] = [[] for _ in subjects]
    for some in ids.split(texts_at_once(subjects[0].model, ids.shape[1])):
        parts: list[list[Tensor]] = [[] for _ in subjects]
        for begin, logits in read_together(subjects, some):
            following = some[:, begin + 1 : begin + 1 + logits[0].shape[1]]
            for pieces, own in zip(parts, logits, strict=True):
                pieces.append(losses_of(own[:, : following.shape[1]], following).double().cpu())
        for texts, pieces in zip(losses_by_subject, parts, strict=True):
            texts.append(torch.cat(pieces, 1))
    return [torch.cat(texts) for texts in losses_by_subject]
