"""Lets a student read a text once, keep its state in a file, and answer from it any number of times."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from linearizer.errors import FolderError, RequestError, TextError
from linearizer.method import checkpoint
from linearizer.plan.allocation import ReadingSize
from linearizer.plan.head_bytes import CACHED, Layer, cache_bytes
from linearizer.progress import Progress, Steps, quiet
from linearizer.run.files import writing
from linearizer.run.folder import Run
from linearizer.run.locks import Lock, take_lock
from linearizer.student.cache import MAX_TURNS, LinearizedCache, LinearizedLayer
from linearizer.student.modeling_linearized import LinearizedForCausalLM
from linearizer.teacher.chat_template import next_turn_tokens, turn_tokens
from linearizer.teacher.token_loop import TextStream, ends_of, generate_tokens, read_tokens


@dataclass(frozen=True)
class Answer:
    """A student's answer, and the size of its state after it."""

    prompt: str
    text: str
    tokens: int  # that were written
    reading: ReadingSize


def read(run: Run, text: str, path: Path, more: bool = False, raw: bool = False) -> Steps[ReadingSize]:
    """Let the student of a run read a text and write its state to a file; `more`: continue from the file's state.

    A model with a chat template reads it as what its user says, unless `raw`. A later text can be taken back.
    """
    with held(path):
        if path.exists() and not more:
            raise FolderError(f"{str(path)!r} exists already: add --more to read on after it, or name another file")
        student, tokenizer = checkpoint.load_of_run(run)
        cache = load_state(student, path) if more else student.empty_cache()
        if more:
            cache.begin_turn()
        ids = tokenize(tokenizer, text, cache, asks=False, raw=raw)
        yield Progress("read", 0, ids.shape[1], "tokens")
        for count in read_tokens(student, ids, cache):
            yield Progress("read", count, ids.shape[1], "tokens")
        save_state(cache, path)
    return measure(student, run.layers, cache)


def ask(
    run: Run,
    prompt: str,
    path: Path | None = None,
    keep: bool = False,
    new_tokens: int = 256,
    seed: int = 0,
    sample: bool = False,
    raw: bool = False,
) -> Generator[str, None, Answer]:
    """Let the student of a run answer a prompt, after the text of a state in a file; yield what it writes.

    A model without a chat template continues the prompt, as any does if `raw`. `keep` writes the state after prompt and
    answer back to the file, where the next prompt begins; they can be taken back.
    """
    if keep and path is None:
        raise RequestError("there is no state to keep the answer in: name its file with --state")
    with held(path) if keep and path is not None else nullcontext(), quiet():
        student, tokenizer = checkpoint.load_of_run(run)
        cache = student.empty_cache() if path is None else load_state(student, path)
        if keep:
            cache.begin_turn()
        ids = tokenize(tokenizer, prompt, cache, asks=True, raw=raw)
        tokens = yield from write_answer(student, tokenizer, ids, cache, new_tokens, seed, sample)
        unread = [] if tokens[-1] in ends_of(student) else tokens[-1:]
        if unread := unread + next_turn_tokens(tokenizer, raw):
            for _ in read_tokens(student, torch.tensor([unread]), cache):
                pass
        if keep and path is not None:
            save_state(cache, path)
    text = tokenizer.decode(tokens, skip_special_tokens=True)
    return Answer(prompt, text, len(tokens), measure(student, run.layers, cache))


def take_back(run: Run, path: Path) -> ReadingSize:
    """Restore a state in a file to the one before the last text or answer."""
    with held(path):
        student, _ = checkpoint.load_of_run(run)
        cache = load_state(student, path)
        take_back_turn(cache)
        save_state(cache, path)
    return measure(student, run.layers, cache)


def measure(student: LinearizedForCausalLM, layers: tuple[Layer, ...], cache: LinearizedCache) -> ReadingSize:
    """Count the tokens that a cache has read, its bytes, and those of a teacher's cache in the student's dtype."""
    state_bytes = sum(layer.bytes() for layer in cache.layers if isinstance(layer, LinearizedLayer))
    tokens = cache.get_seq_length()
    return ReadingSize(tokens, state_bytes, cache_bytes(layers, tokens) * student.dtype.itemsize // CACHED)


def tokenize(
    tokenizer: PreTrainedTokenizerBase, text: str, cache: LinearizedCache, asks: bool, raw: bool
) -> torch.Tensor:  # (1, tokens)
    """Turn what a user says after the texts in the cache into tokens."""
    tokens = turn_tokens(tokenizer, text, not cache.get_seq_length(), asks, raw)
    if not text or not tokens:
        raise TextError("there is nothing to read: the text is empty")
    return torch.tensor([tokens])


def write_answer(
    student: LinearizedForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    ids: torch.Tensor,  # (1, tokens)
    cache: LinearizedCache,
    new_tokens: int,
    seed: int,
    sample: bool,
) -> Generator[str, None, list[int]]:
    """Continue a prompt after the texts in the cache; yield the text piece by piece, and return its tokens.

    Afterwards the cache has read all but the last of them.
    """
    if new_tokens < 1:
        raise RequestError(f"an answer of {new_tokens} tokens is not allowed: ask for at least one token")
    written: list[int] = []
    stream = TextStream(tokenizer, ids[0].tolist())
    for _ in read_tokens(student, ids[:, :-1], cache):
        pass
    for token in generate_tokens(student, ids[:, -1:].to(student.device), cache, new_tokens, seed, sample):
        written.append(token)
        if piece := stream.add(token):
            yield piece
    if tail := stream.rest():
        yield tail
    return written


def load_state(student: LinearizedForCausalLM, path: Path) -> LinearizedCache:
    """Load the state in a file."""
    try:
        return student.load_cache(str(path))
    except FileNotFoundError as error:
        raise FolderError(f"there is no state {str(path)!r}: `linearizer read` writes a state") from error
    except OSError as error:
        why = error.strerror or error
        raise FolderError(f"{str(path)!r} cannot be read ({why}): name the file of a state") from error
    except ValueError as error:
        raise RequestError(str(error)) from error


def take_back_turn(cache: LinearizedCache) -> None:
    """Take back the last text or answer of a state."""
    if not cache.turns:
        raise RequestError(
            f"there is nothing to take back: the state holds what it read first, or its last {MAX_TURNS} turns are "
            "taken back; read the text again"
        )
    cache.take_back_turn()


def save_state(cache: LinearizedCache, path: Path) -> None:
    """Write a state to a file; an older file stays until the new one is complete."""
    with writing(path):
        cache.save(str(path))


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Keep other processes from writing a state meanwhile: of two turns that begin at the same state, one is lost."""
    lock = hold(path)
    try:
        yield
    finally:
        let_go(path, lock)


def hold(path: Path) -> Lock:
    """Take the lock of a state, whose file lies beside the state's while it is held."""
    check_place(path)
    with writing(path):
        lock = take_lock(lock_file(path), 0)
    if lock is None:
        raise FolderError(f"another process is writing the state {str(path)!r}: repeat this when it has finished")
    return lock


def let_go(path: Path, lock: Lock) -> None:
    """Release the lock of a state; `take_lock` notices that its file is gone."""
    lock_file(path).unlink(missing_ok=True)
    lock.release()


def lock_file(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def check_place(path: Path) -> None:
    """Refuse, before anything is read, a path to which no state can be written."""
    folder = path.absolute().parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        why = "is a folder" if path.is_dir() else "cannot be written there"
        raise FolderError(f"the state {str(path)!r} {why}: name a file in a folder that is yours to write")
