"""Lets a student read a text once, keep its state in a file, and answer from it any number of times."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from linearizer.errors import FolderError, RequestError, TextError
from linearizer.method import checkpoint
from linearizer.plan.allocation import ReadingSize
from linearizer.plan.head_bytes import CACHED, Layer, cache_bytes
from linearizer.progress import Progress, Steps, quiet
from linearizer.run.folder import Run
from linearizer.serve import saved_state
from linearizer.serve.saved_state import MAX_TURNS, begin_turn
from linearizer.serve.state_files import held, load_state, save_state
from linearizer.student.cache import LinearizedCache, LinearizedLayer
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.chat_template import next_turn_tokens
from linearizer.teacher.logits import recurrent_bytes
from linearizer.teacher.picture_prompts import Pictures, make_prompt
from linearizer.teacher.read_twice import may_read_twice, read_twice, request_of
from linearizer.teacher.token_loop import NONE, TextStream, ends_of, generate_tokens, read_tokens


@dataclass(frozen=True)
class Answer:
    """A student's answer, and the size of its state after it."""

    prompt: str
    text: str
    tokens: int  # that were written
    reading: ReadingSize


def read(
    run: Run,
    text: str,
    path: str | Path,
    more: bool = False,
    raw: bool = False,
    pictures: Sequence[Any] = (),
    stream: bool = False,
) -> Steps[ReadingSize]:
    """Let the student of a run read a text and write its state to a file; `more`: continue from the file's state.

    A model with a chat template reads it as what its user says, unless `raw`. A later text can be taken back. Pictures
    come before the text. A first text without pictures is read twice (read_twice.py), where the model has room for it,
    unless `stream`.
    """
    path = Path(path)
    with held(path):
        if path.exists() and not more:
            raise FolderError(f"{str(path)!r} exists already: add --more to read on after it, or name another file")
        student, tokenizer = checkpoint.load_of_run(run)
        cache = load_state(student, path) if more else student.empty_cache()
        if more:
            begin_turn(cache)
        ids, shown = tokenize(run, tokenizer, text, cache, asks=False, raw=raw, pictures=pictures)
        twice = not (stream or more or pictures) and may_read_twice(student, ids.shape[1])
        total = (1 + twice) * ids.shape[1]
        yield Progress("read", 0, total, "tokens")
        request = request_of(tokenizer)
        for count in read_twice(student, request, ids, cache) if twice else read_tokens(student, ids, cache, shown):
            yield Progress("read", count, total, "tokens")
        save_state(student, cache, path)
    return replace(measure(student, run.layers, cache), readings=1 + twice)


def ask(
    run: Run,
    prompt: str,
    path: str | Path | None = None,
    keep: bool = False,
    new_tokens: int = 256,
    seed: int = 0,
    sample: bool = False,
    raw: bool = False,
    pictures: Sequence[Any] = (),  # files, or pictures of PIL, before the prompt
) -> Generator[str, None, Answer]:
    """Let the student of a run answer a prompt, after the text of a state in a file; yield what it writes.

    A model without a chat template continues the prompt, as any does if `raw`. `keep` writes the state after prompt and
    answer back to the file, where the next prompt begins; they can be taken back.
    """
    if keep and path is None:
        raise RequestError("there is no state to keep the answer in: name its file with --state")
    path = None if path is None else Path(path)
    with held(path) if keep and path is not None else nullcontext(), quiet():
        student, tokenizer = checkpoint.load_of_run(run)
        cache = student.empty_cache() if path is None else load_state(student, path)
        if keep:
            begin_turn(cache)
        ids, shown = tokenize(run, tokenizer, prompt, cache, asks=True, raw=raw, pictures=pictures)
        tokens = yield from write_answer(student, tokenizer, ids, cache, new_tokens, seed, sample, shown)
        unread = [] if tokens[-1] in ends_of(student) else tokens[-1:]
        if unread := unread + next_turn_tokens(tokenizer, raw):
            for _ in read_tokens(student, torch.tensor([unread]), cache):
                pass
        if keep and path is not None:
            save_state(student, cache, path)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Answer(prompt, text, len(tokens), measure(student, run.layers, cache))


def take_back(run: Run, path: Path) -> ReadingSize:
    """Restore a state in a file to the one before the last text or answer."""
    with held(path):
        student, _ = checkpoint.load_of_run(run)
        cache = load_state(student, path)
        take_back_turn(cache)
        save_state(student, cache, path)
    return measure(student, run.layers, cache)


def measure(student: LinearizedForCausalLM, layers: tuple[Layer, ...], cache: LinearizedCache) -> ReadingSize:
    """Count the tokens that a cache has read, its bytes, and those of a teacher's cache in the student's dtype."""
    state_bytes = sum(layer.bytes() for layer in cache.layers if isinstance(layer, LinearizedLayer))
    tokens = cache.get_seq_length()
    teacher_bytes = cache_bytes(layers, tokens) * student.dtype.itemsize // CACHED
    return ReadingSize(tokens, state_bytes, teacher_bytes, recurrent_bytes(cache))


def tokenize(
    run: Run,
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    cache: LinearizedCache,
    asks: bool,
    raw: bool,
    pictures: Sequence[Any] = (),
) -> tuple[torch.Tensor, Pictures]:  # (1, tokens), and the pictures among them
    """Turn what a user says after the texts in the cache into tokens."""
    processor = checkpoint.load_processor_of(run) if pictures else None
    prompt = make_prompt(tokenizer, processor, text, pictures, not cache.get_seq_length(), asks, raw)
    if not text or not prompt.tokens:
        raise TextError("there is nothing to read: the text is empty")
    return torch.tensor([prompt.tokens]), prompt.pictures


def write_answer(
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,  # (1, tokens)
    cache: LinearizedCache,
    new_tokens: int,
    seed: int,
    sample: bool,
    pictures: Pictures = NONE,
) -> Generator[str, None, list[int]]:
    """Continue a prompt after the texts in the cache; yield the text piece by piece, and return its tokens.

    Afterwards the cache has read all but the last of them.
    """
    if new_tokens < 1:
        raise RequestError(f"an answer of {new_tokens} tokens is not allowed: ask for at least one token")
    written: list[int] = []
    stream = TextStream(tokenizer, ids[0].tolist())
    for _ in read_tokens(student, ids[:, :-1], cache, pictures):
        pass
    for token in generate_tokens(student, ids[:, -1:].to(student.device), cache, new_tokens, seed, sample):
        written.append(token)
        if piece := stream.add(token):
            yield piece
    if tail := stream.rest():
        yield tail
    return written


def take_back_turn(cache: LinearizedCache) -> None:
    """Take back the last text or answer of a state."""
    if not saved_state.turns_of(cache):
        raise RequestError(
            f"there is nothing to take back: the state holds what it read first, or its last {MAX_TURNS} turns are "
            "taken back; read the text again"
        )
    saved_state.take_back_turn(cache)
