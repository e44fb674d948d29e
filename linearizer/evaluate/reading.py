"""Lets subjects read texts, and gives their logits or losses."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence

import torch
from transformers.cache_utils import Cache

from linearizer.evaluate.subjects import Subject
from linearizer.model.logits import Tensor, bytes_held, fresh_cache, losses_of, texts_at_once, tokens_at_once

MAX_BRANCH_BYTES = 2**28  # of the copies of a cache that a text goes on from at once
Pieces = Iterator[tuple[int, list[Tensor]]]  # where a piece begins, and each subject's logits of it
Read = Callable[[Sequence[Subject], Tensor], Pieces]


@torch.inference_mode()
def read_together(subjects: Sequence[Subject], ids: Tensor) -> Pieces:
    """Let all read the same texts: where a piece begins, and each one's logits (texts, tokens, vocabulary) of it.

    Texts whose logits would be too many are read in pieces, each subject remembering in a cache of its own kind.
    """
    size = tokens_at_once(subjects[0].model, len(ids))
    if size >= ids.shape[1]:
        yield 0, [read(subject, ids, None) for subject in subjects]
        return
    yield from read_into(subjects, ids, [fresh_cache(subject.model) for subject in subjects])


@torch.inference_mode()
def read_into(subjects: Sequence[Subject], ids: Tensor, caches: Sequence[Cache]) -> Pieces:
    """Let all read the same texts into their caches, in pieces of whose logits there are not too many."""
    size = tokens_at_once(subjects[0].model, len(ids))
    for begin in range(0, ids.shape[1], size):
        piece = ids[:, begin : begin + size]
        yield begin, [read(subject, piece, cache) for subject, cache in zip(subjects, caches, strict=True)]


@torch.inference_mode()
def read_branches(subject: Subject, ends: Tensor, cache: Cache) -> Tensor:  # (texts, branches, tokens, vocabulary)
    """Let one go on from what its cache holds with several ends of each text (texts, branches, tokens)."""
    at_once = max(1, MAX_BRANCH_BYTES // max(bytes_held(cache), 1))
    logits = []
    for some in ends.split(at_once, 1):
        own = copy.deepcopy(cache)
        own.batch_repeat_interleave(some.shape[1])
        logits.append(read(subject, some.flatten(0, 1), own).unflatten(0, some.shape[:2]))
    return torch.cat(logits, 1)


def read(subject: Subject, ids: Tensor, cache: Cache | None, keep: int = 0) -> Tensor:
    """Let one read on from what its cache holds; give the logits of the last `keep` tokens, or of all."""
    with subject.at_work() as model, torch.inference_mode():
        given = {"input_ids": ids.to(model.device), "past_key_values": cache, "use_cache": cache is not None}
        return model(**given, logits_to_keep=keep).logits.float()


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
